"""What kernels that read rows of logits have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOGIT_BLOCK = tl.constexpr(8192)
"""Logits that a program reads at once."""


class LogitRows(NamedTuple):
    """Rows of logits, some of which were changed and lie elsewhere."""

    logits: torch.Tensor
    """``[rows, vocabulary]`` of any float dtype."""
    changed: torch.Tensor | None = None
    """``[rows, vocabulary]`` float32, contiguous: the rows that `is_changed` names. In other rows
    there may be anything."""
    is_changed: torch.Tensor | None = None
    """``[rows]`` int32: 1 for rows to be read from `changed`, 0 for others."""

    def arguments(self) -> tuple[torch.Tensor | int | None, ...]:
        """The first five arguments of a kernel that takes rows by :func:`row_of`."""
        rows = self.logits
        return rows, rows.stride(0), rows.shape[1], self.changed, self.is_changed

    def latest(self) -> torch.Tensor:
        """Where rows lie that were changed: all of them, if there is no other place."""
        return self.logits if self.changed is None else self.changed


@triton.jit
def row_of(logits, stride, vocab, changed, is_changed, row):
    """A row for :func:`read_logits` and :func:`write_logits`; `row` is an int64."""
    start = logits + row * stride
    if changed is None:
        found = (start,)
    else:
        found = (start, changed + row * vocab, tl.load(is_changed + row) != 0)
    return found


@triton.jit
def read_logits(row, ids, mask):
    """Logits of a row in float32; -inf outside of the mask."""
    if len(row) == 1:
        x = tl.load(row[0] + ids, mask=mask, other=float("-inf")).to(tl.float32)
    else:
        # Of the two loads one takes no time: it has no lane.
        plain = tl.load(row[0] + ids, mask=mask & (row[2] == 0), other=float("-inf"))
        changed = tl.load(row[1] + ids, mask=mask & row[2], other=float("-inf"))
        x = tl.where(row[2], changed, plain.to(tl.float32))
    return x


@triton.jit
def write_logits(row, ids, x, mask):
    """Stores logits of a row."""
    if len(row) == 1:
        tl.store(row[0] + ids, x, mask=mask)
    else:
        tl.store(row[0] + ids, x, mask=mask & (row[2] == 0))
        tl.store(row[1] + ids, x, mask=mask & row[2])


@triton.jit
def ordered(x):
    """Integer keys that sort like the floats."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_block(row, first, vocab):
    """A block of a row in float32; -inf beyond its end."""
    ids = first + tl.arange(0, LOGIT_BLOCK)
    return read_logits(row, ids, ids < vocab)


@triton.jit
def weight_of(x, largest, scale, cap, CAPPED: tl.constexpr):
    """The probability of a logit, as a multiple of the largest probability."""
    # exp2 is exact at 0: the largest one has weight 1.
    return tl.exp2((capped(x, cap, CAPPED) - largest) * scale)


@triton.jit
def capped(x, cap, CAPPED: tl.constexpr):
    """Logits after the soft cap, where there is one."""
    if CAPPED:
        # tanh by the exponential of a negative number, which cannot overflow; -inf stays.
        e = tl.exp(-2.0 * tl.abs(x) / cap)
        bounded = tl.where(x < 0, -cap, cap) * (1.0 - e) / (1.0 + e)
        x = tl.where(x == float("-inf"), x, bounded)
    return x


@triton.jit
def is_wide(top_k, top_p, vocab):
    """Whether top-p is a share of the whole distribution, and not of what top-k leaves."""
    return (top_p < 1.0) & ((top_p < 0.0) | (top_k >= vocab))


@triton.jit
def limits(largest, SHIFT: tl.constexpr):
    """The least and the largest key of a row."""
    lowest = ordered(float("-inf") + 0.0 * largest) >> SHIFT
    return lowest, ordered(largest) >> SHIFT


@triton.jit
def middle_of(low, high):
    """The middle of two integers, rounded up, of any signs."""
    wide = (low.to(tl.int64) + high.to(tl.int64) + 1) >> 1
    return wide.to(tl.int32)


@triton.jit
def weight_at(key, largest, scale, cap, CAPPED: tl.constexpr, SHIFT: tl.constexpr):
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
