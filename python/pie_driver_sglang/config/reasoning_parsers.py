"""The text that ends a model's reasoning, by the name of SGLang's reasoning parser."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.errors import ConfigError, Unsupported, nearest, quoted

_USUAL: Final = "</think>"
_FROM_TEMPLATE: Final = "response_template"
_USUAL_PARSERS: Final = (
    "deepseek-r1",
    "deepseek-v3",
    "deepseek-v4",
    "deepseek-v41",
    "dots",
    "gigachat35",
    "glm45",
    "granite_thinking_parser",
    "hunyuan",
    "interns1",
    "iquest_q1",
    "kimi_k2",
    "ling3",
    "mimo",
    "minimax",
    "minimax-append-think",
    "nanbeige",
    "nemotron_3",
    "poolside_v1",
    "qwen3",
    "qwen3-thinking",
    "step3",
    "step3p5",
)

#: By parser of any supported version of SGLang; a test compares it with the installed one's.
REASONING_ENDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(_USUAL_PARSERS, _USUAL),
        "apertus2509": "<|inner_suffix|>",
        "beam": "<|end|><|start|>assistant",
        "cohere_command4": "<|END_THINKING|>",
        "gemma4": "<channel|>",
        "gpt-oss": "<|end|>",
        "inkling": "<|end_message|>",
        "k2_horizon": "</ifm|think>",
        "kimi": "◁/think▷",
        "kimi_k3": "<|close|>think<|sep|>",
        "minimax-m3": "</mm:think>",
        "mistral": "[/THINK]",
        "muse": "<|eom|>",
    }
)


def reasoning_end(parser: str) -> str:
    """The text that ends the reasoning of a model with this parser.

    Raises:
        ConfigError: SGLang has no parser of that name.
        Unsupported: The parser reads that text from the model's response template.
    """
    if parser.lower() == _FROM_TEMPLATE:
        raise Unsupported(
            f"the reasoning parser {quoted(parser)} takes the end of reasoning from a template",
            f"name the model's own parser, one of: {', '.join(sorted(REASONING_ENDS))}",
        )
    found = REASONING_ENDS.get(parser.lower())
    if found is None:
        raise ConfigError(
            f"there is no reasoning parser {quoted(parser)}",
            nearest(parser, REASONING_ENDS) or f"there are: {', '.join(sorted(REASONING_ENDS))}",
        )
    return found
