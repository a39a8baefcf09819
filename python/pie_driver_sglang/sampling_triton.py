"""The GPU kernel of token sampling: what a row keeps is found without sorting it.

One program for each row. Top-k and top-p keep all logits above some value and, of those equal to
it, the ones with the lowest ids. That value is searched for: each pass over the row sums up what
lies at or above several candidates, and keeps the gap between the two that enclose it. A row's
arithmetic has one order, whatever else is in the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from pie_driver_sglang.sampling import SlotParams


class Launch(NamedTuple):
    """How a row is spread over a program. Results do not depend on it, but for rounding."""

    block: int = 2048
    """Logits that a program looks at in one step."""
    candidates: int = 8
    """Values that one pass of a search tries."""
    stages: int = 5
    """Blocks on their way from memory at a time."""
    warps: int = 16


LAUNCH = Launch()
SMALLEST_KEY = tl.constexpr(-2139095041)
"""Of -inf."""
EXPONENT_RANGE = tl.constexpr(104.0)
"""exp(-104) is zero in float32."""


@triton.jit
def _key(values):  # type: ignore[no-untyped-def]
    """int32 in the order of the floats; the two zeros are one."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    """The float of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _load(row, start, vocabulary, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Ids and logits of a block; -inf behind the vocabulary."""
    ids = start + tl.arange(0, BLOCK)
    return ids, tl.load(row + ids, mask=ids < vocabulary, other=float("-inf"))


@triton.jit
def _weight(values, best, temperature):  # type: ignore[no-untyped-def]
    return tl.exp((values - best) / temperature)


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    row, vocabulary, low, best, target, temperature,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """The largest key at or above which there is the target, and what is above that key.

    Counted are logits, or their weights. `low` is a key at or above which there is the target.
    """
    numbers = tl.arange(0, CANDIDATES)
    # The key is in low..high, `high` not included.
    high = _key(best) + 1
    above = 0.0
    while low + 1 < high:
        # Evenly over the values between, and the middle of the keys: no search takes more passes
        # than keys have bits.
        bottom = _value(low)
        step = (_value(high - 1) - bottom) / CANDIDATES
        even = _key(bottom + step * (numbers + 1).to(tl.float32))
        middle = (low.to(tl.int64) + (high.to(tl.int64) - low.to(tl.int64)) // 2).to(tl.int32)
        tried = tl.where(numbers == CANDIDATES - 1, middle, even)
        tried = tl.minimum(tl.maximum(tried, low), high - 1)
        sums = tl.zeros([CANDIDATES, BLOCK], tl.float32)
        least = tl.zeros([BLOCK], tl.int32) + (high - 1)
        most = tl.zeros([BLOCK], tl.int32) + low
        for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
            ids, values = _load(row, start, vocabulary, BLOCK)
            keys = _key(values)
            if BY_MASS:
                amounts = _weight(values, best, temperature)
            else:
                amounts = tl.where(ids < vocabulary, 1.0, 0.0)
            sums += tl.where(keys[None, :] >= tried[:, None], amounts[None, :], 0.0)
            between = (keys >= low) & (keys < high) & (ids < vocabulary)
            least = tl.minimum(least, tl.where(between, keys, high - 1))
            most = tl.maximum(most, tl.where(between, keys, low))
        sums = tl.sum(sums, axis=1)
        enough = sums >= target
        above = tl.maximum(above, tl.max(tl.where(enough, 0.0, sums), axis=0))
        bound = tl.min(tl.where(enough, high, tried), axis=0)
        low = tl.maximum(low, tl.max(tl.where(enough, tried, low), axis=0))
        # No logit is outside of least..most, so that equal ones end the search at once.
        low = tl.maximum(low, tl.min(least, axis=0))
        high = tl.minimum(bound, tl.max(most, axis=0) + 1)
    return low, above


@triton.jit  # type: ignore[untyped-decorator]
def _mass(  # type: ignore[no-untyped-def]
    row, vocabulary, edge, quota, least, best, temperature,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weight above the edge and of `quota` logits on it, without weights below `least`."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        _, values = _load(row, start, vocabulary, BLOCK)
        weights = _weight(values, best, temperature)
        sums += tl.where((_key(values) > edge) & (weights >= least), weights, 0.0)
    on_edge = _weight(_value(edge), best, temperature)
    # Not multiplied where there is no quota: the edge of an unfiltered row is no number.
    extra = tl.where((quota > 0) & (on_edge >= least), on_edge * quota.to(tl.float32), 0.0)
    return tl.sum(sums, axis=0) + extra


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    row, vocabulary, edge, quota, least, best, temperature, threshold, BLOCK: tl.constexpr
):  # fmt: skip
    """The first kept id with more than the threshold at and below it, else the last kept one."""
    token = vocabulary
    last = 0
    before = 0.0
    equal_before = 0
    start = 0
    while (start < vocabulary) & (token == vocabulary):
        ids, values = _load(row, start, vocabulary, BLOCK)
        keys = _key(values)
        weights = _weight(values, best, temperature)
        equal = (keys == edge).to(tl.int32)
        rank = equal_before + tl.cumsum(equal, axis=0)
        kept = ((keys > edge) | ((equal == 1) & (rank <= quota))) & (weights >= least)
        weights = tl.where(kept, weights, 0.0)
        cumulative = before + tl.cumsum(weights, axis=0)
        hit = (weights > 0) & (cumulative > threshold)
        token = tl.min(tl.where(hit, ids, vocabulary), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, ids, 0), axis=0))
        before += tl.sum(weights, axis=0)
        equal_before += tl.sum(equal, axis=0)
        start += BLOCK
    return tl.where(token == vocabulary, last, token)


@triton.jit(  # type: ignore[untyped-decorator]
    # Slots of a batch start anywhere: no kernel of its own for each alignment.
    do_not_specialize_on_alignment=[
        "tokens", "temperatures", "top_ks", "top_ps", "min_ps", "uniforms",
    ]
)  # fmt: skip
def _sample(  # type: ignore[no-untyped-def]
    logits, tokens, temperatures, top_ks, top_ps, min_ps, uniforms, vocabulary, stride,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    row = logits + slot.to(tl.int64) * stride
    # A GPU divides an infinity by more than this to no number.
    temperature = tl.minimum(tl.load(temperatures + slot), 4e37)
    top_k = tl.load(top_ks + slot)
    top_p = tl.load(top_ps + slot)
    min_p = tl.minimum(tl.load(min_ps + slot), 1.0)
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    finite = tl.zeros([BLOCK], tl.int32)
    unordered = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
        _, values = _load(row, start, vocabulary, BLOCK)
        unordered = unordered | (values != values).to(tl.int32)
        largest = tl.maximum(largest, values)
        possible = values > float("-inf")
        smallest = tl.minimum(smallest, tl.where(possible, values, float("inf")))
        finite += possible.to(tl.int32)
    best = tl.max(largest, axis=0)
    worst = tl.min(smallest, axis=0)
    possible_tokens = tl.sum(finite, axis=0)
    is_number = (tl.max(unordered, axis=0) == 0) & (tl.abs(best) < float("inf"))
    token = vocabulary
    if is_number:
        edge = tl.full([], SMALLEST_KEY, tl.int32) - 1
        quota = tl.full([], 0, tl.int32)
        if top_k < possible_tokens:
            edge, above = _search(
                row, vocabulary, _key(worst), best, top_k.to(tl.float32), temperature,
                BY_MASS=False, BLOCK=BLOCK, STAGES=STAGES, CANDIDATES=CANDIDATES,
            )  # fmt: skip
            quota = top_k - above.to(tl.int32)
        if top_p < 1.0:
            target = top_p * _mass(
                row, vocabulary, edge, quota, 0.0, best, temperature, BLOCK=BLOCK, STAGES=STAGES
            )
            bottom = _key(tl.maximum(worst, best - EXPONENT_RANGE * temperature))
            narrower, above = _search(
                row, vocabulary, tl.maximum(edge, bottom), best, target, temperature,
                BY_MASS=True, BLOCK=BLOCK, STAGES=STAGES, CANDIDATES=CANDIDATES,
            )  # fmt: skip
            on_edge = _weight(_value(narrower), best, temperature)
            needed = tl.where(on_edge > 0, (target - above) / on_edge, 1.0)
            needed = tl.maximum(tl.ceil(tl.minimum(needed, vocabulary.to(tl.float32))), 1.0)
            limit = tl.where(narrower == edge, quota, vocabulary)
            quota = tl.minimum(needed.to(tl.int32), limit)
            edge = narrower
        total = _mass(
            row, vocabulary, edge, quota, min_p, best, temperature, BLOCK=BLOCK, STAGES=STAGES
        )
        threshold = tl.load(uniforms + slot) * total
        token = _draw(
            row, vocabulary, edge, quota, min_p, best, temperature, threshold, BLOCK=BLOCK
        )
    tl.store(tokens + slot, token.to(tl.int64))


def sample(logits: torch.Tensor, params: SlotParams, launch: Launch = LAUNCH) -> torch.Tensor:
    """Samples as :func:`pie_driver_sglang.sampling.sample_filtered` does, up to rounding.

    Args:
        logits: ``[slots, vocabulary]`` float32, rows contiguous.
        params: ``[slots]`` parameters.
        launch: how to launch the kernel.

    Returns:
        ``[slots]`` int64 token ids; the vocabulary's size where the logits are no numbers.
    """
    slots, vocabulary = logits.shape
    tokens = torch.empty(slots, dtype=torch.int64, device=logits.device)
    if slots:
        fields = (field.contiguous() for field in params)
        _sample[(slots,)](
            logits, tokens, *fields, vocabulary, logits.stride(0),
            BLOCK=launch.block, STAGES=launch.stages, CANDIDATES=launch.candidates,
            num_warps=launch.warps,
        )  # fmt: skip
    return tokens
