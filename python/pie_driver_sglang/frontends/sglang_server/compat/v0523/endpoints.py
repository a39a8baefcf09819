"""Implements `EndpointsSeam`."""

from __future__ import annotations

from sglang.srt.managers.tokenizer_manager import TokenizerManager


def correct_top_logprobs() -> None:
    """Nothing: each token has its own."""


def aborts_children(manager: TokenizerManager, rid: str) -> bool:
    """It knows samples by ids of their own alone."""
    return False
