"""What SGLang's endpoints of Ollama get wrong."""

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
    """Has chats answered at all, streams end with their last text, and mistakes answered."""
    OllamaServing.__init__ = _init
    for name, stream in _STREAMS.items():
        setattr(OllamaServing, name, _telling(stream))


def _telling(stream: Callable[..., Any]) -> Callable[..., Any]:
    async def respond(*arguments: Any) -> Any:
        response = await stream(*arguments)
        response.body_iterator = _with_error(response.body_iterator)
        return response

    return respond


async def _with_error(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream has its status before it is refused, so that Ollama's have the error in a line."""
    try:
        async for part in parts:
            yield part
    except HTTPException as error:
        yield json.dumps({"error": short(error.detail)}).encode() + b"\n"


def _init(self: OllamaServing, tokenizer_manager: Any) -> None:
    self.tokenizer_manager = Manager(tokenizer_manager)


class Manager:
    """The tokenizer manager, as these endpoints take it to be."""

    def __init__(self, manager: Any) -> None:
        """Stands in front of a manager."""
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        """Everything else is the manager's."""
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[dict[str, Any]]:
        """What the manager yields.

        Raises:
            HTTPException: 400, where the manager does not take the request.
        """
        _correct(obj)
        adds_up = self._manager.server_args.incremental_streaming_output
        text = ""
        try:
            async for part in self._manager.generate_request(obj, request):
                text = text + part["text"] if adds_up else part["text"]
                whole = {**part, "text": text}
                if obj.stream and part["meta_info"]["finish_reason"] is not None:
                    # Of a part that ends a stream they leave out the text.
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
