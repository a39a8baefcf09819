"""Device functions and types that kernels over rows of logits share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.constants import LOG2E

LOGIT_BLOCK = tl.constexpr(8192)
"""Logits of a block."""


class LogitRows(NamedTuple):
    """Rows of logits, some of which were modified into another tensor."""

    logits: torch.Tensor
    """``[rows, vocabulary]`` of any float dtype."""
    changed: torch.Tensor | None = None
    """``[rows, vocabulary]`` float32, contiguous: modified rows; other rows are undefined."""
    is_changed: torch.Tensor | None = None
    """``[rows]`` int32: 1 for rows of `changed`."""

    def arguments(self) -> tuple[torch.Tensor | int | None, ...]:
        """The first five arguments of a kernel that calls :func:`row_of`."""
        rows = self.logits
        return rows, rows.stride(0), rows.shape[1], self.changed, self.is_changed

    def latest(self) -> torch.Tensor:
        """The tensor of modified rows; `logits` if there is no other."""
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
        # One of the two loads is fully masked, and free.
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
def sort_key(x):
    """Int32 keys that sort like the float32 numbers."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_block(row, first, vocab):
    """A block of a row in float32; -inf beyond its end."""
    ids = first + tl.arange(0, LOGIT_BLOCK)
    return read_logits(row, ids, ids < vocab)


@triton.jit
def weight_of(x, row_max, scale, softcap, SOFTCAP: tl.constexpr):
    """``exp((x - row_max) / temperature)``; `scale` is ``log2(e) / temperature``."""
    # exp2 is exact at 0: the largest weight is 1.
    return tl.exp2((apply_softcap(x, softcap, SOFTCAP) - row_max) * scale)


@triton.jit
def apply_softcap(x, softcap, SOFTCAP: tl.constexpr):
    """``softcap * tanh(x / softcap)`` with `SOFTCAP`, else `x`."""
    if SOFTCAP:
        # By the exponential of a negative number, which cannot overflow; -inf stays.
        e = tl.exp(-2.0 * tl.abs(x) / softcap)
        bounded = tl.where(x < 0, -softcap, softcap) * (1.0 - e) / (1.0 + e)
        x = tl.where(x == float("-inf"), x, bounded)
    return x


@triton.jit
def top_p_of_all(top_k, top_p, vocab):
    """Whether top-p is a share of the whole distribution, not of what top-k keeps."""
    return (top_p < 1.0) & ((top_p < 0.0) | (top_k >= vocab))


@triton.jit
def key_range(row_max, SHIFT: tl.constexpr):
    """Smallest and largest sort key of a row."""
    lowest = sort_key(float("-inf") + 0.0 * row_max) >> SHIFT
    return lowest, sort_key(row_max) >> SHIFT


@triton.jit
def midpoint(low, high):
    """Midpoint of two int32, rounded up, without overflow."""
    wide = (low.to(tl.int64) + high.to(tl.int64) + 1) >> 1
    return wide.to(tl.int32)


@triton.jit
def weight_of_key(key, row_max, scale, softcap, SOFTCAP: tl.constexpr, SHIFT: tl.constexpr):
    """Weight of a logit by its sort key; 0 if no logit has it."""
    bits = key << SHIFT
    if SHIFT:
        # The dropped bits of a negative number's key are ones.
        bits = bits | tl.where(bits < 0, 0xFFFF, 0)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    x = bits.to(tl.float32, bitcast=True)
    weight = weight_of(x, row_max, scale, softcap, SOFTCAP)
    return tl.where((x == x) & (weight == weight), weight, 0.0)


@triton.jit
def inverse_cdf(weights, before, target):
    """First position where `before` plus the cumulative weights exceeds `target`.

    The last position with a weight if rounding leaves the target out of reach.
    """
    positions = tl.arange(0, weights.shape[0])
    beyond = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
    found = tl.min(tl.where(beyond, positions, 0x7FFFFFFF), 0)
    last = tl.max(tl.where(weights > 0.0, positions, 0), 0)
    return tl.where(found == 0x7FFFFFFF, last, found)


@triton.jit
def total_weight(
    block_max, block_sum, row, blocks, row_max, temperature, softcap, NUM_BLOCKS: tl.constexpr,
    SOFTCAP: tl.constexpr
):  # fmt: skip
    """Weight of a row, from block maxima and block sums."""
    lanes = tl.arange(0, NUM_BLOCKS)
    known = lanes < blocks
    top = tl.load(block_max + row * blocks + lanes, mask=known, other=float("-inf"))
    mass = tl.load(block_sum + row * blocks + lanes, mask=known, other=0.0)
    scale = LOG2E / temperature
    return tl.sum(
        mass * weight_of(top, apply_softcap(row_max, softcap, SOFTCAP), scale, softcap, SOFTCAP), 0
    )
