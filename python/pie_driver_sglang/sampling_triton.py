"""Sampling on a GPU without sorting, and what else a captured step needs of kernels.

Computes what :mod:`pie_driver_sglang.sampling` computes, from logits as the model gives them (bf16
logits are not widened in memory), one program for each row. Top-k and top-p keep all logits above
some value and, of those equal to it, the ones with the lowest ids; bisecting the bits of the logits
finds that value exactly. A row's arithmetic has one order, whatever else is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.sampling import SlotParams

_BLOCK = tl.constexpr(8192)
_WARPS = 16
_PROGRAMS = 264
"""Programs that keep the device busy while it looks for the largest logits."""
_MASK_BLOCK = tl.constexpr(2048)
_FETCH_BLOCK = tl.constexpr(4096)
_UPDATE_BLOCK = tl.constexpr(64)


def sample(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """Samples as :func:`pie_driver_sglang.sampling.sample_rows` does, up to rounding.

    Args:
        logits: ``[rows, vocabulary]`` bfloat16, float16 or float32.
        params: ``[rows]`` parameters.

    Returns:
        ``[rows]`` int64 token ids; the vocabulary's size where the logits are no numbers.
    """
    tokens = logits.new_empty(len(logits), dtype=torch.int64)
    if len(logits):
        step = torch.zeros(1, dtype=torch.int32, device=logits.device)
        sample_step(logits, params, tokens, step)
    return tokens


def sample_step(
    logits: torch.Tensor,
    params: SlotParams,
    results: torch.Tensor,
    step: torch.Tensor,
    softcap: float | None = None,
) -> None:
    """Samples each row and writes ``step << 32 | token`` at once; can be captured.

    Args:
        logits: ``[rows, vocabulary]`` bfloat16, float16 or float32, at least one row.
        params: ``[rows]`` parameters; a temperature of 0 takes the arg-max, one below 0 samples
            nothing.
        results: ``[rows]`` int64, may be pinned memory of the host. The token is the vocabulary's
            size where the logits are no numbers.
        step: ``[1]`` int32.
        softcap: Limit of the logits' size by ``cap * tanh(logit / cap)``.
    """
    rows, vocab = logits.shape
    splits = max(1, min(16, _PROGRAMS // rows))
    best = logits.new_empty(rows * splits, dtype=torch.float32)
    ids = logits.new_empty(rows * splits, dtype=torch.int32)
    share = triton.cdiv(vocab, splits)
    _find_best[(rows, splits)](logits, logits.stride(0), vocab, best, ids, share, num_warps=_WARPS)
    _sample_rows[(rows,)](
        logits,
        logits.stride(0),
        vocab,
        best,
        ids,
        splits,
        *(field.contiguous() for field in params),
        results,
        step,
        softcap or 0.0,
        CAPPED=softcap is not None,
        # The lower half of a widened bfloat16 holds no information.
        SHIFT=16 if logits.dtype == torch.bfloat16 else 0,
        num_warps=_WARPS,
    )


def apply_masks(logits: torch.Tensor, slot_masks: torch.Tensor, words: torch.Tensor) -> None:
    """Forbids as :func:`pie_driver_sglang.sampling.apply_masks` does, logits of any type."""
    slots, vocab = logits.shape
    grid = (slots, triton.cdiv(vocab, _MASK_BLOCK.value))
    _apply_masks[grid](logits, logits.stride(0), vocab, slot_masks, words)


def fetch(source: torch.Tensor, target: torch.Tensor, count: torch.Tensor) -> None:
    """Copies the first words; can be captured, for a kernel reads how many.

    Args:
        source: ``[words]`` int32, may be pinned memory of the host.
        target: ``[words]`` int32.
        count: ``[1]`` int32.
    """
    grid = (triton.cdiv(len(source), _FETCH_BLOCK.value),)
    _fetch[grid](source, target, count)


def update_table(table: torch.Tensor, updates: torch.Tensor, count: torch.Tensor) -> None:
    """Writes changed block-table entries.

    Args:
        table: ``[entries, page]`` int32 storage slots.
        updates: ``[most, 2]`` int64: entry, and first storage slot of the page that it now names.
        count: ``[1]`` int32: how many there are.
    """
    grid = (triton.cdiv(len(updates), _UPDATE_BLOCK.value),)
    page = table.shape[1]
    _update_table[grid](table, page, updates, count, PAGE=triton.next_power_of_2(page))


@triton.jit
def _find_best(logits, stride, vocab, best, ids, share):  # type: ignore[no-untyped-def]
    """The largest logit of each share of a row and its lowest id; the id -1 for no number."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    start = split * share
    end = tl.minimum(start + share, vocab)
    lanes = tl.arange(0, _BLOCK)
    top = tl.full([_BLOCK], float("-inf"), tl.float32)
    at = tl.full([_BLOCK], 0x7FFFFFFF, tl.int32)
    broken = tl.zeros([_BLOCK], tl.int32)
    for first in range(start, end, _BLOCK):
        offsets = first + lanes
        x = tl.load(logits + row * stride + offsets, mask=offsets < end, other=float("-inf"))
        x = x.to(tl.float32)
        broken |= (x != x).to(tl.int32)
        better = (x > top) | ((at == 0x7FFFFFFF) & (offsets < end))
        top = tl.where(better, x, top)
        at = tl.where(better, offsets, at)
    largest = tl.max(top, 0)
    lowest = tl.min(tl.where(top == largest, at, 0x7FFFFFFF), 0)
    lowest = tl.where(tl.max(broken, 0) > 0, -1, lowest)
    place = row * tl.num_programs(1) + split
    tl.store(best + place, largest)
    tl.store(ids + place, lowest)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Integers in the order of the numbers."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(base, first, vocab):  # type: ignore[no-untyped-def]
    offsets = first + tl.arange(0, _BLOCK)
    x = tl.load(base + offsets, mask=offsets < vocab, other=float("-inf"))
    return x.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _weight(x, largest, scale, cap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The probability of a logit, as a multiple of the largest probability."""
    if CAPPED:
        x = _cap(x, cap)
    # exp2 is exact at 0: the largest one has weight 1.
    return tl.exp2((x - largest) * scale)


@triton.jit
def _cap(x, cap):  # type: ignore[no-untyped-def]
    # tanh by the exponential of a negative number, which cannot overflow; -inf stays.
    e = tl.exp(-2.0 * tl.abs(x) / cap)
    capped = tl.where(x < 0, -cap, cap) * (1.0 - e) / (1.0 + e)
    return tl.where(x == float("-inf"), x, capped)


@triton.jit  # type: ignore[untyped-decorator]
def _sample_rows(  # type: ignore[no-untyped-def]
    logits,
    stride,
    vocab,
    best,
    ids,
    splits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    results,
    step,
    cap,
    CAPPED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    token = vocab
    if temperature >= 0.0:
        lanes = tl.arange(0, 16)
        parts = lanes < splits
        tops = tl.load(best + row * splits + lanes, mask=parts, other=float("-inf"))
        at = tl.load(ids + row * splits + lanes, mask=parts, other=0)
        largest = tl.max(tops, 0)
        token = tl.min(tl.where(parts & (tops == largest), at, 0x7FFFFFFF), 0)
        token = tl.where(tl.min(at, 0) < 0, vocab, token)
        if temperature > 0.0:
            if tl.abs(largest) < float("inf"):
                if token < vocab:
                    token = _draw(
                        logits + row * stride,
                        vocab,
                        largest,
                        temperature,
                        tl.load(top_ks + row),
                        tl.load(top_ps + row),
                        tl.load(min_ps + row),
                        tl.load(uniforms + row),
                        cap,
                        CAPPED,
                        SHIFT,
                    )
            else:
                token = vocab
    number = tl.load(step).to(tl.int64)
    tl.store(results + row, (number << 32) | token.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    base,
    vocab,
    largest,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    cap,
    CAPPED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """A token of one row: the first whose cumulative weight, by id, exceeds its share."""
    highest = _ordered(largest) >> SHIFT
    lowest = _ordered(float("-inf") + 0.0 * largest) >> SHIFT
    if CAPPED:
        largest = _cap(largest, cap)
    scale = 1.4426950408889634 / temperature
    # Kept are keys above the edge, and the first `ties` ids at the edge.
    edge = lowest - 1
    ties = vocab
    if top_k < vocab:
        edge, above = _edge_of_count(base, vocab, lowest, highest, top_k, SHIFT)
        ties = top_k - above
    if top_p < 1.0:
        inside = _mass(base, vocab, edge + 1, largest, scale, cap, CAPPED, SHIFT)
        at_edge = _edge_weight(base, vocab, edge, largest, scale, cap, CAPPED, SHIFT)
        goal = top_p * (inside + ties * at_edge)
        share_edge, mass = _edge_of_mass(
            base, vocab, tl.maximum(edge, lowest), highest, goal, largest, scale, cap, CAPPED, SHIFT
        )
        weight = _edge_weight(base, vocab, share_edge, largest, scale, cap, CAPPED, SHIFT)
        wanted = tl.maximum(tl.ceil((goal - mass) / tl.maximum(weight, 1e-37)), 1.0)
        wanted = tl.minimum(wanted, vocab * 1.0).to(tl.int32)
        ties = tl.where(share_edge == edge, tl.minimum(ties, wanted), wanted)
        edge = share_edge
    return _invert(base, vocab, edge, ties, min_p, uniform, largest, scale, cap, CAPPED, SHIFT)


@triton.jit  # type: ignore[untyped-decorator]
def _edge_of_count(base, vocab, low, high, count, SHIFT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The `count`-th largest key, and how many keys are larger."""
    above = 0
    while low < high:
        # In this form it cannot overflow.
        middle = high - ((high - low) >> 1) if SHIFT else _middle(low, high)
        found = tl.zeros([_BLOCK], tl.int32)
        for first in range(0, vocab, _BLOCK):
            keys = _ordered(_load(base, first, vocab)) >> SHIFT
            inside = first + tl.arange(0, _BLOCK) < vocab
            found += ((keys >= middle) & inside).to(tl.int32)
        total = tl.sum(found, 0)
        enough = total >= count
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, total)
    return low, above


