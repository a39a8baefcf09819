"""What kernels that read rows of logits have in common."""

from __future__ import annotations

import triton
import triton.language as tl

LOGIT_BLOCK = tl.constexpr(8192)
"""Logits that a program reads at once."""


@triton.jit
def ordered(x):
    """Integer keys that sort like the floats."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_block(base, first, vocab):
    """A block of a row in float32; -inf beyond its end."""
    offsets = first + tl.arange(0, LOGIT_BLOCK)
    x = tl.load(base + offsets, mask=offsets < vocab, other=float("-inf"))
    return x.to(tl.float32)


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
