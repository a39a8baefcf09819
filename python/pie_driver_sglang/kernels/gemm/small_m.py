"""GPU kernels of the products of a decode step of few rows.

Reading weights is all that such a step takes long for. So no kernel of a layer only adds or
normalizes:

* A product adds to the residual, and stores the sum of squares of what it wrote. The product after
  it multiplies rows as they are, and scales its outputs: an RMS norm commutes with a product whose
  matrix has the norm's weights folded in.
* Split-K parts are summed by the program that finishes last, in a fixed order.
* A kernel lets the next one start at once, and asks for weights before it waits for the one before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.dense_layers import LinearWeights, silu
from pie_driver_sglang.kernels.pdl import chained, lead

_VECTOR = tl.constexpr(8)
"""Weights that a thread loads at once."""
_FEWEST_OUTPUTS, _FEWEST_INPUTS = 16, 16
"""Of a tile and of an iteration: what a product on tensor cores takes."""


@dataclass(frozen=True)
class Cut:
    """How a product is divided among programs."""

    outputs: int
    """Outputs of a tile."""
    inputs: int
    """Inputs per iteration of a program's loop."""
    parts: int = 1
    """Split-K factor: programs that divide the inputs of a tile."""
    warps: int = 4
    """Warps of a program."""
    stages: int = 1
    """Iterations whose operands are loaded or being loaded; with 1 they go through registers, the
    first one's weights before the previous kernel has ended. 1 for a step of one row."""

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether the tiles divide a matrix of this shape."""
        return outputs % self.outputs == 0 and inputs % (self.inputs * self.parts) == 0


MOST_ROWS = 64
"""Most rows of a step that these kernels take."""
_MEASURED: dict[tuple[str, int, int, int], Cut] = {
    # One row.
    ("plain", 1, 6144, 4096): Cut(8, 512, warps=2),
    ("plain", 1, 7168, 5120): Cut(8, 512),
    ("plain", 1, 4096, 1024): Cut(4, 512, warps=2),
    ("plain", 1, 5120, 2048): Cut(4, 512, warps=2),
    ("adds", 1, 4096, 4096): Cut(16, 512, parts=2),
    ("adds", 1, 4096, 14336): Cut(16, 512, parts=2),
    ("adds", 1, 5120, 5120): Cut(4, 512, warps=2),
    ("adds", 1, 1024, 2048): Cut(4, 2048, warps=8),
    ("gated", 1, 3072, 1024): Cut(2, 512, warps=1),
    # Up to 16 rows.
    ("adds", 16, 4096, 4096): Cut(64, 256, parts=2, stages=3),
    ("adds", 16, 4096, 14336): Cut(64, 256, parts=2, stages=3),
    ("adds", 16, 5120, 5120): Cut(64, 128, parts=4, stages=3),
    ("adds", 16, 5120, 17408): Cut(64, 128, parts=4, stages=3),
    # Up to 32 rows.
    ("adds", 32, 4096, 4096): Cut(64, 128, parts=2, stages=5),
    ("adds", 32, 4096, 14336): Cut(64, 128, parts=2, stages=5),
}
"""The best cuts on an H200, where they are not :data:`_USUAL`: by kind, rows, outputs, inputs."""
_USUAL: dict[tuple[str, int], Cut] = {
    ("plain", 1): Cut(8, 512, warps=2),
    ("adds", 1): Cut(4, 1024),
    ("gated", 1): Cut(2, 1024, warps=2),
    ("plain", 16): Cut(64, 256, stages=3),
    ("adds", 16): Cut(64, 256, parts=4, stages=3),
    ("gated", 16): Cut(64, 128, stages=5),
    ("plain", 32): Cut(64, 128, stages=5),
    ("adds", 32): Cut(64, 128, parts=4, stages=3),
    ("gated", 32): Cut(64, 128, stages=5),
    ("plain", 64): Cut(64, 256, stages=3),
    ("adds", 64): Cut(64, 256, parts=4, stages=3),
}


def find_cut(
    rows: int, outputs: int, inputs: int, *, adds: bool = False, gated: bool = False
) -> Cut | None:
    """Chooses the cut of a product.

    Args:
        rows: Rows of the step.
        outputs: Outputs of the matrix, or of the gate's half of it.
        inputs: Inputs of the matrix.
        adds: Whether the product adds to a stream.
        gated: Whether the matrix is that of a gate and an up projection.

    Returns:
        None where these kernels do not take the product.
    """
    kind = "gated" if gated else "adds" if adds else "plain"
    tile = next((tile for tile in (1, 16, 32, 64) if rows <= tile), None)
    if tile is None:
        return None
    best = _MEASURED.get((kind, tile, outputs, inputs)) or _USUAL.get((kind, tile))
    if best is None or best.fits(outputs, inputs):
        return best
    return smaller_cut(outputs, inputs, best)


def smaller_cut(outputs: int, inputs: int, cut: Cut) -> Cut | None:
    """A smaller cut than this one, without parts, that fits a matrix of another shape."""
    # The largest powers of two that divide them.
    tile = min(cut.outputs, outputs & -outputs)
    turn = min(cut.inputs, inputs & -inputs)
    if tile < min(cut.outputs, _FEWEST_OUTPUTS) or turn < _FEWEST_INPUTS:
        return None
    return replace(cut, outputs=tile, inputs=turn, parts=1)


class Stream(NamedTuple):
    """The residual stream of a step."""

    rows: torch.Tensor
    """``[rows, width]``, contiguous."""
    squares: torch.Tensor
    """``[rows, tiles]`` float32: sums of squares of parts of the rows."""


class Scratch(NamedTuple):
    """Memory that products share: kernels run one after the other."""

    parts: torch.Tensor
    """Float32 partial sums, as many as `size` says."""
    arrived: torch.Tensor
    """Int32 zeros between kernels: parts of each tile that are stored."""


def product(
    rows: torch.Tensor,
    matrix: LinearWeights,
    cut: Cut,
    scratch: Scratch,
    *,
    stream: Stream | None = None,
    epsilon: float = 0.0,
    into: Stream | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Multiplies rows by a matrix. Can be captured.

    Args:
        rows: ``[rows, inputs]``, inputs contiguous.
        matrix: Of the rows' dtype; without a bias.
        cut: One that fits the matrix, or half of it if `gated`.
        scratch: For parts.
        stream: The stream that the rows are, whose RMS norm is to be applied; None for plain rows.
        epsilon: Of that norm.
        into: The stream to add to, in place, instead of an output.
        gated: Whether the matrix is that of a gate, then that of an up projection.

    Returns:
        ``[rows, outputs]`` of the rows' dtype: the products, or ``silu(gate) * up``; the stream's
        rows with `into`.
    """
    count, inputs = rows.shape
    outputs = len(matrix.weight) // (2 if gated else 1)
    out = rows.new_empty(count, outputs) if into is None else into.rows
    tiles = outputs // cut.outputs
    squares = scratch.parts if stream is None else stream.squares
    left = scratch.parts if into is None else into.squares
    if into is not None and into.squares.shape[1] != tiles:
        raise ValueError(f"{into.squares.shape[1]} sums of squares for {tiles} tiles")
    _product[(tiles, cut.parts)](
        rows, matrix.weight, out, squares, left, scratch.parts, scratch.arrived,
        count, rows.stride(0), outputs, inputs, inputs // cut.parts, epsilon,
        0 if stream is None else squares.shape[1],
        ROWS=1 if count == 1 else max(16, triton.next_power_of_2(count)),
        OUTPUTS=cut.outputs, INPUTS=cut.inputs, PARTS=cut.parts, STAGES=cut.stages,
        SQUARES=0 if stream is None else triton.next_power_of_2(squares.shape[1]),
        GATED=gated, ADDS=into is not None,
        num_warps=cut.warps, **chained(rows.device),
    )  # fmt: skip
    return out


