"""Corrections of SGLang's Ollama endpoints."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

from fastapi import HTTPException
from sglang.srt.entrypoints.ollama.serving import OllamaServing

from pie_driver_sglang.frontends.sglang_server.error_responses import short

_STREAMS: Final = {
    name: getattr(OllamaServing, name)
    for name in ("_stream_chat_response", "_stream_generate_response")
}


def correct_ollama() -> None:
    """Fix chats with transformers 5, the last text of streams, and errors."""
    OllamaServing.__init__ = _init
    for name, stream in _STREAMS.items():
        setattr(OllamaServing, name, _with_stream_errors(stream))


def _with_stream_errors(stream: Callable[..., Any]) -> Callable[..., Any]:
    async def respond(*arguments: Any) -> Any:
        response = await stream(*arguments)
        response.body_iterator = _with_error(response.body_iterator)
        return response

    return respond


async def _with_error(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Report an error as a line of the stream, whose status was sent before."""
    try:
        async for part in parts:
            yield part
    except HTTPException as error:
        yield json.dumps({"error": short(error.detail)}).encode() + b"\n"


def _init(self: OllamaServing, tokenizer_manager: Any) -> None:
    self.tokenizer_manager = Manager(tokenizer_manager)


class Manager:
    """A tokenizer manager adapted to these endpoints."""

    def __init__(self, manager: Any) -> None:
        """Wrap a manager."""
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        """Other attributes are the manager's."""
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the manager's outputs.

        Raises:
            HTTPException: 400, where the manager rejects the request.
        """
        _correct(obj)
        adds_up = self._manager.server_args.incremental_streaming_output
        text = ""
        try:
            async for part in self._manager.generate_request(obj, request):
                text = text + part["text"] if adds_up else part["text"]
                whole = {**part, "text": text}
                if obj.stream and part["meta_info"]["finish_reason"] is not None:
                    # The endpoints ignore the text of the final part.
                    yield {**whole, "meta_info": {}}
                yield whole
        except ValueError as error:
            raise HTTPException(400, str(error)) from error


def _correct(obj: Any) -> None:
    if isinstance(obj.input_ids, Mapping):
        # transformers 5 has a chat's tokens in a dictionary.
        obj.input_ids = obj.input_ids["input_ids"]
    if "seed" in obj.sampling_params:
        obj.sampling_params["sampling_seed"] = obj.sampling_params.pop("seed")
