"""Custom-mask attention over paged KV, in Triton: one mask bit for each row and KV index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams, MaskedRequests

BLOCK_M = 32
"""Query rows of a program."""
_WORD_BITS = tl.constexpr(32)
"""KV indices per iteration: one mask word of each row."""


@triton.jit
def _masked_attention(
    queries, keys, values, out, table, table_rows, kv_lens, row_counts, first_rows,
    first_words, mask_words, sinks, scale, logit_cap, window,
    query_stride, key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    out_stride, table_stride,
    GQA_GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    LOGIT_CAP: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.program_id(2) * BLOCK_M
    row_count = tl.load(row_counts + request)
    if first >= row_count:
        return
    kv_len = tl.load(kv_lens + request)
    rows = first + tl.arange(0, BLOCK_M)
    own = kv_len - row_count + rows
    row_mask = rows < row_count
    start = tl.load(first_rows + request).to(tl.int64)
    dims = tl.arange(0, DIM_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        queries + (start + rows[:, None]) * query_stride + head * DIM + dims[None, :],
        mask=row_mask[:, None] & (dims[None, :] < DIM),
        other=0.0,
    )
    slots_row = table + tl.load(table_rows + request) * table_stride
    words = (kv_len + _WORD_BITS - 1) // _WORD_BITS
    mask_row = mask_words + tl.load(first_words + request) + rows.to(tl.int64) * words
    kv_head = head // GQA_GROUP

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    if SINKS:
        row_max = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32)
        row_sum = tl.full([BLOCK_M], 1.0, tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_BLOCK], tl.float32)
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
        if LOGIT_CAP:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = logit_cap * (2.0 * tl.sigmoid(2.0 * scores / logit_cap) - 1.0)
        mask_bits = tl.load(mask_row + word, mask=row_mask, other=0)
        visible = ((mask_bits[:, None] >> bits[None, :]) & 1) != 0
        visible = visible & stored[None, :]
        if WINDOWED:
            visible = visible & (index[None, :] >= own[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, axis=1))
        # Avoids inf - inf in a row without visible keys so far.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(weights, axis=1)
        v = tl.load(
            values
            + slots[:, None] * value_slot_stride
            + kv_head * value_head_stride
            + value_dims[None, :],
            mask=stored[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        ).to(q.dtype)
        acc = acc * rescale[:, None]
        acc += tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        row_max = new_max
    # A row without visible keys gives zeros.
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    tl.store(
        out + (start + rows[:, None]) * out_stride + head * VALUE_DIM + value_dims[None, :],
        acc.to(q.dtype),
        mask=row_mask[:, None] & (value_dims[None, :] < VALUE_DIM),
    )


def masked_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    requests: MaskedRequests,
    rule: AttentionParams,
    max_rows: int,
) -> None:
    """Computes `masked_reference.masked_attention_torch` on a GPU.

    Grid: (requests, heads, blocks of 32 rows). Accumulates in float32; MMA operands have the dtype
    of the queries.

    Args:
        queries: ``[tokens, heads, dim]``, contiguous.
        keys: ``[slots, kv_heads, dim]``.
        values: ``[slots, kv_heads, value_dim]``.
        out: ``[tokens, heads, value_dim]``, contiguous, written.
        requests: The requests of the pass.
        rule: The layer's parameters.
        max_rows: The largest of the requests' row counts.
    """
    _, heads, dim = queries.shape
    _, kv_heads, value_dim = values.shape
    grid = (len(requests.kv_lens), heads, triton.cdiv(max_rows, BLOCK_M))
    _masked_attention[grid](
        queries, keys, values, out, *requests, out if rule.sinks is None else rule.sinks,
        rule.scale, rule.logit_cap, rule.window,
        queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), requests.table.stride(0),
        GQA_GROUP=heads // kv_heads, DIM=dim, VALUE_DIM=value_dim, BLOCK_M=BLOCK_M,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        LOGIT_CAP=rule.logit_cap > 0, WINDOWED=rule.window >= 0, SINKS=rule.sinks is not None,
        num_stages=2,
    )  # fmt: skip
