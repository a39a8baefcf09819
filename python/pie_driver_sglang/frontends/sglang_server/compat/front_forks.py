"""Forks processes of the server from a process that has imported SGLang.

`multiprocessing` would spawn them, because what starts them has threads: uvicorn, the data-parallel
controller, a server that a library has given threads. Each would import SGLang again. Here Python's
own fork server (`multiprocessing.forkserver`) starts them and returns their status. It is a fork of
the HTTP server, made while that has one thread, and imports nothing itself.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import tempfile
import traceback
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Final, NoReturn

import setproctitle

from pie_driver_sglang import _core
from pie_driver_sglang.console import print_notice
from pie_driver_sglang.fork_server.server import fork_refusal

TITLE: Final = "sglang::fork_server"
"""The name of the process that forks the others."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class _ForkedProcess(ForkServerProcess):
    """A process with the environment of the one that starts it, as a spawned one has."""

    def start(self) -> None:
        """Start it with the variables of now: SGLang sets some before it starts a process."""
        self._variables = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Run in the fork."""
        os.environ.clear()
        os.environ.update(self._variables)
        super().run()


class ReplacedContext(BaseContext):
    """Replaces `multiprocessing` in a module that starts processes."""

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """Set the method of other processes."""
        multiprocessing.set_start_method(method, force)


class ForkingContext(ReplacedContext, ForkServerContext):
    """Starts processes by the fork server."""

    Process = _ForkedProcess


_inherited: list[ForkingContext] = []
"""At most one: of this process, or of the one that it was forked from."""


@contextlib.contextmanager
def front_fork_server() -> Iterator[ForkingContext | None]:
    """Within it, a fork of this process forks others.

    Yields:
        What starts processes by it; None where this process cannot be forked safely, which is said.
    """
    if refused := fork_refusal():
        print_notice(f"processes of the server import SGLang again: {refused}")
        yield None
        return
    context = ForkingContext()
    # Before the fork, which has it, too.
    _inherited[:] = [context]
    with tempfile.TemporaryDirectory() as folder:
        _start(str(Path(folder, "forks")))
        yield context


def inherited_context() -> ForkingContext | None:
    """What starts processes by the fork server of this process's parent; None without one."""
    if not _inherited:
        return None
    # Python would wait for the fork server, which is no child of this process.
    _fork_server().ensure_running = resource_tracker.ensure_running
    return _inherited[0]


def _fork_server() -> Any:
    """Python's, which is the same in Python 3.11 and 3.12."""
    return vars(forkserver)["_forkserver"]


def _start(address: str) -> None:
    """Fork the fork server, and have `multiprocessing` use it.

    Args:
        address: Where its socket is made.
    """
    parent = os.getpid()
    reader, writer = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if pid == 0:
            os.close(writer)
            _serve(listener.fileno(), reader, parent)
    os.close(reader)
    # Python would start a new interpreter.
    server = _fork_server()
    server._forkserver_address, server._forkserver_alive_fd = address, writer
    server._forkserver_pid = pid


def _serve(listener: int, ends: int, parent: int) -> NoReturn:
    """Fork until the server has ended; forks end with this process.

    Args:
        listener: Descriptor of a socket that listens.
        ends: Descriptor that is at its end when all that use it have ended.
        parent: The server's process.
    """
    own = os.getpid()

    def end_with_parent() -> None:
        # Not what a fork forks.
        if os.getppid() == own:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            _core.die_with_parent(own)

    try:
        _core.die_with_parent(parent)
        os.register_at_fork(after_in_child=end_with_parent)
        setproctitle.setproctitle(TITLE)
        # Signals to the whole process group end the forks, each in its own time.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        # By it a scheduler or a detokenizer tells its parent that it has failed.
        signal.signal(signal.SIGQUIT, lambda number, _: os.kill(parent, number))
        gc.freeze()
        forkserver.main(listener, ends, ())
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)
