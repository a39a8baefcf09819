"""Partial softmax results of split rows, and their merge, for decode attention.

Each program of a split row stores a normalized output and its log-sum-exp (base 2); the last one to
arrive merges all, by a semaphore. A row of a prefix group has two halves, the common prefix and the
rest; the second one to finish merges them. Within a kernel a result is an online softmax state:
accumulator, row maximum and row sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.constants import LOG2E

_MERGE_ELEMENTS = tl.constexpr(8192)
"""Elements of partial results that are merged at once, about."""
_HALVES_ITERATIONS = tl.constexpr(3)
"""Iterations of merging that take as long as merging the halves of a row, about."""


def alloc_partials(
    rows: int, queries: torch.Tensor, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocates partial results of `rows` rows, uninitialized.

    Returns:
        ``[rows, heads, value_dim]`` float32 outputs, and ``[rows, heads]`` float32 log-sum-exps.
    """
    heads = queries.shape[1]
    partial_out = queries.new_empty((rows, heads, value_dim), dtype=torch.float32)
    return partial_out, queries.new_empty((rows, heads), dtype=torch.float32)


@triton.jit
def tile_rows(order, row, rows_before, tile_row, prefix_len, PREFIX_GROUPS: tl.constexpr):
    """Step rows of a tile, int64; undefined beyond its last row."""
    rows = row - rows_before + tile_row
    if PREFIX_GROUPS:
        listed = (tile_row <= rows_before) & (prefix_len < 0)
        rows = tl.where(listed, tl.load(order + rows, mask=listed, other=0), rows)
    return rows.to(tl.int64)


@triton.jit
def _partial_index(program, first, tile_row, TILE_ROWS: tl.constexpr):
    """Index of a program's partial result: it has two tiles of them, for both ends of its range."""
    return (2 * program + (program == first).to(tl.int32)) * TILE_ROWS + tile_row