def begin(rows: torch.Tensor, tiles: int) -> Stream:
    """The stream of embeddings, ``[rows, width]``, with so many sums of squares a row."""
    squares = rows.new_empty(len(rows), tiles, dtype=torch.float32)
    width = rows.shape[1]
    _begin[(len(rows),)](
        rows, squares, width, tiles, WIDTH=triton.next_power_of_2(width),
        TILES=triton.next_power_of_2(tiles), num_warps=8, **chained(rows.device),
    )  # fmt: skip
    return Stream(rows, squares)


@triton.jit
def _begin(
    rows, squares, width, tiles, WIDTH: tl.constexpr, TILES: tl.constexpr, CHAINED: tl.constexpr
):
    if CHAINED:
        lead()
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    x = tl.load(rows + row * width + lanes, mask=lanes < width, other=0.0).to(tl.float32)
    tile = tl.arange(0, TILES)
    total = tl.where(tile == 0, tl.sum(x * x, 0), 0.0)
    tl.store(squares + row * tiles + tile, total, mask=tile < tiles)


@triton.jit(do_not_specialize=["row_count"])
def _product(
    rows, weight, out, squares, left, parts, arrived,
    row_count, row_stride, outputs, inputs, part_inputs, epsilon, square_count,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, SQUARES: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One part of a tile of outputs, for all rows."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    units = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    first = part * part_inputs
    own = weight + units.to(tl.int64) * inputs + first
    ups = own + outputs.to(tl.int64) * inputs
    numbers = tl.arange(0, ROWS)
    inside = numbers < row_count
    lanes = tl.arange(0, INPUTS)
    if ROWS == 1:
        x_places = rows + first + lanes[None, :]
        known_x = lanes[None, :] >= 0
    else:
        x_places = rows + numbers[None, :].to(tl.int64) * row_stride + first + lanes[:, None]
        known_x = inside[None, :]
    if STAGES == 1:
        # Weights of the first iteration are on their way while this waits.
        w = tl.load(own[:, None] + lanes[None, :])
        u = w
        if GATED:
            u = tl.load(ups[:, None] + lanes[None, :])
    if CHAINED:
        lead()
    place = units[:, None] + numbers[None, :].to(tl.int64) * outputs
    known = inside[None, :] & (units[:, None] >= 0)
    at_squares = tl.arange(0, 1 if SQUARES == 0 else SQUARES)
    sums = tl.zeros([OUTPUTS, INPUTS // _VECTOR if ROWS == 1 else ROWS], tl.float32)
    up_sums = tl.zeros([OUTPUTS, INPUTS // _VECTOR if ROWS == 1 else ROWS], tl.float32)
    if STAGES == 1:
        x = tl.load(x_places, mask=known_x, other=0.0)
    given = _squares(squares, numbers, inside, at_squares, square_count, SQUARES)
    old = tl.zeros([OUTPUTS, ROWS], out.dtype.element_ty)
    if ADDS:
        old = tl.load(out + place, mask=known, other=0.0)
    if STAGES == 1:
        for at in tl.range(INPUTS, part_inputs, INPUTS, num_stages=1):
            next_x = tl.load(x_places + at, mask=known_x, other=0.0)
            next_w = tl.load(own[:, None] + at + lanes[None, :])
            if GATED:
                next_u = tl.load(ups[:, None] + at + lanes[None, :])
                up_sums = add_products(u, x, up_sums, ROWS)
                u = next_u
            sums = add_products(w, x, sums, ROWS)
            w = next_w
            x = next_x
        sums = add_products(w, x, sums, ROWS)
        if GATED:
            up_sums = add_products(u, x, up_sums, ROWS)
    else:
        for at in tl.range(0, part_inputs, INPUTS, num_stages=STAGES):
            x = tl.load(x_places + at, mask=known_x, other=0.0)
            w = tl.load(own[:, None] + at + lanes[None, :])
            sums = add_products(w, x, sums, ROWS)
            if GATED:
                w = tl.load(ups[:, None] + at + lanes[None, :])
                up_sums = add_products(w, x, up_sums, ROWS)
    if ROWS == 1:
        sums = tl.sum(sums, 1)[:, None]
        up_sums = tl.sum(up_sums, 1)[:, None]
    if PARTS == 1:
        _finish(
            sums, up_sums, given, old, out, left, place, tile, numbers, inside, inputs, epsilon,
            SQUARES, GATED, ADDS,
        )  # fmt: skip
    else:
        size = row_count.to(tl.int64) * outputs
        stored = parts + place
        tl.store(stored + part * size, sums, mask=known)
        if GATED:
            tl.store(stored + (PARTS + part) * size, up_sums, mask=known)
        # All warps must have stored their part before one of them counts it.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1:
            tl.store(arrived + tile, 0)
            sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for each in tl.static_range(PARTS):
                # Bypasses L1, which is not coherent with other SMs.
                sums += tl.load(stored + each * size, mask=known, other=0.0, cache_modifier=".cg")
                if GATED:
                    up_sums += tl.load(
                        stored + (PARTS + each) * size, mask=known, other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
            _finish(
                sums, up_sums, given, old, out, left, place, tile, numbers, inside, inputs, epsilon,
                SQUARES, GATED, ADDS,
            )  # fmt: skip


@triton.jit
def add_products(w, x, sums, ROWS: tl.constexpr):
    """Adds products of weights, ``[outputs, inputs]``, and one row or ``[inputs, rows]``.

    For one row a thread sums what it loaded at once, so that sums take few registers.
    """
    if ROWS == 1:
        OUTPUTS: tl.constexpr = w.shape[0]
        INPUTS: tl.constexpr = w.shape[1]
        each = w.to(tl.float32) * x.to(tl.float32)
        sums += tl.sum(tl.reshape(each, [OUTPUTS, INPUTS // _VECTOR, _VECTOR]), 2)
    else:
        sums = tl.dot(w, x, sums, input_precision="ieee")
    return sums


@triton.jit
def _squares(squares, numbers, inside, lanes, count, SQUARES: tl.constexpr):
    """Sums of squares of the given rows; zeros without any."""
    found = tl.zeros([numbers.shape[0], lanes.shape[0]], tl.float32)
    if SQUARES > 0:
        found = tl.load(
            squares + numbers[:, None] * count + lanes[None, :],
            mask=inside[:, None] & (lanes < count)[None, :],
            other=0.0,
        )
    return found


@triton.jit
def _finish(
    sums, up_sums, given, old, out, left, place, tile, numbers, inside, width, epsilon,
    SQUARES: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """Scales, gates or adds whole sums, and stores them."""
    kind = out.dtype.element_ty
    known = inside[None, :] & (place >= 0)
    if SQUARES > 0:
        spread = tl.rsqrt(tl.sum(given, 1) / width + epsilon)[None, :]
        sums *= spread
        up_sums *= spread
    if GATED:
        # Rounded as the output of an unfused GEMM would be.
        sums = silu(sums.to(kind).to(tl.float32), up_sums.to(kind).to(tl.float32))
    if ADDS:
        sums += old.to(tl.float32)
        rounded = tl.where(known, sums.to(kind).to(tl.float32), 0.0)
        total = tl.sum(rounded * rounded, 0)
        tl.store(left + numbers * tl.num_programs(0) + tile, total, mask=inside)
    tl.store(out + place, sums, mask=known)
