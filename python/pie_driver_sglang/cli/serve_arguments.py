"""The command line of `serve`: names of flags in full, the model, and the file of `--config`."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.config import flag_names
from pie_driver_sglang.config.api_keys import KEY_VARIABLES
from pie_driver_sglang.config.http_limits import HTTP_FLAGS
from pie_driver_sglang.config.server_args import SGLANG_FLAGS
from pie_driver_sglang.errors import ConfigError, quoted, reason
from pie_driver_sglang.frontends.gateway.gateway_flags import GATEWAY_FLAGS
from pie_driver_sglang.frontends.sglang_server.served_flags import (
    OWN_NAMES,
    refuse_other_engines_flags,
    unknown_flags,
)

SHORT_NAMES: Final = {"--model": "--model-path", "--tp": "--tp-size", "--dp": "--dp-size"}
"""Short names that the other commands have, too."""
_ONE_VALUE: Final = (*OWN_NAMES, "--gateway-arg")
"""Flags of this command that take one value and are in no table."""
_REPEATED: Final = ("--option", "--gateway-arg")
"""Flags that are given once for each value."""
_CONFIG: Final = "--config"


def expand_arguments(arguments: Sequence[str]) -> list[str]:
    """The flags of a command line in full, with those of the file of `--config` before them.

    A flag of the file that the command line has, too, is left out, unless it is given once for each
    value.

    Raises:
        ConfigError: The file is missing or no table of flags, or there are several.
    """
    of_file, rest = take_config_file(arguments)
    words = normalized(rest)
    given = {_setting(word) for word in words if word not in _REPEATED}
    kept = (flag for flag in of_file if _setting(flag[0]) not in given)
    return [*itertools.chain.from_iterable(kept), *words]


def take_config_file(arguments: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The flags of the file that `--config` names, in full, and the other arguments.

    Returns:
        Each flag of the file with its values, and what is left of the command line.

    Raises:
        ConfigError: The file is missing or no table of flags, or there are several.
    """
    # What follows one of these is its value, such as a flag of smg.
    pairs = list(zip(["", *arguments], arguments, strict=False))
    hidden = {f"\0{at}": word for at, (before, word) in enumerate(pairs) if before in _ONE_VALUE}
    shown = [f"\0{at}" if before in _ONE_VALUE else word for at, (before, word) in enumerate(pairs)]
    found, rest = flag_names.pop_flags(
        shown, lambda flag: flag_names.field_of(flag) == "config" or None
    )
    if len(found) > 1:
        raise ConfigError(f"`{_CONFIG}` is given {len(found)} times", "put all flags into one file")
    of_file = [flag for _, path in found for flag in _flags_of_file(path)]
    return of_file, [hidden.get(word, word) for word in rest]


def _flags_of_file(path: str) -> list[list[str]]:
    """The flags of a file, each with its values, as words of a command line."""
    try:
        table = _read_table(Path(path))
        names = [f"--{name}" for name, _ in table]
        refuse_other_engines_flags(names)
        if unknown := [name for name in names if "=" in name] or unknown_names(names):
            raise unknown_flags(unknown, known_flags())
        return [words for name, value in table for words in _words_of(name, value)]
    except ConfigError as error:
        raise ConfigError(f"`{_CONFIG}` names {quoted(path)}: {error}", error.hint) from None


def _read_table(path: Path) -> list[tuple[str, Any]]:
    """The flags of a YAML file, and their values."""
    if not path.is_file():
        raise ConfigError("there is no such file", "name a YAML file with flags")
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise ConfigError("it is no YAML file by its name", "name a file that ends in .yaml")
    # SGLang depends on it, and not every command needs SGLang.
    import yaml

    try:
        table = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(reason(error), "name a readable YAML file") from error
    if not isinstance(table, dict) or not all(isinstance(name, str) for name in table):
        raise ConfigError("it is no table of flags", "write one `flag: value` a line")
    return list(table.items())


