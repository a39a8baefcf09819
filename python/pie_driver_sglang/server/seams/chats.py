"""What SGLang's chat endpoint gets wrong."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

_SGLANGS: Final = OpenAIServingChat._process_logprobs_tokens


def correct_top_logprobs() -> None:
    """Gives each token of a chunk its own ``top_logprobs``.

    In a stream SGLang gives all of them those of the first, and a front end that lags gets
    several tokens in one chunk.
    """
    OpenAIServingChat._process_logprobs_tokens = _process_logprobs_tokens


def _process_logprobs_tokens(
    self: OpenAIServingChat, logprobs: Any, use_token_index: bool = False
) -> Any:
    # A chunk's lists begin with its first token.
    return _SGLANGS(self, logprobs, use_token_index=True)
