"""Checks of a command line of `serve` before anything is imported, downloaded or loaded."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.config.flag_names import field_of, pop_flags
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.frontends.common.argument_names import unknown_argument
from pie_driver_sglang.frontends.common.arguments import engine_of, known_arguments

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = "30000"
_REASONS: Final[Mapping[int, tuple[str, str]]] = MappingProxyType(
    {
        errno.EADDRINUSE: ("is in use", "name another `--port`, or stop what uses it"),
        errno.EACCES: ("needs the rights of root", "name a `--port` from 1024 on"),
        errno.EADDRNOTAVAIL: ("is no address of this host", "name another `--host`"),
    }
)
"""Why a port cannot be listened at, and what to do, by the error."""


def check_option_names(arguments: Sequence[str]) -> None:
    """Check the engine and the names of `--option`; values are checked with the model's config.

    Raises:
        ConfigError: There is no such engine or option.
    """
    given = dict(parse_option(text) for text in _values(arguments, "--option"))
    known = known_arguments(engine_of(given))
    for name in given.keys() - known - {"engine"}:
        raise unknown_argument(name, known)


def check_port(arguments: Sequence[str]) -> None:
    """Check that the server's port is free, so that no model is loaded in vain.

    Raises:
        ConfigError: It is no port, or in use.
    """
    if "--no-gateway" in arguments:
        # gRPC servers have ports of their own.
        return
    [port] = _values(arguments, "--port")[-1:] or [DEFAULT_PORT]
    [host] = _values(arguments, "--host")[-1:] or [DEFAULT_HOST]
    if not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigError(f"`--port` is {quoted(port)}", "name a port from 1 to 65535")
    host = host.strip("[]")
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    # Names that no resolver knows are left to the server.
    with contextlib.suppress(socket.gaierror, UnicodeError):
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
        codes = [_unusable(family, address) for family, _, _, _, address in found]
        # An address that this host lacks matters if it has none of them.
        lacking = errno.EADDRNOTAVAIL if None not in codes else None
        code = next((each for each in codes if each not in (None, errno.EADDRNOTAVAIL)), lacking)
        if code is not None:
            reason, hint = _REASONS[code]
            raise ConfigError(f"{name} {reason}", hint)


def _unusable(family: int, address: Any) -> int | None:
    """Why a server cannot listen there, one of `_REASONS`; None if it can."""
    try:
        with socket.socket(family) as probe:
            # As servers do: connections of an earlier one that are being closed do not matter, and
            # neither does a server of the same port for IPv4.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EAFNOSUPPORT:
            return errno.EADDRNOTAVAIL
        return error.errno if error.errno in _REASONS else None
    return None


def _values(arguments: Sequence[str], name: str) -> list[str]:
    """The values of a flag, in order, also where it is abbreviated."""
    found: Iterable[tuple[str, str]]
    found, _ = pop_flags(arguments, lambda flag: flag == name or field_of(flag) == name[2:] or None)
    return [value for _, value in found]
