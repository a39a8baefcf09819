"""Sampling parameters of slots, and the layout of their records in a step."""

from __future__ import annotations

from typing import NamedTuple

import torch

STEP_RECORD_WORDS = 6
"""Words of a slot's record in a step's staging block (`rust/planner/src/staging/graph.rs`):
1 if something is asked; first one of the words that are written; most probable tokens; given
tokens. The last two are the first given one in `words`, and what logits are divided by (bits of
float32)."""


class SlotParams(NamedTuple):
    """Sampling parameters, one entry per slot."""

    temperatures: torch.Tensor
    """``[slots]`` float32, > 0; 0 for a distribution with all mass on the arg-max."""
    top_ks: torch.Tensor
    """``[slots]`` int32, 1..vocabulary; for a distribution how many tokens are listed."""
    top_ps: torch.Tensor
    """``[slots]`` float32, 0..1; 1 keeps all, 0 keeps one. Below 0 it is the negated share of
    the whole distribution, and not of what top-k leaves."""
    min_ps: torch.Tensor
    """``[slots]`` float32, 0..1; 0 keeps all."""
    uniforms: torch.Tensor
    """``[slots]`` float32 in [0, 1)."""

    def rows(self, start: int, end: int) -> SlotParams:
        """The slots ``start..end``."""
        return SlotParams(*(field[start:end] for field in self))
