"""Top-k, top-p and min-p of a row that keeps few tokens: one program has them in its registers.

A row is divided into spans of 64 tokens, whose largest logits, the peaks, are known. The tokens
from some logit on lie in the spans that have a peak from there on. So the row's program chooses
that logit by the peaks alone, reads the few spans, and has in them all tokens that a filter keeps:
of top-k, the spans of the k largest peaks hold k tokens at least. A row that keeps more, or that
has too many peaks at the same logit, is left to the search of
`sampling.top_p_search`.

All sums are in a fixed order: a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pie_driver_sglang.kernels.sampling.logit_rows import (
    capped,
    first_beyond,
    is_wide,
    limits,
    middle_of,
    ordered,
    read_logits,
    weight_at,
    weight_of,
)

SPAN = tl.constexpr(64)
"""Tokens of a span."""
MOST_SPANS = tl.constexpr(128)
"""Spans that a program reads."""
_GONE = tl.constexpr(-0x80000000)
"""Less than the key of any float."""


@triton.jit
def draw_few(
    base, vocab, peaks, room, largest, temperature, top_k, top_p, min_p, uniform, whole, cap,
    SPANS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A token of a row: the first whose cumulative kept weight, by id, exceeds its share; or -1.

    Args:
        base: The row, of `row_of`.
        vocab: How many.
        peaks: The largest logit of each span, float32.
        room: 128 int32 for the spans that are read.
        largest: Of all logits, finite.
        temperature: Above 0.
        top_k: How many tokens may stay; from `vocab` on, all.
        top_p: Their share; below 0, of the whole distribution whatever top-k leaves.
        min_p: The least probability, as a multiple of the largest one.
        uniform: From 0 to 1.
        whole: The weight of all tokens.
        cap: Soft cap.
        SPANS: A power of two, not below the number of spans.
        CAPPED: Whether there is a soft cap.
        SHIFT: Lower bits of a key that say nothing.

    Returns:
        The token, or -1 where more spans were to be read.
    """
    token = -1
    lowest, highest = limits(largest, SHIFT)
    lanes = tl.arange(0, SPANS)
    there = lanes * SPAN < vocab
    tops = ordered(tl.load(peaks + lanes, mask=there, other=0.0)) >> SHIFT
    tops = tl.where(there, tops, _GONE)
    # Tokens at -inf weigh nothing.
    of_top_k = top_k < vocab
    wanted = tl.where(of_top_k, top_k, MOST_SPANS + 1)
    least, _ = _edge(tops, (tops > lowest).to(tl.float32), wanted * 1.0, lowest, highest)
    least = tl.where(of_top_k & (least > lowest), least, least + 1)
    chosen = tops >= least
    count = tl.sum(chosen.to(tl.int32), 0)
    if (count > 0) & (count <= MOST_SPANS):
        places = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(room + places, lanes, mask=chosen)
        tl.debug_barrier()
        numbers = tl.arange(0, MOST_SPANS)
        spans = tl.load(room + numbers, mask=numbers < count, other=0)
        ids = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        read = (numbers < count)[:, None] & (ids < vocab)
        x = read_logits(base, ids, read)
        scale = 1.4426950408889634 / temperature
        largest = capped(largest, cap, CAPPED)
        keys = ordered(x) >> SHIFT
        keys = tl.where(read & (keys >= least), keys, _GONE)
        weights = tl.where(keys >= least, weight_of(x, largest, scale, cap, CAPPED), 0.0)
        edge, ties, is_known = _kept_from(
            keys, weights, least, highest, vocab, top_k, top_p, whole, largest, scale, cap,
            CAPPED, SHIFT,
        )  # fmt: skip
        # What was not read has less weight than this.
        beyond = weight_at(least - 1, largest, scale, cap, CAPPED, SHIFT)
        if is_known | (beyond < min_p) | (beyond == 0.0):
            at_edge = keys == edge
            tied = tl.sum(at_edge.to(tl.int32), 1)
            before = tl.cumsum(tied, 0) - tied
            rank = before[:, None] + tl.cumsum(at_edge.to(tl.int32), 1)
            kept = (keys > edge) | (at_edge & (rank <= ties))
            weights = tl.where(kept & (weights >= min_p), weights, 0.0)
            masses = tl.sum(weights, 1)
            goal = uniform * tl.sum(masses, 0)
            own = first_beyond(masses, 0.0, goal)
            passed = tl.sum(tl.where(numbers < own, masses, 0.0), 0)
            inside = tl.sum(tl.where(numbers[:, None] == own, weights, 0.0), 0)
            span = tl.sum(tl.where(numbers == own, spans, 0), 0)
            token = span * SPAN + first_beyond(inside, passed, goal)
    return token


@triton.jit
def _kept_from(
    keys, weights, least, highest, vocab, top_k, top_p, whole, largest, scale, cap,
    CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The edge above which keys are kept, how many at the edge, and whether no token is missing."""
    edge = least - 1
    ties = vocab
    is_known = top_k < vocab
    if top_k < vocab:
        ones = (keys >= least).to(tl.float32)
        edge, above = _edge(keys, ones, top_k * 1.0, least - 1, highest)
        ties = top_k - above.to(tl.int32)
    if top_p < 1.0:
        if not is_wide(top_k, top_p, vocab):
            at_edge = weight_at(edge, largest, scale, cap, CAPPED, SHIFT)
            whole = tl.sum(tl.where(keys > edge, weights, 0.0)) + ties * at_edge
        goal = tl.abs(top_p) * whole
        if tl.sum(weights) >= goal:
            is_known = top_p < 1.0
            share_edge, mass = _edge(keys, weights, goal, least - 1, highest)
            if share_edge >= edge:
                weight = weight_at(share_edge, largest, scale, cap, CAPPED, SHIFT)
                wanted = tl.maximum(tl.ceil((goal - mass) / tl.maximum(weight, 1e-37)), 1.0)
                wanted = tl.minimum(wanted, vocab * 1.0).to(tl.int32)
                ties = tl.where(share_edge == edge, tl.minimum(ties, wanted), wanted)
                edge = share_edge
    return edge, ties, is_known


@triton.jit
def _edge(keys, shares, goal, low, high):
    """The largest key from `low` to `high` on which the shares reach the goal, else `low`.

    Also returns the sum of the shares above it.
    """
    above = 0.0
    while low < high:
        middle = middle_of(low, high)
        total = tl.sum(tl.where(keys >= middle, shares, 0.0))
        enough = total >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, total)
    return low, above
