"""GPU kernels of decode attention over pages: each row attends to its own KV.

A program computes its range of the step's blocks (`split_plan.py`). It finishes the rows that lie
within its range, and stores partial results of the others, which one program merges
(`partial_results.py`). So the last bits of a row's result depend on the split, and on other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.attention.masked_reference import Rule
from pie_driver_sglang.kernels.attention.partial_results import (
    LOG2E,
    alloc_partials,
    merge_or_store,
    rows_of,
    store_partial,
)
from pie_driver_sglang.kernels.attention.split_plan import DecodeRows, WorkPlan, seen_from
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

_MOST_PAGES = 8
"""Most pages of a block that are looked up one by one; otherwise each token's slot is loaded."""


def attend_paged(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    rows: DecodeRows,
    plan: WorkPlan,
    rule: Rule,
    page_size: int,
    value_scale: float = 1.0,
) -> None:
    """Attends with every row; a row without visible keys gives zeros. Can be captured.

    Accumulates in float32; GEMM operands have the dtype of the queries.

    Args:
        queries: ``[rows, heads, dim]``, heads contiguous.
        keys: ``[slots, kv_heads, dim]`` of any float type; each serves the same number of
            neighbouring heads.
        values: ``[slots, kv_heads, value_dim]``.
        out: ``[rows, heads, value_dim]``, heads contiguous, written.
        rows: The rows of the step.
        plan: The work plan of the step, for this layer's `kv_heads` and window.
        rule: The layer's rule, without its window; the scale includes that of stored keys.
        page_size: Tokens of a page.
        value_scale: The scale of stored values.
    """
    row_count, _, dim = queries.shape
    _, kv_heads, value_dim = values.shape
    how, tile, programs = plan.split.tuning, plan.split.tile, plan.stretches.shape[1]
    groups = None if plan.split.windowed else rows.prefixes
    parts, sums = alloc_partials(2 * programs * tile, queries, value_dim)
    # Halves of rows in groups: their common prefix, and the rest.
    halves = alloc_partials(0 if groups is None else 2 * row_count, queries, value_dim)
    sinks = out if rule.sinks is None else rule.sinks
    # Scores are exponents of two; with a soft cap, cap * tanh(score / cap).
    scale, cap = rule.scale * LOG2E.value, 0.0
    if rule.cap:
        scale, cap = rule.scale / rule.cap, rule.cap * LOG2E.value
    _attend[(kv_heads, programs)](
        queries, keys, values, out, rows.table, out if groups is None else groups.order,
        *plan[1:], parts, sums, *halves, sinks,
        scale, value_scale, cap, plan.split.window, row_count, plan.tiles.shape[1],
        queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), rows.table.stride(0),
        GROUP=plan.split.group, DIM=dim, VALUE_DIM=value_dim,
        PAGE=page_size, PAGES=_pages(how.block, page_size), BLOCK=how.block,
        GROUP_BLOCK=plan.split.queries, HEAD_BLOCK=triton.next_power_of_2(plan.split.group),
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        CAPPED=rule.cap > 0, WINDOWED=plan.split.windowed, SINKS=rule.sinks is not None,
        GROUPED=groups is not None, TILE=tile,
        num_warps=how.warps, num_stages=how.stages, **pdl_options(queries.device),
    )  # fmt: skip


def _pages(block: int, page_size: int) -> int:
    """Pages of a block, or 1 for a part of a page; 0 if each token is looked up."""
    if page_size % block == 0:
        return 1
    pages, rest = divmod(block, page_size)
    return pages if not rest and pages <= _MOST_PAGES else 0


