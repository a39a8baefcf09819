"""Batch-invariant attention over a paged KV cache, in Triton: decodes, drafts and prefills.

``out[row, head] = softmax(scale * q @ K.T) @ V`` over the KV that the row sees. The bits of a row
depend on its query and its KV alone, not on the other rows, on the grid or on which of the two
kernels ran. For that

- KV is split at fixed multiples of `fixed_splits.split_len`, by the row's KV length only;
- a split is an online softmax over blocks of :data:`BLOCK_KV` tokens in ascending order; row sums
  are kept by lane, and lanes are added in fixed point, whose order does not matter;
- the results of splits are merged in ascending order, in float32, by explicit FMAs;
- with a sliding window, blocks and splits before it are skipped: those without a visible token
  would change nothing.

:func:`attend_split_rows` divides a row's splits among programs (flash-decoding), whose last one
merges. :func:`attend_row_tiles` computes consecutive rows of a context as one tile of M, and merges
in registers. That both have the same bits rests on `mma.sync` and `wgmma` adding 16 products alike,
which was measured on an H200. `paged_decode` is faster where rows may depend on their batch: its
splits have equal sizes, as many as the GPU has programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.attention.fixed_splits import MAX_SPLITS, FixedSplits, row_split_len
from pie_driver_sglang.kernels.attention.paged_decode import (
    load_slots,
    prefetch_kv,
    slot_pages,
    token_slots,
)
from pie_driver_sglang.kernels.attention.split_plan import SKIP_ROW, DecodeRows
from pie_driver_sglang.kernels.constants import LOG2E
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

_MAX_SPLITS, _SKIP_ROW = tl.constexpr(MAX_SPLITS), tl.constexpr(SKIP_ROW)
BLOCK_KV = 64
"""Tokens of a softmax block, half as many for heads wider than 128."""
_MMA_M = 16
"""Rows of an MMA."""
_FIXED_POINT = tl.constexpr(2.0**32)
"""Scale of row sums in int64. They are at least 1, and a lane's at most 2^31 / `BLOCK_KV`."""
_SPLIT_WARPS, _SPLIT_STAGES, _SPLIT_PROGRAMS = 4, 3, 2
"""Of a program of :func:`attend_split_rows`, and how many an SM has."""
_TILE_M, _TILE_WARPS, _TILE_STAGES = 64, 4, 2
"""Query heads times rows of a tile of :func:`attend_row_tiles`, and its program's."""


