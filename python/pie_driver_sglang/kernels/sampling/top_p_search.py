"""Top-k/top-p filter and sampling of rows that keep many tokens, without a sort, in Triton.

Finds the threshold exactly: all logits above it are kept and, of those equal to it, the ones with
the lowest ids. The search is a radix-like selection on sort keys. Many programs a row count the
logits at or above 4 pivots and sum their weights, twice: over the whole range, then between two
pivots. The row's own program gathers the remaining candidates and bisects them in registers; if
they are too many, it bisects over the whole row first.

All sums are in a fixed order, so a row's result does not depend on its batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.constants import LOG2E
from pie_driver_sglang.kernels.pdl import pdl_wait_trigger
from pie_driver_sglang.kernels.sampling.logit_rows import (
    LOGIT_BLOCK,
    LogitRows,
    apply_softcap,
    inverse_cdf,
    key_range,
    load_block,
    midpoint,
    row_of,
    sort_key,
    top_p_of_all,
    total_weight,
    weight_of,
    weight_of_key,
)
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams

_PIVOTS = tl.constexpr(4)
_CANDIDATES = tl.constexpr(8192)
"""Candidates that are bisected in registers."""
_DEPTH = tl.constexpr(1.28)
"""Distance of the first pivot from the largest logit, in temperatures."""
_WARPS = 8


class PivotCounts(NamedTuple):
    """Counts and weights at pivots, and scratch for candidates."""

    coarse: torch.Tensor
    """``[rows, blocks, 2, 4]`` float32: counts and weights at or above 4 pivots, of each block.
    Undefined for rows without top-k and top-p."""
    fine: torch.Tensor
    """``[rows, blocks, 3, 4]`` float32: the same between two pivots: counts for top-k, and counts
    and weights for top-p."""
    candidates: torch.Tensor
    """``[rows, 8192]`` int32."""


def count_pivots(
    logit_rows: LogitRows,
    params: SlotParams,
    deferred: torch.Tensor,
    block_max: torch.Tensor,
    block_sum: torch.Tensor,
    options: dict[str, Any],
) -> PivotCounts:
    """Counts logits at coarse, then fine pivots. Can be captured.

    Args:
        logit_rows: The rows.
        params: ``[rows]`` parameters.
        deferred: ``[rows]`` int32: 1 for rows to search.
        block_max: ``[rows, blocks]`` float32.
        block_sum: ``[rows, blocks]`` float32: weights relative to `block_max`.
        options: Further arguments of the kernels.
    """
    rows, blocks = block_max.shape
    coarse, fine = (
        block_max.new_empty(rows, blocks, kinds, _PIVOTS.value, dtype=torch.float32)
        for kinds in (2, 3)
    )
    candidates = block_max.new_empty(rows, _CANDIDATES.value, dtype=torch.int32)
    kernels = ((_count_coarse, (coarse,)), (_count_fine, (coarse, fine)))
    for kernel, out in kernels:
        kernel[(rows, blocks)](
            *logit_rows.arguments(), block_max, block_sum,
            deferred, params.temperatures, params.top_ks, params.top_ps, *out,
            NUM_BLOCKS=triton.next_power_of_2(blocks), **options, num_warps=_WARPS,
        )  # fmt: skip
    return PivotCounts(coarse, fine, candidates)


@triton.jit
def _count_coarse(
    logits, stride, vocab, changed, is_changed, block_max, block_sum,
    deferred, temperatures, top_ks, top_ps, coarse, softcap,
    NUM_BLOCKS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(deferred + row) == 0) | (
        (tl.load(top_ks + row) >= vocab) & (tl.load(top_ps + row) >= 1.0)
    ):
        return
    temperature = tl.load(temperatures + row)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    row_max = _row_max(block_max, row, blocks, NUM_BLOCKS)
    pivots = _coarse_keys(row_max, temperature, SHIFT)
    base = row_of(logits, stride, vocab, changed, is_changed, row)
    x = load_block(base, block * LOGIT_BLOCK, vocab)
    counts, weights = _count(
        x, block * LOGIT_BLOCK, vocab, pivots, row_max, temperature, softcap, SOFTCAP, SHIFT
    )
    out = coarse + (row * blocks + block) * 2 * _PIVOTS + tl.arange(0, _PIVOTS)
    tl.store(out, counts)
    tl.store(out + _PIVOTS, weights)


@triton.jit
def _count_fine(
    logits, stride, vocab, changed, is_changed, block_max, block_sum,
    deferred, temperatures, top_ks, top_ps, coarse, fine, softcap,
    NUM_BLOCKS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    if (tl.load(deferred + row) == 0) | ((top_k >= vocab) & (top_p >= 1.0)):
        return
    temperature = tl.load(temperatures + row)
    block = tl.program_id(1)
    blocks = tl.num_programs(1)
    row_max = _row_max(block_max, row, blocks, NUM_BLOCKS)
    if tl.abs(row_max) == float("inf"):
        return
    base = row_of(logits, stride, vocab, changed, is_changed, row)
    x = load_block(base, block * LOGIT_BLOCK, vocab)
    out = fine + (row * blocks + block) * 3 * _PIVOTS + tl.arange(0, _PIVOTS)
    if top_k < vocab:
        low, high, _, _, _ = _coarse_top_k_bracket(
            coarse, row, blocks, vocab, row_max, temperature, top_k, NUM_BLOCKS, SHIFT
        )
        pivots = _fine_keys(low, high)
        counts, _ = _count(
            x, block * LOGIT_BLOCK, vocab, pivots, row_max, temperature, softcap, SOFTCAP, SHIFT
        )
        tl.store(out, counts)
    if top_p_of_all(top_k, top_p, vocab):
        total = total_weight(
            block_max, block_sum, row, blocks, row_max, temperature, softcap, NUM_BLOCKS, SOFTCAP
        )
        low, high, _, _, _ = _coarse_top_p_bracket(
            coarse, row, blocks, vocab, row_max, temperature, tl.abs(top_p) * total, NUM_BLOCKS,
            SHIFT,
        )  # fmt: skip
        pivots = _fine_keys(low, high)
        counts, weights = _count(
            x, block * LOGIT_BLOCK, vocab, pivots, row_max, temperature, softcap, SOFTCAP, SHIFT
        )
        tl.store(out + _PIVOTS, counts)
        tl.store(out + 2 * _PIVOTS, weights)


@triton.jit
def _row_max(block_max, row, blocks, NUM_BLOCKS: tl.constexpr):
    lanes = tl.arange(0, NUM_BLOCKS)
    top = tl.load(block_max + row * blocks + lanes, mask=lanes < blocks, other=float("-inf"))
    return tl.max(top, 0)


@triton.jit
def _coarse_keys(row_max, temperature, SHIFT: tl.constexpr):
    """Pivots that fall by growing steps."""
    number = (tl.arange(0, _PIVOTS) + 1).to(tl.float32)
    return sort_key(row_max - temperature * _DEPTH * number * number) >> SHIFT


@triton.jit
def _fine_keys(low, high):
    """Pivots that fall by equal steps, down to `low`."""
    first = low.to(tl.int64)
    steps = (tl.arange(0, _PIVOTS) * -1 + _PIVOTS - 1).to(tl.int64)
    return (first + (high.to(tl.int64) - first + 1) * steps // _PIVOTS).to(tl.int32)


@triton.jit
def _count(
    x, first, vocab, pivots, row_max, temperature, softcap, SOFTCAP: tl.constexpr,
    SHIFT: tl.constexpr
):  # fmt: skip
    """Number and weight of a block's keys at or above each pivot."""
    keys = sort_key(x) >> SHIFT
    inside = first + tl.arange(0, LOGIT_BLOCK) < vocab
    scale = LOG2E / temperature
    weights = weight_of(x, apply_softcap(row_max, softcap, SOFTCAP), scale, softcap, SOFTCAP)
    lanes = tl.arange(0, _PIVOTS)
    counts = tl.zeros([_PIVOTS], tl.float32)
    block_sum = tl.zeros([_PIVOTS], tl.float32)
    for number in tl.static_range(_PIVOTS):
        pivot = tl.sum(tl.where(lanes == number, pivots, 0), 0)
        kept = (keys >= pivot) & inside
        count = tl.sum(kept.to(tl.int32), 0).to(tl.float32)
        mass = tl.sum(tl.where(kept, weights, 0.0), 0)
        counts = tl.where(lanes == number, count, counts)
        block_sum = tl.where(lanes == number, mass, block_sum)
    return counts, block_sum


