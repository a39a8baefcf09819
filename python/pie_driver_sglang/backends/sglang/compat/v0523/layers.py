"""Implements `LayersCompat`."""

from __future__ import annotations

from typing import Any


def fuses_shared_experts(topk_config: Any) -> bool:
    """By their slots behind those of the chosen experts."""
    return bool(topk_config.num_shared_topk_slots)


def adds_last_residual_again(model: Any) -> bool:
    """None: Granite 4 is built of stages that add it once."""
    return False
