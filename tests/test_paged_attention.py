"""The attention backend `pie`: its kernels and its place in a model, without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import drivers
import scripts
import tiny_models

pytestmark = pytest.mark.engine


def test_the_kernels_attend_as_dense_attention_does(interpreter: scripts.Interpreter) -> None:
    out = interpreter.run("tests/paged_kernels.py")
    assert ", 0 wrong" in out


def test_the_kernels_compile_for_a_gpu() -> None:
    assert "layers compiled" in scripts.run("tests/paged_compile.py")


def test_a_model_decodes_the_same_logits(
    interpreter: scripts.Interpreter, models_folder: Path, tmp_path: Path
) -> None:
    """Gemma 3 has layers with a window and layers without."""
    snapshot = tiny_models.build("gemma3", models_folder)
    config = drivers.write_config(tmp_path, snapshot, options={"page_size": 16})
    interpreter.run("tests/paged_model.py", str(config))
