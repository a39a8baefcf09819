"""Decode attention over a paged KV cache with stream-K scheduling, in Triton.

``out[row, head] = softmax(scale * q @ K.T) @ V`` over the row's own KV. Supports GQA, sliding
windows, logit soft caps, attention sinks, FP8 KV and prefix groups. Each program computes its range
of the step's KV blocks (`split_plan`), stores the rows that lie within the range, and partial
results of others, which the last program merges (`partial_results`). So a row's last bits depend on
its batch.

It replaces FlashInfer's and FA3's decode kernels in graphs: the plan is computed on the device, so
a captured step needs no host-side planning, and reads the block table instead of a list of slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams
from pie_driver_sglang.kernels.attention.partial_results import (
    alloc_partials,
    merge_or_store,
    store_partial,
    tile_rows,
)
from pie_driver_sglang.kernels.attention.split_plan import (
    END_BLOCK,
    KV_LEN,
    LAST_ROW,
    PREFIX_LEN,
    ROWS_BEFORE,
    TABLE_ROW,
    DecodeRows,
    WorkPlan,
    first_visible,
)
from pie_driver_sglang.kernels.constants import LOG2E
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

_MOST_PAGES = 8
"""Most pages of a block whose first slots are loaded; otherwise each token's slot is loaded."""


def attend_paged(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    rows: DecodeRows,
    plan: WorkPlan,
    rule: AttentionParams,
    page_size: int,
    value_scale: float = 1.0,
) -> None:
    """Decode attention of all rows; a row without visible keys gives zeros. Can be captured.

    Grid: (kv_heads, programs). Accumulates in float32; MMA operands have the dtype of the queries.

    Args:
        queries: ``[rows, heads, dim]``, heads contiguous.
        keys: ``[slots, kv_heads, dim]`` of any float type; each serves the same number of
            neighbouring heads.
        values: ``[slots, kv_heads, value_dim]``.
        out: ``[rows, heads, value_dim]``, heads contiguous, written.
        rows: The rows of the step.
        plan: The work plan of the step, for this layer's `kv_heads` and window.
        rule: The layer's parameters, without its window; the scale includes that of stored keys.
        page_size: Tokens of a page.
        value_scale: The scale of stored values.
    """
    row_count, _, dim = queries.shape
    _, kv_heads, value_dim = values.shape
    config, tile, programs = plan.split.tuning, plan.split.tile, plan.tile_ranges.shape[1]
    groups = None if plan.split.windowed else rows.prefixes
    partial_out, partial_lse = alloc_partials(2 * programs * tile, queries, value_dim)
    # Rows of prefix groups have two halves: the common prefix, and the rest.
    halves = alloc_partials(0 if groups is None else 2 * row_count, queries, value_dim)
    sinks = out if rule.sinks is None else rule.sinks
    # Scores are exponents of two; with a soft cap, cap * tanh(score / cap).
    scale, logit_cap = rule.scale * LOG2E.value, 0.0
    if rule.logit_cap:
        scale, logit_cap = rule.scale / rule.logit_cap, rule.logit_cap * LOG2E.value
    _paged_decode[(kv_heads, programs)](
        queries, keys, values, out, rows.table, out if groups is None else groups.order,
        *plan[1:], partial_out, partial_lse, *halves, sinks,
        scale, value_scale, logit_cap, plan.split.window, row_count, plan.tiles.shape[1],
        queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), rows.table.stride(0),
        GQA_GROUP=plan.split.group, DIM=dim, VALUE_DIM=value_dim,
        PAGE=page_size, PAGES=slot_pages(config.block, page_size), BLOCK_KV=config.block,
        BLOCK_M=plan.split.queries, GQA_BLOCK=triton.next_power_of_2(plan.split.group),
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        LOGIT_CAP=rule.logit_cap > 0, WINDOWED=plan.split.windowed, SINKS=rule.sinks is not None,
        PREFIX_GROUPS=groups is not None, TILE_ROWS=tile,
        num_warps=config.warps, num_stages=config.stages, **pdl_options(queries.device),
    )  # fmt: skip


