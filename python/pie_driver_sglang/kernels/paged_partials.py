"""Decode attention over pages: rows that several programs share, and how a row is finished.

Each program leaves its part of such a row, and the one that is the last to do so merges them. What
a row of a group saw with the others is half of it, what it saw alone the other half; the second one
to be there merges these. Until it is finished, a row is three things: weighted values, the largest
score, and the sum of the weights. Scores are exponents of two, weights those of scores above the
largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_MERGED_NUMBERS = tl.constexpr(8192)
"""Numbers of a row's parts that are merged at once, about."""
_JOINING_TURNS = tl.constexpr(3)
"""Turns of merging that take as long as to join the halves of a row, about."""


def alloc_partials(
    rows: int, queries: torch.Tensor, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where parts of so many rows are left: values by their weights, and the weights' sums.

    Sums are kept as exponents of two. Nothing needs to be there before.
    """
    heads = queries.shape[1]
    parts = queries.new_empty((rows, heads, value_dim), dtype=torch.float32)
    return parts, queries.new_empty((rows, heads), dtype=torch.float32)


@triton.jit
def rows_of(order, row, ahead, number, elsewhere, GROUPED: tl.constexpr):
    """Rows of a tile, by their number in it, int64; those that it does not have may be any."""
    rows = row - ahead + number
    if GROUPED:
        listed = (number <= ahead) & (elsewhere < 0)
        rows = tl.where(listed, tl.load(order + rows, mask=listed, other=0), rows)
    return rows.to(tl.int64)


@triton.jit
def _place(program, first, number, TILE: tl.constexpr):
    """Where a program leaves its part of a row: two tiles, the latter begins in the program."""
    return (2 * program + (program == first).to(tl.int32)) * TILE + number


@triton.jit
def store_partial(
    mixed, best, total, out, parts, sums, sinks, arrived, program, first, final,
    order, row, ahead, number, kv_head, out_stride,
    halves, half_sums, met, row_count, elsewhere,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SINKS: tl.constexpr,
    GROUPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keeps a program's part of a tile; the last of `first` to `final` merges all of them."""
    heads = kv_head * GROUP + tl.arange(0, GROUP_BLOCK) % GROUP
    head_count = tl.num_programs(0) * GROUP
    asks = number <= ahead
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    place = _place(program, first, number, TILE) * head_count + heads
    tl.store(
        parts + place[:, None] * VALUE_DIM + value_dims,
        mixed / tl.where(total > 0, total, 1.0)[:, None],
        mask=asks[:, None] & (value_dims < VALUE_DIM),
    )
    tl.store(sums + place, best + tl.log2(total), mask=asks)
    # No warp says that its part is there before all warps' are.
    tl.debug_barrier()
    count = arrived + kv_head * tl.num_programs(1) + first
    if tl.atomic_add(count, 1, sem="acq_rel") == final - first:
        tl.store(count, 0)
        AT_ONCE: tl.constexpr = max(1, _MERGED_NUMBERS // (HEAD_BLOCK * VALUE_BLOCK))
        # Whatever takes fewer turns.
        turns = (ahead + 1) * tl.cdiv(final - first + 1, AT_ONCE)
        if GROUPED:
            turns += tl.where(elsewhere != 0, ahead * _JOINING_TURNS, 0)
        if final - first < turns:
            mixed, best, total = _merged_rows(
                parts, sums, first, final, number, heads, head_count, asks,
                VALUE_DIM, GROUP_BLOCK, VALUE_BLOCK, TILE,
            )  # fmt: skip
            rows = rows_of(order, row, ahead, number, elsewhere, GROUPED)
            merge_or_store(
                mixed, best, total, rows, heads, asks, out, out_stride,
                halves, half_sums, met, row_count, elsewhere, sinks,
                GROUP, VALUE_DIM, VALUE_BLOCK, SINKS, GROUPED,
            )  # fmt: skip
        else:
            lanes = tl.arange(0, HEAD_BLOCK)
            in_group = lanes < GROUP
            own_heads = kv_head * GROUP + lanes
            for turn in range(ahead + 1):
                one, largest, weight = _merged_parts(
                    parts, sums, first, final, turn, own_heads, in_group, head_count,
                    VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, AT_ONCE, TILE,
                )  # fmt: skip
                own_rows = rows_of(order, row, ahead, turn + lanes * 0, elsewhere, GROUPED)
                merge_or_store(
                    one, largest, weight, own_rows, own_heads, in_group, out, out_stride,
                    halves, half_sums, met, row_count, elsewhere, sinks,
                    GROUP, VALUE_DIM, VALUE_BLOCK, SINKS, GROUPED,
                )  # fmt: skip


@triton.jit
def merge_or_store(
    mixed, best, total, rows, heads, asks, out, out_stride,
    halves, half_sums, met, row_count, elsewhere, sinks,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SINKS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Finishes rows whose tile is seen, or leaves half of them if the other half is not there."""
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    if GROUPED:  # noqa: SIM102  (a constant, unlike the other one)
        if elsewhere != 0:
            mixed, best, total, asks = _joined(
                mixed, best, total, rows, heads, asks, halves, half_sums, met, row_count,
                elsewhere, GROUP, VALUE_DIM, VALUE_BLOCK,
            )  # fmt: skip
    mixed = normalize(mixed, best, total, sinks, heads, asks, SINKS)
    tl.store(
        out + (rows * out_stride + heads * VALUE_DIM)[:, None] + value_dims,
        mixed,
        mask=asks[:, None] & (value_dims < VALUE_DIM),
    )


@triton.jit
def _joined(
    mixed, best, total, rows, heads, asks, halves, half_sums, met, row_count, elsewhere,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Both halves of the rows of which the other half is there, and which these are."""
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    head_count = tl.num_programs(0) * GROUP
    place = rows * head_count + heads
    alone = (elsewhere > 0).to(tl.int64)
    own = place + alone * row_count * head_count
    others = place + (1 - alone) * row_count * head_count
    own_sums = best + tl.log2(total)
    own_values = mixed / tl.where(total > 0, total, 1.0)[:, None]
    stored = value_dims < VALUE_DIM
    left = halves + own[:, None] * VALUE_DIM + value_dims
    tl.store(left, own_values, mask=asks[:, None] & stored)
    tl.store(half_sums + own, own_sums, mask=asks)
    # As above: what a warp says is there all warps have written, and what one has heard all know.
    tl.debug_barrier()
    before = tl.atomic_add(met + place, 1, mask=asks, sem="acq_rel")
    tl.debug_barrier()
    whole = asks & (before == 1)
    tl.store(met + place, 0, mask=whole)
    # Past the first-level cache, which knows nothing of other programs.
    sums = tl.load(half_sums + others, mask=whole, other=float("-inf"), cache_modifier=".cg")
    values = tl.load(
        halves + others[:, None] * VALUE_DIM + value_dims,
        mask=whole[:, None] & stored,
        other=0.0,
        cache_modifier=".cg",
    )
    largest = tl.maximum(own_sums, sums)
    level = tl.where(largest == float("-inf"), 0.0, largest)
    weights, own_weights = tl.exp2(sums - level), tl.exp2(own_sums - level)
    own_values, values = own_values * own_weights[:, None], values * weights[:, None]
    # One of the products is fused with the sum, and so rounded otherwise: always the same one.
    seen_alone = tl.where(elsewhere > 0, own_values, values)
    joined = seen_alone + tl.where(elsewhere > 0, values, own_values)
    return joined, largest, weights + own_weights, whole


@triton.jit
def _merged_rows(
    parts, sums, first, final, number, heads, head_count, asks,
    VALUE_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """What programs `first` to `final` left of a tile: part by part."""
    value_dims = tl.arange(0, VALUE_BLOCK)
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for program in range(first, final + 1):
        place = _place(program, first, number, TILE) * head_count + heads
        # Past the first-level cache, which knows nothing of other programs.
        logs = tl.load(sums + place, mask=asks, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            parts + place[:, None] * VALUE_DIM + value_dims[None, :],
            mask=asks[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        largest = tl.maximum(best, logs)
        level = tl.where(largest == float("-inf"), 0.0, largest)
        shrink = tl.exp2(best - level)
        weights = tl.exp2(logs - level)
        total = total * shrink + weights
        mixed = mixed * shrink[:, None] + weights[:, None] * part
        best = largest
    return mixed, best, total


@triton.jit
def _merged_parts(
    parts, sums, first, final, number, heads, in_set, head_count,
    VALUE_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What programs `first` to `final` left of one row of a tile: many parts at once."""
    value_dims = tl.arange(0, VALUE_BLOCK)[None, None, :]
    best = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    mixed = tl.zeros([HEAD_BLOCK, VALUE_BLOCK], tl.float32)
    for start in range(first, final + 1, AT_ONCE):
        programs = start + tl.arange(0, AT_ONCE)
        known = in_set[:, None] & (programs <= final)[None, :]
        places = _place(programs, first, number, TILE)[None, :] * head_count + heads[:, None]
        # Past the first-level cache, which knows nothing of other programs.
        logs = tl.load(sums + places, mask=known, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            parts + places[:, :, None] * VALUE_DIM + value_dims,
            mask=known[:, :, None] & (value_dims < VALUE_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        largest = tl.maximum(best, tl.max(logs, 1))
        level = tl.where(largest == float("-inf"), 0.0, largest)
        shrink = tl.exp2(best - level)
        weights = tl.exp2(logs - level[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.sum(weights[:, :, None] * part, 1)
        best = largest
    return mixed, best, total


@triton.jit
def normalize(mixed, best, total, sinks, heads, in_group, SINKS: tl.constexpr):
    """Values by their weights, the sink's included."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32) * LOG2E
        largest = tl.maximum(best, sink)
        mixed = mixed * tl.exp2(best - largest)[:, None]
        total = total * tl.exp2(best - largest) + tl.exp2(sink - largest)
    # A row that sees nothing gives zeros.
    return mixed / tl.where(total > 0, total, 1.0)[:, None]
