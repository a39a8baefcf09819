"""Top-k and top-p of a row without sorting: the search for the least logit that is kept.

Kept are all logits above an edge and, of those equal to it, the ones with the lowest ids. The edge
is found exactly, as an integer that sorts like the logits, in three parts:

1. Many programs for each row count, for 8 keys, the logits from each key on, and add their weights
   up. The edge is between two of these keys.
2. The same programs write the logits between the two next to each other. If there are too many,
   they count again for 16 keys between the two.
3. The row's own program halves what it holds in registers. A row whose logits lie so close that
   there still are too many goes on halving over the whole row first.

All sums are in a fixed order: a row's result does not depend on the rest of the batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.chained import follow
from pie_driver_sglang.kernels.logit_rows import LOGIT_BLOCK, capped, load_block, ordered, weight_of
from pie_driver_sglang.kernels.types import SlotParams

_COARSE = tl.constexpr(8)
"""Keys of the first part."""
_FINE = tl.constexpr(16)
_CANDIDATES = tl.constexpr(4096)
"""Logits that the last part of the search holds."""
_DEPTH = tl.constexpr(0.32)
"""How far below the largest logit the first of the keys is, in temperatures."""
_TILE = tl.constexpr(4096)
"""Comparisons that a program of the first two parts makes at once."""
_WRITTEN = tl.constexpr(2048)
"""Logits that it looks through at once for candidates."""
_WARPS = 4
"""Few, so that several programs run at once on a multiprocessor, and idle ones end soon."""


class Search(NamedTuple):
    """What the first two parts have found; nothing of rows without top-k and top-p."""

    coarse: torch.Tensor
    """``[rows, blocks, 2, 8]`` float32: of a block of a row how many logits there are from each of
    8 keys on, and their weight."""
    fine: torch.Tensor
    """``[rows, blocks, 3, 16]`` float32: the same between two of the keys, counts for top-k, and
    counts and weights for top-p; for rows with too many candidates."""
    candidates: torch.Tensor
    """``[rows, 2, 4096]`` int32: the keys between which the edges of top-k and of top-p lie."""


def search(
    logits: torch.Tensor,
    params: SlotParams,
    tops: torch.Tensor,
    masses: torch.Tensor,
    how: dict[str, Any],
) -> Search:
    """The first two parts of the search; can be captured.

    Args:
        logits: ``[rows, vocabulary]``.
        params: ``[rows]`` parameters.
        tops: ``[rows, blocks]`` float32: the largest logit of each block.
        masses: ``[rows, blocks]`` float32: the weight of each block, relative to that.
        how: Further arguments of the kernels.
    """
    rows, parts = tops.shape
    coarse = tops.new_empty(rows, parts, 2, _COARSE.value)
    fine = tops.new_empty(rows, parts, 3, _FINE.value)
    candidates = tops.new_empty(rows, 2, _CANDIDATES.value, dtype=torch.int32)
    asked = (params.temperatures, params.top_ks, params.top_ps)
    how = {"PARTS": triton.next_power_of_2(parts), "num_warps": _WARPS, **how}
    where = (logits, logits.stride(0), logits.shape[1], tops)
    _count_coarse[(rows, parts)](*where, *asked, coarse, **how)
    _refine[(rows, parts)](*where, masses, *asked, coarse, fine, candidates, **how)
    return Search(coarse, fine, candidates)


@triton.jit
def _count_coarse(
    logits, stride, vocab, tops, temperatures, top_ks, top_ps, coarse, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        follow()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    if (temperature <= 0.0) | ((tl.load(top_ks + row) >= vocab) & (tl.load(top_ps + row) >= 1.0)):
        return
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    largest = _largest(tops, row, parts, PARTS)
    pivots = _coarse_keys(largest, temperature, SHIFT)
    counts, weights = _count(
        logits + row * stride,
        part * LOGIT_BLOCK,
        vocab,
        pivots,
        largest,
        temperature,
        cap,
        _COARSE,
        True,
        CAPPED,
        SHIFT,
    )
    out = coarse + (row * parts + part) * 2 * _COARSE + tl.arange(0, _COARSE)
    tl.store(out, counts)
    tl.store(out + _COARSE, weights)


@triton.jit
def _refine(
    logits, stride, vocab, tops, masses, temperatures, top_ks, top_ps,
    coarse, fine, candidates, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        follow()
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    if (temperature <= 0.0) | ((top_k >= vocab) & (top_p >= 1.0)):
        return
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    largest = _largest(tops, row, parts, PARTS)
    if tl.abs(largest) == float("inf"):
        return
    base = logits + row * stride
    first = part * LOGIT_BLOCK
    out = fine + (row * parts + part) * 3 * _FINE + tl.arange(0, _FINE)
    room = candidates + row * 2 * _CANDIDATES
    if top_k < vocab:
        low, high, _above, held, passed, offset = _coarse_bracket(
            coarse, row, part, parts, vocab, largest, temperature, top_k, False, PARTS, SHIFT
        )
        if held - passed <= _CANDIDATES:
            _keep(base, first, first + LOGIT_BLOCK, vocab, low, high, room, offset, SHIFT)
        else:
            counts, weights = _count(
                base, first, vocab, _fine_keys(low, high), largest, temperature, cap,
                _FINE, False, CAPPED, SHIFT,
            )  # fmt: skip
            tl.store(out, counts)
    if _is_wide(top_k, top_p, vocab):
        whole = whole_mass(tops, masses, row, parts, largest, temperature, cap, PARTS, CAPPED)
        goal = tl.abs(top_p) * whole
        low, high, _above, held, passed, offset = _coarse_bracket(
            coarse, row, part, parts, vocab, largest, temperature, goal, True, PARTS, SHIFT
        )
        if held - passed <= _CANDIDATES:
            _keep(
                base,
                first,
                first + LOGIT_BLOCK,
                vocab,
                low,
                high,
                room + _CANDIDATES,
                offset,
                SHIFT,
            )
        else:
            counts, weights = _count(
                base, first, vocab, _fine_keys(low, high), largest, temperature, cap,
                _FINE, True, CAPPED, SHIFT,
            )  # fmt: skip
            tl.store(out + _FINE, counts)
            tl.store(out + 2 * _FINE, weights)


@triton.jit
def _is_wide(top_k, top_p, vocab):
    """Whether top-p is a share of the whole distribution, and not of what top-k leaves."""
    return (top_p < 1.0) & ((top_p < 0.0) | (top_k >= vocab))


@triton.jit
def _largest(tops, row, parts, PARTS: tl.constexpr):
    lanes = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + lanes, mask=lanes < parts, other=float("-inf"))
    return tl.max(top, 0)


@triton.jit
def whole_mass(
    tops, masses, row, parts, largest, temperature, cap, PARTS: tl.constexpr, CAPPED: tl.constexpr
):  # fmt: skip
    """The weight of a whole row, from those of its blocks."""
    lanes = tl.arange(0, PARTS)
    known = lanes < parts
    top = tl.load(tops + row * parts + lanes, mask=known, other=float("-inf"))
    mass = tl.load(masses + row * parts + lanes, mask=known, other=0.0)
    scale = 1.4426950408889634 / temperature
    return tl.sum(mass * weight_of(top, capped(largest, cap, CAPPED), scale, cap, CAPPED), 0)


@triton.jit
def _coarse_keys(largest, temperature, SHIFT: tl.constexpr):
    """Keys that fall, by ever larger steps."""
    number = (tl.arange(0, _COARSE) + 1).to(tl.float32)
    return ordered(largest - temperature * _DEPTH * number * number) >> SHIFT


@triton.jit
def _fine_keys(low, high):
    """Keys that fall by equal steps, the last of which is `low`."""
    first = low.to(tl.int64)
    steps = (tl.arange(0, _FINE) * -1 + _FINE - 1).to(tl.int64)
    return (first + (high.to(tl.int64) - first + 1) * steps // _FINE).to(tl.int32)


@triton.jit
def _count(
    base, first, vocab, pivots, largest, temperature, cap,
    COUNT: tl.constexpr, WEIGHED: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Of a block, for each pivot how many keys there are from it on, and their weight."""
    width: tl.constexpr = _TILE // COUNT
    scale = 1.4426950408889634 / temperature
    largest = capped(largest, cap, CAPPED)
    counts = tl.zeros([COUNT, width], tl.float32)
    masses = tl.zeros([COUNT, width], tl.float32)
    for start in range(first, first + LOGIT_BLOCK, width):
        offsets = start + tl.arange(0, width)
        inside = offsets < vocab
        x = tl.load(base + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        keys = ordered(x) >> SHIFT
        kept = (keys[None, :] >= pivots[:, None]) & inside[None, :]
        counts += kept.to(tl.float32)
        if WEIGHED:
            weights = weight_of(x, largest, scale, cap, CAPPED)
            masses += tl.where(kept, weights[None, :], 0.0)
    return tl.sum(counts, 1), tl.sum(masses, 1)


@triton.jit
def _keep(base, first, end, vocab, low, high, room, offset, SHIFT: tl.constexpr):
    """Writes the keys from `low` to `high` of a part of a row, from place `offset` on."""
    written = tl.full((), 0, tl.int32) + offset
    for start in range(first, tl.minimum(end, vocab), _WRITTEN):
        offsets = start + tl.arange(0, _WRITTEN)
        inside = offsets < vocab
        x = tl.load(base + offsets, mask=inside, other=float("-inf")).to(tl.float32)
        keys = ordered(x) >> SHIFT
        wanted = (keys >= low) & (keys <= high) & inside
        found = tl.sum(wanted.to(tl.int32), 0)
        if found > 0:
            places = written + tl.cumsum(wanted.to(tl.int32), 0) - 1
            tl.store(room + places, keys, mask=wanted & (places < _CANDIDATES))
            written += found


@triton.jit
def _of_blocks(
    stats, row, parts, COUNT: tl.constexpr, KINDS: tl.constexpr, KIND: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Numbers of one kind, ``[PARTS, COUNT]``."""
    lanes = tl.arange(0, PARTS)
    places = ((row * parts + lanes) * KINDS + KIND) * COUNT
    pointers = stats + places[:, None] + tl.arange(0, COUNT)[None, :]
    known = (lanes < parts)[:, None] & (tl.arange(0, COUNT) >= 0)[None, :]
    return tl.load(pointers, mask=known, other=0.0)


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
def _coarse_bracket(
    coarse, row, part, parts, vocab, largest, temperature, goal,
    WEIGHED: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """What :func:`_bracket` returns, and how many of these keys the blocks before `part` have."""
    keys = _coarse_keys(largest, temperature, SHIFT)
    by_block = _of_blocks(coarse, row, parts, _COARSE, 2, 0, PARTS)
    counts = tl.sum(by_block, 0)
    values = counts
    if WEIGHED:
        values = tl.sum(_of_blocks(coarse, row, parts, _COARSE, 2, 1, PARTS), 0)
    lowest, highest = _limits(largest, SHIFT)
    low, high, above, held, passed = _bracket(
        values, counts, keys, goal, lowest, highest, 0.0, vocab * 1.0, 0.0
    )
    # The same of each block, whose counts rise with the keys' numbers, too.
    enough = (values >= goal)[None, :]
    lanes = tl.arange(0, PARTS)
    sizes = tl.minimum(tl.maximum(vocab - lanes * LOGIT_BLOCK, 0), LOGIT_BLOCK).to(tl.float32)
    own_held = tl.min(tl.where(enough, by_block, sizes[:, None]), 1)
    own_passed = tl.max(tl.where(enough, 0.0, by_block), 1)
    offset = tl.sum(tl.where(lanes < part, own_held - own_passed, 0.0), 0)
    return low, high, above, held, passed, offset.to(tl.int32)


@triton.jit
def _limits(largest, SHIFT: tl.constexpr):
    """The least and the largest key of a row."""
    lowest = ordered(float("-inf") + 0.0 * largest) >> SHIFT
    return lowest, ordered(largest) >> SHIFT


@triton.jit
def draw(
    base, vocab, row, parts, largest, temperature, top_k, top_p, min_p, uniform, whole,
    coarse, fine, candidates, cap,
    PARTS: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """A token of one row: the first whose cumulative weight, by id, exceeds its share.

    `whole` is the weight of the row, and the other arguments are those of :func:`search`.
    """
    lowest, _ = _limits(largest, SHIFT)
    raw = largest
    largest = capped(largest, cap, CAPPED)
    scale = 1.4426950408889634 / temperature
    room = candidates + row * 2 * _CANDIDATES
    # Kept are keys above the edge, and the first `ties` ids at the edge.
    edge = lowest - 1
    ties = vocab
    if top_k < vocab:
        low, high, above, held, passed, _offset = _coarse_bracket(
            coarse, row, 0, parts, vocab, raw, temperature, top_k, False, PARTS, SHIFT
        )
        is_written = held - passed <= _CANDIDATES
        if not is_written:
            counts = tl.sum(_of_blocks(fine, row, parts, _FINE, 3, 0, PARTS), 0)
            low, high, above, held, passed = _bracket(
                counts, counts, _fine_keys(low, high), top_k, low, high, above, held, passed
            )
        edge, above = _edge(
            base, vocab, room, is_written, low, high, above, held, passed, top_k * 1.0,
            largest, scale, cap, False, CAPPED, SHIFT,
        )  # fmt: skip
        ties = top_k - above.to(tl.int32)
    if top_p < 1.0:
        is_wide = _is_wide(top_k, top_p, vocab)
        if not is_wide:
            inside = _mass(base, vocab, edge + 1, largest, scale, cap, CAPPED, SHIFT)
            whole = inside + ties * _weight_at(edge, largest, scale, cap, CAPPED, SHIFT)
        goal = tl.abs(top_p) * whole
        low, high, mass, held, passed, _offset = _coarse_bracket(
            coarse, row, 0, parts, vocab, raw, temperature, goal, True, PARTS, SHIFT
        )
        is_written = is_wide & (held - passed <= _CANDIDATES)
        if is_wide & (held - passed > _CANDIDATES):
            counts = tl.sum(_of_blocks(fine, row, parts, _FINE, 3, 1, PARTS), 0)
            masses = tl.sum(_of_blocks(fine, row, parts, _FINE, 3, 2, PARTS), 0)
            low, high, mass, held, passed = _bracket(
                masses, counts, _fine_keys(low, high), goal, low, high, mass, held, passed
            )
        # Below the edge of top-k it changes nothing.
        if high >= edge:
            share_edge, mass = _edge(
                base, vocab, room + _CANDIDATES, is_written, low, high, mass, held, passed, goal,
                largest, scale, cap, True, CAPPED, SHIFT,
            )  # fmt: skip
            if share_edge >= edge:
                weight = _weight_at(share_edge, largest, scale, cap, CAPPED, SHIFT)
                wanted = tl.maximum(tl.ceil((goal - mass) / tl.maximum(weight, 1e-37)), 1.0)
                wanted = tl.minimum(wanted, vocab * 1.0).to(tl.int32)
                ties = tl.where(share_edge == edge, tl.minimum(ties, wanted), wanted)
                edge = share_edge
    return _invert(
        base, vocab, edge, ties, min_p, uniform, largest, scale, cap, PARTS, CAPPED, SHIFT
    )


@triton.jit
def _edge(
    base, vocab, room, is_written, low, high, above, held, passed, goal, largest, scale, cap,
    WEIGHED: tl.constexpr, CAPPED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The largest key at and above which there is as much as `goal`, and how much is above it.

    What is counted are keys, or with `WEIGHED` their weights. `is_written` says whether the keys
    from `low` to `high` are in `room`. The other arguments are those of :func:`_bracket`.
    """
    while (low < high) & (held - passed > _CANDIDATES):
        middle = _middle(low, high)
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
        if not is_written:
            _keep(base, 0, vocab, vocab, low, high, room, 0, SHIFT)
            # The program's other threads read it.
            tl.debug_barrier()
        lanes = tl.arange(0, _CANDIDATES)
        keys = tl.load(room + lanes, mask=lanes < (held - passed).to(tl.int32), other=-0x80000000)
        shares = (keys >= low).to(tl.float32)
        if WEIGHED:
            weights = _weight_at(keys, largest, scale, cap, CAPPED, SHIFT)
            shares = tl.where(keys >= low, weights, 0.0)
        beyond = above
        while low < high:
            middle = _middle(low, high)
            total = beyond + tl.sum(tl.where(keys >= middle, shares, 0.0), 0)
            enough = total >= goal
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
            above = tl.where(enough, above, total)
    return low, above


@triton.jit
def _middle(low, high):
    """The middle of two integers, rounded up, of any signs."""
    wide = (low.to(tl.int64) + high.to(tl.int64) + 1) >> 1
    return wide.to(tl.int32)


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
def _weight_at(key, largest, scale, cap, CAPPED: tl.constexpr, SHIFT: tl.constexpr):
    """The weight of a logit with this key; 0 if there is none."""
    bits = key << SHIFT
    if SHIFT:
        # The lower half of a negative number's key is all ones.
        bits = bits | tl.where(bits < 0, 0xFFFF, 0)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    x = bits.to(tl.float32, bitcast=True)
    weight = weight_of(x, largest, scale, cap, CAPPED)
    return tl.where((x == x) & (weight == weight), weight, 0.0)


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
def first_beyond(weights, before, goal):
    """The first place up to which the weights and those before them exceed the goal.

    The last place with a weight, if rounding leaves the goal just out of reach.
    """
    places = tl.arange(0, weights.shape[0])
    beyond = (before + tl.cumsum(weights, 0) > goal) & (weights > 0.0)
    found = tl.min(tl.where(beyond, places, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(weights > 0.0, places, 0), 0)
    return tl.where(found == 0x7FFFFFFF, last, found)


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
        if tied <= ties:
            kept |= at_edge > 0
        elif ties > 0:
            kept |= (at_edge > 0) & (tl.cumsum(at_edge, 0) <= ties)
    weights = weight_of(x, largest, scale, cap, CAPPED)
    return tl.where(kept & (weights >= min_p), weights, 0.0), tied
