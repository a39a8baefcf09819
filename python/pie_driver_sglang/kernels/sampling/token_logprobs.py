"""Log-probabilities of places on a GPU: of a token, of the most probable ones, of given ones.

They are found in two kernels that read the logits once: the first one looks at each block of a row,
the second one at what the first one has found of a row. Rows of which nothing is asked end at once.
Both can be captured. `pie_driver_sglang.kernels.sampling.logprobs_reference` computes the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

_BLOCK = tl.constexpr(8192)
_GIVEN_BLOCK = tl.constexpr(128)
_WARPS = 8
_GONE = tl.constexpr(-(2**31))
"""Less than the key of any float."""
_LEAST = tl.constexpr(-3.4028234663852886e38)
"""In place of -inf, as SGLang has it."""


def find(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    records: torch.Tensor,
    words: torch.Tensor,
    out: torch.Tensor,
    most: int,
) -> None:
    """Writes the words of each place.

    A place has the log-probability of its token, the most probable tokens, best first and of equal
    ones the lower id first, their log-probabilities, and those of given tokens; floats as their
    bits. Nothing is written for a token outside of the vocabulary.

    Args:
        logits: ``[slots, vocabulary]`` of any float dtype.
        tokens: ``[slots]`` int64, in the lower half of each.
        records: ``[slots, 6]`` int32, see `kernels.types.STEP_RECORD_WORDS`.
        words: ``[words]`` int32: given tokens.
        out: ``[words]`` int32 to be written, may be pinned memory of the host.
        most: Most probable tokens of any place, at most.
    """
    slots, vocab = logits.shape
    parts = triton.cdiv(vocab, _BLOCK.value)
    width = triton.next_power_of_2(max(most, 1))
    largest, masses = (logits.new_empty(slots, parts, dtype=torch.float32) for _ in range(2))
    keys, ids = (logits.new_empty(slots, parts, width, dtype=torch.int32) for _ in range(2))
    how = {"WIDTH": width, "num_warps": _WARPS, **pdl_options(logits.device)}
    _survey[(slots, parts)](
        logits, logits.stride(0), vocab, records, largest, masses, keys, ids, **how,
    )  # fmt: skip
    _write[(slots,)](
        logits, logits.stride(0), vocab, tokens, records, words,
        largest, masses, keys, ids, parts, out,
        PARTS=triton.next_power_of_2(parts), **how,
    )  # fmt: skip


@triton.jit
def _survey(
    logits, stride, vocab, records, largest, masses, keys, ids,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a block of a row: the largest logit, the weight relative to it, the largest ones."""
    if PDL:
        pdl_wait_trigger()
    slot = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    record = records + 6 * slot
    if tl.load(record) == 0:
        return
    offsets = part * _BLOCK + tl.arange(0, _BLOCK)
    inside = offsets < vocab
    x = tl.load(logits + slot * stride + offsets, mask=inside, other=float("-inf"))
    x = x.to(tl.float32) / tl.load(record + 5).to(tl.float32, bitcast=True)
    top = tl.max(x, 0)
    weights = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))
    place = slot * tl.num_programs(1) + part
    tl.store(largest + place, top)
    tl.store(masses + place, tl.sum(weights, 0))
    left = tl.where(inside, _ordered(x), _GONE)
    for number in range(tl.load(record + 2)):
        best = tl.max(left, 0)
        found = tl.min(tl.where(left == best, offsets, 0x7FFFFFFF), 0)
        tl.store(keys + place * WIDTH + number, best)
        tl.store(ids + place * WIDTH + number, found)
        left = tl.where(offsets == found, _GONE, left)


@triton.jit
def _write(
    logits, stride, vocab, tokens, records, words, largest, masses, keys, ids, parts, out,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    slot = tl.program_id(0).to(tl.int64)
    record = records + 6 * slot
    token = tl.load(tokens + slot) & 0xFFFFFFFF
    if (tl.load(record) == 0) | (token >= vocab):
        return
    divisor = tl.load(record + 5).to(tl.float32, bitcast=True)
    lanes = tl.arange(0, PARTS)
    known = lanes < parts
    tops = tl.load(largest + slot * parts + lanes, mask=known, other=float("-inf"))
    mass = tl.load(masses + slot * parts + lanes, mask=known, other=0.0)
    top = tl.max(tops, 0)
    # A part of which nothing is possible weighs nothing.
    whole = tl.sum(tl.where(tops == float("-inf"), 0.0, mass * tl.exp(tops - top)), 0)
    norm = top + tl.log(whole)
    row = logits + slot * stride
    first = out + tl.load(record + 1)
    own = tl.load(row + token).to(tl.float32) / divisor
    tl.store(first, _shown(own - norm))
    count = tl.load(record + 2)
    spread = tl.arange(0, PARTS * WIDTH)
    listed = (spread // WIDTH < parts) & (spread % WIDTH < count)
    places = slot * parts * WIDTH + spread
    left = tl.load(keys + places, mask=listed, other=_GONE)
    found = tl.load(ids + places, mask=listed, other=0x7FFFFFFF)
    for number in range(count):
        best = tl.max(left, 0)
        chosen = tl.min(tl.where(left == best, found, 0x7FFFFFFF), 0)
        value = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(first + 1 + number, chosen)
        tl.store(first + 1 + count + number, _shown(value - norm))
        left = tl.where(found == chosen, _GONE, left)
    given = tl.load(record + 3)
    asked = words + tl.load(record + 4)
    for start in range(0, given, _GIVEN_BLOCK):
        numbers = start + tl.arange(0, _GIVEN_BLOCK)
        there = numbers < given
        named = tl.load(asked + numbers, mask=there, other=0)
        values = tl.load(row + named, mask=there, other=0.0).to(tl.float32) / divisor
        tl.store(first + 1 + 2 * count + numbers, _shown(values - norm), mask=there)


@triton.jit
def _ordered(x):
    """Integer keys that sort like the floats."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _shown(value):
    """A log-probability as its bits."""
    return tl.maximum(value, _LEAST).to(tl.int32, bitcast=True)
