"""Forks tokenizer workers from a process that has imported SGLang.

uvicorn spawns its workers, because the server has threads by then, and each of them would import
SGLang. Here Python's own fork server (`multiprocessing.forkserver`) starts them and returns their
status. It is a fork of the HTTP server, made while that has one thread, and imports nothing itself.
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
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, Final, NoReturn
from unittest import mock

import setproctitle
from uvicorn import _subprocess

from pie_driver_sglang import _core
from pie_driver_sglang.fork_server.server import fork_refusal
from pie_driver_sglang.fork_server.starter import is_enabled

TITLE: Final = "sglang::fork_server"
"""The name of the process that forks workers."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@contextlib.contextmanager
def forking_workers(device: str) -> Iterator[None]:
    """Within it, uvicorn forks its workers where that is safe, also those that replace others.

    Args:
        device: `cpu` or `cuda`, with an index or without.
    """
    if fork_refusal() or not (device == "cpu" or is_enabled(device)):
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        _start(str(Path(folder, "forks")))
        context = multiprocessing.get_context("forkserver")
        with mock.patch.object(_subprocess, "spawn", context):
            yield


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
    # Python would start a new interpreter; the state is the same in Python 3.11 and 3.12.
    server: Any = vars(forkserver)["_forkserver"]
    server._forkserver_address, server._forkserver_alive_fd = address, writer
    server._forkserver_pid = pid


def _serve(listener: int, ends: int, parent: int) -> NoReturn:
    """Fork workers until the server has ended; workers end with this process.

    Args:
        listener: Descriptor of a socket that listens.
        ends: Descriptor that is at its end when the server and all workers have ended.
        parent: The server's process.
    """
    own = os.getpid()

    def end_with_parent() -> None:
        # Not what a worker forks.
        if os.getppid() == own:
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            _core.die_with_parent(own)

    try:
        _core.die_with_parent(parent)
        os.register_at_fork(after_in_child=end_with_parent)
        setproctitle.setproctitle(TITLE)
        # Signals to the whole process group end the workers, each in its own time.
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        gc.freeze()
        forkserver.main(listener, ends, ())
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)
