"""Top-k and top-p of a row without sorting: the search for the least logit that is kept.

Kept are all logits above an edge and, of those equal to it, the ones with the lowest ids. The edge
is found exactly, as an integer that sorts like the logits. The search has three parts. Many
programs for each row count, for 4 keys, the logits from each key on, and add their weights up; the
edge is between two of these keys. They do it again for 4 keys between the two. Then the row's own
program gathers the few logits that are left, and halves what it holds in registers. A row whose
logits lie so close that there are too many of them goes on halving over the whole row first.

All sums are in a fixed order: a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.pdl import pdl_wait_trigger
from pie_driver_sglang.kernels.sampling.logit_rows import (
    LOGIT_BLOCK,
    LogitRows,
    capped,
    first_beyond,
    is_wide,
    limits,
    load_block,
    middle_of,
    ordered,
    row_of,
    weight_at,
    weight_of,
    whole_mass,
)
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams

_PIVOTS = tl.constexpr(4)
_CANDIDATES = tl.constexpr(8192)
"""Logits that the last part of the search holds."""
_DEPTH = tl.constexpr(1.28)
"""How far below the largest logit the first of the keys is, in temperatures."""
_WARPS = 8


class Search(NamedTuple):
    """What the first two parts have found, and room for the last one."""

    coarse: torch.Tensor
    """``[rows, blocks, 2, 4]`` float32: of a block of a row how many logits there are from each of
    4 keys on, and their weight. Nothing of rows without top-k and top-p."""
    fine: torch.Tensor
    """``[rows, blocks, 3, 4]`` float32: the same between two of the keys, counts for top-k, and
    counts and weights for top-p."""
    candidates: torch.Tensor
    """``[rows, 8192]`` int32."""


def search(
    logit_rows: LogitRows,
    params: SlotParams,
    left: torch.Tensor,
    tops: torch.Tensor,
    masses: torch.Tensor,
    how: dict[str, Any],
) -> Search:
    """The first two parts of the search; can be captured.

    Args:
        logit_rows: The rows.
        params: ``[rows]`` parameters.
        left: ``[rows]`` int32: 1 for rows to be searched, 0 for others.
        tops: ``[rows, blocks]`` float32: the largest logit of each block.
        masses: ``[rows, blocks]`` float32: the weight of each block, relative to that.
        how: Further arguments of the kernels.
    """
    rows, parts = tops.shape
    coarse, fine = (
        tops.new_empty(rows, parts, kinds, _PIVOTS.value, dtype=torch.float32) for kinds in (2, 3)
    )
    candidates = tops.new_empty(rows, _CANDIDATES.value, dtype=torch.int32)
    kernels = ((_count_coarse, (coarse,)), (_count_fine, (coarse, fine)))
    for kernel, out in kernels:
        kernel[(rows, parts)](
            *logit_rows.arguments(), tops, masses,
            left, params.temperatures, params.top_ks, params.top_ps, *out,
            PARTS=triton.next_power_of_2(parts), **how, num_warps=_WARPS,
        )  # fmt: skip
    return Search(coarse, fine, candidates)


@triton.jit
def _count_coarse(
    logits, stride, vocab, changed, is_changed, tops, masses,
    left, temperatures, top_ks, top_ps, coarse, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(left + row) == 0) | (
        (tl.load(top_ks + row) >= vocab) & (tl.load(top_ps + row) >= 1.0)
    ):
        return
    temperature = tl.load(temperatures + row)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    largest = _largest(tops, row, parts, PARTS)
    pivots = _coarse_keys(largest, temperature, SHIFT)
    base = row_of(logits, stride, vocab, changed, is_changed, row)
    x = load_block(base, part * LOGIT_BLOCK, vocab)
    counts, weights = _count(
        x, part * LOGIT_BLOCK, vocab, pivots, largest, temperature, cap, CAPPED, SHIFT
    )
    out = coarse + (row * parts + part) * 2 * _PIVOTS + tl.arange(0, _PIVOTS)
    tl.store(out, counts)
    tl.store(out + _PIVOTS, weights)


@triton.jit
def _count_fine(
    logits, stride, vocab, changed, is_changed, tops, masses,
    left, temperatures, top_ks, top_ps, coarse, fine, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    if (tl.load(left + row) == 0) | ((top_k >= vocab) & (top_p >= 1.0)):
        return
    temperature = tl.load(temperatures + row)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    largest = _largest(tops, row, parts, PARTS)
    if tl.abs(largest) == float("inf"):
        return
    base = row_of(logits, stride, vocab, changed, is_changed, row)
    x = load_block(base, part * LOGIT_BLOCK, vocab)
    out = fine + (row * parts + part) * 3 * _PIVOTS + tl.arange(0, _PIVOTS)
    if top_k < vocab:
        low, high, _, _, _ = _coarse_of_count(
            coarse, row, parts, vocab, largest, temperature, top_k, PARTS, SHIFT
        )
        pivots = _fine_keys(low, high)
        counts, _ = _count(
            x, part * LOGIT_BLOCK, vocab, pivots, largest, temperature, cap, CAPPED, SHIFT
        )
        tl.store(out, counts)
    if is_wide(top_k, top_p, vocab):
        whole = whole_mass(tops, masses, row, parts, largest, temperature, cap, PARTS, CAPPED)
        low, high, _, _, _ = _coarse_of_mass(
            coarse, row, parts, vocab, largest, temperature, tl.abs(top_p) * whole, PARTS, SHIFT
        )
        pivots = _fine_keys(low, high)
        counts, weights = _count(
            x, part * LOGIT_BLOCK, vocab, pivots, largest, temperature, cap, CAPPED, SHIFT
        )
        tl.store(out + _PIVOTS, counts)
        tl.store(out + 2 * _PIVOTS, weights)


@triton.jit
def _largest(tops, row, parts, PARTS: tl.constexpr):
    lanes = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + lanes, mask=lanes < parts, other=float("-inf"))
    return tl.max(top, 0)


@triton.jit
def _coarse_keys(largest, temperature, SHIFT: tl.constexpr):
    """Keys that fall, by ever larger steps."""
    number = (tl.arange(0, _PIVOTS) + 1).to(tl.float32)
    return ordered(largest - temperature * _DEPTH * number * number) >> SHIFT


@triton.jit
def _fine_keys(low, high):
    """Keys that fall by equal steps, the last of which is `low`."""
    first = low.to(tl.int64)
    steps = (tl.arange(0, _PIVOTS) * -1 + _PIVOTS - 1).to(tl.int64)
    return (first + (high.to(tl.int64) - first + 1) * steps // _PIVOTS).to(tl.int32)


@triton.jit
def _count(
    x, first, vocab, pivots, largest, temperature, cap, CAPPED: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """Of a block, for each pivot how many keys there are from it on, and their weight."""
    keys = ordered(x) >> SHIFT
    inside = first + tl.arange(0, LOGIT_BLOCK) < vocab
    scale = 1.4426950408889634 / temperature
    weights = weight_of(x, capped(largest, cap, CAPPED), scale, cap, CAPPED)
    lanes = tl.arange(0, _PIVOTS)
    counts = tl.zeros([_PIVOTS], tl.float32)
    masses = tl.zeros([_PIVOTS], tl.float32)
    for number in tl.static_range(_PIVOTS):
        pivot = tl.sum(tl.where(lanes == number, pivots, 0), 0)
        kept = (keys >= pivot) & inside
        count = tl.sum(kept.to(tl.int32), 0).to(tl.float32)
        mass = tl.sum(tl.where(kept, weights, 0.0), 0)
        counts = tl.where(lanes == number, count, counts)
        masses = tl.where(lanes == number, mass, masses)
    return counts, masses


@triton.jit
def _summed(stats, row, parts, KINDS: tl.constexpr, KIND: tl.constexpr, PARTS: tl.constexpr):
    """A kind of numbers for all pivots, over all blocks of a row."""
    lanes = tl.arange(0, PARTS)
    places = ((row * parts + lanes) * KINDS + KIND) * _PIVOTS
    known = (lanes < parts)[:, None] & (tl.arange(0, _PIVOTS) >= 0)[None, :]
    pointers = stats + places[:, None] + tl.arange(0, _PIVOTS)[None, :]
    return tl.sum(tl.load(pointers, mask=known, other=0.0), 0)


@triton.jit
def _bracket(values, counts, keys, goal, low, high, above, held, passed):
    """The two keys between which the edge lies, or `low` and `high`.

    Args:
        values: From each key on, what must be as much as `goal`.
        counts: How many there are from each key on.
        keys: They fall.
        goal: What the edge's value must be, at least.
        low: The edge is one of the keys from here on.
        high: And not above this one.
        above: The value above `high`.
        held: How many there are from `low` on.
        passed: How many there are above `high`.

    Returns:
        The last five.
    """
    enough = values >= goal
    low = tl.max(tl.where(enough, keys, low), 0)
    high = tl.min(tl.where(enough, high, keys - 1), 0)
    above = tl.max(tl.where(enough, above, values), 0)
    held = tl.min(tl.where(enough, counts, held), 0)
    passed = tl.max(tl.where(enough, passed, counts), 0)
    return low, high, above, held, passed


@triton.jit
def _coarse_of_count(
    coarse, row, parts, vocab, largest, temperature, count, PARTS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    keys = _coarse_keys(largest, temperature, SHIFT)
    counts = _summed(coarse, row, parts, 2, 0, PARTS)
    lowest, highest = limits(largest, SHIFT)
    return _bracket(counts, counts, keys, count, lowest, highest, 0.0, vocab * 1.0, 0.0)


@triton.jit
def _coarse_of_mass(
    coarse, row, parts, vocab, largest, temperature, goal, PARTS: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    keys = _coarse_keys(largest, temperature, SHIFT)
    counts = _summed(coarse, row, parts, 2, 0, PARTS)
    masses = _summed(coarse, row, parts, 2, 1, PARTS)
    lowest, highest = limits(largest, SHIFT)
    return _bracket(masses, counts, keys, goal, lowest, highest, 0.0, vocab * 1.0, 0.0)


@triton.jit
def draw(
    base, vocab, row, parts, largest, temperature, top_k, top_p, min_p, uniform, whole,
    coarse, fine, candidates, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A token of one row: the first whose cumulative weight, by id, exceeds its share.

    `whole` is the weight of the row, and the other arguments are those of :func:`search`.
    """
    lowest, _ = limits(largest, SHIFT)
    raw = largest
    largest = capped(largest, cap, CAPPED)
    scale = 1.4426950408889634 / temperature
    room = candidates + row * _CANDIDATES
    # Kept are keys above the edge, and the first `ties` ids at the edge.
    edge = lowest - 1
    ties = vocab
    if top_k < vocab:
        low, high, above, held, passed = _coarse_of_count(
            coarse, row, parts, vocab, raw, temperature, top_k, PARTS, SHIFT
        )
        counts = _summed(fine, row, parts, 3, 0, PARTS)
        low, high, above, held, passed = _bracket(
            counts, counts, _fine_keys(low, high), top_k, low, high, above, held, passed
        )
        edge, above = _edge(
            base, vocab, room, low, high, above, held, passed, top_k * 1.0,
            largest, scale, cap, False, CAPPED, SHIFT,
        )  # fmt: skip
        ties = top_k - above.to(tl.int32)
    if top_p < 1.0:
        wide = is_wide(top_k, top_p, vocab)
        if not wide:
            inside = _mass(base, vocab, edge + 1, largest, scale, cap, CAPPED, SHIFT)
            whole = inside + ties * weight_at(edge, largest, scale, cap, CAPPED, SHIFT)
        goal = tl.abs(top_p) * whole
        low, high, mass, held, passed = _coarse_of_mass(
            coarse, row, parts, vocab, raw, temperature, goal, PARTS, SHIFT
        )
        if wide:
            counts = _summed(fine, row, parts, 3, 1, PARTS)
            masses = _summed(fine, row, parts, 3, 2, PARTS)
            low, high, mass, held, passed = _bracket(
                masses, counts, _fine_keys(low, high), goal, low, high, mass, held, passed
            )
        # Below the edge of top-k it changes nothing.
        if high >= edge:
            share_edge, mass = _edge(
                base, vocab, room, low, high, mass, held, passed, goal,
                largest, scale, cap, True, CAPPED, SHIFT,
            )  # fmt: skip
            if share_edge >= edge:
                weight = weight_at(share_edge, largest, scale, cap, CAPPED, SHIFT)
                wanted = tl.maximum(tl.ceil((goal - mass) / tl.maximum(weight, 1e-37)), 1.0)
                wanted = tl.minimum(wanted, vocab * 1.0).to(tl.int32)
                ties = tl.where(share_edge == edge, tl.minimum(ties, wanted), wanted)
                edge = share_edge
    return _invert(
        base, vocab, edge, ties, min_p, uniform, largest, scale, cap, PARTS, CAPPED, SHIFT
    )