@triton.jit
def store_partial(
    acc, row_max, row_sum, out, partial_out, partial_lse, sinks, semaphores, program, first, final,
    order, row, rows_before, tile_row, kv_head, out_stride,
    half_out, half_lse, half_semaphores, row_count, prefix_len,
    GQA_GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    GQA_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SINKS: tl.constexpr,
    PREFIX_GROUPS: tl.constexpr, TILE_ROWS: tl.constexpr,
    MERGE_ELEMENTS: tl.constexpr = _MERGE_ELEMENTS,
):  # fmt: skip
    """Stores a program's partial tile; the last of programs `first` to `final` merges them."""
    heads = kv_head * GQA_GROUP + tl.arange(0, BLOCK_M) % GQA_GROUP
    head_count = tl.num_programs(0) * GQA_GROUP
    row_mask = tile_row <= rows_before
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    index = _partial_index(program, first, tile_row, TILE_ROWS) * head_count + heads
    tl.store(
        partial_out + index[:, None] * VALUE_DIM + value_dims,
        acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None],
        mask=row_mask[:, None] & (value_dims < VALUE_DIM),
    )
    tl.store(partial_lse + index, row_max + tl.log2(row_sum), mask=row_mask)
    # All warps must have stored their part before the semaphore is raised.
    tl.debug_barrier()
    semaphore = semaphores + kv_head * tl.num_programs(1) + first
    if tl.atomic_add(semaphore, 1, sem="acq_rel") == final - first:
        tl.store(semaphore, 0)
        PARTS_PER_STEP: tl.constexpr = max(1, MERGE_ELEMENTS // (GQA_BLOCK * VALUE_BLOCK))
        # Merges all rows part by part, or row by row: whatever takes fewer iterations.
        iterations = (rows_before + 1) * tl.cdiv(final - first + 1, PARTS_PER_STEP)
        if PREFIX_GROUPS:
            iterations += tl.where(prefix_len != 0, rows_before * _HALVES_ITERATIONS, 0)
        if final - first < iterations:
            acc, row_max, row_sum = _merge_part_by_part(
                partial_out, partial_lse, first, final, tile_row, heads, head_count, row_mask,
                VALUE_DIM, BLOCK_M, VALUE_BLOCK, TILE_ROWS,
            )  # fmt: skip
            rows = tile_rows(order, row, rows_before, tile_row, prefix_len, PREFIX_GROUPS)
            merge_or_store(
                acc, row_max, row_sum, rows, heads, row_mask, out, out_stride,
                half_out, half_lse, half_semaphores, row_count, prefix_len, sinks,
                GQA_GROUP, VALUE_DIM, VALUE_BLOCK, SINKS, PREFIX_GROUPS,
            )  # fmt: skip
        else:
            lanes = tl.arange(0, GQA_BLOCK)
            head_mask = lanes < GQA_GROUP
            own_heads = kv_head * GQA_GROUP + lanes
            for merged_row in range(rows_before + 1):
                row_acc, new_max, row_weight = _merge_row_by_row(
                    partial_out, partial_lse, first, final, merged_row, own_heads, head_mask,
                    head_count, VALUE_DIM, GQA_BLOCK, VALUE_BLOCK, PARTS_PER_STEP, TILE_ROWS,
                )  # fmt: skip
                own_rows = tile_rows(
                    order, row, rows_before, merged_row + lanes * 0, prefix_len, PREFIX_GROUPS
                )
                merge_or_store(
                    row_acc, new_max, row_weight, own_rows, own_heads, head_mask, out, out_stride,
                    half_out, half_lse, half_semaphores, row_count, prefix_len, sinks,
                    GQA_GROUP, VALUE_DIM, VALUE_BLOCK, SINKS, PREFIX_GROUPS,
                )  # fmt: skip


@triton.jit
def merge_or_store(
    acc, row_max, row_sum, rows, heads, row_mask, out, out_stride,
    half_out, half_lse, half_semaphores, row_count, prefix_len, sinks,
    GQA_GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    SINKS: tl.constexpr, PREFIX_GROUPS: tl.constexpr,
):  # fmt: skip
    """Stores the output of rows; of prefix groups only once both halves are there."""
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    if PREFIX_GROUPS:  # noqa: SIM102  (a constant, unlike the other one)
        if prefix_len != 0:
            acc, row_max, row_sum, row_mask = _merge_halves(
                acc, row_max, row_sum, rows, heads, row_mask, half_out, half_lse, half_semaphores,
                row_count, prefix_len, GQA_GROUP, VALUE_DIM, VALUE_BLOCK,
            )  # fmt: skip
    acc = normalize(acc, row_max, row_sum, sinks, heads, row_mask, SINKS)
    tl.store(
        out + (rows * out_stride + heads * VALUE_DIM)[:, None] + value_dims,
        acc,
        mask=row_mask[:, None] & (value_dims < VALUE_DIM),
    )


@triton.jit
def _merge_halves(
    acc, row_max, row_sum, rows, heads, row_mask, half_out, half_lse, half_semaphores, row_count,
    prefix_len, GQA_GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores halves of rows, and merges those whose other half is stored already."""
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    head_count = tl.num_programs(0) * GQA_GROUP
    index = rows * head_count + heads
    is_rest = (prefix_len > 0).to(tl.int64)
    own = index + is_rest * row_count * head_count
    others = index + (1 - is_rest) * row_count * head_count
    own_lse = row_max + tl.log2(row_sum)
    own_values = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    stored = value_dims < VALUE_DIM
    own_ptrs = half_out + own[:, None] * VALUE_DIM + value_dims
    tl.store(own_ptrs, own_values, mask=row_mask[:, None] & stored)
    tl.store(half_lse + own, own_lse, mask=row_mask)
    # Barriers: all warps have stored before one counts, and all see the same counts afterwards.
    tl.debug_barrier()
    before = tl.atomic_add(half_semaphores + index, 1, mask=row_mask, sem="acq_rel")
    tl.debug_barrier()
    whole = row_mask & (before == 1)
    tl.store(half_semaphores + index, 0, mask=whole)
    # Bypasses L1, which is not coherent with other SMs.
    other_lse = tl.load(half_lse + others, mask=whole, other=float("-inf"), cache_modifier=".cg")
    values = tl.load(
        half_out + others[:, None] * VALUE_DIM + value_dims,
        mask=whole[:, None] & stored,
        other=0.0,
        cache_modifier=".cg",
    )
    new_max = tl.maximum(own_lse, other_lse)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights, own_weights = tl.exp2(other_lse - safe_max), tl.exp2(own_lse - safe_max)
    own_values, values = own_values * own_weights[:, None], values * weights[:, None]
    # The compiler fuses one product with the addition (FMA): always that of the prefix.
    rest = tl.where(prefix_len > 0, own_values, values)
    merged = rest + tl.where(prefix_len > 0, values, own_values)
    return merged, new_max, weights + own_weights, whole


@triton.jit
def _merge_part_by_part(
    partial_out, partial_lse, first, final, tile_row, heads, head_count, row_mask,
    VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Merges the partial tiles of programs `first` to `final`: all rows, part by part."""
    value_dims = tl.arange(0, VALUE_BLOCK)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
    for program in range(first, final + 1):
        index = _partial_index(program, first, tile_row, TILE_ROWS) * head_count + heads
        # Bypasses L1, which is not coherent with other SMs.
        logs = tl.load(
            partial_lse + index, mask=row_mask, other=float("-inf"), cache_modifier=".cg"
        )
        part = tl.load(
            partial_out + index[:, None] * VALUE_DIM + value_dims[None, :],
            mask=row_mask[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, logs)
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - safe_max)
        weights = tl.exp2(logs - safe_max)
        row_sum = row_sum * rescale + weights
        acc = acc * rescale[:, None] + weights[:, None] * part
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _merge_row_by_row(
    partial_out, partial_lse, first, final, tile_row, heads, head_mask, head_count,
    VALUE_DIM: tl.constexpr, GQA_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    PARTS_PER_STEP: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Merges the partial results of one row of a tile: many parts at once."""
    value_dims = tl.arange(0, VALUE_BLOCK)[None, None, :]
    row_max = tl.full([GQA_BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([GQA_BLOCK], tl.float32)
    acc = tl.zeros([GQA_BLOCK, VALUE_BLOCK], tl.float32)
    for start in range(first, final + 1, PARTS_PER_STEP):
        programs = start + tl.arange(0, PARTS_PER_STEP)
        mask = head_mask[:, None] & (programs <= final)[None, :]
        indices = (
            _partial_index(programs, first, tile_row, TILE_ROWS)[None, :] * head_count
            + heads[:, None]
        )
        # Bypasses L1, which is not coherent with other SMs.
        logs = tl.load(partial_lse + indices, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            partial_out + indices[:, :, None] * VALUE_DIM + value_dims,
            mask=mask[:, :, None] & (value_dims < VALUE_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, tl.max(logs, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - safe_max)
        weights = tl.exp2(logs - safe_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * part, 1)
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def normalize(acc, row_max, row_sum, sinks, heads, head_mask, SINKS: tl.constexpr):
    """Divides the accumulator by the row sum, attention sink included."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=head_mask, other=0.0).to(tl.float32) * LOG2E
        new_max = tl.maximum(row_max, sink)
        acc = acc * tl.exp2(row_max - new_max)[:, None]
        row_sum = row_sum * tl.exp2(row_max - new_max) + tl.exp2(sink - new_max)
    # A row without visible keys gives zeros.
    return acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