def slot_pages(block: int, page_size: int) -> int:
    """Pages of a block, or 1 for a part of a page; 0 if each token's slot is loaded."""
    if page_size % block == 0:
        return 1
    pages, rest = divmod(block, page_size)
    return pages if not rest and pages <= _MOST_PAGES else 0


@triton.jit
def load_slots(slots, token, end, PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Loads the first slots of a block's pages, or the slots of its tokens, as a tuple."""
    block_slots = ()
    if PAGES == 0:
        index = token + tl.arange(0, BLOCK_KV)
        block_slots = (tl.load(slots + index, mask=index < end, other=0),)  # type: ignore[assignment]
    for page in tl.static_range(PAGES):
        index = token + page * PAGE
        page_slot = tl.load(slots + index, mask=index < end, other=0)
        block_slots = block_slots + (page_slot,)  # type: ignore[assignment]  # noqa: RUF005
    return block_slots


@triton.jit
def token_slots(block_slots, PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Expands the result of `load_slots` to ``[BLOCK_KV]`` int64 slots."""
    slots = block_slots[0]
    lanes = tl.arange(0, BLOCK_KV)
    if PAGES > 0:
        slots = block_slots[0] + lanes
    for page in tl.static_range(1, PAGES):
        slots = tl.where(lanes >= page * PAGE, block_slots[page] + lanes - page * PAGE, slots)
    return slots.to(tl.int64)


@triton.jit
def _attend_blocks(
    q, head_keys, head_values, slots_row, block_slots, first_token, end_token, first_token_visible,
    kv_lens, scale, logit_cap, window, key_slot_stride, value_slot_stride,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_M: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    LOGIT_CAP: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Online softmax over KV blocks: accumulator, row maxima and row sums, in base 2.

    `kv_lens`, ``[BLOCK_M]``, is the KV length of each row of `q`.
    """
    lanes = tl.arange(0, BLOCK_KV)
    dims = tl.arange(0, DIM_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    # Reduced over lanes at the end, since a reduction synchronizes warps.
    row_sums = tl.zeros([BLOCK_M, BLOCK_KV], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    for token in tl.range(first_token, end_token, BLOCK_KV):
        slots = token_slots(block_slots, PAGE, PAGES, BLOCK_KV)
        # One iteration ahead, so that loads of KV do not wait for those of slots.
        block_slots = load_slots(slots_row, token + BLOCK_KV, end_token, PAGE, PAGES, BLOCK_KV)
        # Slots that no row may see can hold anything, even NaNs.
        visible = token + lanes < end_token
        if WINDOWED:
            visible = visible & (token + lanes >= first_token_visible)
        k = tl.load(
            head_keys + slots[None, :] * key_slot_stride + dims[:, None],
            mask=visible[None, :] & (dims[:, None] < DIM),
            other=0.0,
        )
        v = tl.load(
            head_values + slots[:, None] * value_slot_stride + value_dims[None, :],
            mask=visible[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if LOGIT_CAP:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = logit_cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        own = token + lanes[None, :] < kv_lens[:, None]
        if WINDOWED:
            own = own & (token + lanes[None, :] >= kv_lens[:, None] - 1 - window)
        scores = tl.where(own, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # Avoids inf - inf in a row without visible keys so far.
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - safe_max)
        weights = tl.exp2(scores - safe_max[:, None])
        row_sums = row_sums * rescale[:, None] + weights
        acc = acc * rescale[:, None]
        acc += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        row_max = new_max
    return acc, row_max, tl.sum(row_sums, 1)


@triton.jit(do_not_specialize=["row_count", "max_tiles", "window"])
def _paged_decode(
    queries, keys, values, out, table, order, totals, tiles, tile_ranges, semaphores,
    half_semaphores, partial_out, partial_lse, half_out, half_lse, sinks,
    scale, value_scale, logit_cap, window, row_count, max_tiles,
    query_stride, key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    out_stride, table_stride,
    GQA_GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK_KV: tl.constexpr,
    BLOCK_M: tl.constexpr, GQA_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, LOGIT_CAP: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    PREFIX_GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes a program's range of blocks, for the query heads of one KV head.

    Before the previous kernel has ended, which writes neither, it reads the plan and the block
    table, and prefetches its first block into L2.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    blocks_per_program = tl.load(totals)
    block = program * blocks_per_program
    stop = tl.minimum(block + blocks_per_program, tl.load(totals + 1))
    tile_count = tl.load(totals + 2)
    first_tile = tl.load(tile_ranges + program)
    stop_tile = tl.load(tile_ranges + tl.num_programs(1) + program)
    begin = tl.load(tiles + END_BLOCK * max_tiles + first_tile - 1, mask=first_tile > 0, other=0)
    row, rows_before, end, kv_len, slots, prefix_len = _load_tile(
        tiles, first_tile, tile_count, max_tiles, table, table_stride, PREFIX_GROUPS
    )
    following = _load_tile(
        tiles, first_tile + 1, tile_count, max_tiles, table, table_stride, PREFIX_GROUPS
    )
    token_range = _token_range(
        block, tl.minimum(end, stop), begin, rows_before, kv_len, prefix_len, window, BLOCK_KV,
        WINDOWED,
        PREFIX_GROUPS,
    )  # fmt: skip
    block_slots = load_slots(slots, token_range[0], token_range[1], PAGE, PAGES, BLOCK_KV)
    group = tl.arange(0, BLOCK_M)
    # M is tile rows times query heads.
    tile_row = group // GQA_GROUP
    heads = kv_head * GQA_GROUP + group % GQA_GROUP
    own_queries = queries + heads * DIM
    first_rows = tile_rows(order, row, rows_before, tile_row, prefix_len, PREFIX_GROUPS)
    if PDL:
        first_slots = token_slots(block_slots, PAGE, PAGES, BLOCK_KV)
        prefetch_kv(keys + kv_head * key_head_stride, first_slots, key_slot_stride, DIM, DIM_BLOCK)
        prefetch_kv(
            values + kv_head * value_head_stride, first_slots, value_slot_stride, VALUE_DIM,
            VALUE_BLOCK,
        )  # fmt: skip
        pdl_wait_trigger()
    q = _load_queries(
        own_queries, first_rows, tile_row <= rows_before, query_stride, DIM, DIM_BLOCK
    )
    for tile in range(first_tile, stop_tile):
        last = tl.minimum(end, stop)
        # Software pipelining: loads for the next tiles overlap with this tile's attention.
        next_row, next_rows_before, next_end, next_kv_len, next_slots, next_prefix_len = following
        following = _load_tile(
            tiles, tile + 2, tile_count, max_tiles, table, table_stride, PREFIX_GROUPS
        )
        next_token_range = _token_range(
            last, tl.minimum(next_end, stop), end, next_rows_before, next_kv_len, next_prefix_len,
            window, BLOCK_KV, WINDOWED, PREFIX_GROUPS,
        )  # fmt: skip
        next_block_slots = load_slots(
            next_slots, next_token_range[0], next_token_range[1], PAGE, PAGES, BLOCK_KV
        )
        next_rows = tile_rows(
            order, next_row, next_rows_before, tile_row, next_prefix_len, PREFIX_GROUPS
        )
        next_q = _load_queries(
            own_queries, next_rows, tile_row <= next_rows_before, query_stride, DIM, DIM_BLOCK
        )
        # All rows of a prefix group see the whole prefix.
        kv_lens = kv_len - rows_before + tile_row
        if PREFIX_GROUPS:
            kv_lens = tl.where(prefix_len < 0, kv_len, kv_lens)
        acc, row_max, row_sum = _attend_blocks(
            q, keys + kv_head * key_head_stride, values + kv_head * value_head_stride,
            slots, block_slots, token_range[0], token_range[1],
            first_visible(kv_len - rows_before, window, WINDOWED),
            kv_lens, scale, logit_cap, window, key_slot_stride, value_slot_stride,
            DIM, VALUE_DIM, PAGE, PAGES, BLOCK_KV, BLOCK_M, DIM_BLOCK, VALUE_BLOCK,
            LOGIT_CAP, WINDOWED,
        )  # fmt: skip
        acc = acc * value_scale
        row_mask = tile_row <= rows_before
        first, final = begin // blocks_per_program, (end - 1) // blocks_per_program
        if first == final:
            rows = tile_rows(order, row, rows_before, tile_row, prefix_len, PREFIX_GROUPS)
            merge_or_store(
                acc, row_max, row_sum, rows, heads, row_mask, out, out_stride,
                half_out, half_lse, half_semaphores, row_count, prefix_len, sinks,
                GQA_GROUP, VALUE_DIM, VALUE_BLOCK, SINKS, PREFIX_GROUPS,
            )  # fmt: skip
        else:
            store_partial(
                acc, row_max, row_sum, out, partial_out, partial_lse, sinks, semaphores, program,
                first, final,
                order, row, rows_before, tile_row, kv_head, out_stride,
                half_out, half_lse, half_semaphores, row_count, prefix_len,
                GQA_GROUP, VALUE_DIM, BLOCK_M, GQA_BLOCK, VALUE_BLOCK, SINKS, PREFIX_GROUPS,
                TILE_ROWS,
            )  # fmt: skip
        block = last
        begin = end
        row, rows_before, end, kv_len = next_row, next_rows_before, next_end, next_kv_len
        slots = next_slots
        prefix_len = next_prefix_len
        token_range = next_token_range
        block_slots = next_block_slots
        q = next_q


@triton.jit
def prefetch_kv(storage, slots, slot_stride, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr):
    """Prefetches a KV block into L2, which is coherent with later stores to it."""
    LINE: tl.constexpr = 1024 // storage.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = max(1, WIDTH_BLOCK // LINE)
    line = tl.minimum(tl.arange(0, LINES) * LINE, WIDTH - 1)
    lines = storage + slots[:, None] * slot_stride + line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [lines],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _load_tile(
    tiles, tile, tile_count, max_tiles, table, table_stride, PREFIX_GROUPS: tl.constexpr
):
    """Loads a tile of the work plan, with its block-table row; zeros after the last tile."""
    field = tiles + tile
    known = tile < tile_count
    row = tl.load(field + LAST_ROW * max_tiles, mask=known, other=0)
    rows_before = tl.load(field + ROWS_BEFORE * max_tiles, mask=known, other=0)
    end = tl.load(field + END_BLOCK * max_tiles, mask=known, other=0)
    kv_len = tl.load(field + KV_LEN * max_tiles, mask=known, other=0)
    table_row = tl.load(field + TABLE_ROW * max_tiles, mask=known, other=0).to(tl.int64)
    prefix_len = 0
    if PREFIX_GROUPS:
        prefix_len = tl.load(field + PREFIX_LEN * max_tiles, mask=known, other=0)
    return row, rows_before, end, kv_len, table + table_row * table_stride, prefix_len


@triton.jit
def _load_queries(
    own_queries, rows, row_mask, query_stride, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):
    """Loads queries of a tile: ``[BLOCK_M, DIM_BLOCK]``."""
    dims = tl.arange(0, DIM_BLOCK)
    return tl.load(
        (own_queries + rows * query_stride)[:, None] + dims[None, :],
        mask=row_mask[:, None] & (dims[None, :] < DIM),
        other=0.0,
    )


@triton.jit
def _token_range(
    block, last, begin, rows_before, kv_len, prefix_len, window, BLOCK_KV: tl.constexpr,
    WINDOWED: tl.constexpr, PREFIX_GROUPS: tl.constexpr,
):  # fmt: skip
    """First token of a tile's blocks, and the end of those up to `last` that a row may see."""
    hidden = first_visible(kv_len - rows_before, window, WINDOWED)
    if PREFIX_GROUPS:
        hidden = tl.maximum(prefix_len, 0)
    skipped = hidden // BLOCK_KV - begin
    return (block + skipped) * BLOCK_KV, tl.minimum((last + skipped) * BLOCK_KV, kv_len)