def attend_split_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    rows: DecodeRows,
    splits: FixedSplits,
    scale: float,
    page_size: int,
    multiprocessors: int,
    window: int = -1,
) -> None:
    """Attention by flash-decoding; rows of `SKIP_ROW` are left as they are. Can be captured.

    Grid: (kv_heads, programs).

    Args:
        queries: ``[rows, heads, dim]`` of 16 bits, heads contiguous.
        keys: ``[slots, kv_heads, dim]`` of the same dtype.
        values: ``[slots, kv_heads, dim]``.
        out: ``[rows, heads, dim]``, contiguous, written.
        rows: The rows of the step.
        splits: Theirs.
        scale: Of the softmax.
        page_size: Tokens of a page.
        multiprocessors: Of the GPU.
        window: Tokens that a row sees before its own; -1 for all.
    """
    (_, heads, dim), kv_heads, most = queries.shape, keys.shape[1], len(splits.items)
    group = heads // kv_heads
    programs = max(1, min(_SPLIT_PROGRAMS * multiprocessors // kv_heads, most))
    partial_out = queries.new_empty((most, heads, dim), dtype=torch.float32)
    partial_state = queries.new_empty((most, heads, 2), dtype=torch.float32)
    block = _block_kv(dim)
    group_block = int(triton.next_power_of_2(group))
    _attend_split_rows[(kv_heads, programs)](
        queries, keys, values, out, rows.table, rows.table_rows, rows.kv_lens, *splits,
        partial_out, partial_state, scale * LOG2E.value,
        queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        rows.table.stride(0),
        GROUP=group, DIM=dim, PAGE=page_size, PAGES=slot_pages(block, page_size), BLOCK_KV=block,
        BLOCK_M=max(_MMA_M, group_block), WINDOW=window, num_warps=_SPLIT_WARPS,
        num_stages=_SPLIT_STAGES,
        **pdl_options(queries.device),
    )  # fmt: skip


def attend_row_tiles(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    rows: DecodeRows,
    scale: float,
    page_size: int,
    window: int = -1,
) -> None:
    """Attention of rows of which many follow one another in a context, as those of prompts do.

    Rows of `SKIP_ROW` are left as they are. Can be captured. Grid: (rows, kv_heads), of which the
    program of a tile's first row computes it. Arguments are those of :func:`attend_split_rows`.
    """
    (count, heads, dim), kv_heads = queries.shape, keys.shape[1]
    group = heads // kv_heads
    group_block = int(triton.next_power_of_2(group))
    block = _block_kv(dim)
    tile_rows = max(1, _TILE_M // group_block)
    _attend_row_tiles[(count, kv_heads)](
        queries, keys, values, out, rows.table, rows.table_rows, rows.kv_lens, count,
        scale * LOG2E.value,
        queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        rows.table.stride(0),
        GROUP=group, GROUP_BLOCK=group_block, TILE_ROWS=tile_rows, DIM=dim,
        PAGE=page_size, PAGES=slot_pages(block, page_size), BLOCK_KV=block,
        BLOCK_M=tile_rows * group_block, WINDOW=window, num_warps=_TILE_WARPS,
        num_stages=_TILE_STAGES,
        **pdl_options(queries.device),
    )  # fmt: skip


def supports_batch_invariant(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels support heads of this shape."""
    return dim in (64, 128, 256) and heads // kv_heads <= _TILE_M and dtype.itemsize == 2


def _block_kv(dim: int) -> int:
    return BLOCK_KV if dim <= 128 else BLOCK_KV // 2


@triton.jit
def _first_visible(kv_len, WINDOW: tl.constexpr):
    """The first token that the last row of so many sees."""
    first = kv_len * 0
    if WINDOW >= 0:
        first = tl.maximum(kv_len - 1 - WINDOW, 0)
    return first


@triton.jit
def _attend_block(
    q, head_keys, head_values, slots, visible, own, scale, key_stride, value_stride,
    acc, row_max, sums, DIM: tl.constexpr,
):  # fmt: skip
    """Online softmax over a block of tokens, in base 2: accumulator, row maxima, sums by lane.

    Rows that see nothing of it (`own`, ``[BLOCK_M, BLOCK_KV]``) keep their bits.
    """
    dims = tl.arange(0, DIM)
    # Slots that no row may see can hold anything, even NaNs.
    k = tl.load(
        head_keys + slots[None, :] * key_stride + dims[:, None], mask=visible[None, :], other=0.0
    )
    v = tl.load(
        head_values + slots[:, None] * value_stride + dims[None, :],
        mask=visible[:, None],
        other=0.0,
    )
    scores = tl.where(own, tl.dot(q, k, input_precision="ieee"), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    # Avoids inf - inf in a row without visible keys so far.
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - safe_max)
    zeros = tl.zeros_like(scores)
    # Explicit, since a compiler is free to contract products and sums, or not.
    weights = tl.exp2(tl.fma(scores, zeros + scale, zeros - safe_max[:, None]))
    sums = tl.fma(sums, zeros + rescale[:, None], weights)
    acc = tl.dot(weights.to(q.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, sums


@triton.jit
def _add_lanes(sums):
    """Row sums of a split from its sums by lane."""
    return tl.sum((sums * _FIXED_POINT).to(tl.int64), 1).to(tl.float32) / _FIXED_POINT


@triton.jit
def _attend_split(
    q, head_keys, head_values, slots_row, first, stop, kv_lens, scale,
    key_stride, value_stride, DIM: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    BLOCK_KV: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Softmax state of a split: accumulator, row maxima and row sums.

    `kv_lens`, ``[BLOCK_M]``, is the KV length of each row of `q`; `stop` may be that of a longer
    row, and `first` the first block in the window of a shorter one.
    """
    first_visible = _first_visible(kv_lens, WINDOW)
    lanes = tl.arange(0, BLOCK_KV)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_KV], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    block_slots = load_slots(slots_row, first, stop, PAGE, PAGES, BLOCK_KV)
    for token in tl.range(first, stop, BLOCK_KV):
        slots = token_slots(block_slots, PAGE, PAGES, BLOCK_KV)
        # One iteration ahead, so that loads of KV do not wait for those of slots.
        block_slots = load_slots(slots_row, token + BLOCK_KV, stop, PAGE, PAGES, BLOCK_KV)
        own = token + lanes[None, :] < kv_lens[:, None]
        if WINDOW >= 0:
            own &= token + lanes[None, :] >= first_visible[:, None]
        acc, row_max, sums = _attend_block(
            q, head_keys, head_values, slots, token + lanes < stop, own, scale, key_stride,
            value_stride, acc, row_max, sums, DIM,
        )  # fmt: skip
    return acc, row_max, _add_lanes(sums)


@triton.jit
def _merge(acc, row_max, row_sum, next_acc, next_max, next_sum):
    """Adds the softmax state of the next split; one without visible keys changes nothing."""
    new_max = tl.maximum(row_max, next_max)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - safe_max)
    weight = tl.exp2(next_max - safe_max)
    # Explicit, since a compiler is free to contract either product.
    acc = tl.fma(acc, tl.zeros_like(acc) + rescale[:, None], next_acc * weight[:, None])
    return acc, new_max, tl.fma(row_sum, rescale, next_sum * weight)


@triton.jit
def _attend_split_rows(
    queries, keys, values, out, table, table_rows, kv_lens, total, items, semaphores,
    partial_out, partial_state, scale,
    query_stride, key_stride, key_head_stride, value_stride, value_head_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PAGES: tl.constexpr,
    BLOCK_KV: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes consecutive splits, for the query heads of one KV head.

    Those of a row are one loop, which stores a result at the end of each split, so that loads of KV
    run ahead over these ends.
    """
    kv_head = tl.program_id(0)
    head_count = tl.num_programs(0) * GROUP
    number = tl.program_id(1) * tl.load(total) // tl.num_programs(1)
    end = (tl.program_id(1) + 1) * tl.load(total) // tl.num_programs(1)
    member = tl.arange(0, BLOCK_M)
    member_mask = member < GROUP
    lanes = tl.arange(0, BLOCK_KV)
    head_keys = keys + kv_head * key_head_stride
    head_values = values + kv_head * value_head_stride
    heads = kv_head * GROUP + member
    offsets = heads[:, None] * DIM + tl.arange(0, DIM)[None, :]
    splits = _load_splits(items, number, end, table, table_rows, kv_lens, table_stride)
    row, kv_len, slots_row, first, stop = splits
    first_visible = _first_visible(kv_len, WINDOW)
    begin = tl.maximum(first, first_visible // BLOCK_KV * BLOCK_KV)
    block_slots = load_slots(slots_row, begin, stop, PAGE, PAGES, BLOCK_KV)
    if PDL:
        # No kernel since the last one without PDL writes what is loaded above.
        slots = token_slots(block_slots, PAGE, PAGES, BLOCK_KV)
        prefetch_kv(head_keys, slots, key_stride, DIM, DIM)
        prefetch_kv(head_values, slots, value_stride, DIM, DIM)
        pdl_wait_trigger()
    while number < end:
        length = row_split_len(kv_len)
        split_count = tl.maximum(tl.cdiv(kv_len, length), 1)
        split_is_row = split_count == 1
        own_splits = tl.maximum(tl.cdiv(stop - first, length), 1)
        # Where the results of the row's splits are.
        row_at = (number - first // length).to(tl.int64) * head_count
        number += own_splits
        # Software pipelining: loads for the next row overlap with this one's attention.
        following = _load_splits(items, number, end, table, table_rows, kv_lens, table_stride)
        next_visible = _first_visible(following[1], WINDOW)
        next_begin = tl.maximum(following[3], next_visible // BLOCK_KV * BLOCK_KV)
        next_slots = load_slots(following[2], next_begin, following[4], PAGE, PAGES, BLOCK_KV)
        q = tl.load(queries + row * query_stride + offsets, mask=member_mask[:, None], other=0.0)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sums = tl.zeros([BLOCK_M, BLOCK_KV], tl.float32)
        acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        for token in tl.range(begin, stop, BLOCK_KV):
            slots = token_slots(block_slots, PAGE, PAGES, BLOCK_KV)
            # One iteration ahead, so that loads of KV do not wait for those of slots.
            block_slots = load_slots(slots_row, token + BLOCK_KV, stop, PAGE, PAGES, BLOCK_KV)
            visible = token + lanes < stop
            if WINDOW >= 0:
                visible &= token + lanes >= first_visible
            acc, row_max, sums = _attend_block(
                q, head_keys, head_values, slots, visible, visible[None, :], scale, key_stride,
                value_stride, acc, row_max, sums, DIM,
            )  # fmt: skip
            after = token + BLOCK_KV
            if ((after % length == 0) | (after >= stop)) & (split_count > 1):
                at = row_at + token // length * head_count
                state = partial_state + (at + heads) * 2
                tl.store(partial_out + at * DIM + offsets, acc, mask=member_mask[:, None])
                tl.store(state, row_max, mask=member_mask)
                tl.store(state + 1, _add_lanes(sums), mask=member_mask)
                row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                sums = tl.zeros([BLOCK_M, BLOCK_KV], tl.float32)
                acc = tl.zeros([BLOCK_M, DIM], tl.float32)
        row_sum = _add_lanes(sums)
        if split_count > 1:
            # All threads have stored before these count.
            tl.debug_barrier()
            semaphore = semaphores + row * tl.num_programs(0) + kv_head
            before = tl.atomic_add(semaphore, own_splits, sem="acq_rel")
            split_is_row = before + own_splits == split_count
            if split_is_row:
                tl.store(semaphore, 0)
                acc, row_max, row_sum = _merge_splits(
                    partial_out + row_at * DIM + offsets, partial_state + (row_at + heads) * 2,
                    first_visible // length, split_count, head_count, member_mask, DIM, BLOCK_M,
                )  # fmt: skip
        if split_is_row:
            result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
            tl.store(out + row * head_count * DIM + offsets, result, mask=member_mask[:, None])
        row, kv_len, slots_row, first, stop = following
        first_visible, begin, block_slots = next_visible, next_begin, next_slots


@triton.jit
def _load_splits(items, number, end, table, table_rows, kv_lens, table_stride):
    """The splits of one row from an item on: row, KV length, block table, first token and end."""
    known = number < end
    item = tl.load(items + number, mask=known, other=0)
    row = (item // _MAX_SPLITS).to(tl.int64)
    kv_len = tl.load(kv_lens + row, mask=known, other=0).to(tl.int32)
    table_row = tl.load(table_rows + row, mask=known, other=0).to(tl.int64)
    length = row_split_len(kv_len)
    split = item % _MAX_SPLITS
    # Further ones of the program: items of a row follow one another.
    stop = tl.minimum((split + end - number) * length, kv_len)
    return row, kv_len, table + table_row * table_stride, split * length, stop


@triton.jit
def _merge_splits(
    partial_out, partial_state, first, end, head_count, member_mask, DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merges the stored results of a row's splits from `first` on, in their order."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    for split in range(first, end):
        before = (split * head_count).to(tl.int64)
        # Bypasses L1, which is not coherent with other SMs.
        next_acc = tl.load(
            partial_out + before * DIM, mask=member_mask[:, None], other=0.0, cache_modifier=".cg"
        )
        state = partial_state + before * 2
        next_max = tl.load(state, mask=member_mask, other=float("-inf"), cache_modifier=".cg")
        next_sum = tl.load(state + 1, mask=member_mask, other=0.0, cache_modifier=".cg")
        acc, row_max, row_sum = _merge(acc, row_max, row_sum, next_acc, next_max, next_sum)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["row_count"])
def _attend_row_tiles(
    queries, keys, values, out, table, table_rows, kv_lens, row_count, scale,
    query_stride, key_stride, key_head_stride, value_stride, value_head_stride, table_stride,
    GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, TILE_ROWS: tl.constexpr, DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK_KV: tl.constexpr, BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the tile that begins at a row, for the query heads of one KV head.

    Tiles end where ``(kv_len - 1) % TILE_ROWS`` begins anew, so that all rows have splits of one
    length: those change at powers of two.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    own = tl.load(table_rows + row)
    kv_len = tl.load(kv_lens + row).to(tl.int32)
    has_before = row > 0
    before = tl.load(table_rows + row - 1, mask=has_before, other=_SKIP_ROW)
    len_before = tl.load(kv_lens + row - 1, mask=has_before, other=-1).to(tl.int32)
    place = (kv_len - 1) % TILE_ROWS
    continues = (before == own) & (len_before + 1 == kv_len) & (place > 0) & (own > 0)
    if (own != _SKIP_ROW) & (not continues):
        member = tl.arange(0, BLOCK_M)
        tile_row = member // GROUP_BLOCK
        heads = kv_head * GROUP + member % GROUP_BLOCK
        tile_rows = (row + tile_row).to(tl.int64)
        in_tile = (tile_row < TILE_ROWS - place) & (row + tile_row < row_count)
        same = tl.load(table_rows + tile_rows, mask=in_tile, other=_SKIP_ROW) == own
        lens = tl.load(kv_lens + tile_rows, mask=in_tile, other=0).to(tl.int32)
        # Rows of padding see one token each and are a tile each.
        follows = same & (lens == kv_len + tile_row) & ((own > 0) | (tile_row == 0))
        # Of rows in ascending order all up to the first one that does not follow.
        ends = tl.min(tl.where(follows, TILE_ROWS, tile_row), 0)
        row_mask = tile_row < ends
        mask = row_mask & (member % GROUP_BLOCK < GROUP)
        last_len = kv_len + ends - 1
        dims = tl.arange(0, DIM)
        slots_row = table + own.to(tl.int64) * table_stride
        head_keys = keys + kv_head * key_head_stride
        head_values = values + kv_head * value_head_stride
        if PDL:
            pdl_wait_trigger()
        q = tl.load(
            queries + (tile_rows * query_stride + heads * DIM)[:, None] + dims[None, :],
            mask=mask[:, None], other=0.0,
        )  # fmt: skip
        row_lens = tl.where(row_mask, kv_len + tile_row, 0)
        length = row_split_len(last_len)
        # The first row's window begins first.
        first_visible = _first_visible(kv_len, WINDOW)
        begin = first_visible // BLOCK_KV * BLOCK_KV
        first_split = first_visible // length * length
        stop = tl.minimum(first_split + length, last_len)
        acc, row_max, row_sum = _attend_split(
            q, head_keys, head_values, slots_row, begin, stop, row_lens, scale,
            key_stride, value_stride, DIM, PAGE, PAGES, BLOCK_KV, BLOCK_M, WINDOW,
        )  # fmt: skip
        for first in range(first_split + length, last_len, length):
            stop = tl.minimum(first + length, last_len)
            next_acc, next_max, next_sum = _attend_split(
                q, head_keys, head_values, slots_row, first, stop, row_lens, scale,
                key_stride, value_stride, DIM, PAGE, PAGES, BLOCK_KV, BLOCK_M, WINDOW,
            )  # fmt: skip
            acc, row_max, row_sum = _merge(acc, row_max, row_sum, next_acc, next_max, next_sum)
        result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        tl.store(
            out + ((tile_rows * kv_heads * GROUP + heads) * DIM)[:, None] + dims[None, :], result,
            mask=mask[:, None],
        )  # fmt: skip
    elif PDL:
        pdl_wait_trigger()
