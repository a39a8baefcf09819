"""Penalties and biases on a GPU, and the tokens that penalties count: can be captured.

A slot's program counts the tokens of its sequence in a row of zeros, takes each count out again,
and changes the logit of each token once. So time follows the length of the output, and not that of
the vocabulary, and the row is zeros again. `pie_driver_sglang.kernels.sampling.token_history`
computes the same.
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
    load_block,
    row_of,
)

_BLOCK = tl.constexpr(1024)
_NOTE_BLOCK = tl.constexpr(256)
_NOTE_PROGRAMS = 8
_WARPS = 8


def widened(
    logits: torch.Tensor,
    records: torch.Tensor,
    places: torch.Tensor,
    softcap: float | None = None,
) -> LogitRows:
    """Copies rows of which something is asked, in float32; can be captured.

    Args:
        logits: ``[slots, vocabulary]`` of any float dtype.
        records: ``[slots, 8]`` int32; see `Records`.
        places: ``[slots, 6]`` int32, see `kernels.types.STEP_RECORD_WORDS`.
        softcap: Soft cap: logits become ``softcap * tanh(logit / softcap)``. With one, all rows are
            copied.

    Returns:
        The rows. No soft cap is to be applied to them any more.
    """
    slots, vocab = logits.shape
    changed = logits.new_empty(slots, vocab, dtype=torch.float32)
    is_changed = logits.new_empty(slots, dtype=torch.int32)
    if slots:
        _widen[(slots, triton.cdiv(vocab, LOGIT_BLOCK.value))](
            logits, logits.stride(0), vocab, records, places, changed, is_changed, softcap or 0.0,
            CAPPED=softcap is not None, num_warps=_WARPS, **pdl_options(logits.device),
        )  # fmt: skip
    return LogitRows(logits, changed, is_changed)


def adjust(
    logits: torch.Tensor,
    table: torch.Tensor,
    tokens: torch.Tensor,
    records: torch.Tensor,
    words: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Applies penalties, then biases, in place.

    Args:
        logits: ``[slots, vocabulary]`` float32, rows contiguous.
        table: ``[rows, context]`` int32: the storage slots of each row of the block table.
        tokens: ``[storage slots]`` int32: the token of each.
        records: ``[slots, 8]`` int32; see `Records`.
        words: ``[words]`` int32: biases.
        counts: ``[rows, vocabulary]`` int32 zeros, and zeros again afterwards.
    """
    slots, vocab = logits.shape
    for first in range(0, slots, len(counts)):
        count = min(len(counts), slots - first)
        _adjust[(count,)](
            logits, logits.stride(0), vocab, table, table.stride(0), tokens,
            records, words, counts, first, num_warps=_WARPS, **pdl_options(logits.device),
        )  # fmt: skip


def note(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    words: torch.Tensor,
    pairs: torch.Tensor,
) -> None:
    """Notes the tokens of storage slots.

    Args:
        tokens: ``[storage slots]`` int32, to be written.
        slots: ``[rows]`` int64: storage slots of the rows of a step.
        ids: ``[rows]`` int64: their tokens.
        words: ``[words]`` int32: further pairs of storage slot and token.
        pairs: ``[2]`` int32: the first of these words, and how many pairs.
    """
    count = len(slots)
    grid = (triton.cdiv(count, _NOTE_BLOCK.value) + _NOTE_PROGRAMS,)
    _note[grid](
        tokens, slots, ids, count, words, pairs, PROGRAMS=_NOTE_PROGRAMS,
        **pdl_options(tokens.device),
    )  # fmt: skip


