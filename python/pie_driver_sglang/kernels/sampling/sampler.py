"""Sampling on a GPU without sorting, and the other small kernels of a captured step.

Computes what `sampling.reference` computes, without a float32 copy
of bfloat16 logits, except of rows that were changed. Several programs survey a row, and one draws
its token: with filters as `sampling.small_filters` says, or, of many
tokens that they keep, as `sampling.top_p_search` does. A row's
result does not depend on the rest of the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger
from pie_driver_sglang.kernels.sampling.logit_rows import (
    LOGIT_BLOCK,
    LogitRows,
    capped,
    first_beyond,
    load_block,
    row_of,
    weight_of,
    whole_mass,
    write_logits,
)
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams
from pie_driver_sglang.kernels.sampling.small_filters import MOST_SPANS, SPAN, draw_few
from pie_driver_sglang.kernels.sampling.top_p_search import draw, search

_SURVEY_WARPS = 8
_ROW_WARPS = 8
_SEARCH_WARPS = 16
_SPANS = tl.constexpr(LOGIT_BLOCK.value // SPAN.value)
"""Spans of a block."""
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
        params: ``[rows]`` parameters; a temperature of 0 takes the arg-max, one below 0 samples
            nothing.
        results: ``[rows]`` int64, may be pinned memory of the host. The token is the vocabulary's
            size for a row with NaNs.
        step: ``[1]`` int32.
        softcap: Soft cap: logits become ``softcap * tanh(logit / softcap)``. Rows that were changed
            must have none.
    """
    logits = logit_rows.logits
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, LOGIT_BLOCK.value)
    tops, masses = (logits.new_empty(rows, parts, dtype=torch.float32) for _ in range(2))
    ids = logits.new_empty(rows, parts, dtype=torch.int32)
    peaks = logits.new_empty(rows, parts, _SPANS.value, dtype=torch.float32)
    room = logits.new_empty(rows, MOST_SPANS.value, dtype=torch.int32)
    # Rows that keep many tokens, and which the search is for.
    left = logits.new_empty(rows, dtype=torch.int32)
    params = SlotParams(*(field.contiguous() for field in params))
    # The lower half of a bfloat16 in float32 is zero.
    shift = 16 if logits.dtype == torch.bfloat16 and logit_rows.changed is None else 0
    how = {"CAPPED": softcap is not None, **pdl_options(logits.device)}
    cap = softcap or 0.0
    _survey[(rows, parts)](
        *logit_rows.arguments(), *params[:4], tops, ids, masses, peaks, cap,
        **how, num_warps=_SURVEY_WARPS,
    )  # fmt: skip
    wide = {"PARTS": triton.next_power_of_2(parts), "SHIFT": shift, **how}
    _sample_rows[(rows,)](
        *logit_rows.arguments(), tops, ids, masses, peaks, parts, *params, room, left,
        results, step, cap, **wide, num_warps=_ROW_WARPS,
    )  # fmt: skip
    found = search(logit_rows, params, left, tops, masses, {"cap": cap, "SHIFT": shift, **how})
    _sample_left[(rows,)](
        *logit_rows.arguments(), tops, masses, parts, *params, left, *found,
        results, step, cap, **wide, num_warps=_SEARCH_WARPS,
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
            further turns of the same programs.
    """
    grid = (fetch_programs(len(source) if expected is None else min(expected, len(source))),)
    _fetch[grid](source, target, count)


def fetch_programs(words: int) -> int:
    """Programs (CTAs) of :func:`fetch`: one wave at most, and enough to hide the host's latency."""
    return max(_FETCH_FEWEST, min(-(-words // int(_FETCH_BLOCK.value)), _FETCH_MOST))


def publish(results: torch.Tensor, target: torch.Tensor) -> None:
    """Writes results to memory that the host polls, each in one store; can be captured.

    Who sees a result sees all that earlier kernels have written to the host's memory, too.

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
        further: ``[words]`` int32: those that `updates` has no room for, as pairs, from the first
            word on.
        count: ``[1]`` int32: how many there are in both.
    """
    most, page = len(updates), table.shape[1]
    grid = (triton.cdiv(most, _UPDATE_BLOCK.value),)
    size = triton.next_power_of_2(page)
    _update_table[grid](table, page, updates, most, further, count, PAGE=size)


@triton.jit
def _survey(
    logits, stride, vocab, changed, is_changed, temperatures, top_ks, top_ps, min_ps,
    tops, ids, masses, peaks, cap,
    CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """For a block of a row: the largest logit, an id, and the sum of weights relative to it.

    The id is -1 if there is a NaN; else, for a row that takes the arg-max, the lowest id with that
    logit. For a row with filters, also the largest logit of each span.
    """
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature < 0.0:
        return
    base = row_of(logits, stride, vocab, changed, is_changed, row)
    x = load_block(base, part * LOGIT_BLOCK, vocab)
    top = tl.max(x, 0)
    mass = 0.0
    if (temperature > 0.0) & (tl.abs(top) < float("inf")):
        scale = 1.4426950408889634 / temperature
        # NaN if one of the logits is NaN.
        mass = tl.sum(weight_of(x, capped(top, cap, CAPPED), scale, cap, CAPPED), 0)
        found = tl.where(mass == mass, part * LOGIT_BLOCK, -1)
    else:
        offsets = part * LOGIT_BLOCK + tl.arange(0, LOGIT_BLOCK)
        at_top = tl.where((x == top) & (offsets < vocab), offsets, 0x7FFFFFFF)
        found = tl.min(tl.where(x != x, -1, at_top), 0)
    place = row * tl.num_programs(1) + part
    tl.store(tops + place, top)
    tl.store(ids + place, found)
    tl.store(masses + place, mass)
    if (temperature > 0.0) & _is_filtered(top_ks, top_ps, min_ps, row, vocab):
        spans = place * _SPANS + tl.arange(0, _SPANS)
        tl.store(peaks + spans, tl.max(tl.reshape(x, [_SPANS, SPAN]), 1))


@triton.jit
def _is_filtered(top_ks, top_ps, min_ps, row, vocab):
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    return (top_k < vocab) | (top_p < 1.0) | (tl.load(min_ps + row) > 0.0)


@triton.jit
def _sample_rows(
    logits, stride, vocab, changed, is_changed, tops, ids, masses, peaks, parts,
    temperatures, top_ks, top_ps, min_ps, uniforms, room, left, results, step, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draws a row's token, or says that the row is left to the search."""
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    token = vocab
    if temperature >= 0.0:
        lanes = tl.arange(0, PARTS)
        known = lanes < parts
        top = tl.load(tops + row * parts + lanes, mask=known, other=float("-inf"))
        at = tl.load(ids + row * parts + lanes, mask=known, other=0x7FFFFFFF)
        largest = tl.max(top, 0)
        token = tl.min(tl.where(known & (top == largest), at, 0x7FFFFFFF), 0)
        token = tl.where(tl.min(at, 0) < 0, vocab, token)
        if temperature > 0.0:
            if tl.abs(largest) < float("inf"):
                if token < vocab:
                    base = row_of(logits, stride, vocab, changed, is_changed, row)
                    uniform = tl.load(uniforms + row)
                    if _is_filtered(top_ks, top_ps, min_ps, row, vocab):
                        whole = whole_mass(
                            tops, masses, row, parts, largest, temperature, cap, PARTS, CAPPED
                        )
                        token = draw_few(
                            base, vocab, peaks + row * parts * _SPANS, room + row * MOST_SPANS,
                            largest, temperature, tl.load(top_ks + row), tl.load(top_ps + row),
                            tl.load(min_ps + row), uniform, whole, cap,
                            PARTS * _SPANS, CAPPED, SHIFT,
                        )  # fmt: skip
                    else:
                        mass = tl.load(masses + row * parts + lanes, mask=known, other=0.0)
                        token = _draw_any(
                            base, vocab, top, mass, largest, temperature, uniform, cap,
                            PARTS, CAPPED,
                        )  # fmt: skip
            else:
                token = vocab
    tl.store(left + row, (token < 0).to(tl.int32))
    if token >= 0:
        _store_result(results, step, row, token)


@triton.jit
def _sample_left(
    logits, stride, vocab, changed, is_changed, tops, masses, parts,
    temperatures, top_ks, top_ps, min_ps, uniforms, left, coarse, fine, candidates, results, step,
    cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draws the token of a row that is left to the search."""
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(left + row) == 0:
        return
    temperature = tl.load(temperatures + row)
    lanes = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + lanes, mask=lanes < parts, other=float("-inf"))
    largest = tl.max(top, 0)
    whole = whole_mass(tops, masses, row, parts, largest, temperature, cap, PARTS, CAPPED)
    base = row_of(logits, stride, vocab, changed, is_changed, row)
    token = draw(
        base, vocab, row, parts, largest, temperature, tl.load(top_ks + row),
        tl.load(top_ps + row), tl.load(min_ps + row), tl.load(uniforms + row), whole,
        coarse, fine, candidates, cap, PARTS, CAPPED, SHIFT,
    )  # fmt: skip
    _store_result(results, step, row, token)


@triton.jit
def _store_result(results, step, row, token):
    number = tl.load(step).to(tl.int64)
    tl.store(results + row, (number << 32) | token.to(tl.int64))


@triton.jit
def _draw_any(
    base, vocab, top, mass, largest, temperature, uniform, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """A token of a row without filters: only the block that it lies in is read again."""
    scale = 1.4426950408889634 / temperature
    largest = capped(largest, cap, CAPPED)
    mass = mass * weight_of(top, largest, scale, cap, CAPPED)
    goal = uniform * tl.sum(mass, 0)
    part = first_beyond(mass, 0.0, goal)
    lanes = tl.arange(0, PARTS)
    before = tl.sum(tl.where(lanes < part, mass, 0.0), 0)
    x = load_block(base, part * LOGIT_BLOCK, vocab)
    weights = weight_of(x, largest, scale, cap, CAPPED)
    return part * LOGIT_BLOCK + first_beyond(weights, before, goal)


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
    turn = tl.num_programs(1) * _MASK_BLOCK
    for start in range(tl.program_id(1) * _MASK_BLOCK, vocab, turn):
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
        # The first range of allowed tokens that ends after the block's first token.
        stretch = 0
        above = edges // 2
        while stretch < above:
            middle = (stretch + above) // 2
            before = tl.load(mask + 2 * middle + 1) <= start
            stretch = tl.where(before, middle + 1, stretch)
            above = tl.where(before, above, middle)
        allowed = tl.zeros([_MASK_BLOCK], tl.int32)
        more = 2 * stretch < edges
        while more:
            begin = tl.load(mask + 2 * stretch)
            end = tl.load(mask + 2 * stretch + 1)
            allowed = allowed | ((ids >= begin) & (ids < end)).to(tl.int32)
            stretch += 1
            more = (2 * stretch < edges) & (end < start + _MASK_BLOCK)
    return allowed


@triton.jit
def _fetch(source, target, count):
    words = tl.load(count)
    turn = tl.num_programs(0) * _FETCH_BLOCK
    for start in range(tl.program_id(0) * _FETCH_BLOCK, words, turn):
        offsets = start + tl.arange(0, _FETCH_BLOCK)
        used = offsets < words
        tl.store(target + offsets, tl.load(source + offsets, mask=used), mask=used)


@triton.jit
def _publish(results, target, count, FENCED: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        pdl_wait_trigger()
    places = tl.program_id(0) * _PUBLISH_BLOCK + tl.arange(0, _PUBLISH_BLOCK)
    known = places < count
    values = tl.load(results + places, mask=known)
    if FENCED:
        # In front of each store: its value passes through.
        values = tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [values],
            dtype=tl.int64, is_pure=False, pack=1,
        )  # fmt: skip
    tl.store(target + places, values, mask=known)


@triton.jit
def _update_table(table, page, updates, most, further, count, PAGE: tl.constexpr):
    first = tl.program_id(0) * _UPDATE_BLOCK
    used = tl.load(count)
    places = first + tl.arange(0, _UPDATE_BLOCK)
    known = places < tl.minimum(used, most)
    entries = tl.load(updates + 2 * places, mask=known, other=0)
    slots = tl.load(updates + 2 * places + 1, mask=known, other=0)
    _write_pages(table, page, entries, slots, known, PAGE)
    # Few steps have more: those that a context joins with a long cached prefix.
    turn = tl.num_programs(0) * _UPDATE_BLOCK
    for start in range(first, used - most, turn):
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
