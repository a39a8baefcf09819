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
    ("rows", "outputs", "inputs", "parts", "own"),
    [
        (64, 3072, 1024, 1, True),
        (32, 17408, 5120, 1, True),
        (33, 17408, 5120, 1, False),
        (64, 5120, 17408, MOST_PARTS, False),
        (64, 1792, 5120, MOST_PARTS, True),
        (64, 1792, 5120, 1, False),
        (32, 1792, 5120, 1, True),
        (256, 3072, 1024, 1, False),
    ],
    ids=["0.6B", "14B", "14B, more rows", "14B, down", "in parts", "a quarter of 14B's",
         "a quarter, fewer rows", "0.6B, many rows"],
)  # fmt: skip
def test_which_products_are_the_drivers_own(
    rows: int, outputs: int, inputs: int, parts: int, own: bool
) -> None:
    cut = tiling(rows, outputs, inputs, parts, gated=outputs > inputs)
    assert (cut is not None) == own
