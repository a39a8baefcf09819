"""The vLLM backend's attention over our pages, as a GPU has it, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from support import REPOSITORY
from support.models import architectures
from support.process import drivers, vllm_drivers

pytestmark = pytest.mark.engine

SCRIPT = REPOSITORY / "tests" / "support" / "kernels" / "vllm_paged.py"
LIMIT_S = 220.0


@pytest.fixture(scope="module")
def interpreted_vllm() -> Iterator[str]:
    """As `vllm_python`, with Triton's interpreter, which Triton reads when it is imported."""
    if reason := vllm_drivers.missing():
        pytest.skip(reason)
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"), vllm_drivers.interpreter() as program:
        yield program


@pytest.mark.parametrize(
    ("name", "adapts"),
    [("Llama", False), ("Qwen2", False), ("Gemma 3", False), ("Qwen3-MoE", False), ("Llama", True)],
)
def test_a_model_has_the_logits_of_vllms_own_attention(
    name: str, adapts: bool, models_folder: Path, tmp_path: Path, interpreted_vllm: str
) -> None:
    """Qwen 2 has biases, and Gemma 3 windows in some layers, and no fused layers.

    The last model's layers are wrapped for adapters, of which no step here applies one.
    """
    snapshot = architectures.build(name, models_folder / "wide", wide=True)
    options = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    options["enable_lora"] = adapts
    config = drivers.write_config(tmp_path, snapshot, options=options)
    result = subprocess.run(
        [interpreted_vllm, str(SCRIPT), str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-3000:]}"
