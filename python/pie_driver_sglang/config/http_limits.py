"""Limits and permissions of the HTTP frontends, and the command-line flags that set them.

`sglang_server` enforces them in `connections` and `media`; the gateway passes on those that smg has
flags for (`gateway.smg`). docs/serve.md documents them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.config.flag_names import pop_flags
from pie_driver_sglang.errors import ConfigError, quoted

_MIB: Final = 1 << 20
_UNITS: Final = {"": 1, "k": 1 << 10, "m": _MIB, "g": 1 << 30}
_SIZE: Final = re.compile(r"(\d+)\s*([kmg]?)(?:i?b)?", re.IGNORECASE)


class ConnectionLimits(NamedTuple):
    """Limits of a server's connections.

    Attributes:
        max_connections: Connections open at once.
        max_header_bytes: Bytes of a request line and its headers.
        max_body_bytes: Bytes of a request body.
        max_file_bytes: Bytes of the body of an upload to `/v1/files`, which goes to disk.
        max_buffered_bytes: Bytes of all other request bodies that have not been answered, and
            of all uploads.
        header_timeout_s: Seconds that a connection may take to send a request head.
        body_timeout_s: Seconds in which each further 64 KiB of a body must arrive.
        write_timeout_s: Seconds that a client may go without reading its response.
        keep_alive_timeout_s: Seconds that a connection may be idle between requests.
    """

    max_connections: int = 4096
    max_header_bytes: int = 64 << 10
    max_body_bytes: int = 64 * _MIB
    max_file_bytes: int = 200 * _MIB
    max_buffered_bytes: int = 1 << 30
    header_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    keep_alive_timeout_s: float = 5.0


class BatchLimits(NamedTuple):
    """Limits of batches (`/v1/batches`).

    Attributes:
        max_stored_bytes: Bytes of all stored files, beyond which uploads are rejected.
        max_batch_lines: Lines of an input file.
        batch_concurrency: Lines of all batches that run at once.
    """

    max_stored_bytes: int = 16 << 30
    max_batch_lines: int = 50_000
    batch_concurrency: int = 256


class MediaPolicy(NamedTuple):
    """Where media that requests name by URL may come from.

    Attributes:
        allowed_domains: Hosts that media are fetched from; empty for any public host.
        allow_private_hosts: Whether hosts with private, loopback or link-local addresses are
            allowed.
        local_path: Folder whose files `file://` URLs may name; None for no local files.
        max_bytes: Bytes of all media that one request has fetched.
        timeout_s: Seconds for fetching the media of one request.
    """

    allowed_domains: tuple[str, ...] = ()
    allow_private_hosts: bool = False
    local_path: str | None = None
    max_bytes: int = 64 * _MIB
    timeout_s: float = 30.0


class HttpSettings(NamedTuple):
    """What a frontend accepts from the network.

    Attributes:
        connections: Limits of connections.
        media: Where media may come from.
        allow_pickled_adapters: Whether adapters may arrive as pickles, which can run any code.
        allow_pickled_weights: Whether weights may.
        given: The flags on the command line, by their names without dashes in front.
        batches: Limits of batches.
    """

    connections: ConnectionLimits = ConnectionLimits()
    media: MediaPolicy = MediaPolicy()
    allow_pickled_adapters: bool = False
    allow_pickled_weights: bool = False
    given: frozenset[str] = frozenset()
    batches: BatchLimits = BatchLimits()


class HttpFlag(NamedTuple):
    """A command-line flag.

    Attributes:
        read: Reads its value; None for a flag without one.
        default: Its default, for the help text.
        help: What it means.
    """

    read: Callable[[str], Any] | None
    default: str
    help: str


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ValueError
    return int(found[1]) * _UNITS[found[2].lower()]


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value <= 0:
        raise ValueError
    return value


def _count(text: str) -> int:
    if (value := int(text)) <= 0:
        raise ValueError
    return value


def _domains(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    if not names:
        raise ValueError
    return names


_EXPECTED: Final[Mapping[Callable[[str], Any], str]] = MappingProxyType(
    {
        _size: "a number of bytes, as 1048576 or 64MiB",
        _seconds: "a positive number of seconds",
        _count: "a positive integer",
        _domains: "host names with commas between them",
        str: "a folder",
    }
)
#: By name; the order is that of the help text.
HTTP_FLAGS: Final[Mapping[str, HttpFlag]] = MappingProxyType(
    {
        "max-connections": HttpFlag(_count, "4096", "connections open at once"),
        "max-header-bytes": HttpFlag(_size, "64KiB", "size of a request's headers; else 431"),
        "max-body-bytes": HttpFlag(_size, "64MiB", "size of a request body; else 413"),
        "max-file-bytes": HttpFlag(_size, "200MiB", "size of an upload to /v1/files; else 413"),
        "max-buffered-bytes": HttpFlag(_size, "1GiB", "bodies of all open requests; else 503"),
        "header-timeout": HttpFlag(_seconds, "30", "seconds to send the headers; else 408"),
        "body-timeout": HttpFlag(_seconds, "30", "seconds for each 64 KiB of a body; else 408"),
        "write-timeout": HttpFlag(_seconds, "60", "seconds that a response may stay unread"),
        "keep-alive-timeout": HttpFlag(_seconds, "5", "seconds a connection may be idle"),
        "max-stored-bytes": HttpFlag(_size, "16GiB", "all stored files; else uploads get 507"),
        "max-batch-lines": HttpFlag(_count, "50000", "lines of a batch; else it fails"),
        "batch-concurrency": HttpFlag(_count, "256", "lines of batches that run at once"),
        "max-media-bytes": HttpFlag(_size, "64MiB", "media that a request has fetched; else 400"),
        "media-timeout": HttpFlag(_seconds, "30", "seconds to fetch a request's media; else 400"),
        "allowed-media-domains": HttpFlag(_domains, "any", "hosts to fetch media from: a,b,..."),
        "allow-private-media-hosts": HttpFlag(None, "off", "fetch media from private addresses"),
        "allowed-local-media-path": HttpFlag(str, "none", "folder that file:// URLs may name"),
        "allow-pickled-adapters": HttpFlag(None, "off", "unpickle adapters: clients run code"),
        "allow-pickled-weights": HttpFlag(None, "off", "unpickle weights: clients run code"),
    }
)
_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "header-timeout": "header_timeout_s",
        "body-timeout": "body_timeout_s",
        "write-timeout": "write_timeout_s",
        "keep-alive-timeout": "keep_alive_timeout_s",
        "max-media-bytes": "max_bytes",
        "media-timeout": "timeout_s",
        "allowed-media-domains": "allowed_domains",
        "allow-private-media-hosts": "allow_private_hosts",
        "allowed-local-media-path": "local_path",
    }
)


def http_flags_help() -> str:
    """The help text of the flags."""
    lines = []
    for name, flag in HTTP_FLAGS.items():
        shown = f"--{name}" if flag.read is None else f"--{name} {name.split('-')[-1].upper()}"
        lines.append(f"  {shown:<34} {flag.help}; {flag.default}\n")
    return "".join(lines)


def take_http_flags(arguments: Sequence[str]) -> tuple[HttpSettings, list[str]]:
    """Take the flags of `HTTP_FLAGS` out of a command line.

    Returns:
        The settings, and the other arguments.

    Raises:
        ConfigError: A value is missing or wrong.
    """

    def takes_value(flag: str) -> bool | None:
        known = HTTP_FLAGS.get(flag[2:])
        return None if known is None else known.read is not None

    found, rest = pop_flags(arguments, takes_value)
    return _settings({flag[2:]: _read(flag[2:], value) for flag, value in found}), rest


def _read(name: str, text: str) -> Any:
    read = HTTP_FLAGS[name].read
    if read is None:
        return True
    try:
        if not text:
            raise ValueError
        return read(text)
    except ValueError:
        raise ConfigError(f"`--{name}` is {quoted(text)}", f"expected {_EXPECTED[read]}") from None


def _settings(values: Mapping[str, Any]) -> HttpSettings:
    fields = {_FIELDS.get(name, name.replace("-", "_")): value for name, value in values.items()}

    def of(kind: type[NamedTuple]) -> dict[str, Any]:
        return {name: fields[name] for name in kind._fields if name in fields}

    return HttpSettings(
        ConnectionLimits(**of(ConnectionLimits)),
        MediaPolicy(**of(MediaPolicy)),
        bool(fields.get("allow_pickled_adapters")),
        bool(fields.get("allow_pickled_weights")),
        frozenset(values),
        BatchLimits(**of(BatchLimits)),
    )
