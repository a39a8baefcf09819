"""Implements `EndpointsSeam`."""

from __future__ import annotations

from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import TokenizerManager


def correct_top_logprobs() -> None:
    """Nothing: each token has its own."""


def check_by_scheduler() -> None:
    """SGLang's schema of `/generate` names no parameter, and refuses whole floats."""
    http_server.generate_contract_error = lambda _: None


def unread_parameters() -> tuple[frozenset[str], frozenset[str]]:
    """Without a refusal, a prompt would share a cache with those that its salt is to keep apart.

    SGLang sets `ebnf_full_assistant` for parsers of tools whose grammar includes the thinking.
    """
    return frozenset({"cache_salt", "token_indices_to_pool", "watermark"}), frozenset(
        {"beam_width", "ebnf_full_assistant", "watermark"}
    )


def aborts_children(manager: TokenizerManager, rid: str) -> bool:
    """It knows samples by ids of their own alone."""
    return False
