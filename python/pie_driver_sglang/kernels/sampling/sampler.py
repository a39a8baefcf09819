"""Sampler for bfloat16, float16 or float32 logits without sorting, in Triton; other step kernels.

``token = inverse_cdf(top_p(top_k(min_p(softmax(logits / temperature)))), uniform)``, the same as
`reference`. A block kernel computes the maximum and sum of exponentials of each block of 8192
logits, and a row kernel samples: without filters it reads one more block, with filters see
`small_filters`, and where many tokens are kept, `top_p_search`. A row's result does not depend on
its batch, unlike that of FlashInfer's rejection sampler.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.constants import LOG2E
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger
from pie_driver_sglang.kernels.sampling.logit_rows import (
    LOGIT_BLOCK,
    LogitRows,
    apply_softcap,
    inverse_cdf,
    load_block,
    row_of,
    total_weight,
    weight_of,
    write_logits,
)
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams
from pie_driver_sglang.kernels.sampling.small_filters import MAX_SEGMENTS, SEGMENT, sample_few_kept
from pie_driver_sglang.kernels.sampling.top_p_search import count_pivots, sample_many_kept

_BLOCK_STATS_WARPS = 8
_ROW_WARPS = 8
_DEFERRED_WARPS = 16
_SEGMENTS_PER_BLOCK = tl.constexpr(LOGIT_BLOCK.value // SEGMENT.value)
"""Segments of a block."""
_MASK_BLOCK = tl.constexpr(2048)
_MASK_PROGRAMS = 16
"""Programs of a row."""
_FETCH_BLOCK = tl.constexpr(4096)
_FETCH_FEWEST = 4
_FETCH_MOST = 64
_PUBLISH_BLOCK = tl.constexpr(256)
_UPDATE_BLOCK = tl.constexpr(64)


def sample(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """Samples as `reference.sample_rows` does, up to rounding.

    Args:
        logits: ``[rows, vocabulary]`` bfloat16, float16 or float32.
        params: ``[rows]`` parameters.

    Returns:
        ``[rows]`` int64 token ids; the vocabulary's size for a row with NaNs.
    """
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    if len(logits):
        step = torch.zeros(1, dtype=torch.int32, device=logits.device)
        sample_step(LogitRows(logits), params, tokens, step)
    return tokens


def sample_step(
    logit_rows: LogitRows,
    params: SlotParams,
    results: torch.Tensor,
    step: torch.Tensor,
    softcap: float | None = None,
) -> None:
    """Samples each row and writes ``step << 32 | token`` at once; can be captured.

    Args:
        logit_rows: At least one row.
        params: ``[rows]`` parameters; temperature 0 for arg-max, negative for no sampling.
        results: ``[rows]`` int64, may be pinned memory of the host. The token is the vocabulary's
            size for a row with NaNs.
        step: ``[1]`` int32.
        softcap: Soft cap: logits become ``softcap * tanh(logit / softcap)``. Rows that were changed
            must have none.
    """
    logits = logit_rows.logits
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, LOGIT_BLOCK.value)
    block_max, block_sum = (logits.new_empty(rows, blocks, dtype=torch.float32) for _ in range(2))
    ids = logits.new_empty(rows, blocks, dtype=torch.int32)
    segment_max = logits.new_empty(rows, blocks, _SEGMENTS_PER_BLOCK.value, dtype=torch.float32)
    scratch = logits.new_empty(rows, MAX_SEGMENTS.value, dtype=torch.int32)
    # Rows that keep too many tokens for `sample_few_kept`.
    deferred = logits.new_empty(rows, dtype=torch.int32)
    params = SlotParams(*(field.contiguous() for field in params))
    # The lower half of a bfloat16 in float32 is zero.
    shift = 16 if logits.dtype == torch.bfloat16 and logit_rows.changed is None else 0
    options = {"SOFTCAP": softcap is not None, **pdl_options(logits.device)}
    cap = softcap or 0.0
    _block_stats[(rows, blocks)](
        *logit_rows.arguments(), *params[:4], block_max, ids, block_sum, segment_max, cap,
        **options, num_warps=_BLOCK_STATS_WARPS,
    )  # fmt: skip
    wide = {"NUM_BLOCKS": triton.next_power_of_2(blocks), "SHIFT": shift, **options}
    _sample_rows[(rows,)](
        *logit_rows.arguments(), block_max, ids, block_sum, segment_max, blocks, *params, scratch,
        deferred, results, step, cap, **wide, num_warps=_ROW_WARPS,
    )  # fmt: skip
    found = count_pivots(
        logit_rows,
        params,
        deferred,
        block_max,
        block_sum,
        {"softcap": cap, "SHIFT": shift, **options},
    )
    _sample_deferred[(rows,)](
        *logit_rows.arguments(), block_max, block_sum, blocks, *params, deferred, *found,
        results, step, cap, **wide, num_warps=_DEFERRED_WARPS,
    )  # fmt: skip


def mask_logits(logit_rows: LogitRows, slot_masks: torch.Tensor, words: torch.Tensor) -> None:
    """As `reference.apply_masks`, for logits of any float dtype."""
    logits = logit_rows.logits
    slots, vocab = logits.shape
    # Most rows have no mask, and empty programs take time, too.
    grid = (slots, min(_MASK_PROGRAMS, triton.cdiv(vocab, _MASK_BLOCK.value)))
    _mask_logits[grid](
        *logit_rows.arguments(), slot_masks, words, **pdl_options(logits.device)
    )  # fmt: skip


def fetch(
    source: torch.Tensor, target: torch.Tensor, count: torch.Tensor, expected: int | None = None
) -> None:
    """Copies the first `count` words; can be captured, since the kernel reads the count.

    Args:
        source: ``[words]`` int32, may be pinned memory of the host.
        target: ``[words]`` int32.
        count: ``[1]`` int32.
        expected: Words that the grid is sized for; None for all. More of them are copied, too, by
            further iterations of the same programs.
    """
    grid = (fetch_programs(len(source) if expected is None else min(expected, len(source))),)
    _fetch[grid](source, target, count)


def fetch_programs(words: int) -> int:
    """Programs of :func:`fetch`: at most one wave, enough to hide the latency of host memory."""
    return max(_FETCH_FEWEST, min(-(-words // int(_FETCH_BLOCK.value)), _FETCH_MOST))


def publish(results: torch.Tensor, target: torch.Tensor) -> None:
    """Writes results to memory that the host polls, each in one store; can be captured.

    Stores are releases at system scope: earlier kernels' writes to host memory are visible first.

    Args:
        results: ``[rows]`` int64.
        target: ``[rows]`` int64, may be pinned memory of the host.
    """
    count = len(results)
    grid = (triton.cdiv(count, _PUBLISH_BLOCK.value),)
    _publish[grid](
        results, target, count, FENCED=results.is_cuda, **pdl_options(results.device)
    )  # fmt: skip


def update_table(
    table: torch.Tensor, updates: torch.Tensor, further: torch.Tensor, count: torch.Tensor
) -> None:
    """Writes changed block-table entries; can be captured, since the kernel reads the count.

    Args:
        table: ``[entries, page]`` int32 storage slots.
        updates: ``[most, 2]`` int64: entry, and first storage slot of the page that it now names.
        further: ``[words]`` int32: pairs that `updates` has no room for.
        count: ``[1]`` int32: how many there are in both.
    """
    most, page = len(updates), table.shape[1]
    grid = (triton.cdiv(most, _UPDATE_BLOCK.value),)
    size = triton.next_power_of_2(page)
    _update_table[grid](table, page, updates, most, further, count, PAGE=size)


@triton.jit
def _block_stats(
    logits, stride, vocab, changed, is_changed, temperatures, top_ks, top_ps, min_ps,
    block_max, ids, block_sum, segment_max, softcap,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes the maximum logit of a block, an id, and the sum of exponentials relative to it.

    The id is -1 if there is a NaN, else for greedy rows the lowest arg-max. Rows with filters also
    get the maximum of each segment.
    """
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature < 0.0:
        return
    base = row_of(logits, stride, vocab, changed, is_changed, row)
    x = load_block(base, block * LOGIT_BLOCK, vocab)
    top = tl.max(x, 0)
    mass = 0.0
    if (temperature > 0.0) & (tl.abs(top) < float("inf")):
        scale = LOG2E / temperature
        # NaN if one of the logits is NaN.
        mass = tl.sum(
            weight_of(x, apply_softcap(top, softcap, SOFTCAP), scale, softcap, SOFTCAP), 0
        )
        found = tl.where(mass == mass, block * LOGIT_BLOCK, -1)
    else:
        offsets = block * LOGIT_BLOCK + tl.arange(0, LOGIT_BLOCK)
        at_top = tl.where((x == top) & (offsets < vocab), offsets, 0x7FFFFFFF)
        found = tl.min(tl.where(x != x, -1, at_top), 0)
    index = row * tl.num_programs(1) + block
    tl.store(block_max + index, top)
    tl.store(ids + index, found)
    tl.store(block_sum + index, mass)
    if (temperature > 0.0) & _is_filtered(top_ks, top_ps, min_ps, row, vocab):
        segments = index * _SEGMENTS_PER_BLOCK + tl.arange(0, _SEGMENTS_PER_BLOCK)
        tl.store(segment_max + segments, tl.max(tl.reshape(x, [_SEGMENTS_PER_BLOCK, SEGMENT]), 1))


