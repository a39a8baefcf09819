"""Dense layers of a decode step as few kernels, without a GPU."""

from __future__ import annotations

import scripts


def test_the_kernels_compute_what_float64_does(interpreter: scripts.Interpreter) -> None:
    assert "all close" in interpreter.run("tests/dense_kernels.py")
