"""Implements `EndpointsCompat`."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import TokenizerManager


def correct_top_logprobs() -> None:
    """Nothing: each token has its own."""


def check_by_scheduler() -> None:
    """SGLang's schema of `/generate` names no parameter, and refuses whole floats."""
    http_server.generate_contract_error = lambda _: None


def fold_salt(request: Any) -> None:
    """Our prefix index has one key besides the tokens: the salt becomes a part of it."""
    if salt := getattr(request, "cache_salt", None):
        request.extra_key = json.dumps([salt, request.extra_key])
        request.cache_salt = None


def aborts_children(manager: TokenizerManager, rid: str) -> bool:
    """It knows samples by ids of their own alone."""
    return False
