"""Every field of SGLang's `ServerArgs`, its type and who sets it; every flag and architecture.

They are those of the supported version that is installed, of the newest one before another version,
and of the oldest one without SGLang. `tools/generate_server_args.py` writes a list for each version
of what has changed since the one before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from pie_driver_sglang.config import server_args_v0517, server_args_v0523
from pie_driver_sglang.config.server_arg import Flag, ServerArg, ServerArgList
from pie_driver_sglang.config.sglang_versions import adapter_version


def _merged(changes: Iterable[ServerArgList]) -> Iterable[ServerArgList]:
    fields: dict[str, ServerArg] = {}
    flags: dict[str, Flag] = {}
    architectures: frozenset[str] = frozenset()
    for each in changes:
        changed = {**fields, **each.fields}
        fields = {name: changed[name] for name in sorted(changed.keys() - each.gone)}
        architectures = (architectures | each.architectures) - each.gone
        flags = {k: v for k, v in {**flags, **each.flags}.items() if k not in each.gone}
        yield ServerArgList(
            each.version, MappingProxyType(fields), architectures, flags=MappingProxyType(flags)
        )


LISTS: Final[Mapping[str, ServerArgList]] = MappingProxyType(
    {x.version: x for x in _merged((server_args_v0517.CHANGES, server_args_v0523.CHANGES))}
)
"""By the version of SGLang, from the oldest to the newest."""
_INSTALLED: Final = LISTS[adapter_version().sglang]

SGLANG_VERSION: Final = _INSTALLED.version
SERVER_ARGS: Final = _INSTALLED.fields
SGLANG_FLAGS: Final = _INSTALLED.flags
ARCHITECTURES: Final = _INSTALLED.architectures
