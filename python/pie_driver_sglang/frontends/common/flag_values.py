"""Values of SGLang's flags, by the types of its settings, without SGLang's parser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.config.flag_names import flag_of, full_flag, value_counts
from pie_driver_sglang.config.server_arg import Flag, ServerArg
from pie_driver_sglang.config.server_args import SERVER_ARGS, SGLANG_FLAGS
from pie_driver_sglang.errors import ConfigError, quoted

_PLAIN: Final = frozenset(
    {"bool", "float", "int", "str", "table", "list[float]", "list[int]", "list[str]"}
)
"""Types that SGLang's parser and this module read alike."""
_SUFFIXES: Final[Mapping[str, int]] = MappingProxyType(
    {name: 1000**power for power, name in enumerate("kMGT", 1)}
    | {f"{name}i": 1024**power for power, name in enumerate("KMGT", 1)}
)
"""Of integers, as in SGLang: `8k`, `1.5M`, `64Ki`."""


def read_flags(arguments: Sequence[str]) -> dict[str, Any] | None:
    """The values of a command line's flags that are not the defaults, by their fields.

    Args:
        arguments: Flags of SGLang's server.

    Returns:
        None if only SGLang's parser can read one of them.

    Raises:
        ConfigError: A value is missing, of a wrong type, or none of the choices.
    """
    found: dict[str, Any] = {}
    is_complete, queue = True, list(arguments)
    while queue:
        flag, equals, inline = queue.pop(0).partition("=")
        if not flag.startswith("-"):
            raise ConfigError(
                f"{quoted(flag + equals + inline)} belongs to no flag",
                "`pie-sglang serve --help` lists all flags",
            )
        fewest, most = value_counts(flag)
        values = [inline] if equals else []
        # A negative number looks like a flag.
        while queue and not equals and len(values) < most and _is_value(queue[0]):
            values.append(queue.pop(0))
        if len(values) < fewest:
            raise ConfigError(f"`{flag}` has no value", "see `pie-sglang serve --help`")
        if len(values) > most:
            raise ConfigError(f"`{flag}` takes no value", f"write `{flag}` alone")
        about = SGLANG_FLAGS.get(full_flag(flag), Flag(""))
        field = SERVER_ARGS.get(about.field)
        if field is None or not _is_plain(field, about, values):
            is_complete = False
        else:
            found[about.field] = _of_type(about, field, values)
    given = {name: value for name, value in found.items() if value != SERVER_ARGS[name].default}
    return given if is_complete else None


def _is_plain(field: ServerArg, about: Flag, values: list[str]) -> bool:
    """Whether SGLang's parser reads the values of a flag as this module does."""
    if not values:
        return about.value is not None
    kind = field.type
    if kind.startswith("list[str] | ") and not any(value.startswith("{") for value in values):
        # A list of texts, where none is JSON.
        kind = "list[str]"
    # It makes no list of a single value.
    return kind in _PLAIN and kind.startswith("list") == (about.nargs in ("*", "+"))


def _of_type(about: Flag, field: ServerArg, values: list[str]) -> Any:
    if not values:
        return about.value
    name = about.field
    read = [convert_value(name, scalar(field.type), each) for each in values]
    if field.type.startswith("list"):
        return read
    check_choice(name, field, read[0])
    return read[0]


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _is_number(word)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def check_choice(name: str, field: ServerArg, value: Any) -> None:
    """Check that a value is one of those that SGLang knows.

    Raises:
        ConfigError: It is not, and no plugin can have added it.
    """
    if field.choices and not field.open_choices and value not in field.choices:
        raise ConfigError(
            f"{flag_name(name)} is {quoted(value)}", f"expected one of {', '.join(field.choices)}"
        )


def convert_value(name: str, reader: Callable[[str], Any], text: str) -> Any:
    """A value of a flag by its reader.

    Raises:
        ConfigError: The reader raises ValueError.
    """
    try:
        return reader(text)
    except ValueError:
        wanted = {
            int: "an integer",
            integer: "an integer",
            float: "a number",
            boolean: "true or false",
        }
        expected = wanted.get(reader, "a JSON object")
        raise ConfigError(f"{flag_name(name)} is {quoted(text)}", f"expected {expected}") from None


def scalar(kind: str) -> Callable[[str], Any]:
    """The reader of one value of a type in `SERVER_ARGS`."""
    inner = kind.removeprefix("list[").split("]")[0].split("|")[0].strip()
    readers: Mapping[str, Callable[[str], Any]] = {"int": integer, "float": float}
    if inner == "table":
        return json.loads
    return readers.get(inner, str)


def integer(text: str) -> int:
    """An integer, as `8192`, `8k` or `8Ki`; ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)", text.strip())
    if found is None or ("." in found[1] and found[2].endswith("i")):
        return int(text)
    return int(Decimal(found[1]) * _SUFFIXES[found[2]])


def boolean(text: str) -> bool:
    """`true`, `1`, `false` or `0`; ValueError for anything else."""
    values = {"true": True, "1": True, "false": False, "0": False}
    if text.lower() not in values:
        raise ValueError
    return values[text.lower()]


def flag_name(name: str) -> str:
    """The flag of a field, in backquotes."""
    return f"`{flag_of(name) or '--' + name.replace('_', '-')}`"
