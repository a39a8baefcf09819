"""What SGLang's chat endpoint gets wrong."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call import utils

from pie_driver_sglang.server.stores import BoundedStore

_SGLANGS: Final = OpenAIServingChat._process_logprobs_tokens
_SCHEMA: Final = utils._get_tool_schema
_MOST_RESPONSES: Final = 1000
_MOST_BYTES: Final = 256 << 20
_OBJECT: Final = {"type": "object"}


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


def correct_tool_schemas() -> None:
    """Has the call of a named tool be an object.

    SGLang's schema says which properties it has. By JSON Schema that allows a string, too; SGLang
    relies on xgrammar, which takes such a schema for an object's.
    """
    utils._get_tool_schema = _get_tool_schema


def limit_stored_responses() -> None:
    """Bounds what the endpoint of responses keeps: SGLang keeps every one for ever."""
    try:
        from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    except ImportError:
        # SGLang serves without this endpoint then.
        return
    init = OpenAIServingResponses.__init__

    def with_bounds(self: Any, *arguments: Any, **keywords: Any) -> None:
        init(self, *arguments, **keywords)
        self.response_store = BoundedStore(_MOST_RESPONSES, _MOST_BYTES)
        # A response that is there has its messages: they are larger, and are stored first.
        self.msg_store = BoundedStore(2 * _MOST_RESPONSES, 4 * _MOST_BYTES)

    OpenAIServingResponses.__init__ = with_bounds


def _get_tool_schema(tool: Any) -> dict[str, Any]:
    schema = _SCHEMA(tool)
    properties = schema["properties"]
    arguments = {**_OBJECT, **properties["parameters"]}
    return {**_OBJECT, **schema, "properties": {**properties, "parameters": arguments}}
