"""Penalties and logit biases on a GPU, in Triton, and the recording of tokens for penalties.

A slot's program counts the tokens of its sequence by atomics in a row of zeros, takes each count
out again and changes the logit of each token once. So time follows the length of the output, not
the vocabulary, and the counts are zero again; SGLang keeps a dense ``[requests, vocabulary]``
penalty tensor. The torch reference is `token_history`. All can be captured.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger
from pie_driver_sglang.kernels.sampling.logit_rows import (
    LOGIT_BLOCK,
    LogitRows,
    apply_softcap,
    load_block,
    row_of,
)

_BLOCK = tl.constexpr(1024)
_RECORD_BLOCK = tl.constexpr(256)
_PAIR_PROGRAMS = 8
_WARPS = 8


def cast_modified_rows(
    logits: torch.Tensor,
    records: torch.Tensor,
    logprob_records: torch.Tensor,
    softcap: float | None = None,
) -> LogitRows:
    """Copies rows that a request modifies to float32; can be captured.

    Args:
        logits: ``[slots, vocabulary]`` of any float dtype.
        records: ``[slots, 8]`` int32; see `Records`.
        logprob_records: ``[slots, 6]`` int32, see `slot_params.STEP_RECORD_WORDS`.
        softcap: Soft cap: logits become ``softcap * tanh(logit / softcap)``. With one, all rows are
            copied.

    Returns:
        The rows. No soft cap is to be applied to them any more.
    """
    slots, vocab = logits.shape
    changed = logits.new_empty(slots, vocab, dtype=torch.float32)
    is_changed = logits.new_empty(slots, dtype=torch.int32)
    if slots:
        _cast_modified_rows[(slots, triton.cdiv(vocab, LOGIT_BLOCK.value))](
            logits, logits.stride(0), vocab, records, logprob_records, changed, is_changed,
            softcap or 0.0,
            SOFTCAP=softcap is not None, num_warps=_WARPS, **pdl_options(logits.device),
        )  # fmt: skip
    return LogitRows(logits, changed, is_changed)


def apply_penalties(
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
        counts: ``[rows, vocabulary]`` int32 zeros; zeros again afterwards.
    """
    slots, vocab = logits.shape
    for first in range(0, slots, len(counts)):
        count = min(len(counts), slots - first)
        _apply_penalties[(count,)](
            logits, logits.stride(0), vocab, table, table.stride(0), tokens,
            records, words, counts, first, num_warps=_WARPS, **pdl_options(logits.device),
        )  # fmt: skip


def record_tokens(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    ids: torch.Tensor,
    words: torch.Tensor,
    pairs: torch.Tensor,
) -> None:
    """Records the tokens of KV slots.

    Args:
        tokens: ``[storage slots]`` int32, to be written.
        slots: ``[rows]`` int64: storage slots of the rows of a step.
        ids: ``[rows]`` int64: their tokens.
        words: ``[words]`` int32: further pairs of storage slot and token.
        pairs: ``[2]`` int32: the first of these words, and how many pairs.
    """
    count = len(slots)
    grid = (triton.cdiv(count, _RECORD_BLOCK.value) + _PAIR_PROGRAMS,)
    _record_tokens[grid](
        tokens, slots, ids, count, words, pairs, PROGRAMS=_PAIR_PROGRAMS,
        **pdl_options(tokens.device),
    )  # fmt: skip


@triton.jit
def _cast_modified_rows(
    logits, stride, vocab, records, logprob_records, changed, is_changed, softcap,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    record = records + 8 * row
    penalized = tl.load(record + 2) > tl.load(record + 1)
    biased = tl.load(record + 7) > 0
    modified = SOFTCAP | penalized | biased | (tl.load(logprob_records + 6 * row) != 0)
    first = tl.program_id(1) * LOGIT_BLOCK
    if first == 0:
        tl.store(is_changed + row, modified.to(tl.int32))
    if modified:
        x = load_block(row_of(logits, stride, vocab, None, None, row), first, vocab)
        ids = first + tl.arange(0, LOGIT_BLOCK)
        tl.store(changed + row * vocab + ids, apply_softcap(x, softcap, SOFTCAP), mask=ids < vocab)


@triton.jit
def _apply_penalties(
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
        # All threads have counted.
        tl.debug_barrier()
        frequency = tl.load(record + 3).to(tl.float32, bitcast=True)
        presence = tl.load(record + 4).to(tl.float32, bitcast=True)
        repetition = tl.load(record + 5).to(tl.float32, bitcast=True)
        for at in range(start, end, _BLOCK):
            ids, there = _ids(row, tokens, at, end, vocab)
            # Of several positions with the same token one gets its count.
            count = tl.atomic_xchg(own + ids, 0, mask=there, sem="relaxed")
            first = there & (count > 0)
            x = tl.load(base + ids, mask=first, other=0.0)
            x = x - frequency * count.to(tl.float32) - presence
            x = tl.where(x < 0, x * repetition, x / repetition)
            tl.store(base + ids, x, mask=first)
        # All threads have written their logits.
        tl.debug_barrier()
    bias_count = tl.load(record + 7)
    if bias_count > 0:
        pairs = words + tl.load(record + 6)
        for at in range(0, bias_count, _BLOCK):
            positions = at + tl.arange(0, _BLOCK)
            there = positions < bias_count
            ids = tl.load(pairs + 2 * positions, mask=there, other=0)
            bits = tl.load(pairs + 2 * positions + 1, mask=there, other=0)
            # A token may be biased and suppressed.
            tl.atomic_add(base + ids, bits.to(tl.float32, bitcast=True), mask=there, sem="relaxed")


@triton.jit
def _ids(row, tokens, at, end, vocab):
    """The tokens of a block of a sequence, and which of its positions have one."""
    positions = at + tl.arange(0, _BLOCK)
    there = positions < end
    slots = tl.load(row + positions, mask=there, other=0)
    ids = tl.load(tokens + slots, mask=there, other=0)
    return ids, there & (ids < vocab)


@triton.jit
def _record_tokens(
    tokens, slots, ids, count, words, pairs, PROGRAMS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    number = tl.program_id(0)
    others = tl.num_programs(0) - PROGRAMS
    if number < others:
        rows = number * _RECORD_BLOCK + tl.arange(0, _RECORD_BLOCK)
        there = rows < count
        slot = tl.load(slots + rows, mask=there, other=0)
        tl.store(tokens + slot, tl.load(ids + rows, mask=there, other=0).to(tl.int32), mask=there)
    else:
        pair_words = words + tl.load(pairs)
        used = tl.load(pairs + 1)
        stride_pairs = PROGRAMS * _RECORD_BLOCK
        for start in range((number - others) * _RECORD_BLOCK, used, stride_pairs):
            entries = start + tl.arange(0, _RECORD_BLOCK)
            known = entries < used
            slot = tl.load(pair_words + 2 * entries, mask=known, other=0)
            token = tl.load(pair_words + 2 * entries + 1, mask=known, other=0)
            tl.store(tokens + slot, token, mask=known)
