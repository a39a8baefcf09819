"""Implements `LaunchCompat`: resolved settings are read-only, and read where they are published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from unittest import mock

import uvicorn
from sglang.srt.arg_groups.serving_hook import ssl_verify_of
from sglang.srt.entrypoints import http_server
from sglang.srt.runtime_context import get_serving
from sglang.srt.server_args import ServerArgs

_FREEZE: Final = http_server._freeze_gc_after_server_warmup


def attach(args: ServerArgs, name: str, value: Any) -> None:
    """What is no field lies in the record's dictionary, which is pickled, too."""
    vars(args)[name] = value


def take_keys(args: ServerArgs) -> tuple[str | None, str | None]:
    """Both are fields, which can be changed until the settings are resolved.

    Raises:
        RuntimeError: They are resolved, so the keys would stay in them.
    """
    keys = args.api_key, args.admin_api_key
    try:
        args.api_key = args.admin_api_key = None
    except AttributeError as error:
        raise RuntimeError("keys must be taken out of settings before they are resolved") from error
    # The command line, which `/server_info` shows; flags of a `--config` file are in it.
    attach(args, "_launch_command", None)
    return keys


@contextmanager
def warming_up(args: ServerArgs, token: str) -> Iterator[ServerArgs]:
    """The published settings have the key meanwhile; the application is set up before that."""
    with get_serving().override(api_key=token):
        yield args


def freeze_with_key(token: Callable[[ServerArgs], str]) -> None:
    """It takes the key from the published settings, which have none."""

    def freeze(args: ServerArgs) -> None:
        with warming_up(args, token(args)) as with_key:
            _FREEZE(with_key)

    http_server._freeze_gc_after_server_warmup = freeze


def verifies_ssl(args: ServerArgs) -> bool | str:
    """As SGLang's warm-up."""
    verifies: bool | str = ssl_verify_of(args)
    return verifies


@contextmanager
def replacing_server(run: Callable[[Any], None]) -> Iterator[None]:
    """SGLang makes a `uvicorn.Server` and runs it."""

    class Replaced(uvicorn.Server):
        def run(self, sockets: Any = None) -> None:
            run(self.config.app)

    with (
        mock.patch.object(uvicorn, "Server", Replaced),
        # A request to a server that is not there.
        mock.patch.object(http_server, "_freeze_gc_after_server_warmup", lambda _: None),
    ):
        yield
