"""Log-probabilities in two Triton kernels: of the sampled token, the top k, and given tokens.

The first kernel computes maximum, sum of exponentials and top k of each block of a row, the second
one merges the blocks of a row. Logits are read once; rows without a request return at once. Both
can be captured. The torch reference is `logprobs_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger
from pie_driver_sglang.kernels.sampling.logit_rows import sort_key

_BLOCK = tl.constexpr(8192)
_GIVEN_BLOCK = tl.constexpr(128)
_WARPS = 8
_NO_KEY = tl.constexpr(-(2**31))
"""Less than the sort key of any float."""
_MIN_LOGPROB = tl.constexpr(-3.4028234663852886e38)
"""Instead of -inf, as in SGLang."""


def compute_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    records: torch.Tensor,
    words: torch.Tensor,
    out: torch.Tensor,
    max_top: int,
) -> None:
    """Writes the log-probability words of each request, by slot.

    A request has the log-probability of its token, the ids of the top k tokens, best first and the
    lower id first among equals, their log-probabilities, and those of given tokens; floats as their
    bits. Nothing is written for a token outside of the vocabulary. Grid: (slots, blocks), (slots).

    Args:
        logits: ``[slots, vocabulary]`` of any float dtype.
        tokens: ``[slots]`` int64, in the lower half of each.
        records: ``[slots, 6]`` int32, see `slot_params.STEP_RECORD_WORDS`.
        words: ``[words]`` int32: given tokens.
        out: ``[words]`` int32, written; may be pinned host memory.
        max_top: Largest k of any request.
    """
    slots, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK.value)
    width = triton.next_power_of_2(max(max_top, 1))
    block_max, block_sum = (logits.new_empty(slots, blocks, dtype=torch.float32) for _ in range(2))
    keys, ids = (logits.new_empty(slots, blocks, width, dtype=torch.int32) for _ in range(2))
    options = {"WIDTH": width, "num_warps": _WARPS, **pdl_options(logits.device)}
    _block_top[(slots, blocks)](
        logits, logits.stride(0), vocab, records, block_max, block_sum, keys, ids, **options,
    )  # fmt: skip
    _write_logprobs[(slots,)](
        logits, logits.stride(0), vocab, tokens, records, words,
        block_max, block_sum, keys, ids, blocks, out,
        NUM_BLOCKS=triton.next_power_of_2(blocks), **options,
    )  # fmt: skip


@triton.jit
def _block_top(
    logits, stride, vocab, records, block_max, block_sum, keys, ids,
    WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Maximum logit, sum of exponentials and top k of a block."""
    if PDL:
        pdl_wait_trigger()
    slot = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    record = records + 6 * slot
    if tl.load(record) == 0:
        return
    offsets = block * _BLOCK + tl.arange(0, _BLOCK)
    inside = offsets < vocab
    x = tl.load(logits + slot * stride + offsets, mask=inside, other=float("-inf"))
    x = x.to(tl.float32) / tl.load(record + 5).to(tl.float32, bitcast=True)
    top = tl.max(x, 0)
    weights = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))
    offset = slot * tl.num_programs(1) + block
    tl.store(block_max + offset, top)
    tl.store(block_sum + offset, tl.sum(weights, 0))
    remaining = tl.where(inside, sort_key(x), _NO_KEY)
    for number in range(tl.load(record + 2)):
        best = tl.max(remaining, 0)
        found = tl.min(tl.where(remaining == best, offsets, 0x7FFFFFFF), 0)
        tl.store(keys + offset * WIDTH + number, best)
        tl.store(ids + offset * WIDTH + number, found)
        remaining = tl.where(offsets == found, _NO_KEY, remaining)


@triton.jit
def _write_logprobs(
    logits, stride, vocab, tokens, records, words, block_max, block_sum, keys, ids, blocks, out,
    NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    slot = tl.program_id(0).to(tl.int64)
    record = records + 6 * slot
    token = tl.load(tokens + slot) & 0xFFFFFFFF
    if (tl.load(record) == 0) | (token >= vocab):
        return
    divisor = tl.load(record + 5).to(tl.float32, bitcast=True)
    lanes = tl.arange(0, NUM_BLOCKS)
    known = lanes < blocks
    block_maxes = tl.load(block_max + slot * blocks + lanes, mask=known, other=float("-inf"))
    block_sums = tl.load(block_sum + slot * blocks + lanes, mask=known, other=0.0)
    top = tl.max(block_maxes, 0)
    # A block of -inf has no weight.
    total = tl.sum(
        tl.where(block_maxes == float("-inf"), 0.0, block_sums * tl.exp(block_maxes - top)), 0
    )
    logsumexp = top + tl.log(total)
    row = logits + slot * stride
    first = out + tl.load(record + 1)
    own = tl.load(row + token).to(tl.float32) / divisor
    tl.store(first, _logprob_bits(own - logsumexp))
    count = tl.load(record + 2)
    entries = tl.arange(0, NUM_BLOCKS * WIDTH)
    listed = (entries // WIDTH < blocks) & (entries % WIDTH < count)
    offsets = slot * blocks * WIDTH + entries
    remaining = tl.load(keys + offsets, mask=listed, other=_NO_KEY)
    found = tl.load(ids + offsets, mask=listed, other=0x7FFFFFFF)
    for number in range(count):
        best = tl.max(remaining, 0)
        chosen = tl.min(tl.where(remaining == best, found, 0x7FFFFFFF), 0)
        value = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(first + 1 + number, chosen)
        tl.store(first + 1 + count + number, _logprob_bits(value - logsumexp))
        remaining = tl.where(found == chosen, _NO_KEY, remaining)
    given_count = tl.load(record + 3)
    given_tokens = words + tl.load(record + 4)
    for start in range(0, given_count, _GIVEN_BLOCK):
        numbers = start + tl.arange(0, _GIVEN_BLOCK)
        there = numbers < given_count
        token_ids = tl.load(given_tokens + numbers, mask=there, other=0)
        values = tl.load(row + token_ids, mask=there, other=0.0).to(tl.float32) / divisor
        tl.store(first + 1 + 2 * count + numbers, _logprob_bits(values - logsumexp), mask=there)


@triton.jit
def _logprob_bits(value):
    """The bits of a log-probability, clamped to finite numbers."""
    return tl.maximum(value, _MIN_LOGPROB).to(tl.int32, bitcast=True)
