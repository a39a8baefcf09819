"""The attention backend `pie` without a GPU: kernels, and models that use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import architectures, lora_adapters, tiny_models
from support.process import drivers, scripts

pytestmark = pytest.mark.engine
POCKET = Path(__file__).resolve().parents[1] / "models" / "pocket"


@pytest.mark.interpreted("tests/support/kernels/paged_decode.py")
def test_the_kernels_attend_as_dense_attention_does(interpreted: str) -> None:
    assert ", 0 wrong" in interpreted


def test_the_kernels_compile_for_a_gpu() -> None:
    assert "compiled" in scripts.run("tests/support/kernels/compile_kernels.py")


@pytest.mark.parametrize(
    ("name", "adapters"),
    [
        ("gemma3", False),
        ("llama-of-3b", False),
        ("qwen2-of-7b", False),
        ("qwen3-of-4b", False),
        ("qwen3", True),
        ("Phi-3", False),
        ("Qwen3-MoE", False),
        ("Mixtral", False),
    ],
)
def test_a_model_decodes_the_same_logits(
    name: str,
    adapters: bool,
    interpreter: scripts.Interpreter,
    models_folder: Path,
    tmp_path: Path,
) -> None:
    """Gemma 3 has layers with a window, Qwen 2 biases and Qwen 3 norms of its heads.

    Three have the proportions of published models: odd numbers of heads, and widths that are no
    powers of two.
    """
    builder = architectures if name in architectures.ARCHITECTURES else tiny_models
    snapshot = builder.build(name, models_folder)
    options = {"page_size": 16, "enable_lora": adapters}
    config = drivers.write_config(tmp_path, snapshot, options=options)
    interpreter.run("tests/support/kernels/fused_model.py", str(config))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_model_with_adapters_decodes_the_logits_of_its_layers(
    name: str, interpreter: scripts.Interpreter, models_folder: Path, tmp_path: Path
) -> None:
    """Rows of several adapters and of none, with folded norms, against SGLang's without."""
    made = [
        lora_adapters.make(name, adapter, models_folder)
        for adapter in ("linear", "ranks", "one layer", "head")
    ]
    options = {"page_size": 16, "enable_lora": True, "max_loras_per_batch": 5}
    config = drivers.write_config(tmp_path, tiny_models.build(name, models_folder), options=options)
    folders = [str(one.adapter) for one in made]
    interpreter.run("tests/support/kernels/lora_model.py", str(config), *folders)


@pytest.mark.parametrize("kind", ["channel", "tensor", "block"])
def test_a_quantized_model_decodes_the_logits_of_its_layers(
    kind: str, interpreter: scripts.Interpreter, models_folder: Path, tmp_path: Path
) -> None:
    """FP8 weights with a scale for each output, for all of a matrix, or for each block of it."""
    snapshot = architectures.build("Llama", models_folder / "wide", wide=True)
    config = drivers.write_config(tmp_path, snapshot, options={"page_size": 16})
    interpreter.run("tests/support/kernels/fp8_model.py", str(config), kind)


def test_prefill_by_another_kernel_has_the_same_logits(
    interpreter: scripts.Interpreter, tmp_path: Path
) -> None:
    """From the frame to the kernels, except FlashAttention-3 itself."""
    options = {"page_size": 16, "cuda_graph_max_bs": 8}
    config = drivers.write_config(tmp_path, POCKET, options=options)
    interpreter.run("tests/support/kernels/mixed_steps.py", str(config))


def test_steps_with_groups_decode_the_same_logits(
    interpreter: scripts.Interpreter, tmp_path: Path
) -> None:
    """From the frame to the kernels, except the capture of a graph."""
    config = drivers.write_config(tmp_path, POCKET, options={"page_size": 16})
    interpreter.run("tests/support/kernels/shared_prefix_steps.py", str(config))
