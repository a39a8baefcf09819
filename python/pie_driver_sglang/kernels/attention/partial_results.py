"""Decode attention over pages: partial results of rows, and how they are merged.

Each program of a split row stores a partial result, and the last one to do so merges all of them. A
row of a group has two halves, its common prefix and the rest; the second one to finish merges them.
A partial result is an online softmax: weighted values, the largest score, and the sum of weights.
Scores are exponents of two, and weights are relative to the largest score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_MERGED_NUMBERS = tl.constexpr(8192)
"""Elements of partial results that are merged at once, about."""
_JOINING_TURNS = tl.constexpr(3)
"""Iterations of merging that take as long as joining the halves of a row, about."""


def alloc_partials(
    rows: int, queries: torch.Tensor, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates partial results of `rows` rows, uninitialized.

    Returns:
        ``[rows, heads, value_dim]`` float32 normalized values, and ``[rows, heads]`` float32 sums
        of their weights, as exponents of two.
    """
    heads = queries.shape[1]
    parts = queries.new_empty((rows, heads, value_dim), dtype=torch.float32)
    return parts, queries.new_empty((rows, heads), dtype=torch.float32)


@triton.jit
def rows_of(order, row, ahead, number, elsewhere, GROUPED: tl.constexpr):
    """Rows of a tile by their index in it, int64; undefined beyond its last row."""
    rows = row - ahead + number
    if GROUPED:
        listed = (number <= ahead) & (elsewhere < 0)
        rows = tl.where(listed, tl.load(order + rows, mask=listed, other=0), rows)
    return rows.to(tl.int64)


@triton.jit
def _place(program, first, number, TILE: tl.constexpr):
    """Where a program stores its part of a row: it has two places, for the tiles at its ends."""
    return (2 * program + (program == first).to(tl.int32)) * TILE + number


@triton.jit
def store_partial(
    mixed, best, total, out, parts, sums, sinks, arrived, program, first, final,
    order, row, ahead, number, kv_head, out_stride,
    halves, half_sums, met, row_count, elsewhere,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SINKS: tl.constexpr,
    GROUPED: tl.constexpr, TILE: tl.constexpr, MERGED: tl.constexpr = _MERGED_NUMBERS,
):  # fmt: skip
    """Stores a program's part of a tile; the last one of `first` to `final` merges all parts."""
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
    # All warps must have stored their part before one of them counts it.
    tl.debug_barrier()
    count = arrived + kv_head * tl.num_programs(1) + first
    if tl.atomic_add(count, 1, sem="acq_rel") == final - first:
        tl.store(count, 0)
        AT_ONCE: tl.constexpr = max(1, MERGED // (HEAD_BLOCK * VALUE_BLOCK))
        # Merge all rows part by part, or row by row: whatever takes fewer iterations.
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
    """Writes the output of rows, or stores one half if the other half is missing."""
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
    """Stores these halves, and merges those rows whose other half is stored already."""
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
    # As above: all warps have stored before one counts, and all see the same counts afterwards.
    tl.debug_barrier()
    before = tl.atomic_add(met + place, 1, mask=asks, sem="acq_rel")
    tl.debug_barrier()
    whole = asks & (before == 1)
    tl.store(met + place, 0, mask=whole)
    # Bypasses L1, which is not coherent with other SMs.
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
    # One product is fused with the addition and rounds differently: always the same one.
    seen_alone = tl.where(elsewhere > 0, own_values, values)
    joined = seen_alone + tl.where(elsewhere > 0, values, own_values)
    return joined, largest, weights + own_weights, whole


@triton.jit
def _merged_rows(
    parts, sums, first, final, number, heads, head_count, asks,
    VALUE_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Merges the parts of a tile that programs `first` to `final` stored: part by part."""
    value_dims = tl.arange(0, VALUE_BLOCK)
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for program in range(first, final + 1):
        place = _place(program, first, number, TILE) * head_count + heads
        # Bypasses L1, which is not coherent with other SMs.
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
    """Merges the parts of one row of a tile: many parts at once."""
    value_dims = tl.arange(0, VALUE_BLOCK)[None, None, :]
    best = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    mixed = tl.zeros([HEAD_BLOCK, VALUE_BLOCK], tl.float32)
    for start in range(first, final + 1, AT_ONCE):
        programs = start + tl.arange(0, AT_ONCE)
        known = in_set[:, None] & (programs <= final)[None, :]
        places = _place(programs, first, number, TILE)[None, :] * head_count + heads[:, None]
        # Bypasses L1, which is not coherent with other SMs.
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
    """Divides weighted values by the sum of weights, the attention sink's included."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32) * LOG2E
        largest = tl.maximum(best, sink)
        mixed = mixed * tl.exp2(best - largest)[:, None]
        total = total * tl.exp2(best - largest) + tl.exp2(sink - largest)
    # A row without visible keys gives zeros.
    return mixed / tl.where(total > 0, total, 1.0)[:, None]