def _words_of(name: str, value: Any) -> Iterator[list[str]]:
    """A flag in full and its values, in the way of SGLang's server; several times if repeated."""
    flag = _full_flag(f"--{name}")
    if flag_names.field_of(flag) == "config":
        raise ConfigError("it names another file", "put all flags into one file")
    is_switch = flag in known_flags() and values_after(flag) == 0
    if value is None or (is_switch and not isinstance(value, bool)):
        expected = "true or false" if is_switch else "a value"
        raise ConfigError(f"`{name}` is {quoted(value)}", f"expected {expected}")
    if is_switch:
        if value:
            yield [flag]
        return
    items = [_text(item) for item in (value if isinstance(value, list) else [value])]
    if flag in _REPEATED:
        yield from ([flag, item] for item in items)
    elif len(items) == 1 and items[0].startswith("-"):
        # As a word of its own it would be taken for a flag.
        yield [f"{flag}={items[0]}"]
    elif items:
        yield [flag, *items]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def normalized(arguments: Sequence[str]) -> list[str]:
    """The arguments with SGLang's flag names in full, and the model as `--model-path`.

    The model is the first value that no flag takes, else the last value of a list whose others look
    different.
    """
    flags: list[tuple[str, list[str]]] = [("", [])]
    for argument in arguments:
        is_value = _has_space(argument) or (flags[-1][0] in _ONE_VALUE and not flags[-1][1])
        if argument.startswith("-") and not is_value:
            name, equals, value = argument.partition("=")
            flags.append((f"{_full_flag(name)}{equals}{value}", []))
        else:
            flags[-1][1].append(argument)
    is_named = any(flag.partition("=")[0] == "--model-path" for flag, _ in flags)
    surplus = (values.pop(most) for flag, values in flags if len(values) > (most := _most(flag)))
    model = next(surplus, None)
    if model is None and not is_named:
        lists = (values for flag, values in flags if flag_names.field_of(flag))
        model = next((values.pop() for values in lists if _ends_differently(values)), None)
    found = [word for flag, values in flags for word in (flag, *values)][1:]
    if model is None:
        return found
    # Of two models one would be ignored: as a flag's surplus value it is an error.
    return [model, *found] if is_named else ["--model-path", model, *found]


def _has_space(argument: str) -> bool:
    """Whether the name of a flag would have a space: `argparse` takes such a word for a value."""
    return " " in argument.partition("=")[0]


def _full_flag(flag: str) -> str:
    """The flag of SGLang that a flag abbreviates; short names of this command are others."""
    name = flag if flag in known_flags() else flag_names.full_flag(flag)
    return SHORT_NAMES.get(name, name)


def _setting(flag: str) -> str:
    """What a flag sets, by whichever of its names."""
    name = flag.partition("=")[0]
    return flag_names.field_of(name) or name


def _ends_differently(values: Sequence[str]) -> bool:
    """Whether the last of several values has another form than all others."""
    return len(values) > 1 and _form(values[-1]) not in map(_form, values[:-1])


def _form(value: str) -> int:
    """Which of number, `name=value` or JSON, path or repository, and plain word a value is."""
    patterns = (r"[\d.e+-]+", r".*[={].*", r".*/.*", r".*")
    return next(form for form, each in enumerate(patterns) if re.fullmatch(each, value, re.DOTALL))


def _most(flag: str) -> int:
    """The most values that may follow a flag; for an unknown flag, any number."""
    return 0 if not flag or "=" in flag else values_after(flag)


def values_after(flag: str) -> int:
    """The most values that may follow a flag of this command or of SGLang."""
    name = flag.removeprefix("--")
    if flag in _ONE_VALUE or name.removesuffix("-file") in KEY_VARIABLES:
        return 1
    if name in HTTP_FLAGS:
        return int(HTTP_FLAGS[name].read is not None)
    own = GATEWAY_FLAGS.get(name.replace("-", "_"))
    if own is not None:
        return int(own[0] is not None)
    return flag_names.value_counts(flag)[1]


def known_flags() -> set[str]:
    """All flags of this command."""
    files = (f"{name}-file" for name in KEY_VARIABLES)
    own = {
        f"--{name.replace('_', '-')}"
        for name in (*GATEWAY_FLAGS, *HTTP_FLAGS, *KEY_VARIABLES, *files)
    }
    return {*SGLANG_FLAGS, *_ONE_VALUE, *own}


def unknown_names(arguments: Sequence[str]) -> list[str]:
    """The flags that are neither known nor an abbreviation."""
    known = known_flags()
    # What follows one of these is its value, such as a flag of smg.
    pairs = zip(["", *arguments], arguments, strict=False)
    flags = [word for before, word in pairs if before not in _ONE_VALUE and not _has_space(word)]
    names = [flag.partition("=")[0] for flag in flags if re.match(r"--|-[A-Za-z]", flag)]
    return [name for name in names if name not in known and not flag_names.starting_with(name)]
