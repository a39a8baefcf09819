"""GEMMs on the CPU whose rows do not depend on each other."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional

from pie_driver_sglang.errors import StartError

GEMM_ROWS: Final = 16
"""Rows of each GEMM."""


class CpuBatchInvariantGemm:
    """Multiplies in blocks of `GEMM_ROWS` rows, the last of which is padded.

    torch's library chooses its kernel by the number of rows, which is the same for all blocks. That
    a row's place in its block does not matter is checked for each shape of weights.
    """

    def __init__(self) -> None:
        """Checks nothing yet."""
        self._checked: set[tuple[torch.Size, torch.dtype]] = set()

    def __call__(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Computes ``rows @ weight.T``, ``[rows, outputs]`` in their dtype.

        Args:
            rows: ``[rows, inputs]``, contiguous.
            weight: ``[outputs, inputs]``.
        """
        out = rows.new_empty(len(rows), len(weight))
        for first in range(0, len(rows), GEMM_ROWS):
            block = rows[first : first + GEMM_ROWS]
            padded = functional.pad(block, (0, 0, 0, GEMM_ROWS - len(block)))
            out[first : first + GEMM_ROWS] = functional.linear(padded, weight)[: len(block)]
        return out

    def supports(self, weight: torch.Tensor) -> bool:
        """Whether it multiplies by a weight: by any.

        Raises:
            StartError: A row's place in its block changes its result.
        """
        kind = (weight.shape, weight.dtype)
        if kind not in self._checked:
            _check(weight)
            self._checked.add(kind)
        return True


def _check(weight: torch.Tensor) -> None:
    """Multiplies a block of random rows, and the same rows at every other place."""
    generator = torch.Generator().manual_seed(0)
    shape = (GEMM_ROWS, weight.shape[1])
    block = torch.randn(shape, generator=generator).to(weight.dtype)
    expected = functional.linear(block, weight)
    for shift in range(1, GEMM_ROWS):
        found = functional.linear(block.roll(shift, 0), weight)
        if not torch.equal(found, expected.roll(shift, 0)):
            raise StartError(
                f"`enable_deterministic_inference` is set, and on this CPU torch's GEMM of "
                f"{GEMM_ROWS} rows by a {weight.dtype} matrix of {list(weight.shape)} gives a "
                "row other bits in another place",
                hint="unset it, or use a GPU of the Hopper generation",
            )
