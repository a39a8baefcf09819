"""Settings of a server with several tokenizer workers, which uvicorn starts as processes.

A worker unpickles the settings, which name its class. This module imports no HTTP server, because
the scheduler and the detokenizer unpickle the settings, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import requests
from sglang.srt.server_args import ServerArgs

from pie_driver_sglang.frontends.sglang_server.compat.selection import launch_compat

_LOOK_S: Final = 0.5
_ANSWER_S: Final = 60.0


class PieSettings(ServerArgs):
    """Settings of a server with our scheduler."""

    def get_tokenizer_worker_class(self) -> Any:
        """The class that rejects what our scheduler does not support."""
        from pie_driver_sglang.frontends.sglang_server.compat import tokenizer_managers

        return tokenizer_managers.PieWorker


class MsgpackSettings(ServerArgs):
    """Settings of a server with SGLang's own scheduler."""

    def get_tokenizer_worker_class(self) -> Any:
        """The class for messages in msgpack."""
        from pie_driver_sglang.frontends.sglang_server.compat import tokenizer_managers

        return tokenizer_managers.MsgpackWorker


def set_worker_class(settings: ServerArgs, *, is_ours: bool) -> None:
    """Make the settings name the class of our workers."""
    # A copy by its fields would be resolved a second time.
    settings.__class__ = PieSettings if is_ours else MsgpackSettings


@contextlib.contextmanager
def notifying_ready(settings: ServerArgs, ready: Callable[[], None]) -> Iterator[None]:
    """Within it, a thread calls `ready` once a worker is healthy.

    With several workers SGLang has no such callback. The thread starts with their router, after all
    processes that may be forked.
    """
    from sglang.srt.entrypoints import engine

    def make_router(*arguments: Any) -> Any:
        threading.Thread(target=_watch, args=(settings, ready), name="ready", daemon=True).start()
        return router(*arguments)

    router = engine.MultiTokenizerRouter
    with mock.patch.object(engine, "MultiTokenizerRouter", make_router):
        yield


def _watch(settings: ServerArgs, ready: Callable[[], None]) -> None:
    url, verify = f"{settings.url()}/health", launch_compat().verifies_ssl(settings)
    while not _is_healthy(url, verify):
        time.sleep(_LOOK_S)
    ready()


def _is_healthy(url: str, verify: Any) -> bool:
    try:
        return requests.get(url, timeout=_ANSWER_S, verify=verify).status_code == 200
    except requests.RequestException:
        return False
