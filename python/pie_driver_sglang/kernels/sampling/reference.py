"""Sampling and probes in torch: one row of logits and one uniform number per slot.

A slot's output depends on its own row, parameters and uniform number only, so it is
batch-invariant. Tokens are sampled by inverse CDF over the ids. A row with NaNs gives the
vocabulary size instead of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.kernels.sampling.outputs import Outputs
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams

if TYPE_CHECKING:
    from pie_driver_sglang._core import SlotGroup


def run_group(
    logits: torch.Tensor, group: SlotGroup, params: SlotParams, labels: torch.Tensor | None = None
) -> Outputs:
    """Computes a slot group: tokens, then distributions, logits, log-probabilities, entropies.

    Slots of prompt log-probabilities come last, and are computed elsewhere.

    Args:
        logits: ``[slots, vocabulary]`` float32, masked.
        group: how many slots of each class there are, in this order.
        params: ``[slots]`` parameters.
        labels: ``[labels, 2]`` int64: log-probability slot (counted from the first), and token.
    """
    tokens_end = group.greedy + group.plain + group.filtered
    tokens = sample_group(logits[:tokens_end], group, params.rows(0, tokens_end))
    if tokens_end == len(logits):
        return Outputs(tokens)
    dists_end = tokens_end + group.dists
    logits_end = dists_end + group.logits
    logprobs_end = logits_end + group.logprobs
    dist_ids = dist_probs = raw = logprobs = entropies = None
    if group.dists:
        rows = params.rows(tokens_end, dists_end)
        dist_ids, dist_probs = most_probable(logits[tokens_end:dists_end], rows)
    if group.logits:
        raw = logits[dists_end:logits_end].reshape(-1)
    if labels is not None:
        logprobs = log_probabilities(logits[logits_end:logprobs_end], labels)
    if group.entropies:
        probs = logits[logprobs_end : logprobs_end + group.entropies].softmax(dim=-1)
        entropies = torch.special.entr(probs).sum(dim=-1)
    return Outputs(tokens, dist_ids, dist_probs, raw, logprobs, entropies)


def sample_group(logits: torch.Tensor, group: SlotGroup, params: SlotParams) -> torch.Tensor:
    """Samples the token slots of a group: first greedy, then plain, then filtered ones.

    Args:
        logits: ``[token slots, vocabulary]`` float32.
        group: how many slots of each class there are.
        params: ``[token slots]`` parameters.

    Returns:
        ``[token slots]`` int64 token ids.
    """
    end = group.greedy + group.plain + group.filtered
    parts = []
    if group.greedy:
        parts.append(sample_greedy(logits[: group.greedy]))
    if end > group.greedy:
        rows = params.rows(group.greedy, end)
        parts.append(_sample_random(logits[group.greedy : end], group.plain, rows))
    if not parts:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sample_rows(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """Samples rows of any class in any order.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        params: ``[rows]`` parameters; temperature 0 for arg-max, negative for no sampling.

    Returns:
        ``[rows]`` int64 token ids; the vocabulary's size for rows that are not sampled.
    """
    vocabulary = logits.shape[-1]
    tokens = torch.full((len(logits),), vocabulary, dtype=torch.int64)
    random = params.temperatures > 0
    restricted = (params.top_ks < vocabulary) | (params.top_ps < 1.0) | (params.min_ps > 0.0)
    for chosen, sample in (
        (params.temperatures == 0, lambda rows, _: sample_greedy(rows)),
        (random & ~restricted, sample_plain),
        (random & restricted, sample_filtered),
    ):
        rows = chosen.nonzero()[:, 0]
        if len(rows):
            own = SlotParams(*(field[rows] for field in params))
            tokens[rows] = sample(logits[rows], own)
    return tokens


def _sample_random(logits: torch.Tensor, plain: int, params: SlotParams) -> torch.Tensor:
    """Samples `plain` slots without a filter, then filtered ones."""
    if logits.is_cuda:
        # Imported here: a machine without a GPU may have no Triton.
        from pie_driver_sglang.kernels.sampling import sampler

        return sampler.sample(logits, params)
    parts = []
    if plain:
        parts.append(sample_plain(logits[:plain], params.rows(0, plain)))
    if plain < len(logits):
        parts.append(sample_filtered(logits[plain:], params.rows(plain, len(logits))))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def apply_masks(logits: torch.Tensor, slot_masks: torch.Tensor, words: torch.Tensor) -> None:
    """Sets forbidden logits to -inf, in place.

    Args:
        logits: ``[slots, vocabulary]`` float32, rows contiguous.
        slot_masks: ``[slots, 2]`` int32: the first word of the slot's mask and how many edges it
            has; 0 edges for no mask, -1 for bits.
        words: int32: edges, between whose pairs tokens are allowed; or bits, of which bit ``i`` of
            word ``w`` allows token ``32 w + i``.
    """
    if logits.is_cuda:
        from pie_driver_sglang.kernels.sampling.logit_rows import LogitRows
        from pie_driver_sglang.kernels.sampling.sampler import mask_logits

        mask_logits(LogitRows(logits), slot_masks, words)
        return
    vocabulary = logits.shape[-1]
    for row, (first, edges) in zip(logits, slot_masks.tolist(), strict=True):
        if edges < 0:
            packed = words[first : first + -(-vocabulary // 32)]
            shifts = torch.arange(32, dtype=torch.int32)
            allowed = ((packed[:, None] >> shifts) & 1).flatten()[:vocabulary]
        else:
            flips = torch.zeros(vocabulary + 1, dtype=torch.int32)
            flips[words[first : first + edges].long()] = 1
            allowed = flips.cumsum(0)[:vocabulary] & 1
        if edges:
            row.masked_fill_(allowed == 0, -torch.inf)


def most_probable(logits: torch.Tensor, params: SlotParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and probabilities of the `top_ks` most probable tokens of each row, flattened.

    Ties go to the lower id. A temperature of 0 puts all mass on the arg-max.
    """
    point = params.temperatures[:, None] == 0
    temperatures = torch.where(params.temperatures > 0, params.temperatures, 1.0)
    best = logits.argmax(dim=-1, keepdim=True)
    on_best = torch.zeros_like(logits).scatter_(-1, best, 1.0)
    probs = torch.where(point, on_best, _softmax_at(logits, temperatures))
    probs, ids = probs.sort(dim=-1, descending=True, stable=True)
    widest = int(params.top_ks.max())
    listed = torch.arange(widest, device=logits.device) < params.top_ks[:, None]
    return ids[:, :widest][listed], probs[:, :widest][listed]


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``log_softmax(logits)[row, token]`` of each label; -inf outside the vocabulary.

    Args:
        logits: ``[rows, vocabulary]`` float32.
        labels: ``[labels, 2]`` int64 rows and tokens.

    Returns:
        ``[labels]`` float32.
    """
    rows, tokens = labels[:, 0], labels[:, 1]
    known = tokens < logits.shape[-1]
    chosen = logits[rows, torch.where(known, tokens, 0)]
    return torch.where(known, chosen - logits.logsumexp(dim=-1)[rows], -torch.inf)


def sample_greedy(logits: torch.Tensor) -> torch.Tensor:
    """The arg-max of each row, lowest id on ties. Shapes as in :func:`sample_group`."""
    tokens = logits.argmax(dim=-1)
    # A NaN counts as the largest value.
    chosen = logits.gather(-1, tokens[:, None])[:, 0]
    return torch.where(chosen.isnan(), logits.shape[-1], tokens)


def sample_plain(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """Samples ``softmax(logits / temperature)``. Shapes as in :func:`sample_group`."""
    return _inverse_cdf(_softmax_at(logits, params.temperatures), params.uniforms)


def sample_filtered(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """Samples with top-k, then top-p of the renormalised rest, and min-p.

    A negative top-p is the negated share of the whole distribution instead. Min-p is relative to
    the largest probability; ties go to lower ids. Sorts every row; `sampler` computes the same on a
    GPU without sorting. Shapes as in :func:`sample_group`.
    """
    return _inverse_cdf(filtered_weights(logits, params), params.uniforms)


def filtered_weights(logits: torch.Tensor, params: SlotParams) -> torch.Tensor:
    """The weights that :func:`sample_filtered` samples from.

    Returns:
        ``[slots, vocabulary]`` float32: probabilities, times a factor of each row.
    """
    sorted_logits, ids = logits.sort(dim=-1, descending=True, stable=True)
    probs = _softmax_at(sorted_logits, params.temperatures)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    whole_before = probs.cumsum(dim=-1) - probs
    probs = probs.masked_fill(rank >= params.top_ks[:, None], 0.0)
    probs = probs / probs.sum(dim=-1, keepdim=True)
    top_ps = params.top_ps[:, None]
    mass_before = torch.where(top_ps < 0, whole_before, probs.cumsum(dim=-1) - probs)
    top_ps = top_ps.abs()
    outside = ((mass_before >= top_ps) & (top_ps < 1.0)) | (
        probs < params.min_ps[:, None] * probs[:, :1]
    )
    probs = probs.masked_fill(outside & (rank > 0), 0.0)
    # Back in the order of ids, so that the sample does not depend on the filters.
    return torch.empty_like(probs).scatter_(-1, ids, probs)


def _softmax_at(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    # Shifted before the division, so that a tiny temperature underflows instead of overflowing.
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    return (shifted / temperatures[:, None]).softmax(dim=-1)


def _inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative weight exceeds ``uniform * total``: ``[slots]`` int64.

    Returns the number of weights for a row with NaNs.
    """
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:]
    # The product may round up to the total, after which only ids of weight zero follow.
    below = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(uniforms[:, None] * total, below)
    index = torch.searchsorted(cumulative, threshold, right=True)
    return torch.where(total.isnan(), weights.shape[-1], index)[:, 0]
