"""Forks the scheduler and the detokenizer from the server instead of spawning them.

This saves two imports of SGLang, seconds of a core each. The server is still single-threaded then;
where a library has given it threads, an earlier fork of it starts them (`front_forks`).
Neither of the two uses CUDA, so that they may be forks of a process that has initialized it; the
driver is started by a new interpreter, or by the fork server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any, Final
from unittest import mock

from sglang.srt.entrypoints import engine

from pie_driver_sglang.fork_server.starter import is_enabled
from pie_driver_sglang.frontends.sglang_server.compat.front_forks import (
    ForkingContext,
    ReplacedContext,
)

_INHERITED: Final = (signal.SIGCHLD, signal.SIGQUIT, signal.SIGTERM)
"""Signals whose handlers are for the server's own children."""


@contextlib.contextmanager
def forks(device: str, early: ForkingContext | None = None) -> Iterator[None]:
    """Within it, SGLang's server forks its processes where that is safe.

    Args:
        device: `cpu` or `cuda`, with an index or without.
        early: Starts them where this process has threads.
    """
    context = _Forks() if _threads() == 1 else early
    if context is None or not (device == "cpu" or is_enabled(device)):
        yield
        return
    with mock.patch.object(engine, "mp", context):
        yield


def _threads() -> int:
    """Threads of this process, native ones included: their locks would deadlock a fork."""
    return len(list(Path("/proc/self/task").iterdir()))


def run_with_default_signals(function: Callable[..., None], *arguments: Any) -> None:
    """Run the entry point of a process, with default signal handlers."""
    for number in _INHERITED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function(*arguments)


def run_and_exit(function: Callable[..., None], *arguments: Any) -> None:
    """As `run_with_default_signals`, and ends the process without unloading what is imported.

    That takes a spawned process seconds of a core, and SGLang kills a scheduler that has not ended
    15 s after it was told to.
    """
    run_with_default_signals(function, *arguments)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


class _Forks(ReplacedContext, ForkContext):
    """`multiprocessing` with forks, for SGLang's engine."""
