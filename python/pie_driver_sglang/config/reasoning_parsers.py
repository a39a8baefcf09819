"""The text that ends a model's reasoning, by the name of SGLang's reasoning parser."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.errors import ConfigError, nearest, quoted

_USUAL: Final = "</think>"
_USUAL_PARSERS: Final = (
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    "glm45",
    "hunyuan",
    "interns1",
    "kimi_k2",
    "mimo",
    "minimax",
    "minimax-append-think",
    "nemotron_3",
    "poolside_v1",
    "qwen3",
    "qwen3-thinking",
    "step3",
    "step3p5",
)

#: By parser; a test compares it with SGLang's parsers.
REASONING_ENDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(_USUAL_PARSERS, _USUAL),
        "apertus2509": "<|inner_suffix|>",
        "cohere_command4": "<|END_THINKING|>",
        "gemma4": "<channel|>",
        "gpt-oss": "<|end|>",
        "inkling": "<|end_message|>",
        "kimi": "◁/think▷",
        "kimi_k3": "<|close|>think<|sep|>",
        "minimax-m3": "</mm:think>",
        "mistral": "[/THINK]",
    }
)


def reasoning_end(parser: str) -> str:
    """The text that ends the reasoning of a model with this parser.

    Raises:
        ConfigError: SGLang has no parser of that name.
    """
    found = REASONING_ENDS.get(parser.lower())
    if found is None:
        raise ConfigError(
            f"there is no reasoning parser {quoted(parser)}",
            nearest(parser, REASONING_ENDS) or f"there are: {', '.join(sorted(REASONING_ENDS))}",
        )
    return found
