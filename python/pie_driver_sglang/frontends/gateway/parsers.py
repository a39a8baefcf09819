"""Maps SGLang's names of tool and reasoning parsers to those of smg."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.errors import ConfigError, quoted

#: smg's parser for the same format as SGLang's; identical names are not listed.
TOOL_PARSERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cohere_command4": "cohere",
        "deepseekv3": "deepseek",
        "deepseekv31": "deepseek31",
        "deepseekv32": "deepseek32",
        "deepseekv4": "deepseek_v4",
        "deepseekv41": "deepseek_v41",
        "dots": "dots3",
        "glm": "glm45_moe",
        "glm45": "glm45_moe",
        "glm47": "glm47_moe",
        "hermes": "qwen",
        "iquest_q1": "iquest",
        "kimi_k2": "kimik2",
        "llama3": "llama",
        "minimax-m2": "minimax_m2",
        "minimax-m3": "minimax_m3",
        "nanbeige": "qwen_coder",
        "qwen25": "qwen",
        "qwen3_coder": "qwen_coder",
    }
)
REASONING_PARSERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cohere_command4": "cohere_cmd",
        "deepseek-r1": "deepseek_r1",
        "deepseek-v3": "deepseek_v31",
        "deepseek-v4": "deepseek_v4",
        "deepseek-v41": "deepseek_v41",
        "dots": "dots3",
        "iquest_q1": "iquest",
        "minimax-m3": "minimax_m3",
        "nanbeige": "qwen3",
        "nemotron_3": "nano_v3",
        "qwen3-thinking": "qwen3_thinking",
    }
)
#: Parsers of SGLang whose format smg does not support.
MISSING_TOOL_PARSERS: Final = frozenset(
    {
        "apertus2509",
        "beam",
        "gigachat3",
        "gigachat35",
        "gpt-oss",
        "hunyuan",
        "interns1",
        "lfm2",
        "ling3",
        "mimo",
        "muse",
        "poolside_v1",
        "response_template",
        "spark25",
        "step3p5",
        "trinity",
    }
)
MISSING_REASONING_PARSERS: Final = frozenset(
    {
        "apertus2509",
        "beam",
        "gigachat35",
        "gpt-oss",
        "granite_thinking_parser",
        "hunyuan",
        "interns1",
        "kimi_k2",
        "ling3",
        "mimo",
        "minimax-append-think",
        "mistral",
        "muse",
        "poolside_v1",
        "response_template",
        "step3p5",
    }
)


def tool_parser(name: str) -> str:
    """Smg's name of a tool parser.

    Raises:
        ConfigError: smg has none for this format.
    """
    return _find("--tool-call-parser", name, TOOL_PARSERS, MISSING_TOOL_PARSERS)


def reasoning_parser(name: str) -> str:
    """Smg's name of a reasoning parser.

    Raises:
        ConfigError: smg has none for this format.
    """
    return _find("--reasoning-parser", name, REASONING_PARSERS, MISSING_REASONING_PARSERS)


def gateway_choices(flag: str) -> frozenset[str]:
    """The values that the installed smg accepts for a flag; empty if it is not installed."""
    if find_spec("smg") is None:
        return frozenset()
    from smg.router_args import RouterArgs

    parser = _GatewayParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    return parser.choices(flag)


class _GatewayParser(argparse.ArgumentParser):
    def choices(self, flag: str) -> frozenset[str]:
        """The choices of a flag; empty if it accepts any value."""
        actions = [action for action in self._actions if flag in action.option_strings]
        return frozenset(choice for action in actions for choice in action.choices or ())


def _find(flag: str, name: str, names: Mapping[str, str], missing: frozenset[str]) -> str:
    choices = gateway_choices(flag)
    found = names.get(name, name)
    if found in choices or not (choices or name in missing or name == "auto"):
        # smg itself rejects a parser that it does not know.
        return found
    ours = {each for each, other in names.items() if other in choices}
    known = ", ".join(sorted({*choices, *ours}))
    raise ConfigError(
        f"`{flag}` is {quoted(name)}, for which the gateway has no parser",
        f"expected one of {known}" if known else "`smg launch --help` lists its own",
    )
