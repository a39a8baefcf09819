"""Command lines: the flags of SGLang's server by all names, and how many values each takes.

SGLang's parser, whose import takes seconds, is not needed: the generated list has what it knows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.config.server_args import SGLANG_FLAGS
from pie_driver_sglang.errors import ConfigError

_NARGS: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {"": (1, 1), "0": (0, 0), "?": (0, 1), "*": (0, sys.maxsize), "+": (1, sys.maxsize)}
)
"""The fewest and the most values of a flag, by argparse's `nargs`."""
_TAKE_FLAGS: Final = ("--gateway-arg",)
"""Flags whose value may be a flag."""


def full_flag(flag: str) -> str:
    """The flag of SGLang that a flag abbreviates, as its parser reads it; else the flag itself."""
    found = starting_with(flag)
    return found[0] if len(found) == 1 else flag


def starting_with(flag: str) -> list[str]:
    """The flags of SGLang that a flag stands for: itself, or those that it abbreviates."""
    if flag in SGLANG_FLAGS:
        return [flag]
    return sorted(each for each in SGLANG_FLAGS if each.startswith(flag)) if len(flag) > 2 else []


def field_of(flag: str) -> str:
    """The field that a flag sets, also if the flag is abbreviated; empty for an unknown flag."""
    fields = {SGLANG_FLAGS[each].field for each in starting_with(flag)}
    return fields.pop() if len(fields) == 1 else ""


def flag_of(field: str) -> str | None:
    """The flag that sets a field; None for a field that the command line has no flag for."""
    usual = f"--{field.replace('_', '-')}"
    named = (flag for flag, about in SGLANG_FLAGS.items() if about.field == field)
    return usual if usual in SGLANG_FLAGS else next(named, None)


def value_counts(flag: str) -> tuple[int, int]:
    """The fewest and the most values that follow a flag of SGLang; any for an unknown flag."""
    found = SGLANG_FLAGS.get(full_flag(flag))
    return (0, sys.maxsize) if found is None else _NARGS[found.nargs]


def pop_flags(
    arguments: Sequence[str], takes_value: Callable[[str], bool | None]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Take flags out of a command line.

    Args:
        arguments: The command line.
        takes_value: Whether a flag takes a value; None for one that is not taken out.

    Returns:
        The flags with their values, which are empty for those without, and the other arguments.

    Raises:
        ConfigError: A value is missing, or there is one for a flag without.
    """
    found: list[tuple[str, str]] = []
    rest, queue = [], list(arguments)
    while queue:
        flag, equals, value = (argument := queue.pop(0)).partition("=")
        takes = takes_value(flag) if flag.startswith("--") else None
        if takes is None:
            rest.append(argument)
        elif not takes:
            if equals:
                raise ConfigError(f"`{flag}` takes no value", f"write `{flag}` alone")
            found.append((flag, ""))
        elif equals:
            found.append((flag, value))
        elif queue and (flag in _TAKE_FLAGS or not queue[0].startswith("--")):
            found.append((flag, queue.pop(0)))
        else:
            # What looks like a flag is none's value, as with argparse.
            hint = f"write `{flag}=VALUE`; `pie-sglang serve --help` lists all flags"
            raise ConfigError(f"`{flag}` has no value", hint)
    return found, rest
