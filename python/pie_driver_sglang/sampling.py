"""Vectorised token sampling: one logit row and one uniform number per slot.

A slot's token is a function of its own row, parameters and uniform number alone, so it does not
change with the company that it keeps in a batch. Tokens are drawn by inverting the cumulative
distribution.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from pie_driver_sglang._core import SlotGroup


class SlotParams(NamedTuple):
    """Sampling parameters, one entry per slot."""

    temperatures: torch.Tensor
    """``[slots]`` float32, > 0."""
    top_ks: torch.Tensor
    """``[slots]`` int32, 1..vocabulary."""
    top_ps: torch.Tensor
    """``[slots]`` float32, 0..1; 1 keeps all, 0 keeps one."""
    min_ps: torch.Tensor
    """``[slots]`` float32, 0..1; 0 keeps all."""
    uniforms: torch.Tensor
    """``[slots]`` float32 in [0, 1)."""

    def rows(self, start: int, end: int) -> SlotParams:
        """The slots ``start..end``."""
        return SlotParams(*(field[start:end] for field in self))


def sample_group(logits: torch.Tensor, group: SlotGroup, params: SlotParams) -> torch.Tensor:
    """Samples a slot group: first its greedy slots, then the plain ones, then the filtered ones.

    Args:
        logits: ``[slots, vocabulary]`` float32.
        group: how many slots of each class there are.
        params: ``[slots]`` parameters.

    Returns:
        ``[slots]`` int64 token ids.
    """
    plain_end = group.greedy + group.plain
    parts = []
    if group.greedy:
        parts.append(logits[: group.greedy].argmax(dim=-1))
    if group.plain:
        parts.append(
            sample_plain(logits[group.greedy : plain_end], params.rows(group.greedy, plain_end))
        )
    if group.filtered:
        parts.append(
            sample_filtered(logits[plain_end:], params.rows(plain_end, plain_end + group.filtered))
        )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sample_plain(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """Samples ``softmax(logits / temperature)``. Shapes as in :func:`sample_group`."""
    return _invert(_tempered(logits, params), params.uniforms)


def sample_filtered(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """Samples with top-k, then top-p on the renormalised rest, and min-p beside them.

    Min-p compares with the largest probability. Shapes as in :func:`sample_group`.
    """
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    probs = _tempered(ordered, params)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    probs = probs.masked_fill(rank >= params.top_ks[:, None], 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    mass_before = probs.cumsum(dim=-1) - probs
    top_ps = params.top_ps[:, None]
    outside = ((mass_before >= top_ps) & (top_ps < 1.0)) | (
        probs < params.min_ps[:, None] * probs[:, :1]
    )
    probs = probs.masked_fill(outside & (rank > 0), 0.0)
    return ids.gather(-1, _invert(probs, params.uniforms)[:, None])[:, 0]


def _tempered(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    # Shifted before the division: a tiny temperature then underflows to zero and never overflows.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return (shifted / params.temperatures[:, None]).softmax(dim=-1)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative weight exceeds ``uniform * total``: ``[slots]`` int64."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, behind which only ids of weight zero lie.
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniforms[:, None] * total, below)
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