@triton.jit
def _look_up(slots, token, end, PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr):
    """The storage of the block at `token`: first slots of its pages, or slots of its tokens."""
    found = ()
    if PAGES == 0:
        index = token + tl.arange(0, BLOCK)
        found = (tl.load(slots + index, mask=index < end, other=0),)  # type: ignore[assignment]
    for page in tl.static_range(PAGES):
        index = token + page * PAGE
        start = tl.load(slots + index, mask=index < end, other=0)
        found = found + (start,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _slots(found, PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr):
    """``[BLOCK]`` int64 slots of a block that was looked up."""
    slots = found[0]
    lanes = tl.arange(0, BLOCK)
    if PAGES > 0:
        slots = found[0] + lanes
    for page in tl.static_range(1, PAGES):
        slots = tl.where(lanes >= page * PAGE, found[page] + lanes - page * PAGE, slots)
    return slots.to(tl.int64)


@triton.jit
def _attend_span(
    q, head_keys, head_values, slots_row, found, first_token, end_token, first_seen, kv_lens,
    scale, cap, window, key_slot_stride, value_slot_stride,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Attends to whole blocks: weighted values, the largest score, and the sum of weights.

    Scores are exponents of two, and weights are relative to the largest score. `kv_lens`,
    ``[GROUP_BLOCK]``, is the KV length of each row of `q`.
    """
    lanes = tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    # Reduced over the lanes at the end, since a reduction synchronizes warps.
    totals = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for token in tl.range(first_token, end_token, BLOCK):
        slots = _slots(found, PAGE, PAGES, BLOCK)
        # One iteration ahead, so that loads of KV do not wait for the lookup.
        found = _look_up(slots_row, token + BLOCK, end_token, PAGE, PAGES, BLOCK)
        # Storage that the row does not see may hold anything, even NaNs.
        seen = token + lanes < end_token
        if WINDOWED:
            seen = seen & (token + lanes >= first_seen)
        k = tl.load(
            head_keys + slots[None, :] * key_slot_stride + dims[:, None],
            mask=seen[None, :] & (dims[:, None] < DIM),
            other=0.0,
        )
        v = tl.load(
            head_values + slots[:, None] * value_slot_stride + value_dims[None, :],
            mask=seen[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if CAPPED:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        own = token + lanes[None, :] < kv_lens[:, None]
        if WINDOWED:
            own = own & (token + lanes[None, :] >= kv_lens[:, None] - 1 - window)
        scores = tl.where(own, scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        # A row without visible keys so far has weights of 0.
        level = tl.where(largest == float("-inf"), 0.0, largest)
        shrink = tl.exp2(best - level)
        weights = tl.exp2(scores - level[:, None])
        totals = totals * shrink[:, None] + weights
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        best = largest
    return mixed, best, tl.sum(totals, 1)


@triton.jit(do_not_specialize=["row_count", "most", "window"])
def _attend(
    queries, keys, values, out, table, order, totals, tiles, stretches, arrived, met,
    parts, sums, halves, half_sums, sinks,
    scale, value_scale, cap, window, row_count, most,
    query_stride, key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    out_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    GROUPED: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's range of blocks, for the query heads of one KV head.

    It reads the plan and the block table before the previous kernel has ended, which writes
    neither, and prefetches its first block.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    share = tl.load(totals)
    block = program * share
    stop = tl.minimum(block + share, tl.load(totals + 1))
    tile_count = tl.load(totals + 2)
    start = tl.load(stretches + program)
    until = tl.load(stretches + tl.num_programs(1) + program)
    begin = tl.load(tiles + 2 * most + start - 1, mask=start > 0, other=0)
    row, ahead, end, kv_len, slots, elsewhere = _tile(
        tiles, start, tile_count, most, table, table_stride, GROUPED
    )
    following = _tile(tiles, start + 1, tile_count, most, table, table_stride, GROUPED)
    seen = _span(
        block, tl.minimum(end, stop), begin, ahead, kv_len, elsewhere, window, BLOCK, WINDOWED,
        GROUPED,
    )  # fmt: skip
    found = _look_up(slots, seen[0], seen[1], PAGE, PAGES, BLOCK)
    group = tl.arange(0, GROUP_BLOCK)
    # The heads of the first row of the tile, then those of the second one.
    number = group // GROUP
    heads = kv_head * GROUP + group % GROUP
    own_queries = queries + heads * DIM
    first_rows = rows_of(order, row, ahead, number, elsewhere, GROUPED)
    if PDL:
        first_slots = _slots(found, PAGE, PAGES, BLOCK)
        _ask(keys + kv_head * key_head_stride, first_slots, key_slot_stride, DIM, DIM_BLOCK)
        _ask(
            values + kv_head * value_head_stride, first_slots, value_slot_stride, VALUE_DIM,
            VALUE_BLOCK,
        )  # fmt: skip
        pdl_wait_trigger()
    q = _load_queries(own_queries, first_rows, number <= ahead, query_stride, DIM, DIM_BLOCK)
    for tile in range(start, until):
        last = tl.minimum(end, stop)
        # Loads for the next tiles overlap with this tile's attention.
        next_row, next_ahead, next_end, next_kv_len, next_slots, next_elsewhere = following
        following = _tile(tiles, tile + 2, tile_count, most, table, table_stride, GROUPED)
        next_seen = _span(
            last, tl.minimum(next_end, stop), end, next_ahead, next_kv_len, next_elsewhere, window,
            BLOCK, WINDOWED, GROUPED,
        )  # fmt: skip
        next_found = _look_up(next_slots, next_seen[0], next_seen[1], PAGE, PAGES, BLOCK)
        next_rows = rows_of(order, next_row, next_ahead, number, next_elsewhere, GROUPED)
        next_q = _load_queries(
            own_queries, next_rows, number <= next_ahead, query_stride, DIM, DIM_BLOCK
        )
        # All rows of a group see its whole prefix.
        kv_lens = kv_len - ahead + number
        if GROUPED:
            kv_lens = tl.where(elsewhere < 0, kv_len, kv_lens)
        mixed, best, total = _attend_span(
            q, keys + kv_head * key_head_stride, values + kv_head * value_head_stride,
            slots, found, seen[0], seen[1], seen_from(kv_len - ahead, window, WINDOWED),
            kv_lens, scale, cap, window, key_slot_stride, value_slot_stride,
            DIM, VALUE_DIM, PAGE, PAGES, BLOCK, GROUP_BLOCK, DIM_BLOCK, VALUE_BLOCK,
            CAPPED, WINDOWED,
        )  # fmt: skip
        mixed = mixed * value_scale
        asks = number <= ahead
        first, final = begin // share, (end - 1) // share
        if first == final:
            rows = rows_of(order, row, ahead, number, elsewhere, GROUPED)
            merge_or_store(
                mixed, best, total, rows, heads, asks, out, out_stride,
                halves, half_sums, met, row_count, elsewhere, sinks,
                GROUP, VALUE_DIM, VALUE_BLOCK, SINKS, GROUPED,
            )  # fmt: skip
        else:
            store_partial(
                mixed, best, total, out, parts, sums, sinks, arrived, program, first, final,
                order, row, ahead, number, kv_head, out_stride,
                halves, half_sums, met, row_count, elsewhere,
                GROUP, VALUE_DIM, GROUP_BLOCK, HEAD_BLOCK, VALUE_BLOCK, SINKS, GROUPED, TILE,
            )  # fmt: skip
        block = last
        begin = end
        row, ahead, end, kv_len, slots = next_row, next_ahead, next_end, next_kv_len, next_slots
        elsewhere = next_elsewhere
        seen = next_seen
        found = next_found
        q = next_q


@triton.jit
def _ask(storage, slots, slot_stride, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr):
    """Prefetches a block into L2. Later stores to it go through L2, so they are not lost."""
    LINE: tl.constexpr = 1024 // storage.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = max(1, WIDTH_BLOCK // LINE)
    line = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
    places = storage + slots[:, None] * slot_stride + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [places],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _tile(tiles, tile, tile_count, most, table, table_stride, GROUPED: tl.constexpr):
    """A tile's last row, the number of rows before it, its end, KV length, slots and group KV.

    Zeros after the last tile.
    """
    place = tiles + tile
    known = tile < tile_count
    row = tl.load(place, mask=known, other=0)
    ahead = tl.load(place + most, mask=known, other=0)
    end = tl.load(place + 2 * most, mask=known, other=0)
    kv_len = tl.load(place + 3 * most, mask=known, other=0)
    table_row = tl.load(place + 4 * most, mask=known, other=0).to(tl.int64)
    elsewhere = 0
    if GROUPED:
        elsewhere = tl.load(place + 5 * most, mask=known, other=0)
    return row, ahead, end, kv_len, table + table_row * table_stride, elsewhere


@triton.jit
def _load_queries(
    own_queries, rows, asks, query_stride, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):
    """Queries of a tile's rows: ``[GROUP_BLOCK, DIM_BLOCK]``."""
    dims = tl.arange(0, DIM_BLOCK)
    return tl.load(
        (own_queries + rows * query_stride)[:, None] + dims[None, :],
        mask=asks[:, None] & (dims[None, :] < DIM),
        other=0.0,
    )


@triton.jit
def _span(
    block, last, begin, ahead, kv_len, elsewhere, window, BLOCK: tl.constexpr,
    WINDOWED: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """The first token of a tile's blocks up to `last`, and the end of those that one row sees."""
    unseen = seen_from(kv_len - ahead, window, WINDOWED)
    if GROUPED:
        unseen = tl.maximum(elsewhere, 0)
    skipped = unseen // BLOCK - begin
    return (block + skipped) * BLOCK, tl.minimum((last + skipped) * BLOCK, kv_len)
