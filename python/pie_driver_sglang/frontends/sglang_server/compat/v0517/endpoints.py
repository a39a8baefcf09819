"""Implements `EndpointsCompat`."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_SGLANGS: Final = OpenAIServingChat._process_logprobs_tokens


def correct_top_logprobs() -> None:
    """Without it, tokens of a streamed chunk repeat those of its first token."""
    OpenAIServingChat._process_logprobs_tokens = _process_logprobs_tokens


def _process_logprobs_tokens(
    self: OpenAIServingChat, logprobs: Any, use_token_index: bool = False
) -> Any:
    # A chunk's lists begin with its first token.
    return _SGLANGS(self, logprobs, use_token_index=True)


def check_by_scheduler() -> None:
    """Nothing: no other check comes before."""


def fold_salt(request: Any) -> None:
    """SGLang has done so."""


def aborts_children(manager: TokenizerManager, rid: str) -> bool:
    """The manager keeps the samples of a request by its id."""
    return rid in manager.logical_rid_to_child_rids
