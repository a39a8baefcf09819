"""Attention under a custom mask: torch reference, also used on CPUs, and its argument types."""

from __future__ import annotations

from typing import NamedTuple

import torch

WORD_BITS = 32
MAX_SCORES = 1 << 24
"""Most float32 scores that are computed at once: 64 MB."""


class MaskedRequests(NamedTuple):
    """The rows, KV and mask of each request of a pass."""

    table: torch.Tensor
    """``[table rows, tokens]`` int32: storage slot of each KV index."""
    table_rows: torch.Tensor
    """``[requests]`` int64."""
    kv_lens: torch.Tensor
    """``[requests]`` int64: KV length after the pass."""
    row_counts: torch.Tensor
    """``[requests]`` int32: rows of the pass, which are the last of the KV."""
    first_rows: torch.Tensor
    """``[requests]`` int32: first row of the pass."""
    first_words: torch.Tensor
    """``[requests]`` int64: first word of the mask."""
    words: torch.Tensor
    """``[words]`` int32: the mask, in the format of `Pass.mask`."""


class AttentionParams(NamedTuple):
    """Softmax parameters of an attention layer."""

    scale: float
    """Factor that scores are multiplied by."""
    logit_cap: float = 0.0
    """Soft cap: scores become ``cap * tanh(score / cap)``; 0 for no cap."""
    window: int = -1
    """Sliding window: most earlier keys that a row sees, by KV index; -1 for all."""
    sinks: torch.Tensor | None = None
    """``[heads]``: attention sinks, the scores of a key without a value."""


def masked_attention_torch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    requests: MaskedRequests,
    rule: AttentionParams,
) -> None:
    """Attends in float32 under mask and window; a row without visible keys gives zeros.

    Args:
        queries: ``[tokens, heads, dim]``.
        keys: ``[slots, kv_heads, dim]``; each serves the same number of neighbouring heads.
        values: ``[slots, kv_heads, value_dim]``.
        out: ``[tokens, heads, value_dim]``, written.
        requests: The requests of the pass.
        rule: The layer's parameters.
    """
    table, rest = requests.table, [part.tolist() for part in requests[1:6]]
    for table_row, kv_len, rows, first_row, first_word in zip(*rest, strict=True):
        slots = table[table_row, :kv_len]
        k, v = keys[slots].float(), values[slots].float()
        width = -(-kv_len // WORD_BITS)
        step = max(1, MAX_SCORES // (queries.shape[1] * kv_len))
        for start in range(0, rows, step):
            count = min(step, rows - start)
            part = slice(first_row + start, first_row + start + count)
            shown = expand(requests.words[first_word + start * width :], count, kv_len)
            if rule.window >= 0:
                index = torch.arange(kv_len)
                own = kv_len - rows + start
                shown &= index >= index[own : own + count, None] - rule.window
            out[part] = _attend_rows(queries[part].float(), k, v, shown, rule).to(out.dtype)


def expand(words: torch.Tensor, rows: int, kv_len: int) -> torch.Tensor:
    """Unpacks a request's mask: ``[rows, kv_len]`` bool.

    Args:
        words: int32, from the request's first word on.
        rows: Its query rows.
        kv_len: Its KV length after the pass.
    """
    width = -(-kv_len // WORD_BITS)
    bits = torch.arange(WORD_BITS, dtype=torch.int32)
    packed = words[: rows * width].view(rows, width, 1)
    return ((packed >> bits) & 1).bool().flatten(1)[:, :kv_len]


def _attend_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    rule: AttentionParams,
) -> torch.Tensor:
    """Attention of rows of one request: ``[rows, heads, value_dim]``."""
    rows, heads, dim = queries.shape
    kv_len, kv_heads, _ = keys.shape
    grouped = queries.reshape(rows, kv_heads, -1, dim)
    scores = torch.einsum("rkgd,tkd->rkgt", grouped, keys).flatten(1, 2) * rule.scale
    if rule.logit_cap > 0:
        scores = rule.logit_cap * torch.tanh(scores / rule.logit_cap)
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if rule.sinks is not None:
        scores = torch.cat([scores, rule.sinks.float().expand(rows, heads)[..., None]], dim=-1)
    weights = scores.softmax(dim=-1)[..., :kv_len]
    weights = weights.masked_fill(~visible.any(dim=-1)[:, None, None], 0.0)
    weights = weights.reshape(rows, kv_heads, -1, kv_len)
    mixed = torch.einsum("rkgt,tkd->rkgd", weights, values)
    return mixed.flatten(1, 2)
