"""Models on vLLM: prefill in chunks, decodes, drafts and copies of pages against transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

import pytest

from support import REPOSITORY
from support.models import architectures, model_checks
from support.models.reference import MaskedReference, Pages, Reference
from support.process import drivers, vllm_drivers

pytestmark = pytest.mark.engine

DOCUMENT: Final = REPOSITORY / "docs" / "vllm.md"
TOLERANCE: Final = 2e-4
GAP: Final = 1e-3
PAGE: Final = 16
OPTIONS: Final = {
    "max_num_batched_tokens": model_checks.CHUNK,
    "max_num_seqs": 32,
    "cpu_mem_budget_in_gb": model_checks.SWAP_GIB,
}
SERVED: Final = ("Llama", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "Mixtral", "Qwen3-MoE")
"""Of those that the page lists: dense, with windows of some layers or of all, with experts."""
WORKS: Final = {"runs": "yes", "masks": "refused", "drafts": "yes", "copies": "yes"}


def nearly_equal(found: object, expected: object, _: object) -> None:
    import torch

    assert isinstance(found, torch.Tensor)
    assert isinstance(expected, torch.Tensor)
    error = float((found - expected).abs().max())
    assert error <= TOLERANCE, f"logits off by {error}"


@pytest.mark.parametrize("name", SERVED)
def test_a_model_computes_what_transformers_does(
    name: str, models_folder: Path, tmp_path: Path, vllm_python: str
) -> None:
    assert f"| {name} |" in DOCUMENT.read_text()
    snapshot = architectures.build(name, models_folder / "wide", wide=True)
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS)
    with vllm_drivers.fork(config, vllm_python) as driver:
        served = model_checks.Served(
            client=driver.client(),
            pages=Pages(driver.caps["total_pages"], PAGE),
            host=Pages(driver.caps["swap_pool_size"], PAGE),
            states=None,
            reference=Reference(snapshot),
            rounded=None,
            masked=functools.partial(MaskedReference, snapshot, "float32"),
            equal=nearly_equal,
            gap=GAP,
        )
        assert model_checks.find_out(served) == WORKS
    assert driver.stop() == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepSeek-V3", "(DeepseekV3ForCausalLM) has latent attention (MLA)"),
        ("Qwen3-Next", "(Qwen3NextForCausalLM) has recurrent state"),
        ("Persimmon", "vLLM 0.26.0 has no PersimmonForCausalLM"),
        (
            "Phi-3.5-MoE",
            "the checkpoint leaves numbers of `model.layers.0.self_attn.qkv_proj.bias`",
        ),
    ],
)
def test_a_model_that_is_not_served_is_refused_by_name(
    name: str, reason: str, models_folder: Path, tmp_path: Path, vllm_python: str
) -> None:
    """The last has a bias in vLLM that this checkpoint lacks: it would be whatever memory holds."""
    snapshot = architectures.build(name, models_folder / "wide", wide=True)
    with pytest.raises(drivers.StartFailedError) as caught:
        vllm_drivers.fork(drivers.write_config(tmp_path, snapshot), vllm_python)
    assert reason in caught.value.stderr
    assert "\nhint: " in caught.value.stderr
    assert "Traceback" not in caught.value.stderr