@triton.jit
def _sum_over_blocks(
    stats, row, blocks, KINDS: tl.constexpr, KIND: tl.constexpr, NUM_BLOCKS: tl.constexpr
):
    """Sums one kind of numbers over the blocks of a row, for all pivots."""
    lanes = tl.arange(0, NUM_BLOCKS)
    places = ((row * blocks + lanes) * KINDS + KIND) * _PIVOTS
    known = (lanes < blocks)[:, None] & (tl.arange(0, _PIVOTS) >= 0)[None, :]
    pointers = stats + places[:, None] + tl.arange(0, _PIVOTS)[None, :]
    return tl.sum(tl.load(pointers, mask=known, other=0.0), 0)


@triton.jit
def _bracket(values, counts, keys, target, low, high, above, count_from_low, count_above_high):
    """Narrows `low` and `high` to the pivots that bracket the threshold.

    Args:
        values: Count or weight at or above each pivot.
        counts: Count at or above each pivot.
        keys: The pivots, falling.
        target: Count or weight that must be reached.
        low: The threshold is at least this key.
        high: And at most this one.
        above: Value above `high`.
        count_from_low: Count from `low` on.
        count_above_high: Count above `high`.

    Returns:
        The last five.
    """
    enough = values >= target
    low = tl.max(tl.where(enough, keys, low), 0)
    high = tl.min(tl.where(enough, high, keys - 1), 0)
    above = tl.max(tl.where(enough, above, values), 0)
    count_from_low = tl.min(tl.where(enough, counts, count_from_low), 0)
    count_above_high = tl.max(tl.where(enough, count_above_high, counts), 0)
    return low, high, above, count_from_low, count_above_high