@triton.jit
def _middle(low, high):  # type: ignore[no-untyped-def]
    """The middle of two integers, rounded up, of any signs."""
    wide = (low.to(tl.int64) + high.to(tl.int64) + 1) >> 1
    return wide.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _edge_of_mass(  # type: ignore[no-untyped-def]
    base,
    vocab,
    low,
    high,
    goal,
    largest,
    scale,
    cap,
    CAPPED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The largest key at and above which lies the mass `goal`, and the mass above it."""
    above = 0.0
    while low < high:
        middle = high - ((high - low) >> 1) if SHIFT else _middle(low, high)
        total = _mass(base, vocab, middle, largest, scale, cap, CAPPED, SHIFT)
        enough = total >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
        above = tl.where(enough, above, total)
    return low, above


@triton.jit  # type: ignore[untyped-decorator]
def _mass(  # type: ignore[no-untyped-def]
    base,
    vocab,
    least,
    largest,
    scale,
    cap,
    CAPPED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The weight of all keys from `least` on."""
    total = tl.zeros([_BLOCK], tl.float32)
    for first in range(0, vocab, _BLOCK):
        x = _load(base, first, vocab)
        kept = _ordered(x) >> SHIFT >= least
        total += tl.where(kept, _weight(x, largest, scale, cap, CAPPED), 0.0)
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _edge_weight(  # type: ignore[no-untyped-def]
    base,
    vocab,
    edge,
    largest,
    scale,
    cap,
    CAPPED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The weight of one logit whose key is `edge`; 0 if there is none."""
    bits = edge << SHIFT
    if SHIFT:
        # The lower half of a negative number's key is all ones.
        bits = bits | tl.where(bits < 0, 0xFFFF, 0)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    x = bits.to(tl.float32, bitcast=True)
    weight = _weight(x, largest, scale, cap, CAPPED)
    return tl.where((x == x) & (weight == weight), weight, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _invert(  # type: ignore[no-untyped-def]
    base,
    vocab,
    edge,
    ties,
    min_p,
    uniform,
    largest,
    scale,
    cap,
    CAPPED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The first id whose cumulative kept weight exceeds `uniform` of all kept weight."""
    total = 0.0
    ties_seen = 0
    for first in range(0, vocab, _BLOCK):
        weights, tied = _kept(
            base, first, vocab, edge, ties - ties_seen, min_p, largest, scale, cap, CAPPED, SHIFT
        )
        total += tl.sum(weights, 0)
        ties_seen += tied
    goal = uniform * total
    before = 0.0
    ties_seen = 0
    first = 0
    token = -1
    last = 0
    while (token < 0) & (first < vocab):
        weights, tied = _kept(
            base, first, vocab, edge, ties - ties_seen, min_p, largest, scale, cap, CAPPED, SHIFT
        )
        offsets = first + tl.arange(0, _BLOCK)
        own = tl.sum(weights, 0)
        if own > 0.0:
            last = tl.max(tl.where(weights > 0.0, offsets, 0), 0)
            if before + own > goal:
                cumulative = before + tl.cumsum(weights, 0)
                beyond = (cumulative > goal) & (weights > 0.0)
                token = tl.min(tl.where(beyond, offsets, 0x7FFFFFFF), 0)
                token = tl.where(token == 0x7FFFFFFF, -1, token)
        before += own
        ties_seen += tied
        first += _BLOCK
    # Rounding may leave the goal just out of reach.
    return tl.where(token < 0, last, token)


@triton.jit  # type: ignore[untyped-decorator]
def _kept(  # type: ignore[no-untyped-def]
    base,
    first,
    vocab,
    edge,
    ties,
    min_p,
    largest,
    scale,
    cap,
    CAPPED: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Weights of a block, 0 where dropped, and how many keys lie at the edge; `ties` may stay."""
    x = _load(base, first, vocab)
    keys = _ordered(x) >> SHIFT
    inside = first + tl.arange(0, _BLOCK) < vocab
    at_edge = ((keys == edge) & inside).to(tl.int32)
    tied = tl.sum(at_edge, 0)
    kept = (keys > edge) & inside
    if tied > 0:
        kept |= (at_edge > 0) & (tl.cumsum(at_edge, 0) <= ties)
    weights = _weight(x, largest, scale, cap, CAPPED)
    return tl.where(kept & (weights >= min_p), weights, 0.0), tied


@triton.jit
def _apply_masks(logits, stride, vocab, slot_masks, words):  # type: ignore[no-untyped-def]
    slot = tl.program_id(0).to(tl.int64)
    mask = words + tl.load(slot_masks + 2 * slot)
    edges = tl.load(slot_masks + 2 * slot + 1)
    if edges == 0:
        return
    start = tl.program_id(1) * _MASK_BLOCK
    ids = start + tl.arange(0, _MASK_BLOCK)
    if edges < 0:
        bits = tl.load(mask + ids // 32, mask=ids < vocab, other=0)
        allowed = (bits >> (ids % 32)) & 1
    else:
        # The first stretch of allowed tokens that ends behind the block's first token.
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
    none = tl.full([_MASK_BLOCK], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + slot * stride + ids, none, mask=(ids < vocab) & (allowed == 0))


@triton.jit
def _fetch(source, target, count):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * _FETCH_BLOCK + tl.arange(0, _FETCH_BLOCK)
    used = places < tl.load(count)
    tl.store(target + places, tl.load(source + places, mask=used), mask=used)


@triton.jit  # type: ignore[untyped-decorator]
def _update_table(table, page, updates, count, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0) * _UPDATE_BLOCK + tl.arange(0, _UPDATE_BLOCK)
    used = places < tl.load(count)
    entries = tl.load(updates + 2 * places, mask=used, other=0)
    slots = tl.load(updates + 2 * places + 1, mask=used, other=0)
    within = tl.arange(0, PAGE)
    targets = table + entries[:, None] * page + within[None, :]
    values = (slots[:, None] + within[None, :]).to(tl.int32)
    tl.store(targets, values, mask=used[:, None] & (within < page)[None, :])
