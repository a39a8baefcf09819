"""The GPU kernel of logit masks: from a mask's edges, or its bits, to forbidden logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048
"""Logits of a program."""
WORD_BITS = tl.constexpr(32)


@triton.jit  # type: ignore[untyped-decorator]
def _forbid(  # type: ignore[no-untyped-def]
    logits, slot_masks, words, vocabulary, stride, BLOCK: tl.constexpr
):  # fmt: skip
    slot = tl.program_id(0)
    mask = words + tl.load(slot_masks + 2 * slot)
    edges = tl.load(slot_masks + 2 * slot + 1)
    if edges == 0:
        return
    start = tl.program_id(1) * BLOCK
    ids = start + tl.arange(0, BLOCK)
    inside = ids < vocabulary
    if edges < 0:
        bits = tl.load(mask + ids // WORD_BITS, mask=inside, other=0)
        allowed = (bits >> (ids % WORD_BITS)) & 1
    else:
        # The first stretch of allowed tokens that ends behind the block's first token.
        stretch = 0
        above = edges // 2
        while stretch < above:
            middle = (stretch + above) // 2
            before = tl.load(mask + 2 * middle + 1) <= start
            stretch = tl.where(before, middle + 1, stretch)
            above = tl.where(before, above, middle)
        allowed = tl.zeros([BLOCK], tl.int32)
        more = 2 * stretch < edges
        while more:
            begin = tl.load(mask + 2 * stretch)
            end = tl.load(mask + 2 * stretch + 1)
            allowed = allowed | ((ids >= begin) & (ids < end)).to(tl.int32)
            stretch += 1
            more = (2 * stretch < edges) & (end < start + BLOCK)
    row = logits + slot.to(tl.int64) * stride
    tl.store(row + ids, float("-inf"), mask=inside & (allowed == 0))


def apply(logits: torch.Tensor, slot_masks: torch.Tensor, words: torch.Tensor) -> None:
    """Forbids as :func:`pie_driver_sglang.sampling.apply_masks` does. Arguments as there."""
    slots, vocabulary = logits.shape
    _forbid[(slots, triton.cdiv(vocabulary, BLOCK))](
        logits, slot_masks, words, vocabulary, logits.stride(0), BLOCK=BLOCK
    )
