"""Correction of SGLang's `/detokenize`."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize

_SGLANGS: Final = OpenAIServingDetokenize._handle_non_streaming_request


def correct_detokenize() -> None:
    """Reject token ids outside the vocabulary, to which SGLang answers 500."""
    OpenAIServingDetokenize._handle_non_streaming_request = _handle


async def _handle(self: OpenAIServingDetokenize, adapted: Any, request: Any, raw: Any) -> Any:
    vocab = _count_tokens(self.tokenizer_manager)
    for each in request.tokens:
        for token in each if isinstance(each, list) else [each]:
            if not 0 <= token < vocab:
                return self.create_error_response(
                    f"token {token} of `tokens` is not in the vocabulary, which has {vocab}: send "
                    "ids below that"
                )
    return await _SGLANGS(self, adapted, request, raw)


def _count_tokens(manager: Any) -> int:
    """The larger of the model's vocabulary and the tokenizer's."""
    known = len(manager.tokenizer) if hasattr(manager.tokenizer, "__len__") else 0
    return max(int(manager.model_config.vocab_size), known)
