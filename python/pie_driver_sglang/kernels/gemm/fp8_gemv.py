"""Products of one row and FP8 matrices, of which each is one kernel: ``cuda/fp8_gemv.cu``.

The kernel norms the row, makes FP8 of it, and joins a gate or adds to the residual at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy
import torch

from pie_driver_sglang.kernels.gemm.dense_layers import Norm
from pie_driver_sglang.kernels.gemm.fp8_rows import QuantizedWeights

_PIECE = 64
"""Inputs that four threads load at once."""
_TILE = 16
"""Outputs of a tile."""
_HOPPER = 9


class ProductKind(IntEnum):
    """What a product does at its end."""

    STORES = 0
    JOINS = 1
    """Joins a gate and an up projection."""
    ADDS = 2

    @classmethod
    def of(cls, *, gated: bool, adds: bool) -> ProductKind:
        """That of a product with a gate, or one that adds, or of another one."""
        return cls.JOINS if gated else cls.ADDS if adds else cls.STORES


@dataclass(frozen=True)
class RowCut:
    """How a product is divided."""

    threads: int
    """Of a CTA, whose warps divide the inputs."""
    batch: int
    """Pieces of 64 inputs that a warp loads at once: two are a group of quantized rows."""
    resident: int
    """CTAs of a multiprocessor, which divide the tiles."""

    def fits(self, inputs: int) -> bool:
        """Whether the warps divide so many inputs."""
        return inputs % (self.threads // 32 * self.batch * _PIECE) == 0


ROW_CUTS = (RowCut(256, 4, 2), RowCut(256, 2, 3), RowCut(128, 2, 6), RowCut(64, 2, 12))
"""The best on an H100 first, then some for other shapes."""


def find_row_cut(inputs: int) -> RowCut | None:
    """How a product of so many inputs is divided; None where the kernel does not take it."""
    return next((cut for cut in ROW_CUTS if cut.fits(inputs)), None)


def quantizes_row(weights: QuantizedWeights) -> bool:
    """Whether the kernel knows such a matrix, and was measured on GPUs like its own."""
    outputs, inputs = weights.weight.shape
    whole = outputs % _TILE == 0 and find_row_cut(inputs) is not None
    cuda = weights.weight.device.type == "cuda"
    return (
        cuda and whole and torch.cuda.get_device_capability(weights.weight.device)[0] == _HOPPER
    )  # fmt: skip


class RowProduct:
    """The kernel of matrices with the same inputs, kind, norm and scale."""

    def __init__(
        self,
        inputs: int,
        kind: ProductKind,
        dtype: torch.dtype,
        device: torch.device,
        cut: RowCut,
        *,
        normed: bool,
        fixed: bool,
        grouped: bool,
    ) -> None:
        """Compiles it.

        Args:
            inputs: Of the matrices.
            kind: What it does at its end.
            dtype: Of rows and outputs, of 16 bits.
            device: Where it runs.
            cut: One that fits.
            normed: Whether it norms the row first.
            fixed: Whether the matrices have the row's scale, too.
            grouped: Whether blocks of the matrices and groups of the row have scales.
        """
        # Half a second, which other models need not wait for.
        from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

        constants = {
            "BF16": int(dtype is torch.bfloat16), "INPUTS": inputs, "THREADS": cut.threads,
            "BATCH": cut.batch, "RESIDENT": cut.resident, "KIND": int(kind),
            "NORMED": int(normed), "FIXED": int(fixed), "GROUPED": int(grouped),
        }  # fmt: skip
        self._kind = kind
        self._cut = cut
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._most = processors * cut.resident
        self._kernel = CudaKernel("fp8_gemv.cu", constants, device)

    def multiply(
        self,
        row: torch.Tensor,
        weights: QuantizedWeights,
        *,
        norm: Norm | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiplies a row by a matrix. Can be captured.

        Args:
            row: ``[1, inputs]``, contiguous.
            weights: The matrix.
            norm: To be applied to the row first.
            into: ``[1, outputs]``: what is added to, in place, by a product that adds.

        Returns:
            ``[1, outputs]``, half of them of a product that joins; `into` of one that adds.
        """
        outputs = len(weights.weight) // (2 if self._kind == ProductKind.JOINS else 1)
        tiles = len(weights.weight) // _TILE
        out = row.new_empty(1, outputs) if into is None else into
        unused = weights.scales
        self._kernel.launch(
            (min(tiles, self._most),), self._cut.threads, row, weights.weight, weights.scales,
            row if norm is None else norm.weight,
            unused if weights.row_scale is None else weights.row_scale, out,
            numpy.float32(0.0 if norm is None else norm.epsilon), numpy.int32(tiles),
        )  # fmt: skip
        return out
