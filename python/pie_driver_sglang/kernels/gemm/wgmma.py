"""Products of 2 to 224 rows and a matrix, of which each is one kernel: ``cuda/wgmma_gemm.cu``.

They do what those of ``tiled.py`` do, on GPUs whose matrix instructions are those of
a warpgroup: multiply by scales, join a gate with an up projection, or add to the residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy
import torch

from pie_driver_sglang.kernels.gemm.dense_layers import LinearWeights
from pie_driver_sglang.kernels.gemm.fp8_gemv import ProductKind
from pie_driver_sglang.kernels.gemm.fp8_rows import QuantizedRows, QuantizedWeights
from pie_driver_sglang.kernels.gemm.small_m import Stream

if TYPE_CHECKING:
    from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

MOST_BATCH_ROWS = 224
"""Most rows of a product: the kernel takes 256, but with them a library is as fast."""
ROWS = (8, 16, *range(32, MOST_BATCH_ROWS + 1, 32))
"""Of the matrix instruction."""
_HOPPER = 9
_SLAB_BYTES = 128
"""Of each row that the copy engine brings at once."""
_GROUP_OUTPUTS = 64
"""Outputs of a warpgroup."""
_ROOM, _HALF_ROOM = 205 << 10, 100 << 10
"""Bytes of stages of a CTA, if it is alone on a multiprocessor or with another one."""
_MOST_STAGES = 12
_MULTIPROCESSORS = 132
"""Of an H100 or H200."""
_MOST_PARTS = 4
_DIVIDED = 100
"""Most CTAs of a product that has three parts or more: clusters do not fill the chip."""
_BOUND_BY_MEMORY = 192
"""Rows up to which weights of 16 bits take longer to read than to multiply; of FP8 half of them."""
_LONG, _NARROW = 4096, 2048
"""Fewest inputs of a product of more rows than that, and of one of more than 128."""
_FEWEST_FILLED = 0.7
"""Share of multiprocessors that a product of more rows than that must use, in its waves."""


@dataclass(frozen=True)
class BatchCut:
    """How a product is divided."""

    rows: int
    """Of the matrix instruction; those that are not given count as zeros."""
    warpgroups: int
    """Of a CTA, each of which has 64 outputs."""
    stages: int
    """Stages whose operands are loaded or being loaded."""
    slabs: int = 1
    """128 bytes of each row and weight row of a stage."""
    across: int = 1
    """CTAs that fetch the rows for each other, which have other outputs."""
    parts: int = 1
    """CTAs that divide the inputs."""

    @property
    def outputs(self) -> int:
        """Rows of the matrix of a CTA."""
        return self.warpgroups * _GROUP_OUTPUTS

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA's stages, and what aligns them."""
        return self.stages * _stage_bytes(self.rows, self.warpgroups, self.slabs) + 1024


