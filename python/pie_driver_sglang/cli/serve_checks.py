"""Checks of a command line of `serve` before anything is imported, downloaded or loaded."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.config.flag_names import pop_flags
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.frontends.common.argument_names import unknown_argument
from pie_driver_sglang.frontends.common.arguments import known_arguments

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = "30000"
_CONFIG: Final = "--config"


def check_config_file(arguments: Sequence[str]) -> None:
    """Check that the file that `--config` names exists.

    Raises:
        ConfigError: It does not.
    """
    for path in _values(arguments, _CONFIG):
        if not Path(path).is_file():
            raise ConfigError(
                f"`{_CONFIG}` names {quoted(path)}, which is no file", "name a YAML file with flags"
            )


def check_option_names(arguments: Sequence[str]) -> None:
    """Check the names of `--option`; their values are checked with the model's configuration.

    Raises:
        ConfigError: There is no such option.
    """
    given = dict(parse_option(text) for text in _values(arguments, "--option"))
    known = known_arguments(given.get("engine", "sglang"))
    for name in given.keys() - known - {"engine"}:
        raise unknown_argument(name, known)


def check_port(arguments: Sequence[str]) -> None:
    """Check that the server's port is free, so that no model is loaded in vain.

    Raises:
        ConfigError: It is no port, or in use.
    """
    if _values(arguments, _CONFIG):
        # The file may set both.
        return
    [port] = _values(arguments, "--port")[-1:] or [DEFAULT_PORT]
    [host] = _values(arguments, "--host")[-1:] or [DEFAULT_HOST]
    if not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigError(f"`--port` is {quoted(port)}", "name a port from 1 to 65535")
    with contextlib.suppress(socket.gaierror):
        [address, *_] = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        _bind(address[0], address[4], f"{host}:{port}")


def _bind(family: int, address: Any, name: str) -> None:
    with socket.socket(family) as probe:
        # As servers do: connections of an earlier one that are being closed do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            reasons = {
                errno.EADDRINUSE: ("is in use", "name another `--port`, or stop what uses it"),
                errno.EACCES: ("needs the rights of root", "name a `--port` from 1024 on"),
                errno.EADDRNOTAVAIL: ("is no address of this host", "name another `--host`"),
            }
            if error.errno in reasons:
                reason, hint = reasons[error.errno]
                raise ConfigError(f"{name} {reason}", hint) from None


def _values(arguments: Sequence[str], name: str) -> list[str]:
    """The values of a flag, in order."""
    found: Iterable[tuple[str, str]]
    found, _ = pop_flags(arguments, lambda flag: flag == name or None)
    return [value for _, value in found]
