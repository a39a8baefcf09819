"""Top-k/top-p/min-p filter and sampling of rows that keep few tokens, in registers of one program.

A row is divided into segments of 64 tokens whose maxima are known. All tokens at or above a logit
lie in segments whose maximum is at or above it. So the program selects a minimum logit by segment
maxima alone, reads those few segments, and has all tokens that the filter keeps: the segments of
the k largest maxima hold the top k tokens. A row that keeps more, or has too many equal maxima, is
left to `top_p_search`. Unlike FlashInfer's sampler there is no rejection loop: the result is the
exact inverse CDF over token ids.

All sums are in a fixed order, so a row's result does not depend on its batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pie_driver_sglang.kernels.constants import LOG2E
from pie_driver_sglang.kernels.sampling.logit_rows import (
    apply_softcap,
    inverse_cdf,
    key_range,
    midpoint,
    read_logits,
    sort_key,
    top_p_of_all,
    weight_of,
    weight_of_key,
)

SEGMENT = tl.constexpr(64)
"""Tokens of a segment."""
MAX_SEGMENTS = tl.constexpr(128)
"""Most segments that a program reads."""
_NO_KEY = tl.constexpr(-0x80000000)
"""Less than the sort key of any float."""


@triton.jit
def sample_few_kept(
    base, vocab, segment_max, scratch, row_max, temperature, top_k, top_p, min_p, uniform, total,
    softcap, NUM_SEGMENTS: tl.constexpr, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Samples a row: the first token whose cumulative kept weight, by id, exceeds `uniform`; or -1.

    Args:
        base: The row, from :func:`row_of`.
        vocab: Vocabulary size.
        segment_max: Largest logit of each segment, float32.
        scratch: 128 int32.
        row_max: Largest logit, finite.
        temperature: Above 0.
        top_k: Most tokens to keep; `vocab` or more for all.
        top_p: Share of weight to keep; negated for a share of all weight, not of what top-k keeps.
        min_p: Least probability, relative to the largest.
        uniform: In [0, 1).
        total: Weight of all tokens.
        softcap: Logit soft cap.
        NUM_SEGMENTS: A power of two, at least the number of segments.
        SOFTCAP: Whether there is a soft cap.
        SHIFT: Low bits that are dropped from sort keys.

    Returns:
        The token, or -1 where more segments would have to be read.
    """
    token = -1
    min_row_key, max_key = key_range(row_max, SHIFT)
    lanes = tl.arange(0, NUM_SEGMENTS)
    in_vocab = lanes * SEGMENT < vocab
    block_max = sort_key(tl.load(segment_max + lanes, mask=in_vocab, other=0.0)) >> SHIFT
    block_max = tl.where(in_vocab, block_max, _NO_KEY)
    # Tokens at -inf have no weight.
    of_top_k = top_k < vocab
    wanted = tl.where(of_top_k, top_k, MAX_SEGMENTS + 1)
    min_key, _ = _threshold(
        block_max, (block_max > min_row_key).to(tl.float32), wanted * 1.0, min_row_key, max_key
    )
    min_key = tl.where(of_top_k & (min_key > min_row_key), min_key, min_key + 1)
    chosen = block_max >= min_key
    count = tl.sum(chosen.to(tl.int32), 0)
    if (count > 0) & (count <= MAX_SEGMENTS):
        places = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(scratch + places, lanes, mask=chosen)
        tl.debug_barrier()
        numbers = tl.arange(0, MAX_SEGMENTS)
        segments = tl.load(scratch + numbers, mask=numbers < count, other=0)
        ids = segments[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
        read = (numbers < count)[:, None] & (ids < vocab)
        x = read_logits(base, ids, read)
        scale = LOG2E / temperature
        row_max = apply_softcap(row_max, softcap, SOFTCAP)
        keys = sort_key(x) >> SHIFT
        keys = tl.where(read & (keys >= min_key), keys, _NO_KEY)
        weights = tl.where(keys >= min_key, weight_of(x, row_max, scale, softcap, SOFTCAP), 0.0)
        threshold, ties, is_known = _find_threshold(
            keys, weights, min_key, max_key, vocab, top_k, top_p, total, row_max, scale, softcap,
            SOFTCAP, SHIFT,
        )  # fmt: skip
        # Upper bound of the weights that were not read.
        beyond = weight_of_key(min_key - 1, row_max, scale, softcap, SOFTCAP, SHIFT)
        if is_known | (beyond < min_p) | (beyond == 0.0):
            at_edge = keys == threshold
            tied = tl.sum(at_edge.to(tl.int32), 1)
            before = tl.cumsum(tied, 0) - tied
            rank = before[:, None] + tl.cumsum(at_edge.to(tl.int32), 1)
            kept = (keys > threshold) | (at_edge & (rank <= ties))
            weights = tl.where(kept & (weights >= min_p), weights, 0.0)
            block_sum = tl.sum(weights, 1)
            target = uniform * tl.sum(block_sum, 0)
            own = inverse_cdf(block_sum, 0.0, target)
            passed = tl.sum(tl.where(numbers < own, block_sum, 0.0), 0)
            inside = tl.sum(tl.where(numbers[:, None] == own, weights, 0.0), 0)
            segment = tl.sum(tl.where(numbers == own, segments, 0), 0)
            token = segment * SEGMENT + inverse_cdf(inside, passed, target)
    return token


@triton.jit
def _find_threshold(
    keys, weights, min_key, max_key, vocab, top_k, top_p, total, row_max, scale, softcap,
    SOFTCAP: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Key threshold, number of kept keys equal to it, and whether no kept token is missing."""
    threshold = min_key - 1
    ties = vocab
    is_known = top_k < vocab
    if top_k < vocab:
        ones = (keys >= min_key).to(tl.float32)
        threshold, above = _threshold(keys, ones, top_k * 1.0, min_key - 1, max_key)
        ties = top_k - above.to(tl.int32)
    if top_p < 1.0:
        if not top_p_of_all(top_k, top_p, vocab):
            at_edge = weight_of_key(threshold, row_max, scale, softcap, SOFTCAP, SHIFT)
            total = tl.sum(tl.where(keys > threshold, weights, 0.0)) + ties * at_edge
        target = tl.abs(top_p) * total
        if tl.sum(weights) >= target:
            is_known = top_p < 1.0
            share_edge, mass = _threshold(keys, weights, target, min_key - 1, max_key)
            if share_edge >= threshold:
                weight = weight_of_key(share_edge, row_max, scale, softcap, SOFTCAP, SHIFT)
                wanted = tl.maximum(tl.ceil((target - mass) / tl.maximum(weight, 1e-37)), 1.0)
                wanted = tl.minimum(wanted, vocab * 1.0).to(tl.int32)
                ties = tl.where(share_edge == threshold, tl.minimum(ties, wanted), wanted)
                threshold = share_edge
    return threshold, ties, is_known


@triton.jit
def _threshold(keys, shares, target, low, high):
    """Bisects the largest key from `low` to `high` above which shares sum to `target`, else `low`.

    Also returns the sum of the shares above it.
    """
    above = 0.0
    while low < high:
        middle = midpoint(low, high)
        total = tl.sum(tl.where(keys >= middle, shares, 0.0))
        enough = total >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, total)
    return low, above
