"""The server's scheduler and detokenizer on the CPU: forked from it instead of started afresh.

All three import SGLang, which takes seconds of a core each time. The server has no thread of its
own yet when it starts them. On a GPU host they start afresh, as SGLang has it: there the server may
have used CUDA, which no fork of it could, and cores are many.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkContext
from pathlib import Path
from typing import Any, Final
from unittest import mock

from sglang.srt.entrypoints import engine

_INHERITED: Final = (signal.SIGCHLD, signal.SIGQUIT, signal.SIGTERM)
"""Signals for which the server has handlers, which are about its own children."""


@contextlib.contextmanager
def forks(device: str) -> Iterator[None]:
    """Within it SGLang's server forks its processes where that is safe; see the module."""
    if device != "cpu" or _threads() > 1:
        yield
        return
    with mock.patch.object(engine, "mp", _Forks()):
        yield


def _threads() -> int:
    """Threads of this process, those of native libraries among them.

    A fork has only the thread that calls it. Where another one holds a lock, as of a pool of OpenMP
    or of the tokenizer, the child would wait for it for ever.
    """
    return len(list(Path("/proc/self/task").iterdir()))


def run_afresh(function: Callable[..., None], *arguments: Any) -> None:
    """Runs what a process is for, with signals as a process that starts has them."""
    for number in _INHERITED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    function(*arguments)


class _Forks(ForkContext):
    """`multiprocessing` for SGLang's engine, which would have its processes spawned."""

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Sets it for all other processes."""
        multiprocessing.set_start_method(method, force)
