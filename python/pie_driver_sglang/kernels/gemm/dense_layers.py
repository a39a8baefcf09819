"""GPU kernels of the dense layers of a step.

Most steps have few rows, so loading weights and launching kernels take most of their time. Between
two GEMMs there is therefore one kernel: split-K reduction with residual and norm, or head norms
with rotary embedding and the store of new KV. The activation of an MLP is fused into its GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.pdl import await_previous, chained, follow, release_next

_GATE_BLOCK = tl.constexpr(1024)
_HEADS = 8
"""Heads per program of :func:`norm_rope_store`."""


@dataclass(frozen=True)
class Tiling:
    """The tiling of a GEMM; ``benches/gpu/dense_check.py --tune`` measures it."""

    rows: int
    """Rows of a tile."""
    outputs: int
    """Outputs of a tile."""
    inputs: int
    """Inputs per iteration of a program's loop."""
    parts: int = 1
    """Split-K factor: programs that divide the inputs of a tile."""
    warps: int = 4
    """Warps of a program."""
    stages: int = 4
    """Software pipeline stages: iterations whose operands are loaded or being loaded."""

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether the tiles divide a matrix of this shape."""
        return outputs % self.outputs == 0 and inputs % (self.inputs * self.parts) == 0


SHARED_BYTES = 208 << 10
"""Most shared memory of a GEMM program, in bytes."""
MOST_PARTS = 4
"""Largest split-K factor, where a later kernel reduces the parts."""
_PREFETCHED_BYTES = 16 << 20
"""Bytes of a matrix that are prefetched into L2, of which they take a part."""
_LARGE, _ROWS_OF_LARGE = 16 << 20, 32
"""From this many matrix elements on, and above this many rows, a library's GEMM is faster."""
_LONG = 4096
"""Inputs from which on a library's GEMM is faster for those rows as well, if programs are few."""
_PROGRAMS, _FEWEST_PROGRAMS = 64, 48
"""Wanted programs of a GEMM, and the fewest that do if the split-K factor cannot grow."""


def tiling(
    rows: int, outputs: int, inputs: int, most_parts: int = 1, *, gated: bool = False
) -> Tiling | None:
    """Chooses the tiling of a GEMM.

    Args:
        rows: Rows of the step.
        outputs: Outputs of the matrix, or of the gate's half of it.
        inputs: Inputs of the matrix.
        most_parts: Largest split-K factor.
        gated: Whether a program computes a tile of the gate and the same tile of the up half.

    Returns:
        None where a library's GEMM is as fast.
    """
    if rows > 128:
        return None
    tile = max(16, triton.next_power_of_2(rows))
    if tile > 64 and most_parts == 1:
        return None
    if tile > _ROWS_OF_LARGE:
        few = most_parts == 1 and inputs > _LONG and outputs < 32 * _PROGRAMS
        if few or outputs * inputs * (2 if gated else 1) > _LARGE:
            return None
    stages = 3 if tile > (32 if gated else 64) else 5
    for tile_outputs in (64, 32, 16):
        for parts in (1, 2, 4):
            cut = Tiling(tile, tile_outputs, 128, min(parts, most_parts), stages=stages)
            programs = outputs // tile_outputs * cut.parts
            # A larger split-K factor is used only for enough programs.
            enough = _PROGRAMS if cut.parts < most_parts else _FEWEST_PROGRAMS
            if programs >= enough and cut.fits(outputs, inputs):
                return cut
    return None


class LinearWeights(NamedTuple):
    """Weights of a linear layer."""

    weight: torch.Tensor
    """``[outputs, inputs]``, contiguous."""
    bias: torch.Tensor | None = None
    """``[outputs]``."""


class Norm(NamedTuple):
    """RMS normalization."""

    weight: torch.Tensor
    """``[width]``."""
    epsilon: float


