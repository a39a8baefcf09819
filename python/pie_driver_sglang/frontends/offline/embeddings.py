"""`Engine.encode` and `Engine.rerank`: embeddings, classes and rewards of prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.errors import DriverError, invalid_value
from pie_driver_sglang.frontends.common.model_updates import ModelUpdates
from pie_driver_sglang.frontends.offline.error_notes import (
    config_error,
    refuse_argument,
    with_hint,
    with_note,
)
from pie_driver_sglang.frontends.offline.prompts import CallPrompts, PromptParser
from pie_driver_sglang.frontends.offline.requests import Call, NewRequest, OpenRequests

#: Arguments of SGLang's `encode` that are not served, which must be None, and the reason.
REFUSED_ENCODE_ARGUMENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "image_data": "the offline engine takes text and tokens",
        "audio_data": "the offline engine takes text and tokens",
        "video_data": "the offline engine takes text and tokens",
        "embed_override_token_id": "the driver computes embeddings itself",
        "embed_overrides": "the driver computes embeddings itself",
        "external_trace_header": "requests are not traced",
    }
)


class EmbeddingCalls:
    """The calls of an engine whose model returns embeddings."""

    _prompts: PromptParser
    _requests: OpenRequests
    _updates: ModelUpdates
    _capabilities: dict[str, Any]

    def encode(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        dimensions: int | None = None,
        lora_path: str | Sequence[str | None] | None = None,
        rid: str | Sequence[str] | None = None,
        priority: int | None = None,
        **others: Any,
    ) -> Any:
        """Return the embedding of one prompt or several; needs an embedding model.

        Args:
            prompt: A text, or a list of texts.
            input_ids: Tokens instead of text, or a list of them.
            dimensions: Size to which embeddings are truncated, for Matryoshka models.
            lora_path: Name of the loaded adapter to use, for all prompts or a list with that of
                each; None for the model alone.
            rid: Id of the request, or a list of ids; generated if None.
            priority: With `enable_priority_scheduling`, higher values are scheduled first.
            others: Arguments of SGLang's `encode` that must be None here.

        Returns:
            A dictionary with `embedding`, a list of numbers, and `meta_info`; a list of them for a
            list of prompts. For a model with a classification or reward head, `embedding` has its
            logits.

        Raises:
            ConfigError: An argument is unknown, unsupported or invalid, or the model is generative.
            StartError: No driver is left.
        """
        for name, value in others.items():
            refuse_argument("encode", name, value, REFUSED_ENCODE_ARGUMENTS)
        for name, value in (("dimensions", dimensions), ("priority", priority)):
            if value is not None and type(value) is not int:
                raise with_note(invalid_value(f"`{name}`", value, "an integer"))
        prompts = with_hint(self._prompts.read, prompt, None, input_ids, rid, {}, lora_path)
        return self._encoded(prompts, {"dimensions": dimensions, "priority": priority})

    async def async_encode(self, *arguments: Any, **named: Any) -> Any:
        """Do as :meth:`encode` without blocking the loop."""
        return await asyncio.to_thread(self.encode, *arguments, **named)

    def rerank(self, prompt: Sequence[Sequence[str]]) -> Any:
        """Return what a model with a classification head makes of pairs of texts.

        Args:
            prompt: Pairs of a query and a document, tokenized as the tokenizer joins pairs.

        Returns:
            As :meth:`encode`, for each pair.

        Raises:
            ConfigError: As :meth:`encode`.
            StartError: The drivers are gone.
        """
        prompts = with_hint(self._prompts.read_pairs, prompt)
        return self._encoded(prompts, {})

    def _encoded(self, prompts: CallPrompts, parameters: Mapping[str, Any]) -> Any:
        started = time.perf_counter()
        normalized = bool(self._capabilities.get("embedding_normalized"))
        found: dict[int, dict[str, Any]] = {}
        counts: list[int] = []
        with Call(self._requests) as call:
            try:
                for part in self._prompts.tokenized(prompts):
                    counts += [len(each.tokens) for each in part]
                    asked = [
                        NewRequest(each.tokens, 1, {**parameters, "adapter_id": each.adapter}, True)
                        for each in part
                    ]
                    with self._updates.admitting():
                        call.submit(asked)
            except (TypeError, ValueError, OverflowError) as error:
                raise with_note(config_error(error)) from error
            except DriverError as error:
                raise with_note(error) from None
            for event in call.events():
                found[event.request] = {
                    "embedding": event.output.embedding(
                        parameters.get("dimensions"), normalized=normalized
                    ),
                    "meta_info": {
                        "id": prompts.prompts[event.request].name,
                        "finish_reason": _finish_reason(event.output),
                        "prompt_tokens": counts[event.request],
                        "e2e_latency": time.perf_counter() - started,
                    },
                }
        results = [found[index] for index in range(len(counts))]
        return results if prompts.is_list else results[0]


def _finish_reason(output: Any) -> dict[str, Any]:
    reason = output.finish_reason
    if reason == "length":
        return {"type": "length", "length": 0}
    if reason == "error":
        raise with_note(config_error(ValueError(output.error)))
    return {"type": "abort", "message": "Aborted"}
