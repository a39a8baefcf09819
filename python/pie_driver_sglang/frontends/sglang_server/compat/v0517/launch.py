"""Implements `LaunchCompat`: settings are one object, which is read where a value is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import uvicorn
from sglang.srt.server_args import ServerArgs


def attach(args: ServerArgs, name: str, value: Any) -> None:
    """Past the settings' own check, which refuses a change once they are resolved."""
    vars(args)[name] = value


def take_keys(args: ServerArgs) -> tuple[str | None, str | None]:
    """Both are fields."""
    keys = args.api_key, args.admin_api_key
    vars(args).update({"api_key": None, "admin_api_key": None})
    return keys


@contextmanager
def warming_up(args: ServerArgs, token: str) -> Iterator[ServerArgs]:
    """A copy of the settings has the key."""
    with_key = copy.copy(args)
    vars(with_key)["api_key"] = token
    yield with_key


def freeze_with_key(token: Callable[[ServerArgs], str]) -> None:
    """Nothing: it does not freeze by a request."""


def verifies_ssl(args: ServerArgs) -> bool | str:
    """As the settings say it."""
    verifies: bool | str = args.ssl_verify()
    return verifies


@contextmanager
def replacing_server(run: Callable[[Any], None]) -> Iterator[None]:
    """SGLang calls `uvicorn.run`."""
    with mock.patch.object(uvicorn, "run", lambda app, **_: run(app)):
        yield
