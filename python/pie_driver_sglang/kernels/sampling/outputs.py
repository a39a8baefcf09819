"""The outputs of a slot group."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Outputs(NamedTuple):
    """The outputs of a slot group: flat arrays, each in the order of the slots of its class."""

    tokens: torch.Tensor
    """``[token slots]`` int64; the vocabulary's size for rows with NaNs."""
    dist_ids: torch.Tensor | None = None
    """``[listed]`` int64: the tokens of each distribution, most probable first."""
    dist_probs: torch.Tensor | None = None
    """``[listed]`` float32: their probabilities."""
    logits: torch.Tensor | None = None
    """``[raw slots * vocabulary]`` float32."""
    logprobs: torch.Tensor | None = None
    """``[labels]`` float32."""
    entropies: torch.Tensor | None = None
    """``[entropy slots]`` float32, in nats."""
    logprob_words: torch.Tensor | None = None
    """``[words]`` int32: log-probabilities that extensions ask for; see `logprobs_reference.py`."""
    failures: tuple[tuple[int, str], ...] = ()
    """Slots whose custom logit processor failed, and why; their token is the vocabulary's size."""
