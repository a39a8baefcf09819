"""A setting of an engine, as the generated lists of settings describe it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class ServerArg(NamedTuple):
    """One field of SGLang's `ServerArgs`, or of vLLM's `EngineArgs`.

    `type` lists what TOML may hold, e.g. `int` or `str | table`. `owner` is None when the user
    may set the field, `key` when the driver has an option of that name, else who sets it.
    `choices` lists the allowed words, if they are known; with `open_choices` an SGLang plugin may
    add more. `default` is that of SGLang's command line.
    """

    type: str
    owner: str | None = None
    choices: tuple[str, ...] = ()
    open_choices: bool = False
    default: Any = None


class Flag(NamedTuple):
    """A flag of SGLang's command line: the field that it sets, which may be none of `ServerArgs`.

    `nargs` is argparse's: empty for one value, `0` for none, which sets `value`.
    """

    field: str
    nargs: str = ""
    value: Any = None


class ServerArgList(NamedTuple):
    """The fields of `ServerArgs` of a version of SGLang, its flags, and its model classes.

    `architectures` are the names that a `config.json` has for the classes. A generated list has
    what is new or changed since the version before, and in `gone` the names that only that one has.
    """

    version: str
    fields: Mapping[str, ServerArg]
    architectures: frozenset[str]
    gone: frozenset[str] = frozenset()
    flags: Mapping[str, Flag] = MappingProxyType({})
