"""GPU kernels of the products of a decode step of more rows, and of those of FP8 weights.

They do what those of ``small_m.py`` do: add to the residual in place, apply a norm to what comes
out, or join a gate with an up projection. Operands come in tiles by the copy engine (TMA), because
what is read from the L2 cache for every tile of outputs is as much as the weights themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pie_driver_sglang.kernels.gemm.dense_layers import LinearWeights, prefetch, silu
from pie_driver_sglang.kernels.gemm.fp8_rows import GROUP, QuantizedRows, QuantizedWeights
from pie_driver_sglang.kernels.gemm.small_m import Scratch, Stream
from pie_driver_sglang.kernels.pdl import chained, lead

_LARGEST_PARTS = 4
"""Largest split-K factor of a tile."""
_MULTIPROCESSORS = 132
"""Of an H100 or H200."""
_SHARED_BYTES = 227 << 10
"""Shared memory of a multiprocessor that programs can have."""


_FEWEST_FILLED = 0.65
"""Share of the places for programs that a product must have programs for."""
_NEARLY_FULL = 112
"""Rows above which a tile of 128 pays, of bfloat16: it takes as long for fewer, and a library does
not."""
_LONG = 8192
"""Inputs from which on a library's product of 65 rows and more is the faster one, of bfloat16."""


