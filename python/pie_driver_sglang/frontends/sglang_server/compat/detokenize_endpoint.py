"""What SGLang's endpoints of tokens get wrong."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingDetokenize

_SGLANGS: Final = OpenAIServingDetokenize._handle_non_streaming_request


def correct_detokenize() -> None:
    """Has ids refused that are no tokens: tokenizers fail on them, and SGLang answers 500."""
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
    """The model's vocabulary, or the tokenizer's where that has more: both can be decoded."""
    known = len(manager.tokenizer) if hasattr(manager.tokenizer, "__len__") else 0
    return max(int(manager.model_config.vocab_size), known)