@triton.jit
def _widen(
    logits, stride, vocab, records, places, changed, is_changed, cap,
    CAPPED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    record = records + 8 * row
    penalized = tl.load(record + 2) > tl.load(record + 1)
    biased = tl.load(record + 7) > 0
    asked = CAPPED | penalized | biased | (tl.load(places + 6 * row) != 0)
    first = tl.program_id(1) * LOGIT_BLOCK
    if first == 0:
        tl.store(is_changed + row, asked.to(tl.int32))
    if asked:
        x = load_block(row_of(logits, stride, vocab, None, None, row), first, vocab)
        ids = first + tl.arange(0, LOGIT_BLOCK)
        tl.store(changed + row * vocab + ids, capped(x, cap, CAPPED), mask=ids < vocab)


@triton.jit
def _adjust(
    logits, stride, vocab, table, table_stride, tokens, records, words, counts, first_slot,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    number = tl.program_id(0).to(tl.int64)
    slot = first_slot + number
    base = logits + slot * stride
    record = records + 8 * slot
    start = tl.load(record + 1)
    end = tl.load(record + 2)
    if end > start:
        row = table + tl.load(record).to(tl.int64) * table_stride
        own = counts + number * vocab
        for at in range(start, end, _BLOCK):
            ids, there = _ids(row, tokens, at, end, vocab)
            tl.atomic_add(own + ids, 1, mask=there, sem="relaxed")
        # The counts of all threads are there.
        tl.debug_barrier()
        frequency = tl.load(record + 3).to(tl.float32, bitcast=True)
        presence = tl.load(record + 4).to(tl.float32, bitcast=True)
        repetition = tl.load(record + 5).to(tl.float32, bitcast=True)
        for at in range(start, end, _BLOCK):
            ids, there = _ids(row, tokens, at, end, vocab)
            # One of those that meet the same token gets its count.
            count = tl.atomic_xchg(own + ids, 0, mask=there, sem="relaxed")
            first = there & (count > 0)
            x = tl.load(base + ids, mask=first, other=0.0)
            x = x - frequency * count.to(tl.float32) - presence
            x = tl.where(x < 0, x * repetition, x / repetition)
            tl.store(base + ids, x, mask=first)
        # Biases are added to what all threads have written.
        tl.debug_barrier()
    biases = tl.load(record + 7)
    if biases > 0:
        pairs = words + tl.load(record + 6)
        for at in range(0, biases, _BLOCK):
            places = at + tl.arange(0, _BLOCK)
            there = places < biases
            ids = tl.load(pairs + 2 * places, mask=there, other=0)
            bits = tl.load(pairs + 2 * places + 1, mask=there, other=0)
            # A token may be biased and suppressed.
            tl.atomic_add(base + ids, bits.to(tl.float32, bitcast=True), mask=there, sem="relaxed")


@triton.jit
def _ids(row, tokens, at, end, vocab):
    """The tokens of a block of a sequence, and which of its places have one."""
    places = at + tl.arange(0, _BLOCK)
    there = places < end
    slots = tl.load(row + places, mask=there, other=0)
    ids = tl.load(tokens + slots, mask=there, other=0)
    return ids, there & (ids < vocab)


@triton.jit
def _note(
    tokens, slots, ids, count, words, pairs, PROGRAMS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    number = tl.program_id(0)
    others = tl.num_programs(0) - PROGRAMS
    if number < others:
        rows = number * _NOTE_BLOCK + tl.arange(0, _NOTE_BLOCK)
        there = rows < count
        place = tl.load(slots + rows, mask=there, other=0)
        tl.store(tokens + place, tl.load(ids + rows, mask=there, other=0).to(tl.int32), mask=there)
    else:
        further = words + tl.load(pairs)
        used = tl.load(pairs + 1)
        turn = PROGRAMS * _NOTE_BLOCK
        for start in range((number - others) * _NOTE_BLOCK, used, turn):
            entries = start + tl.arange(0, _NOTE_BLOCK)
            known = entries < used
            place = tl.load(further + 2 * entries, mask=known, other=0)
            token = tl.load(further + 2 * entries + 1, mask=known, other=0)
            tl.store(tokens + place, token, mask=known)