@triton.jit
def _coarse_top_k_bracket(
    coarse, row, blocks, vocab, row_max, temperature, count, NUM_BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr
):  # fmt: skip
    keys = _coarse_keys(row_max, temperature, SHIFT)
    counts = _sum_over_blocks(coarse, row, blocks, 2, 0, NUM_BLOCKS)
    lowest, highest = key_range(row_max, SHIFT)
    return _bracket(counts, counts, keys, count, lowest, highest, 0.0, vocab * 1.0, 0.0)


@triton.jit
def _coarse_top_p_bracket(
    coarse, row, blocks, vocab, row_max, temperature, target, NUM_BLOCKS: tl.constexpr,
    SHIFT: tl.constexpr
):  # fmt: skip
    keys = _coarse_keys(row_max, temperature, SHIFT)
    counts = _sum_over_blocks(coarse, row, blocks, 2, 0, NUM_BLOCKS)
    block_sum = _sum_over_blocks(coarse, row, blocks, 2, 1, NUM_BLOCKS)
    lowest, highest = key_range(row_max, SHIFT)
    return _bracket(block_sum, counts, keys, target, lowest, highest, 0.0, vocab * 1.0, 0.0)


@triton.jit
def sample_many_kept(
    base, vocab, row, blocks, row_max, temperature, top_k, top_p, min_p, uniform, total,
    coarse, fine, candidates, softcap,
    NUM_BLOCKS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Samples a row: the first token whose cumulative kept weight, by id, exceeds `uniform`.

    `total` is the weight of the row; other arguments are those of :func:`count_pivots`.
    """
    lowest, _ = key_range(row_max, SHIFT)
    raw = row_max
    row_max = apply_softcap(row_max, softcap, SOFTCAP)
    scale = LOG2E / temperature
    candidate_row = candidates + row * _CANDIDATES
    # Keys above the threshold are kept, and the first `ties` ids equal to it.
    threshold = lowest - 1
    ties = vocab
    if top_k < vocab:
        low, high, above, count_from_low, count_above_high = _coarse_top_k_bracket(
            coarse, row, blocks, vocab, raw, temperature, top_k, NUM_BLOCKS, SHIFT
        )
        counts = _sum_over_blocks(fine, row, blocks, 3, 0, NUM_BLOCKS)
        low, high, above, count_from_low, count_above_high = _bracket(
            counts,
            counts,
            _fine_keys(low, high),
            top_k,
            low,
            high,
            above,
            count_from_low,
            count_above_high,
        )
        threshold, above = _threshold(
            base, vocab, candidate_row, low, high, above, count_from_low, count_above_high,
            top_k * 1.0,
            row_max, scale, softcap, False, SOFTCAP, SHIFT,
        )  # fmt: skip
        ties = top_k - above.to(tl.int32)
    if top_p < 1.0:
        of_all = top_p_of_all(top_k, top_p, vocab)
        if not of_all:
            inside = _weight_from(
                base, vocab, threshold + 1, row_max, scale, softcap, SOFTCAP, SHIFT
            )
            total = inside + ties * weight_of_key(
                threshold, row_max, scale, softcap, SOFTCAP, SHIFT
            )
        target = tl.abs(top_p) * total
        low, high, mass, count_from_low, count_above_high = _coarse_top_p_bracket(
            coarse, row, blocks, vocab, raw, temperature, target, NUM_BLOCKS, SHIFT
        )
        if of_all:
            counts = _sum_over_blocks(fine, row, blocks, 3, 1, NUM_BLOCKS)
            block_sum = _sum_over_blocks(fine, row, blocks, 3, 2, NUM_BLOCKS)
            low, high, mass, count_from_low, count_above_high = _bracket(
                block_sum,
                counts,
                _fine_keys(low, high),
                target,
                low,
                high,
                mass,
                count_from_low,
                count_above_high,
            )
        # Below the threshold of top-k it changes nothing.
        if high >= threshold:
            top_p_threshold, mass = _threshold(
                base, vocab, candidate_row, low, high, mass, count_from_low, count_above_high,
                target, row_max, scale, softcap, True, SOFTCAP, SHIFT,
            )  # fmt: skip
            if top_p_threshold >= threshold:
                weight = weight_of_key(top_p_threshold, row_max, scale, softcap, SOFTCAP, SHIFT)
                wanted = tl.maximum(tl.ceil((target - mass) / tl.maximum(weight, 1e-37)), 1.0)
                wanted = tl.minimum(wanted, vocab * 1.0).to(tl.int32)
                ties = tl.where(top_p_threshold == threshold, tl.minimum(ties, wanted), wanted)
                threshold = top_p_threshold
    return _sample_kept(
        base, vocab, threshold, ties, min_p, uniform, row_max, scale, softcap, NUM_BLOCKS, SOFTCAP,
        SHIFT,
    )  # fmt: skip


@triton.jit
def _threshold(
    base, vocab, candidate_row, low, high, above, count_from_low, count_above_high, target, row_max,
    scale, softcap,
    WEIGHED: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Bisects the largest key at and above which the count (or weight) reaches `target`.

    Also returns the count (or weight) above it. Other arguments are those of :func:`_bracket`.
    """
    while (low < high) & (count_from_low - count_above_high > _CANDIDATES):
        middle = midpoint(low, high)
        found = tl.zeros([LOGIT_BLOCK], tl.float32)
        weights = tl.zeros([LOGIT_BLOCK], tl.float32)
        for first in range(0, vocab, LOGIT_BLOCK):
            x = load_block(base, first, vocab)
            kept = (sort_key(x) >> SHIFT >= middle) & (first + tl.arange(0, LOGIT_BLOCK) < vocab)
            found += kept.to(tl.float32)
            if WEIGHED:
                weights += tl.where(kept, weight_of(x, row_max, scale, softcap, SOFTCAP), 0.0)
        count = tl.sum(found, 0)
        total = count
        if WEIGHED:
            total = tl.sum(weights, 0)
        enough = total >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, total)
        count_from_low = tl.where(enough, count, count_from_low)
        count_above_high = tl.where(enough, count_above_high, count)
    if low < high:
        keys = _gather_candidates(base, vocab, candidate_row, low, high, SHIFT)
        kept = keys >= low
        weights_ = kept.to(tl.float32)
        if WEIGHED:
            weights = weight_of_key(keys, row_max, scale, softcap, SOFTCAP, SHIFT)
            weights_ = tl.where(kept, weights, 0.0)
        beyond = above
        while low < high:
            middle = midpoint(low, high)
            total = beyond + tl.sum(tl.where(keys >= middle, weights_, 0.0), 0)
            enough = total >= target
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
            above = tl.where(enough, above, total)
    return low, above