def find_batch_cut(
    rows: int, height: int, inputs: int, itemsize: int, kind: ProductKind
) -> BatchCut | None:
    """Chooses how a product is divided, as measured on an H100.

    Args:
        rows: Rows of the step.
        height: Rows of the matrix, both halves of a gate and an up projection.
        inputs: Inputs of the matrix.
        itemsize: Bytes of a weight.
        kind: What the product does at its end.

    Returns:
        None where the kernel does not take the product, or a library's is as fast.
    """
    count = next((most for most in ROWS if rows <= most), None)
    if count is None or rows < 2 or height % _GROUP_OUTPUTS or inputs * itemsize % 256:
        return None
    units = height // _GROUP_OUTPUTS
    groups, parts = _divide(units, kind)
    few = count <= (_BOUND_BY_MEMORY if itemsize > 1 else _BOUND_BY_MEMORY // 2)
    fills = inputs >= _LONG and _fill(units // groups * parts) >= _FEWEST_FILLED
    if (count > 128 and inputs < _NARROW) or not (few or fills):
        return None
    # Two CTAs of a multiprocessor have room for two tiles, where one after the other takes longer.
    two = kind == ProductKind.JOINS and groups == 2 and 64 <= count <= 128
    slabs = 2 if count <= 64 and not two else 1
    steps = inputs * itemsize // (slabs * _SLAB_BYTES)
    parts = min(parts, steps)
    room = (_HALF_ROOM if two else _ROOM) // _stage_bytes(count, groups, slabs)
    stages = min(room, _MOST_STAGES, max(2, steps // parts))
    cut = BatchCut(count, groups, stages, slabs, 2 if two and units % 4 == 0 else 1, parts)
    # The parts are summed where the stages were.
    blocks = -(-count // 8 // parts) * parts
    return cut if parts == 1 or blocks * 8 * cut.outputs * 4 < cut.shared_bytes else None


def _divide(units: int, kind: ProductKind) -> tuple[int, int]:
    """Warpgroups of a CTA, and the parts of the inputs, for so many times 64 outputs."""
    if kind == ProductKind.JOINS:
        return 2 if units % 2 == 0 and _fill(units // 2) >= _fill(units) else 1, 1
    if kind == ProductKind.ADDS:
        groups = 2 if units * 2 > _MULTIPROCESSORS and units % 2 == 0 else 1
        return groups, max(2, min(_MOST_PARTS, _DIVIDED * groups // units))
    return 1, max(1, min(_MOST_PARTS, _DIVIDED // units)) if units < 64 else 1


def _stage_bytes(rows: int, warpgroups: int, slabs: int) -> int:
    return slabs * (warpgroups * _GROUP_OUTPUTS + rows) * _SLAB_BYTES


def _fill(programs: int) -> float:
    """The share of multiprocessors that CTAs use, one on each, in the waves that they need."""
    return programs / (-(-programs // _MULTIPROCESSORS) * _MULTIPROCESSORS)


def runs_on(device: torch.device) -> bool:
    """Whether a device has the kernel's instructions, which are those of one generation."""
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER
    )  # fmt: skip


class BatchProducts:
    """The kernels of one GPU, each compiled when it is first wanted."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """Compiles nothing yet.

        Args:
            dtype: Of rows and outputs, of 16 bits.
            device: Where they run: one that they :func:`runs_on`.
        """
        self._dtype = dtype
        self._device = device
        self._kernels: dict[tuple[tuple[str, int], ...], CudaKernel] = {}

    def multiply(
        self,
        given: torch.Tensor | QuantizedRows,
        matrix: LinearWeights | QuantizedWeights,
        cut: BatchCut,
        kind: ProductKind,
        *,
        stream: Stream | None = None,
        epsilon: float = 0.0,
        into: Stream | torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiplies rows by a matrix. Can be captured.

        Args:
            given: ``[rows, inputs]``, contiguous; at most the cut's rows.
            matrix: Of the rows' dtype, without a bias. In FP8 if the rows are, with a scale for
                each row and output.
            cut: That of :func:`find_batch_cut`.
            kind: What it does at its end.
            stream: The stream that the rows are, whose RMS norm is to be applied; None for plain
                rows.
            epsilon: Of that norm.
            into: What a product that adds adds to, in place: ``[rows, outputs]``, or a stream.

        Returns:
            ``[rows, outputs]``, half of them of a product that joins; what was added to of one
            that adds.

        Raises:
            ValueError: There are more rows, or the stream has room for other sums of squares.
        """
        from pie_driver_sglang.kernels.cuda.compiled import tile_map

        quantized = given if isinstance(given, QuantizedRows) else None
        rows = given.rows if isinstance(given, QuantizedRows) else given
        (count, inputs), height = rows.shape, len(matrix.weight)
        tiles = height // cut.outputs
        outputs = height // 2 if kind == ProductKind.JOINS else height
        out, left = into if isinstance(into, Stream) else (into, None)
        if count > cut.rows:
            raise ValueError(f"{count} rows are more than the {cut.rows} of the kernel")
        if left is not None and left.shape[1] != tiles:
            raise ValueError(f"{left.shape[1]} sums of squares for {tiles} tiles")
        if out is None:
            out = rows.new_empty(count, outputs, dtype=self._dtype)
        assert isinstance(out, torch.Tensor)
        # Of rows, and of outputs: unused ones are any address.
        row_scales = of_outputs = out
        if quantized is not None and isinstance(matrix, QuantizedWeights):
            row_scales, of_outputs = quantized.scales, matrix.scales
        elif stream is not None:
            row_scales = stream.squares
        unscaled = quantized is None and stream is None
        weight, wide = matrix.weight, _SLAB_BYTES // matrix.weight.itemsize
        box: tuple[int, ...] = (cut.outputs, wide)
        if kind == ProductKind.JOINS:
            # Eight rows of the gate, then the same of the up projection: a thread has both.
            weight = weight.view(2, outputs // 8, 8, inputs).permute(1, 0, 2, 3)
            box = (cut.outputs // 16, 2, 8, wide)
        kernel = self._kernel(cut, kind, fp8=quantized is not None, normed=stream is not None)
        threads = cut.warpgroups * 128 + (32 if unscaled else 64)
        kernel.launch(
            (tiles * cut.parts,), threads, tile_map(weight, box),
            tile_map(rows, (cut.rows // cut.across, wide)), of_outputs, row_scales, out,
            0 if left is None else left, numpy.float32(epsilon), numpy.int32(count),
            numpy.int32(outputs), numpy.int32(inputs),
            numpy.int32(0 if stream is None else stream.squares.shape[1]),
        )  # fmt: skip
        return out

    def _kernel(self, cut: BatchCut, kind: ProductKind, *, fp8: bool, normed: bool) -> CudaKernel:
        from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

        named = constants(cut, kind, self._dtype, fp8=fp8, normed=normed)
        key = tuple(named.items())
        if key not in self._kernels:
            self._kernels[key] = CudaKernel(
                "wgmma_gemm.cu", named, self._device, shared_bytes=cut.shared_bytes,
                cluster=cut.across * cut.parts,
            )  # fmt: skip
        return self._kernels[key]


def constants(
    cut: BatchCut, kind: ProductKind, dtype: torch.dtype, *, fp8: bool, normed: bool
) -> dict[str, int]:
    """The macros that the source wants."""
    return {
        "FP8": int(fp8), "BF16": int(dtype is torch.bfloat16), "ROWS": cut.rows,
        "WARPGROUPS": cut.warpgroups, "ACROSS": cut.across, "PARTS": cut.parts,
        "SLABS": cut.slabs, "STAGES": cut.stages, "KIND": int(kind), "NORMED": int(normed),
    }  # fmt: skip
