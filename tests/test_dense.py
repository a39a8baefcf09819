"""Dense layers of a decode step as few kernels, without a GPU."""

from __future__ import annotations

import pytest

import scripts
from pie_driver_sglang.sglang.dense_triton import MOST_PARTS, tiling


def test_the_kernels_compute_what_float64_does(interpreter: scripts.Interpreter) -> None:
    assert "all close" in interpreter.run("tests/dense_kernels.py")


def test_sums_over_ranks(interpreter: scripts.Interpreter) -> None:
    assert "all close" in interpreter.run("tests/rank_kernels.py")


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "gated", "own"),
    [
        (64, 3072, 1024, True, True),
        (32, 17408, 5120, True, True),
        (33, 17408, 5120, True, False),
        (64, 5120, 17408, False, False),
        (64, 1792, 5120, False, True),
        (256, 3072, 1024, True, False),
    ],
    ids=["0.6B", "14B", "14B, more rows", "14B, down", "a quarter of 14B's", "0.6B, many rows"],
)
def test_which_products_are_the_drivers_own(
    rows: int, outputs: int, inputs: int, gated: bool, own: bool
) -> None:
    cut = tiling(rows, outputs, inputs, 1 if gated else MOST_PARTS, gated=gated)
    assert (cut is not None) == own