@triton.jit
def _is_filtered(top_ks, top_ps, min_ps, row, vocab):
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    return (top_k < vocab) | (top_p < 1.0) | (tl.load(min_ps + row) > 0.0)


@triton.jit
def _sample_rows(
    logits, stride, vocab, changed, is_changed, block_max, ids, block_sum, segment_max, blocks,
    temperatures, top_ks, top_ps, min_ps, uniforms, scratch, deferred, results, step, softcap,
    NUM_BLOCKS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Samples a row, or defers it to `_sample_deferred`."""
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    token = vocab
    if temperature >= 0.0:
        lanes = tl.arange(0, NUM_BLOCKS)
        known = lanes < blocks
        top = tl.load(block_max + row * blocks + lanes, mask=known, other=float("-inf"))
        at = tl.load(ids + row * blocks + lanes, mask=known, other=0x7FFFFFFF)
        row_max = tl.max(top, 0)
        token = tl.min(tl.where(known & (top == row_max), at, 0x7FFFFFFF), 0)
        token = tl.where(tl.min(at, 0) < 0, vocab, token)
        if temperature > 0.0:
            if tl.abs(row_max) < float("inf"):
                if token < vocab:
                    base = row_of(logits, stride, vocab, changed, is_changed, row)
                    uniform = tl.load(uniforms + row)
                    if _is_filtered(top_ks, top_ps, min_ps, row, vocab):
                        total = total_weight(
                            block_max, block_sum, row, blocks, row_max, temperature, softcap,
                            NUM_BLOCKS, SOFTCAP,
                        )  # fmt: skip
                        token = sample_few_kept(
                            base, vocab, segment_max + row * blocks * _SEGMENTS_PER_BLOCK,
                            scratch + row * MAX_SEGMENTS,
                            row_max, temperature, tl.load(top_ks + row), tl.load(top_ps + row),
                            tl.load(min_ps + row), uniform, total, softcap,
                            NUM_BLOCKS * _SEGMENTS_PER_BLOCK, SOFTCAP, SHIFT,
                        )  # fmt: skip
                    else:
                        mass = tl.load(block_sum + row * blocks + lanes, mask=known, other=0.0)
                        token = _sample_unfiltered(
                            base, vocab, top, mass, row_max, temperature, uniform, softcap,
                            NUM_BLOCKS, SOFTCAP,
                        )  # fmt: skip
            else:
                token = vocab
    tl.store(deferred + row, (token < 0).to(tl.int32))
    if token >= 0:
        _store_result(results, step, row, token)


@triton.jit
def _sample_deferred(
    logits, stride, vocab, changed, is_changed, block_max, block_sum, blocks,
    temperatures, top_ks, top_ps, min_ps, uniforms, deferred, coarse, fine, candidates, results,
    step, softcap,
    NUM_BLOCKS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Samples a deferred row."""
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(deferred + row) == 0:
        return
    temperature = tl.load(temperatures + row)
    lanes = tl.arange(0, NUM_BLOCKS)
    top = tl.load(block_max + row * blocks + lanes, mask=lanes < blocks, other=float("-inf"))
    row_max = tl.max(top, 0)
    total = total_weight(
        block_max, block_sum, row, blocks, row_max, temperature, softcap, NUM_BLOCKS, SOFTCAP
    )
    base = row_of(logits, stride, vocab, changed, is_changed, row)
    token = sample_many_kept(
        base, vocab, row, blocks, row_max, temperature, tl.load(top_ks + row),
        tl.load(top_ps + row), tl.load(min_ps + row), tl.load(uniforms + row), total,
        coarse, fine, candidates, softcap, NUM_BLOCKS, SOFTCAP, SHIFT,
    )  # fmt: skip
    _store_result(results, step, row, token)


@triton.jit
def _store_result(results, step, row, token):
    number = tl.load(step).to(tl.int64)
    tl.store(results + row, (number << 32) | token.to(tl.int64))


@triton.jit
def _sample_unfiltered(
    base, vocab, top, mass, row_max, temperature, uniform, softcap,
    NUM_BLOCKS: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Samples a row without filters; reads only the block of the token again."""
    scale = LOG2E / temperature
    row_max = apply_softcap(row_max, softcap, SOFTCAP)
    mass = mass * weight_of(top, row_max, scale, softcap, SOFTCAP)
    target = uniform * tl.sum(mass, 0)
    block = inverse_cdf(mass, 0.0, target)
    lanes = tl.arange(0, NUM_BLOCKS)
    before = tl.sum(tl.where(lanes < block, mass, 0.0), 0)
    x = load_block(base, block * LOGIT_BLOCK, vocab)
    weights = weight_of(x, row_max, scale, softcap, SOFTCAP)
    return block * LOGIT_BLOCK + inverse_cdf(weights, before, target)


@triton.jit
def _mask_logits(
    logits, stride, vocab, changed, is_changed, slot_masks, words, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    slot = tl.program_id(0).to(tl.int64)
    edges = tl.load(slot_masks + 2 * slot + 1)
    if edges == 0:
        return
    mask = words + tl.load(slot_masks + 2 * slot)
    base = row_of(logits, stride, vocab, changed, is_changed, slot)
    stride_of_grid = tl.num_programs(1) * _MASK_BLOCK
    for start in range(tl.program_id(1) * _MASK_BLOCK, vocab, stride_of_grid):
        ids = start + tl.arange(0, _MASK_BLOCK)
        allowed = _allowed(mask, edges, start, vocab)
        write_logits(base, ids, float("-inf"), (ids < vocab) & (allowed == 0))


@triton.jit
def _allowed(mask, edges, start, vocab):
    """1 for the tokens of the block at `start` that a mask allows, 0 for others."""
    ids = start + tl.arange(0, _MASK_BLOCK)
    if edges < 0:
        bits = tl.load(mask + ids // 32, mask=ids < vocab, other=0)
        allowed = (bits >> (ids % 32)) & 1
    else:
        # Binary search: the first allowed interval that ends after the block's first token.
        interval = 0
        above = edges // 2
        while interval < above:
            middle = (interval + above) // 2
            before = tl.load(mask + 2 * middle + 1) <= start
            interval = tl.where(before, middle + 1, interval)
            above = tl.where(before, above, middle)
        allowed = tl.zeros([_MASK_BLOCK], tl.int32)
        more = 2 * interval < edges
        while more:
            begin = tl.load(mask + 2 * interval)
            end = tl.load(mask + 2 * interval + 1)
            allowed = allowed | ((ids >= begin) & (ids < end)).to(tl.int32)
            interval += 1
            more = (2 * interval < edges) & (end < start + _MASK_BLOCK)
    return allowed


@triton.jit
def _fetch(source, target, count):
    words = tl.load(count)
    stride_of_grid = tl.num_programs(0) * _FETCH_BLOCK
    for start in range(tl.program_id(0) * _FETCH_BLOCK, words, stride_of_grid):
        offsets = start + tl.arange(0, _FETCH_BLOCK)
        used = offsets < words
        tl.store(target + offsets, tl.load(source + offsets, mask=used), mask=used)


@triton.jit
def _publish(results, target, count, FENCED: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        pdl_wait_trigger()
    result_ids = tl.program_id(0) * _PUBLISH_BLOCK + tl.arange(0, _PUBLISH_BLOCK)
    known = result_ids < count
    values = tl.load(results + result_ids, mask=known)
    if FENCED:
        # In front of each store: its value passes through.
        values = tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [values],
            dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    tl.store(target + result_ids, values, mask=known)


@triton.jit
def _update_table(table, page, updates, most, further, count, PAGE: tl.constexpr):
    first = tl.program_id(0) * _UPDATE_BLOCK
    used = tl.load(count)
    update_ids = first + tl.arange(0, _UPDATE_BLOCK)
    known = update_ids < tl.minimum(used, most)
    entries = tl.load(updates + 2 * update_ids, mask=known, other=0)
    slots = tl.load(updates + 2 * update_ids + 1, mask=known, other=0)
    _write_pages(table, page, entries, slots, known, PAGE)
    # Rare: a context with a long cached prefix joined.
    stride_of_grid = tl.num_programs(0) * _UPDATE_BLOCK
    for start in range(first, used - most, stride_of_grid):
        pairs = start + tl.arange(0, _UPDATE_BLOCK)
        there = pairs < used - most
        others = tl.load(further + 2 * pairs, mask=there, other=0).to(tl.int64)
        named = tl.load(further + 2 * pairs + 1, mask=there, other=0)
        _write_pages(table, page, others, named, there, PAGE)


@triton.jit
def _write_pages(table, page, entries, slots, known, PAGE: tl.constexpr):
    within = tl.arange(0, PAGE)
    targets = table + entries[:, None] * page + within[None, :]
    values = (slots[:, None] + within[None, :]).to(tl.int32)
    tl.store(targets, values, mask=known[:, None] & (within < page)[None, :])
