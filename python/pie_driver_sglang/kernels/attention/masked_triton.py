"""The GPU kernel of masked attention: paged KV, one bit for each row and KV index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.attention.masked_reference import Requests, Rule

BLOCK_ROWS = 32
"""Query rows of a program."""
_WORD_BITS = tl.constexpr(32)
"""KV indices per iteration: one mask word of each row."""


@triton.jit
def _attend(
    queries, keys, values, out, table, table_rows, kv_lens, row_counts, first_rows,
    first_words, mask_words, sinks, scale, cap, window,
    query_stride, key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    out_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.program_id(2) * ROWS
    row_count = tl.load(row_counts + request)
    if first >= row_count:
        return
    kv_len = tl.load(kv_lens + request)
    rows = first + tl.arange(0, ROWS)
    own = kv_len - row_count + rows
    in_request = rows < row_count
    start = tl.load(first_rows + request).to(tl.int64)
    dims = tl.arange(0, DIM_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        queries + (start + rows[:, None]) * query_stride + head * DIM + dims[None, :],
        mask=in_request[:, None] & (dims[None, :] < DIM),
        other=0.0,
    )
    slots_row = table + tl.load(table_rows + request) * table_stride
    words = (kv_len + _WORD_BITS - 1) // _WORD_BITS
    words_row = mask_words + tl.load(first_words + request) + rows.to(tl.int64) * words
    kv_head = head // GROUP

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:
        best = tl.zeros([ROWS], tl.float32) + tl.load(sinks + head).to(tl.float32)
        total = tl.full([ROWS], 1.0, tl.float32)
    mixed = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    bits = tl.arange(0, _WORD_BITS)
    for word in range(words):
        index = word * _WORD_BITS + bits
        stored = index < kv_len
        slots = tl.load(slots_row + index, mask=stored, other=0).to(tl.int64)
        k = tl.load(
            keys + slots[:, None] * key_slot_stride + kv_head * key_head_stride + dims[None, :],
            mask=stored[:, None] & (dims[None, :] < DIM),
            other=0.0,
        )
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * scale
        if CAPPED:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        admitted = tl.load(words_row + word, mask=in_request, other=0)
        visible = ((admitted[:, None] >> bits[None, :]) & 1) != 0
        visible = visible & stored[None, :]
        if WINDOWED:
            visible = visible & (index[None, :] >= own[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, axis=1))
        # A row without visible keys so far has no maximum to subtract.
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        weights = tl.exp(scores - shift[:, None])
        shrink = tl.exp(best - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(
            values
            + slots[:, None] * value_slot_stride
            + kv_head * value_head_stride
            + value_dims[None, :],
            mask=stored[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        ).to(q.dtype)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        best = largest
    # A row without visible keys gives zeros.
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + (start + rows[:, None]) * out_stride + head * VALUE_DIM + value_dims[None, :],
        mixed.to(q.dtype),
        mask=in_request[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


def attend_masked(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    requests: Requests,
    rule: Rule,
    longest: int,
) -> None:
    """Attends as `masked_reference.attend_masked_torch` does.

    Accumulates in float32; GEMM operands have the dtype of the queries.

    Args:
        queries: ``[tokens, heads, dim]``, contiguous.
        keys: ``[slots, kv_heads, dim]``.
        values: ``[slots, kv_heads, value_dim]``.
        out: ``[tokens, heads, value_dim]``, contiguous, written.
        requests: The requests of the pass.
        rule: The layer's rule.
        longest: The largest of the requests' row counts.
    """
    _, heads, dim = queries.shape
    _, kv_heads, value_dim = values.shape
    grid = (len(requests.kv_lens), heads, triton.cdiv(longest, BLOCK_ROWS))
    _attend[grid](
        queries, keys, values, out, *requests, out if rule.sinks is None else rule.sinks,
        rule.scale, rule.cap, rule.window,
        queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), requests.table.stride(0),
        GROUP=heads // kv_heads, DIM=dim, VALUE_DIM=value_dim, ROWS=BLOCK_ROWS,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        CAPPED=rule.cap > 0, WINDOWED=rule.window >= 0, SINKS=rule.sinks is not None,
        num_stages=2,
    )  # fmt: skip
