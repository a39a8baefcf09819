"""API keys of a frontend: from the environment, a file or the command line.

Every user of the host can read the arguments of a process (`/proc/PID/cmdline`), so keys are passed
on by environment or pipe, and masked in the title of a process that was given one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from pie_driver_sglang.config.flag_names import pop_flags
from pie_driver_sglang.errors import ConfigError, quoted, reason

#: Environment variable of each key, by the flag that gives it.
KEY_VARIABLES: Final[Mapping[str, str]] = MappingProxyType(
    {"api-key": "PIE_API_KEY", "admin-api-key": "PIE_ADMIN_API_KEY"}
)
KEY_FLAGS: Final = """\
  --api-key KEY        key that clients must send; better by PIE_API_KEY or --api-key-file, which
                       other users of the host cannot read
  --api-key-file FILE  a file with the key
  --admin-api-key KEY, --admin-api-key-file FILE, PIE_ADMIN_API_KEY
                       the same for the key of control and administration
"""
_MOST_BYTES: Final = 4096
HIDDEN: Final = "***"


class ApiKeys(NamedTuple):
    """The keys of a server, masked in its `repr`.

    Attributes:
        api: What clients send; None for a server without.
        admin: What administrators send.
    """

    api: str | None = None
    admin: str | None = None

    def __repr__(self) -> str:
        """Show which keys are set."""
        shown = [HIDDEN if key else "None" for key in self]
        return f"ApiKeys(api={shown[0]}, admin={shown[1]})"

    def variables(self) -> dict[str, str]:
        """Environment variables that give a child process the keys."""
        pairs = zip(KEY_VARIABLES.values(), self, strict=True)
        return {name: key for name, key in pairs if key is not None}


def take_keys(
    arguments: Sequence[str], environment: MutableMapping[str, str] = os.environ
) -> tuple[ApiKeys, list[str]]:
    """Take the keys out of a command line and an environment, whose children must not inherit it.

    Args:
        arguments: The command line.
        environment: Where the variables are removed.

    Returns:
        The keys, and the other arguments.

    Raises:
        ConfigError: A key is empty, given twice, or its file cannot be read.
    """

    def takes_value(flag: str) -> bool | None:
        return _name(flag).removesuffix("-file") in KEY_VARIABLES or None

    found: dict[str, list[str]] = {name: [] for name in KEY_VARIABLES}
    given, rest = pop_flags(arguments, takes_value)
    for flag, value in given:
        name = _name(flag).removesuffix("-file")
        found[name].append(value if _name(flag) == name else _read_key(_name(flag), value))
    for name, variable in KEY_VARIABLES.items():
        if (value := environment.pop(variable, "")) and not found[name]:
            found[name].append(value)
    return ApiKeys(*(_one(name, keys) for name, keys in found.items())), rest


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("_", "-")


def hide_keys(arguments: Sequence[str]) -> list[str]:
    """A command line with its keys masked."""
    hidden: list[str] = []
    follows = False
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        is_key = flag.startswith("--") and _name(flag) in KEY_VARIABLES
        hidden.append(HIDDEN if follows else f"{flag}={HIDDEN}" if is_key and equals else argument)
        follows = is_key and not equals
    return hidden


def digest(key: str) -> bytes:
    """The SHA-256 of a key, which is all that is kept of it."""
    return hashlib.sha256(key.encode()).digest()


def matches(given: str, wanted: bytes) -> bool:
    """Whether a key has this digest, in constant time."""
    return secrets.compare_digest(digest(given), wanted)


def _one(name: str, keys: list[str]) -> str | None:
    if len(keys) > 1:
        raise ConfigError(f"`--{name}` is given {len(keys)} times", "give one key")
    if not keys:
        return None
    if not keys[0].isascii() or not keys[0].isprintable() or " " in keys[0] or not keys[0]:
        raise ConfigError(
            f"`--{name}` is empty, or has spaces or characters that no HTTP header has",
            "use printable ASCII, e.g. the output of `openssl rand -hex 32`",
        )
    return keys[0]


def _read_key(flag: str, path: str) -> str:
    try:
        with Path(path).expanduser().open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
        return data.decode("ascii").strip()
    except (OSError, ValueError) as error:
        text = reason(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"cannot read a key from `--{flag}` {quoted(path)}: {text}",
            "name a file whose only line is the key",
        ) from error
