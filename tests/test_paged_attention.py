"""The attention backend `pie`: its kernels and its place in a model, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import drivers
import tiny_models

# Importing SGLang takes its time on a busy machine.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


def run(script: str, *arguments: str, interpreted: bool) -> str:
    """Runs a script of the tests' in a process of its own and returns what it prints."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=230,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_kernels_attend_as_dense_attention_does() -> None:
    assert ", 0 wrong" in run("paged_kernels.py", interpreted=True)


def test_the_kernels_compile_for_a_gpu() -> None:
    assert "layers compiled" in run("paged_compile.py", interpreted=False)


def test_a_model_decodes_the_same_logits(models_folder: Path, tmp_path: Path) -> None:
    """Gemma 3 has layers with a window and layers without."""
    snapshot = tiny_models.build("gemma3", models_folder)
    config = drivers.write_config(tmp_path, snapshot, options={"page_size": 16})
    run("paged_model.py", str(config), interpreted=True)