class Heads(NamedTuple):
    """The heads of an attention layer, and the storage of their KV."""

    queries: int
    """Query heads."""
    query_norm: Norm | None
    """Norm of each query head; None only together with `key_norm`."""
    key_norm: Norm | None
    """Norm of each key head."""
    rotations: torch.Tensor
    """``[positions, dim]`` float32: cosines, then sines, each of half the dimensions."""
    halves: bool
    """Whether dimension pairs are half a head apart (NeoX style) instead of adjacent."""
    keys: torch.Tensor
    """``[slots, kv_heads, dim]``, heads contiguous."""
    values: torch.Tensor
    """``[slots, kv_heads, dim]``, heads contiguous."""


class Scale(NamedTuple):
    """An RMS scale that is still to be applied to a GEMM's output: the rows were not normalized."""

    rows: torch.Tensor
    """``[rows, width]``, width contiguous: the rows; or ``[rows, 1]`` float32: what each row's
    outputs are to be multiplied by, as :func:`find_scale` gives it."""
    epsilon: float


def linear(rows: torch.Tensor, matrix: LinearWeights, tiling: Tiling) -> torch.Tensor:
    """Multiplies rows by a matrix, with or without split-K. Can be captured.

    Args:
        rows: ``[rows, inputs]``, inputs contiguous.
        matrix: Of the rows' dtype; without a bias if `tiling` splits the inputs.
        tiling: One that fits the matrix.

    Returns:
        ``[1, rows, outputs]`` of the rows' dtype, or ``[parts, rows, outputs]`` float32 partial
        sums.
    """
    dtype = rows.dtype if tiling.parts == 1 else torch.float32
    out = rows.new_empty(tiling.parts, len(rows), len(matrix.weight), dtype=dtype)
    _launch(rows, matrix, out, tiling, gated=False)
    return out


