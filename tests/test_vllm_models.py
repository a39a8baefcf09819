"""Models on vLLM: prefill in chunks, decodes, drafts and copies of pages against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

from support import REPOSITORY
from support.models import architectures, model_checks
from support.process import drivers, vllm_drivers

pytestmark = pytest.mark.engine

DOCUMENT: Final = REPOSITORY / "docs" / "vllm.md"
TOLERANCE: Final = 2e-4
OPTIONS: Final = {
    "max_num_batched_tokens": model_checks.CHUNK,
    "max_num_seqs": 32,
    "cpu_mem_budget_in_gb": model_checks.SWAP_GIB,
}
SERVED: Final = ("Llama", "Qwen3", "Mistral", "Gemma 2", "Gemma 3", "Mixtral", "Qwen3-MoE")
"""Of those that the page lists: dense, with windows of some layers or of all, with experts."""
WINDOWED: Final = {"sliding_window": architectures.WINDOW}
WORKS: Final = {"runs": "yes", "masks": "refused", "drafts": "yes", "copies": "yes"}


def with_windows(snapshot: Path, folder: Path) -> Path:
    """A copy of a model whose layers all have a window."""
    shutil.copytree(snapshot, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **WINDOWED}))
    return folder


@pytest.mark.parametrize(
    ("name", "windowed", "ranks"),
    [
        *((name, False, 1) for name in SERVED),
        ("Mistral", True, 1),
        *((name, False, 2) for name in ("Llama", "Gemma 2", "Qwen3-MoE")),
    ],
)
def test_a_model_computes_what_transformers_does(
    name: str, windowed: bool, ranks: int, models_folder: Path, tmp_path: Path, vllm_python: str
) -> None:
    assert f"| {name} |" in DOCUMENT.read_text()
    snapshot = architectures.build(name, models_folder / "wide", wide=True)
    if windowed:
        snapshot = with_windows(snapshot, tmp_path / "windowed")
    config = drivers.write_config(tmp_path, snapshot, options=OPTIONS, **drivers.spread(ranks))
    with vllm_drivers.fork(config, vllm_python) as driver:
        assert (
            model_checks.find_out(model_checks.served_on_cpu(driver, snapshot, TOLERANCE)) == WORKS
        )
    assert driver.stop() == 0


def refusal_of(snapshot: Path, folder: Path, program: str, options: dict[str, Any]) -> str:
    """What a driver says that does not start."""
    with pytest.raises(drivers.StartFailedError) as caught:
        vllm_drivers.fork(drivers.write_config(folder, snapshot, options=options), program)
    assert "\nhint: " in caught.value.stderr
    assert "Traceback" not in caught.value.stderr
    return caught.value.stderr


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
    assert reason in refusal_of(snapshot, tmp_path, vllm_python, {})


def test_a_prefix_lm_is_refused_before_its_weights_are_read(
    tmp_path: Path, vllm_python: str
) -> None:
    """Its layers have the KV and the backend of causal ones."""
    from transformers import HrmTextConfig

    snapshot = tmp_path / "model"
    HrmTextConfig(
        architectures=["HrmTextForCausalLM"],
        vocab_size=256,
        hidden_size=64,
        head_dim=32,
        num_attention_heads=2,
        num_layers_per_stack=1,
        intermediate_size=128,
    ).save_pretrained(snapshot)
    log = refusal_of(snapshot, tmp_path, vllm_python, {"load_format": "dummy"})
    assert "attends to later tokens of a prompt (prefix LM)" in log


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3"])
def test_windows_take_one_size_of_pages(
    name: str, models_folder: Path, tmp_path: Path, vllm_python: str
) -> None:
    snapshot = architectures.build(name, models_folder / "wide", wide=True)
    if name == "Mistral":
        snapshot = with_windows(snapshot, tmp_path / "windowed")
    log = refusal_of(snapshot, tmp_path, vllm_python, {"block_size": 32})
    assert "wants pages of 16 tokens, not 32" in log
    assert "set `block_size = 16`" in log