@triton.jit
def _edge(
    base, vocab, room, low, high, above, held, passed, goal, largest, scale, cap,
    WEIGHED: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The largest key at and above which there is as much as `goal`, and how much is above it.

    What is counted are keys, or with `WEIGHED` their weights. The other arguments are those of
    :func:`_bracket`.
    """
    while (low < high) & (held - passed > _CANDIDATES):
        middle = middle_of(low, high)
        found = tl.zeros([LOGIT_BLOCK], tl.float32)
        weights = tl.zeros([LOGIT_BLOCK], tl.float32)
        for first in range(0, vocab, LOGIT_BLOCK):
            x = load_block(base, first, vocab)
            kept = (ordered(x) >> SHIFT >= middle) & (first + tl.arange(0, LOGIT_BLOCK) < vocab)
            found += kept.to(tl.float32)
            if WEIGHED:
                weights += tl.where(kept, weight_of(x, largest, scale, cap, CAPPED), 0.0)
        count = tl.sum(found, 0)
        total = count
        if WEIGHED:
            total = tl.sum(weights, 0)
        enough = total >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, total)
        held = tl.where(enough, count, held)
        passed = tl.where(enough, passed, count)
    if low < high:
        keys = _gathered(base, vocab, room, low, high, SHIFT)
        kept = keys >= low
        shares = kept.to(tl.float32)
        if WEIGHED:
            weights = weight_at(keys, largest, scale, cap, CAPPED, SHIFT)
            shares = tl.where(kept, weights, 0.0)
        beyond = above
        while low < high:
            middle = middle_of(low, high)
            total = beyond + tl.sum(tl.where(keys >= middle, shares, 0.0), 0)
            enough = total >= goal
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
            above = tl.where(enough, above, total)
    return low, above


@triton.jit
def _gathered(base, vocab, room, low, high, SHIFT: tl.constexpr):
    """The keys from `low` to `high`, no more than there are candidates, and smaller ones."""
    written = 0
    # What an earlier search has left there was read.
    tl.debug_barrier()
    for first in range(0, vocab, LOGIT_BLOCK):
        keys = ordered(load_block(base, first, vocab)) >> SHIFT
        inside = first + tl.arange(0, LOGIT_BLOCK) < vocab
        wanted = (keys >= low) & (keys <= high) & inside
        found = tl.sum(wanted.to(tl.int32), 0)
        if found > 0:
            places = written + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(room + places, keys, mask=wanted & (places < _CANDIDATES))
            written += found
    tl.debug_barrier()
    lanes = tl.arange(0, _CANDIDATES)
    return tl.load(room + lanes, mask=lanes < written, other=-0x80000000)


@triton.jit
def _mass(
    base, vocab, least, largest, scale, cap, CAPPED: tl.constexpr, SHIFT: tl.constexpr
):  # fmt: skip
    """The weight of all keys from `least` on."""
    total = tl.zeros([LOGIT_BLOCK], tl.float32)
    for first in range(0, vocab, LOGIT_BLOCK):
        x = load_block(base, first, vocab)
        kept = ordered(x) >> SHIFT >= least
        total += tl.where(kept, weight_of(x, largest, scale, cap, CAPPED), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _invert(
    base, vocab, edge, ties, min_p, uniform, largest, scale, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The first id whose cumulative kept weight exceeds `uniform` of all kept weight."""
    lanes = tl.arange(0, PARTS)
    masses = tl.zeros([PARTS], tl.float32)
    before_ties = tl.zeros([PARTS], tl.int32)
    seen = 0
    for first in range(0, vocab, LOGIT_BLOCK):
        weights, tied = _kept(
            base, first, vocab, edge, ties - seen, min_p, largest, scale, cap, CAPPED, SHIFT
        )
        masses = tl.where(lanes == first // LOGIT_BLOCK, tl.sum(weights, 0), masses)
        before_ties = tl.where(lanes == first // LOGIT_BLOCK, seen, before_ties)
        seen += tied
    goal = uniform * tl.sum(masses, 0)
    part = first_beyond(masses, 0.0, goal)
    before = tl.sum(tl.where(lanes < part, masses, 0.0), 0)
    seen = tl.sum(tl.where(lanes == part, before_ties, 0), 0)
    weights, _ = _kept(
        base,
        part * LOGIT_BLOCK,
        vocab,
        edge,
        ties - seen,
        min_p,
        largest,
        scale,
        cap,
        CAPPED,
        SHIFT,
    )
    return part * LOGIT_BLOCK + first_beyond(weights, before, goal)


@triton.jit
def _kept(
    base, first, vocab, edge, ties, min_p, largest, scale, cap,
    CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Weights of a block, 0 where dropped, and how many keys lie at the edge; `ties` may stay."""
    x = load_block(base, first, vocab)
    keys = ordered(x) >> SHIFT
    inside = first + tl.arange(0, LOGIT_BLOCK) < vocab
    at_edge = ((keys == edge) & inside).to(tl.int32)
    tied = tl.sum(at_edge, 0)
    kept = (keys > edge) & inside
    if tied > 0:
        kept |= (at_edge > 0) & (tl.cumsum(at_edge, 0) <= ties)
    weights = weight_of(x, largest, scale, cap, CAPPED)
    return tl.where(kept & (weights >= min_p), weights, 0.0), tied
