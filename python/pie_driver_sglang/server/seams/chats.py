"""What SGLang's chat endpoint gets wrong."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call import utils

_SGLANGS: Final = OpenAIServingChat._process_logprobs_tokens
_SCHEMA: Final = utils._get_tool_schema
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


def _get_tool_schema(tool: Any) -> dict[str, Any]:
    schema = _SCHEMA(tool)
    properties = schema["properties"]
    arguments = {**_OBJECT, **properties["parameters"]}
    return {**_OBJECT, **schema, "properties": {**properties, "parameters": arguments}}
