"""Decode attention over pages: rows that several programs share, and how a row is finished.

Each program leaves its part of such a row, and the one that is the last to do so merges them.
Until it is finished, a row is three things: weighted values, the largest score, and the sum of the
weights. Scores are exponents of two, weights those of scores above the largest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
_MERGED_NUMBERS = tl.constexpr(8192)
"""Numbers of a row's parts that are merged at once, about."""


def room(
    queries: torch.Tensor, programs: int, tile: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the programs of a layer leave parts: values by their weights, and the weights' sums.

    Sums are kept as exponents of two. Nothing needs to be there before.
    """
    rows, heads = 2 * programs * tile, queries.shape[1]
    parts = queries.new_empty((rows, heads, value_dim), dtype=torch.float32)
    return parts, queries.new_empty((rows, heads), dtype=torch.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _place(program, first, number, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a program leaves its part of a row: two tiles, the latter begins in the program."""
    return (2 * program + (program == first).to(tl.int32)) * TILE + number


@triton.jit  # type: ignore[untyped-decorator]
def leave(  # type: ignore[no-untyped-def]
    mixed, best, total, out, parts, sums, sinks, arrived, program, first, final,
    first_row, ahead, number, kv_head, out_stride,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SINKS: tl.constexpr, TILE: tl.constexpr,
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
        if final - first < (ahead + 1) * tl.cdiv(final - first + 1, AT_ONCE):
            mixed, best, total = _merged_rows(
                parts, sums, first, final, number, heads, head_count, asks,
                VALUE_DIM, GROUP_BLOCK, VALUE_BLOCK, TILE,
            )  # fmt: skip
            mixed = finish(mixed, best, total, sinks, heads, asks, SINKS)
            start = (first_row + number).to(tl.int64) * out_stride + heads * VALUE_DIM
            written = asks[:, None] & (value_dims < VALUE_DIM)
            tl.store(out + start[:, None] + value_dims, mixed, mask=written)
        else:
            lanes = tl.arange(0, HEAD_BLOCK)
            in_group = lanes < GROUP
            own_heads = kv_head * GROUP + lanes
            for turn in range(ahead + 1):
                one, largest, weight = _merged_parts(
                    parts, sums, first, final, turn, own_heads, in_group, head_count,
                    VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, AT_ONCE, TILE,
                )  # fmt: skip
                one = finish(one, largest, weight, sinks, own_heads, in_group, SINKS)
                begin = (first_row + turn).to(tl.int64) * out_stride + own_heads * VALUE_DIM
                kept = in_group[:, None] & (value_dims < VALUE_DIM)
                tl.store(out + begin[:, None] + value_dims, one, mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _merged_rows(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def _merged_parts(  # type: ignore[no-untyped-def]
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


@triton.jit  # type: ignore[untyped-decorator]
def finish(  # type: ignore[no-untyped-def]
    mixed, best, total, sinks, heads, in_group, SINKS: tl.constexpr
):
    """Values by their weights, the sink's included."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32) * LOG2E
        largest = tl.maximum(best, sink)
        mixed = mixed * tl.exp2(best - largest)[:, None]
        total = total * tl.exp2(best - largest) + tl.exp2(sink - largest)
    # A row that sees nothing gives zeros.
    return mixed / tl.where(total > 0, total, 1.0)[:, None]