def gated(rows: torch.Tensor, matrix: LinearWeights, tiling: Tiling) -> torch.Tensor:
    """Computes ``silu(rows @ gate) * (rows @ up)`` of an MLP. Can be captured.

    Args:
        rows: ``[rows, inputs]``, inputs contiguous.
        matrix: Weights of the gate, then of the up projection; of the rows' dtype.
        tiling: One that fits half of the matrix, without split-K.

    Returns:
        ``[rows, outputs / 2]`` of the rows' dtype.
    """
    out = rows.new_empty(len(rows), len(matrix.weight) // 2)
    _launch(rows, matrix, out, tiling, gated=True)
    return out


def _launch(
    rows: torch.Tensor, matrix: LinearWeights, out: torch.Tensor, tiling: Tiling, gated: bool
) -> None:
    outputs, inputs = out.shape[-1], rows.shape[-1]
    tiles = outputs // tiling.outputs
    part_inputs = inputs // tiling.parts
    # Bytes of each matrix row that a program prefetches.
    ahead = _PREFETCHED_BYTES // (len(matrix.weight) * tiling.parts)
    ahead = min(part_inputs * rows.itemsize, triton.cdiv(ahead, 128) * 128)
    _linear[(tiles, triton.cdiv(len(rows), tiling.rows), tiling.parts)](
        rows, matrix.weight, matrix.bias, out, len(rows), rows.stride(0), outputs, inputs,
        part_inputs, ahead,
        ROWS=tiling.rows, OUTPUTS=tiling.outputs, INPUTS=tiling.inputs, GATED=gated,
        num_warps=tiling.warps, num_stages=tiling.stages, **chained(rows.device),
    )  # fmt: skip


def gate(rows: torch.Tensor, scale: Scale | None = None) -> torch.Tensor:
    """Computes ``silu(gate) * up`` of a GEMM's output. Can be captured.

    Args:
        rows: ``[rows, 2 * outputs]``: gate, then up.
        scale: The RMS scale that is still to be applied to them.

    Returns:
        ``[rows, outputs]``.
    """
    out = rows.new_empty(len(rows), rows.shape[1] // 2)
    grid = (len(rows), triton.cdiv(out.shape[1], _GATE_BLOCK.value))
    _gate[grid](rows, out, out.shape[1], **_scaling(rows, scale), **chained(rows.device))
    return out


def find_scale(rows: torch.Tensor, epsilon: float) -> Scale:
    """The RMS scale of rows, ``[rows, width]``, computed once for all that apply it."""
    out = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(rows.shape[1])
    _find_scale[(len(rows),)](
        rows, out, rows.stride(0), rows.shape[1], epsilon, BLOCK=block,
        num_warps=max(1, min(8, block // 512)), **chained(rows.device),
    )  # fmt: skip
    return Scale(out, epsilon)


def _scaling(rows: torch.Tensor, scale: Scale | None) -> dict[str, Any]:
    """Kernel arguments for an optional RMS scale; a block of 1 has what is to be applied."""
    given, epsilon = (rows, 0.0) if scale is None else scale
    width = given.shape[1]
    return {
        "given": given,
        "given_stride": given.stride(0),
        "width": width,
        "epsilon": epsilon,
        "WIDTH_BLOCK": 0 if scale is None else triton.next_power_of_2(width),
    }


def add_norm(
    parts: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds a layer's output to the residual, and normalizes the sum. Can be captured.

    Args:
        parts: ``[parts, rows, width]`` partial sums of the output.
        residual: ``[rows, width]``, overwritten by the sum; None in front of the first layer.
        norm: Of the residual's dtype.
        scales: ``[rows, 1]`` and ``[width]`` float32: what the parts are to be multiplied by.

    Returns:
        ``[rows, width]`` normalized sums, and the sums.
    """
    count, rows, width = parts.shape
    total = residual
    if total is None:
        total = norm.weight.new_empty(rows, width)
    out = torch.empty_like(total)
    block = triton.next_power_of_2(width)
    of_rows, of_columns = (parts, parts) if scales is None else scales
    _add_norm[(rows,)](
        parts, total, norm.weight, out, of_rows, of_columns, rows, width, norm.epsilon,
        PARTS=count, ADDS=residual is not None, SCALED=scales is not None, BLOCK=block,
        num_warps=max(4, min(16, block // 512)), **chained(parts.device),
    )  # fmt: skip
    return out, total


def norm_rope_store(
    rows: torch.Tensor,
    heads: Heads,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: Scale | None = None,
    of_outputs: torch.Tensor | None = None,
    out_of_place: bool = False,
) -> torch.Tensor:
    """Applies head norms and rotary embedding, and stores keys and values. Can be captured.

    Args:
        rows: ``[rows, heads]``: queries, keys and values of each row.
        heads: Their layout, norms and storage.
        positions: ``[rows]`` int64.
        slots: ``[rows]`` int64: the KV slot of each row.
        scale: The scale of rows that is still to be applied to queries, keys and values.
        of_outputs: ``[heads]`` float32, of as many numbers as a row: what else they are to be
            multiplied by; only with `scale`.
        out_of_place: Whether the queries get contiguous storage of their own.

    Returns:
        ``[rows, queries, dim]`` queries; a view of `rows`, which is overwritten, unless
        `out_of_place`.
    """
    kv_heads, dim = heads.keys.shape[1:]
    width = heads.queries * dim
    out = rows.new_empty(len(rows), width) if out_of_place else rows[:, :width]
    norms = (heads.query_norm, heads.key_norm)
    weights = [rows if norm is None else norm.weight for norm in norms]
    epsilons = [0.0 if norm is None else norm.epsilon for norm in norms]
    grid = (len(rows), triton.cdiv(heads.queries + kv_heads, _HEADS))
    _norm_rope_store[grid](
        rows, out, *weights, *epsilons, heads.rotations, positions, slots, heads.keys, heads.values,
        rows.stride(0), out.stride(0), heads.rotations.stride(0), heads.keys.stride(0),
        heads.values.stride(0), rows if of_outputs is None else of_outputs,
        QUERIES=heads.queries, KV_HEADS=kv_heads, DIM=dim, HEADS=_HEADS,
        HALF_BLOCK=triton.next_power_of_2(dim // 2), HALVES=heads.halves,
        NORMED=heads.query_norm is not None, SCALED=of_outputs is not None, num_warps=4,
        **_scaling(rows, scale), **chained(rows.device),
    )  # fmt: skip
    return out.view(len(rows), heads.queries, dim)


@triton.jit
def prefetch(rows, row_bytes):
    """Prefetches rows of a matrix into L2: a hint, which the hardware may ignore."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows, row_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["row_count"])
def _linear(
    rows, weight, bias, out, row_count, row_stride, outputs, inputs, part_inputs, ahead_bytes,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GATED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """A tile of the transposed GEMM: there are more outputs than rows."""
    units = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    part = tl.program_id(2)
    first = part * part_inputs
    own = weight + units.to(tl.int64) * inputs + first
    ups = own + outputs.to(tl.int64) * inputs
    if CHAINED:
        # Weights do not depend on the previous kernel.
        prefetch(own, ahead_bytes)
        if GATED:
            prefetch(ups, ahead_bytes)
        follow()
    numbers = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = numbers < row_count
    lanes = tl.arange(0, INPUTS)
    x_columns = rows + numbers[None, :].to(tl.int64) * row_stride + first + lanes[:, None]
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up_sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for at in range(0, part_inputs, INPUTS):
        x = tl.load(x_columns + at, mask=inside[None, :], other=0.0)
        w = tl.load(own[:, None] + at + lanes[None, :])
        sums = tl.dot(w, x, sums, input_precision="ieee")
        if GATED:
            w = tl.load(ups[:, None] + at + lanes[None, :])
            up_sums = tl.dot(w, x, up_sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + units).to(tl.float32)[:, None]
    if GATED:
        # Rounded as the output of an unfused GEMM would be.
        gate = sums.to(rows.dtype.element_ty).to(tl.float32)
        up = up_sums.to(rows.dtype.element_ty).to(tl.float32)
        sums = silu(gate, up)
    row = part.to(tl.int64) * row_count + numbers[None, :]
    tl.store(out + row * outputs + units[:, None], sums, mask=inside[None, :])


@triton.jit
def silu(gate, up):
    """The activation of an MLP: ``silu(gate) * up``."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _find_scale(rows, out, stride, width, epsilon, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    if CHAINED:
        follow()
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _spread(rows, stride, row, width, epsilon, BLOCK))


@triton.jit
def _spread(given, given_stride, row, width, epsilon, WIDTH_BLOCK: tl.constexpr):
    """The reciprocal RMS of a row, which is given or to be computed."""
    if WIDTH_BLOCK == 1:
        spread = tl.load(given + row)
    else:
        lanes = tl.arange(0, WIDTH_BLOCK)
        x = tl.load(given + row * given_stride + lanes, mask=lanes < width, other=0.0)
        x = x.to(tl.float32)
        spread = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    return spread


@triton.jit
def _gate(
    rows, out, outputs, given, given_stride, width, epsilon,
    WIDTH_BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        follow()
    row = tl.program_id(0).to(tl.int64)
    units = tl.program_id(1) * _GATE_BLOCK + tl.arange(0, _GATE_BLOCK)
    inside = units < outputs
    place = rows + 2 * row * outputs + units
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + outputs, mask=inside, other=0.0).to(tl.float32)
    if WIDTH_BLOCK > 0:
        spread = _spread(given, given_stride, row, width, epsilon, WIDTH_BLOCK)
        gate *= spread
        up *= spread
    tl.store(out + row * outputs + units, silu(gate, up), mask=inside)


@triton.jit(do_not_specialize=["row_count"])
def _add_norm(
    parts, residual, weight, out, of_rows, of_columns, row_count, width, epsilon,
    PARTS: tl.constexpr, ADDS: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    scale = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    place = tl.program_id(0).to(tl.int64) * width + lanes
    total = tl.zeros([BLOCK], tl.float32)
    if ADDS:
        # The previous kernel writes the parts and does not touch the residual.
        total = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if CHAINED:
        follow()
    added = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        before = tl.cast(part, tl.int64) * row_count * width
        added += tl.load(parts + before + place, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        of_row = tl.load(of_rows + tl.program_id(0))
        added *= of_row * tl.load(of_columns + lanes, mask=inside, other=0.0)
    total = added + total
    tl.store(residual + place, total, mask=inside)
    spread = tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
    tl.store(out + place, total * spread * scale, mask=inside)


@triton.jit
def _norm_rope_store(
    rows, out, query_weight, key_weight, query_epsilon, key_epsilon, rotations, positions, slots,
    keys, values, row_stride, out_stride, rotation_stride, key_stride, value_stride, of_outputs,
    QUERIES: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr, HALVES: tl.constexpr, NORMED: tl.constexpr, SCALED: tl.constexpr,
    given, given_stride, width, epsilon, WIDTH_BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Some query and key heads of a row, and the values that belong to these keys."""
    HALF: tl.constexpr = DIM // 2
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    is_key = (head >= QUERIES) & (head < QUERIES + KV_HEADS)
    pair = tl.arange(0, HALF_BLOCK)
    in_half = pair < HALF
    first = pair
    second = pair + HALF
    if not HALVES:
        first = 2 * pair
        second = 2 * pair + 1
    if CHAINED:
        # Attention comes next, which looks up its pages while this kernel waits and runs.
        release_next()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    turn = rotations + tl.load(positions + row).to(tl.int64) * rotation_stride + pair
    cosine = tl.load(turn, mask=in_half, other=0.0)[None, :].to(tl.float32)
    sine = tl.load(turn + HALF, mask=in_half, other=0.0)[None, :].to(tl.float32)
    if CHAINED:
        # The previous kernel writes nothing of what is loaded above.
        await_previous()
    place = rows + row * row_stride + head * DIM
    known = (head < QUERIES + KV_HEADS) & in_half[None, :]
    x = tl.load(place + first[None, :], mask=known, other=0.0).to(tl.float32)
    y = tl.load(place + second[None, :], mask=known, other=0.0).to(tl.float32)
    scale = 1.0
    if WIDTH_BLOCK > 0:
        scale = _spread(given, given_stride, row, width, epsilon, WIDTH_BLOCK)
        x *= scale
        y *= scale
    if SCALED:
        x *= tl.load(of_outputs + head * DIM + first[None, :], mask=known, other=0.0)
        y *= tl.load(of_outputs + head * DIM + second[None, :], mask=known, other=0.0)
    if NORMED:
        squares = tl.sum(x * x + y * y, 1)[:, None]
        spread = tl.rsqrt(squares / DIM + tl.where(is_key, key_epsilon, query_epsilon))
        x = x * spread * _head_weights(query_weight, key_weight, first, in_half, is_key)
        y = y * spread * _head_weights(query_weight, key_weight, second, in_half, is_key)
        # Rounded as a separate norm kernel would do.
        x = x.to(rows.dtype.element_ty).to(tl.float32)
        y = y.to(rows.dtype.element_ty).to(tl.float32)
    turned_x = x * cosine - y * sine
    turned_y = y * cosine + x * sine
    is_query = (head < QUERIES) & in_half[None, :]
    query = out + row * out_stride + head * DIM
    tl.store(query + first[None, :], turned_x, mask=is_query)
    tl.store(query + second[None, :], turned_y, mask=is_query)
    stored = is_key & in_half[None, :]
    key = keys + slot * key_stride + (head - QUERIES) * DIM
    tl.store(key + first[None, :], turned_x, mask=stored)
    tl.store(key + second[None, :], turned_y, mask=stored)
    own_value = place + KV_HEADS * DIM + pair[None, :]
    value = values + slot * value_stride + (head - QUERIES) * DIM + pair[None, :]
    first_values = tl.load(own_value, mask=stored) * scale
    second_values = tl.load(own_value + HALF, mask=stored) * scale
    if SCALED:
        of_values = of_outputs + (head + KV_HEADS) * DIM + pair[None, :]
        first_values *= tl.load(of_values, mask=stored, other=0.0)
        second_values *= tl.load(of_values + HALF, mask=stored, other=0.0)
    tl.store(value, first_values, mask=stored)
    tl.store(value + HALF, second_values, mask=stored)


@triton.jit
def _head_weights(query_weight, key_weight, dims, inside, is_key):
    of_query = tl.load(query_weight + dims, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + dims, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_key, of_key[None, :], of_query[None, :])
