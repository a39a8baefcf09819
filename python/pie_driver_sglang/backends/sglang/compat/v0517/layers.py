"""Implements `LayersCompat`."""

from __future__ import annotations

from typing import Any, Final

_GRANITE_4: Final = "GraniteMoeHybridForCausalLM"


def fuses_shared_experts(topk_config: Any) -> bool:
    """By their number."""
    return bool(topk_config.num_fused_shared_experts)


def adds_last_residual_again(model: Any) -> bool:
    """Granite 4."""
    return type(model).__name__ == _GRANITE_4