@dataclass(frozen=True)
class Tile:
    """How a product is divided among programs."""

    rows: int
    """Rows of a tile."""
    outputs: int
    """Outputs of a tile; of a gated product as many of the gate and of the up half."""
    inputs: int
    """Inputs per iteration of a program's loop."""
    parts: int = 1
    """Split-K factor: programs that divide the inputs of a tile."""
    warps: int = 4
    """Warps of a program."""
    stages: int = 4
    """Iterations whose operands are loaded or being loaded."""
    swapped: bool = False
    """Whether outputs are the first dimension of the matrix instruction, which wants 64 of it."""
    ahead: int = 0
    """Bytes of each of its weight rows that a program asks for before the kernel in front has
    ended."""

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether the tiles divide a matrix of this shape."""
        return outputs % self.outputs == 0 and inputs % (self.inputs * self.parts) == 0

    def shared_bytes(self, itemsize: int, *, gated: bool = False) -> int:
        """Bytes of shared memory of a program."""
        held = self.rows + self.outputs * (2 if gated else 1)
        return held * self.inputs * itemsize * self.stages


_TILES: dict[tuple[str, int, int], tuple[Tile, ...]] = {
    ("plain", 1, 16): (
        Tile(16, 64, 256, stages=5, swapped=True),
        Tile(16, 64, 128, stages=8, swapped=True),
    ),
    ("adds", 1, 16): (
        Tile(16, 64, 256, 2, stages=5, swapped=True),
        Tile(16, 64, 128, 2, stages=8, swapped=True),
    ),
    ("gated", 1, 16): (
        Tile(16, 64, 256, stages=3, swapped=True),
        Tile(16, 64, 128, stages=6, swapped=True),
    ),
    ("plain", 1, 64): (
        Tile(64, 64, 256, stages=6, swapped=True),
        Tile(64, 64, 128, stages=8, swapped=True),
    ),
    ("adds", 1, 64): (Tile(64, 32, 256, stages=8), Tile(64, 32, 256, stages=4)),
    ("gated", 1, 64): (Tile(64, 64, 128, stages=4, swapped=True),),
    ("plain", 1, 128): (
        Tile(128, 64, 128, stages=8, swapped=True),
        Tile(128, 64, 128, stages=4, swapped=True),
    ),
    ("adds", 1, 128): (
        Tile(128, 64, 256, 2, stages=4, swapped=True),
        Tile(128, 32, 256, stages=5),
        Tile(128, 64, 128, 2, stages=4),
    ),
    ("gated", 1, 128): (Tile(128, 128, 128, warps=8, stages=4, swapped=True),),
    ("plain", 2, 64): (Tile(64, 64, 128, stages=6), Tile(64, 64, 64, stages=6)),
    ("adds", 2, 64): (Tile(64, 32, 128, stages=8), Tile(64, 32, 64, stages=8)),
    ("gated", 2, 64): (Tile(64, 64, 128, stages=4),),
    ("adds", 2, 128): (Tile(128, 32, 128, stages=5),),
    ("gated", 2, 128): (Tile(128, 64, 64, stages=3, swapped=True),),
}
"""By kind, bytes of a number and rows: the best on an H200 first, then some for other shapes."""


def find_tile(
    rows: int,
    outputs: int,
    inputs: int,
    itemsize: int,
    *,
    adds: bool = False,
    gated: bool = False,
) -> Tile | None:
    """Chooses how a product is divided.

    Args:
        rows: Rows of the step.
        outputs: Outputs of the matrix, or of the gate's half of it.
        inputs: Inputs of the matrix.
        itemsize: Bytes of a weight.
        adds: Whether the product adds to a stream.
        gated: Whether the matrix is that of a gate and an up projection.

    Returns:
        None where a library's product is as fast, or no tile fits.
    """
    kind = "gated" if gated else "adds" if adds else "plain"
    if itemsize > 1 and rows > 64 and (rows <= _NEARLY_FULL or inputs >= _LONG):
        return None
    for bucket in (16, 64, 128):
        tiles = _TILES.get((kind, itemsize, bucket), ()) if rows <= bucket else ()
        for tile in tiles:
            filled = _fill(tile, outputs, itemsize, gated=gated)
            if tile.fits(outputs, inputs) and filled >= _FEWEST_FILLED:
                return tile
        if tiles:
            break
    return None


def _fill(tile: Tile, outputs: int, itemsize: int, *, gated: bool) -> float:
    """The share of a GPU's places for programs that a product takes, in the waves that it needs."""
    programs = outputs // tile.outputs * tile.parts
    shared = tile.shared_bytes(itemsize, gated=gated)
    places = _MULTIPROCESSORS * max(1, min(_SHARED_BYTES // (shared + 2048), 16 // tile.warps))
    if programs <= places:
        # Programs that run at once share the bandwidth: one on most multiprocessors is enough.
        return min(1.0, programs / _MULTIPROCESSORS)
    return programs / (-(-programs // places) * places)


def scratch_sizes(rows: int, outputs: int) -> tuple[int, int]:
    """Floats and counters of a `Scratch` for products of so many rows and outputs.

    Products with a gate have no parts.
    """
    return _LARGEST_PARTS * rows * outputs, outputs


def tiled_product(
    given: torch.Tensor | QuantizedRows,
    matrix: LinearWeights | QuantizedWeights,
    tile: Tile,
    scratch: Scratch,
    *,
    stream: Stream | None = None,
    epsilon: float = 0.0,
    into: Stream | torch.Tensor | None = None,
    gated: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiplies rows by a matrix. Can be captured.

    Args:
        given: ``[rows, inputs]``, inputs contiguous.
        matrix: Of the rows' dtype; without a bias. In FP8 if the rows are.
        tile: One that fits the matrix, or half of it if `gated`.
        scratch: For parts.
        stream: The stream that the rows are, whose RMS norm is to be applied; None for plain rows.
        epsilon: Of that norm.
        into: What to add to, in place, instead of an output: ``[rows, outputs]``, or a stream.
        gated: Whether the matrix is that of a gate, then that of an up projection.
        dtype: Of the output; that of the rows unless it is named.

    Returns:
        ``[rows, outputs]``: the products, or ``silu(gate) * up``; what was added to with `into`.

    Raises:
        ValueError: The stream has room for other sums of squares.
    """
    rows = given.rows if isinstance(given, QuantizedRows) else given
    count, inputs = rows.shape
    outputs = len(matrix.weight) // (2 if gated else 1)
    tiles = outputs // tile.outputs
    unused = scratch.parts
    left, out = unused, into
    if isinstance(into, Stream):
        out, left = into
        if left.shape[1] != tiles:
            raise ValueError(f"{left.shape[1]} sums of squares for {tiles} tiles")
    if out is None:
        out = rows.new_empty(count, outputs, dtype=dtype)
    assert isinstance(out, torch.Tensor)
    squares = 0 if stream is None else stream.squares.shape[1]
    x = TensorDescriptor(rows, [count, inputs], [rows.stride(0), 1], [tile.rows, tile.inputs])
    height = len(matrix.weight)
    w = TensorDescriptor(matrix.weight, [height, inputs], [inputs, 1], [tile.outputs, tile.inputs])
    _tiled_product[(tiles, triton.cdiv(count, tile.rows), tile.parts)](
        x, w, matrix.weight, out, unused if stream is None else stream.squares, left, scratch.parts,
        scratch.arrived, count, outputs, inputs, inputs // tile.parts, epsilon, squares,
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, PARTS=tile.parts,
        STAGES=tile.stages, SWAPPED=tile.swapped, AHEAD=tile.ahead,
        SQUARES=triton.next_power_of_2(squares) if squares else 0, GATED=gated,
        ADDS=into is not None, LEAVES=isinstance(into, Stream),
        **_scales(given, matrix, unused),
        num_warps=tile.warps, **chained(rows.device),
    )  # fmt: skip
    return out


def _scales(
    given: torch.Tensor | QuantizedRows,
    matrix: LinearWeights | QuantizedWeights,
    unused: torch.Tensor,
) -> dict[str, Any]:
    """Kernel arguments of what FP8 numbers are to be multiplied by."""
    if not isinstance(matrix, QuantizedWeights) or not isinstance(given, QuantizedRows):
        return {"of_rows": unused, "of_weights": unused, "SCALED": False, "GROUP": 0}
    group = GROUP if matrix.grouped else 0
    return {"of_rows": given.scales, "of_weights": matrix.scales, "SCALED": True, "GROUP": group}


@triton.jit(do_not_specialize=["row_count"])
def _tiled_product(
    x, w, weight, out, squares, left, parts, arrived,
    row_count, outputs, inputs, part_inputs, epsilon, square_count,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, SWAPPED: tl.constexpr, SQUARES: tl.constexpr, GATED: tl.constexpr,
    ADDS: tl.constexpr, LEAVES: tl.constexpr, of_rows, of_weights, SCALED: tl.constexpr,
    GROUP: tl.constexpr, AHEAD: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One part of a tile."""
    tile = tl.program_id(0)
    part = tl.program_id(2)
    first_row = tl.program_id(1) * ROWS
    unit = tile * OUTPUTS
    first = part * part_inputs
    if CHAINED:
        if AHEAD > 0:
            begins = (unit + tl.arange(0, OUTPUTS)).to(tl.int64) * inputs + first
            prefetch(weight + begins, AHEAD)
            if GATED:
                prefetch(weight + outputs.to(tl.int64) * inputs + begins, AHEAD)
        lead()
    numbers = first_row + tl.arange(0, ROWS)
    inside = numbers < row_count
    units = unit + tl.arange(0, OUTPUTS)
    spread = _row_spread(squares, numbers, inside, square_count, inputs, epsilon, SQUARES)
    sums = _zeros(ROWS, OUTPUTS, SWAPPED)
    up_sums = sums
    for at in tl.range(first, first + part_inputs, INPUTS, num_stages=STAGES):
        given = x.load([first_row, at])
        own = w.load([unit, at])
        if GROUP == 0:
            sums = _add_tile(sums, given, own, SWAPPED)
            if GATED:
                up_sums = _add_tile(up_sums, given, w.load([outputs + unit, at]), SWAPPED)
        else:
            groups = inputs // GROUP
            group = at // GROUP
            row_scales = tl.load(of_rows + numbers * groups + group, mask=inside, other=0.0)
            scales = tl.load(of_weights + units // GROUP * groups + group)
            sums = _add_scaled_tile(sums, given, own, row_scales, scales, SWAPPED)
            if GATED:
                own = w.load([outputs + unit, at])
                scales = tl.load(of_weights + (outputs + units) // GROUP * groups + group)
                up_sums = _add_scaled_tile(up_sums, given, own, row_scales, scales, SWAPPED)
    if SWAPPED:
        sums = tl.trans(sums)
        up_sums = tl.trans(up_sums)
    place = numbers[:, None].to(tl.int64) * outputs + units[None, :]
    known = inside[:, None] & (units >= 0)[None, :]
    last = True
    if PARTS > 1:
        size = row_count.to(tl.int64) * outputs
        tl.store(parts + part * size + place, sums, mask=known)
        if GATED:
            tl.store(parts + (PARTS + part) * size + place, up_sums, mask=known)
        # All warps must have stored their part before one of them counts it.
        tl.debug_barrier()
        count = arrived + tl.program_id(1) * tl.num_programs(0) + tile
        last = tl.atomic_add(count, 1, sem="acq_rel") == PARTS - 1
        if last:
            tl.store(count, 0)
            sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
            up_sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for each in tl.static_range(PARTS):
                # Bypasses L1, which is not coherent with other SMs.
                stored = parts + each * size + place
                sums += tl.load(stored, mask=known, other=0.0, cache_modifier=".cg")
                if GATED:
                    stored = parts + (PARTS + each) * size + place
                    up_sums += tl.load(stored, mask=known, other=0.0, cache_modifier=".cg")
    if last:
        kind = out.dtype.element_ty
        if SCALED and GROUP == 0:
            row_scales = tl.load(of_rows + numbers, mask=inside, other=0.0)[:, None]
            sums *= row_scales * tl.load(of_weights + units)[None, :]
            if GATED:
                up_sums *= row_scales * tl.load(of_weights + outputs + units)[None, :]
        if SQUARES > 0:
            sums *= spread[:, None]
            up_sums *= spread[:, None]
        if GATED:
            # Rounded as the output of an unfused GEMM would be.
            sums = silu(sums.to(kind).to(tl.float32), up_sums.to(kind).to(tl.float32))
        if ADDS:
            sums += tl.load(out + place, mask=known, other=0.0).to(tl.float32)
            if LEAVES:
                rounded = tl.where(known, sums.to(kind).to(tl.float32), 0.0)
                total = tl.sum(rounded * rounded, 1)
                tl.store(left + numbers * tl.num_programs(0) + tile, total, mask=inside)
        tl.store(out + place, sums.to(kind), mask=known)


@triton.jit
def _zeros(ROWS: tl.constexpr, OUTPUTS: tl.constexpr, SWAPPED: tl.constexpr):
    """Sums of a tile, in the order of the matrix instruction."""
    if SWAPPED:
        sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    else:
        sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    return sums


@triton.jit
def _add_tile(sums, given, weights, SWAPPED: tl.constexpr):
    """Adds the products of a tile of rows and a tile of weights."""
    if SWAPPED:
        sums = tl.dot(weights, tl.trans(given), sums, input_precision="ieee")
    else:
        sums = tl.dot(given, tl.trans(weights), sums, input_precision="ieee")
    return sums


@triton.jit
def _add_scaled_tile(sums, given, weights, of_rows, of_weights, SWAPPED: tl.constexpr):
    """Adds the products of a group of each row and blocks of weights, times their scales."""
    part = _add_tile(tl.zeros_like(sums), given, weights, SWAPPED)
    if SWAPPED:
        sums += part * of_weights[:, None] * of_rows[None, :]
    else:
        sums += part * of_rows[:, None] * of_weights[None, :]
    return sums


@triton.jit
def _row_spread(squares, numbers, inside, count, width, epsilon, SQUARES: tl.constexpr):
    """The reciprocal RMS of each row."""
    total = tl.zeros([numbers.shape[0]], tl.float32)
    if SQUARES > 0:
        lanes = tl.arange(0, SQUARES)
        found = tl.load(
            squares + numbers[:, None] * count + lanes[None, :],
            mask=inside[:, None] & (lanes < count)[None, :],
            other=0.0,
        )
        total = tl.rsqrt(tl.sum(found, 1) / width + epsilon)
    return total