@triton.jit
def _gather_candidates(base, vocab, candidate_row, low, high, SHIFT: tl.constexpr):
    """Gathers the keys from `low` to `high`, padded with smaller ones."""
    written = 0
    # Earlier candidates have been read.
    tl.debug_barrier()
    for first in range(0, vocab, LOGIT_BLOCK):
        keys = sort_key(load_block(base, first, vocab)) >> SHIFT
        inside = first + tl.arange(0, LOGIT_BLOCK) < vocab
        wanted = (keys >= low) & (keys <= high) & inside
        found = tl.sum(wanted.to(tl.int32), 0)
        if found > 0:
            places = written + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(candidate_row + places, keys, mask=wanted & (places < _CANDIDATES))
            written += found
    tl.debug_barrier()
    lanes = tl.arange(0, _CANDIDATES)
    return tl.load(candidate_row + lanes, mask=lanes < written, other=-0x80000000)


@triton.jit
def _weight_from(
    base, vocab, min_key, row_max, scale, softcap, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Weight of all keys from `min_key` on."""
    total = tl.zeros([LOGIT_BLOCK], tl.float32)
    for first in range(0, vocab, LOGIT_BLOCK):
        x = load_block(base, first, vocab)
        kept = sort_key(x) >> SHIFT >= min_key
        total += tl.where(kept, weight_of(x, row_max, scale, softcap, SOFTCAP), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _sample_kept(
    base, vocab, threshold, ties, min_p, uniform, row_max, scale, softcap,
    NUM_BLOCKS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Inverse CDF: the first id whose cumulative kept weight exceeds `uniform` of its total."""
    lanes = tl.arange(0, NUM_BLOCKS)
    block_sum = tl.zeros([NUM_BLOCKS], tl.float32)
    before_ties = tl.zeros([NUM_BLOCKS], tl.int32)
    seen = 0
    for first in range(0, vocab, LOGIT_BLOCK):
        weights, tied = _kept(
            base, first, vocab, threshold, ties - seen, min_p, row_max, scale, softcap, SOFTCAP,
            SHIFT,
        )  # fmt: skip
        block_sum = tl.where(lanes == first // LOGIT_BLOCK, tl.sum(weights, 0), block_sum)
        before_ties = tl.where(lanes == first // LOGIT_BLOCK, seen, before_ties)
        seen += tied
    target = uniform * tl.sum(block_sum, 0)
    block = inverse_cdf(block_sum, 0.0, target)
    before = tl.sum(tl.where(lanes < block, block_sum, 0.0), 0)
    seen = tl.sum(tl.where(lanes == block, before_ties, 0), 0)
    weights, _ = _kept(
        base, block * LOGIT_BLOCK, vocab, threshold, ties - seen, min_p, row_max, scale, softcap,
        SOFTCAP, SHIFT,
    )  # fmt: skip
    return block * LOGIT_BLOCK + inverse_cdf(weights, before, target)


@triton.jit
def _kept(
    base, first, vocab, threshold, ties, min_p, row_max, scale, softcap,
    SOFTCAP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Kept weights of a block, and its number of keys equal to the threshold; `ties` are kept."""
    x = load_block(base, first, vocab)
    keys = sort_key(x) >> SHIFT
    inside = first + tl.arange(0, LOGIT_BLOCK) < vocab
    at_edge = ((keys == threshold) & inside).to(tl.int32)
    tied = tl.sum(at_edge, 0)
    kept = (keys > threshold) & inside
    if tied > 0:
        kept |= (at_edge > 0) & (tl.cumsum(at_edge, 0) <= ties)
    weights = weight_of(x, row_max, scale, softcap, SOFTCAP)
    return tl.where(kept & (weights >= min_p), weights, 0.0), tied
