"""Runs Python scripts in forks of a process with SGLang, and in Triton's interpreter."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, NamedTuple, Self
from unittest import mock

from pie_driver_sglang import _core
from support import REPOSITORY
from support.process import drivers

LIMIT_S: Final = 220.0
"""Less than the time of a test, so that a script that hangs is ended."""


class Script(NamedTuple):
    """A run of a script."""

    path: str
    arguments: tuple[str, ...]
    plugins: str
    out: str
    """The file that gets what it prints."""
    log: str
    """The file that gets everything else."""
    python: str = ""
    """What it runs by `sys.executable`, if not Python."""

    def execute(self) -> None:
        """Runs it in this process, as `python SCRIPT ARGUMENTS...` would."""
        drivers.redirect_output(self.log)
        os.environ["SGLANG_PLUGINS"] = self.plugins
        sys.executable = self.python or sys.executable
        sys.argv = [self.path, *self.arguments]
        sys.path.insert(0, str(Path(self.path).parent))
        with Path(self.out).open("w", buffering=1) as sys.stdout:
            runpy.run_path(self.path, run_name="__main__")


def run(script: str, *arguments: str, plugins: str = "", python: str = "") -> str:
    """What a script, named from the repository's root, prints; it must end well."""
    with _prepared(script, arguments, plugins) as prepared:
        return _printed(prepared, _status(prepared._replace(python=python)))


def fail(script: str, *arguments: str, plugins: str = "", statuses: Collection[int] = (1,)) -> str:
    """What a script logs, which must end with one of these statuses: 1 is that of an exception."""
    with _prepared(script, arguments, plugins) as prepared:
        status = _status(prepared)
        log = Path(prepared.log).read_text(errors="replace")
    assert status in statuses, f"{script} ended with {status}\n{log[-3000:]}"
    return log


def _status(script: Script) -> int:
    """Runs a script and returns how it ended."""
    process = drivers.fork_call(Script.execute, (script,))
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        return process.wait()


class Interpreter:
    """Runs scripts whose kernels Triton's interpreter takes on the CPU.

    They are forked from a process of its own, since Triton asks when it is imported. One runs at a
    time, beside the tests: those that need no fixture begin before the test that waits for them.
    """

    def __init__(self, *, yields: bool) -> None:
        """Starts its process, which yields the processor to tests that run at the same time."""
        self._pool = ThreadPoolExecutor(1)
        self._begun: dict[tuple[str, ...], Future[str]] = {}
        self._connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_serve, args=(theirs, yields))
        with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
            self._process.start()
        theirs.close()

    def begin(self, script: str, *arguments: str) -> None:
        """Has a script run once all that began before have ended."""
        key = (script, *arguments)
        if key not in self._begun:
            self._begun[key] = self._pool.submit(self._run, script, arguments)

    def run(self, script: str, *arguments: str) -> str:
        """What a script prints; see :func:`run`. It may have begun before."""
        self.begin(script, *arguments)
        return self._begun.pop((script, *arguments)).result()

    def close(self) -> None:
        """Ends the process, and the script that it runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        # Its end by itself takes a while.
        self._process.kill()
        self._process.join()
        self._pool.shutdown()
        self._connection.close()

    def _run(self, script: str, arguments: tuple[str, ...]) -> str:
        with _prepared(script, arguments) as prepared:
            self._connection.send(prepared)
            return _printed(prepared, self._connection.recv())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(connection: Connection, yields: bool) -> None:
    """Runs scripts, one after the other, until the connection ends."""
    if yields:
        # The tests wait for others meanwhile.
        os.nice(5)
    from support.kernels import fast_interpreter
    from support.process import fork_preload  # noqa: F401

    fast_interpreter.install()
    context = multiprocessing.get_context("fork")
    while True:
        try:
            script = connection.recv()
        except EOFError:
            return
        process = context.Process(target=_execute, args=(script, os.getpid()))
        process.start()
        process.join(LIMIT_S)
        process.kill()
        process.join()
        connection.send(process.exitcode)


def _execute(script: Script, parent: int) -> None:
    """Runs in the fork, and ends with its parent."""
    _core.die_with_parent(parent)
    script.execute()


@contextmanager
def _prepared(script: str, arguments: tuple[str, ...], plugins: str = "") -> Iterator[Script]:
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out"), Path(folder, "log")
        out.touch()
        log.touch()
        yield Script(str(REPOSITORY / script), arguments, plugins, str(out), str(log))


def _printed(script: Script, status: int) -> str:
    out, log = Path(script.out).read_text(), Path(script.log).read_text(errors="replace")
    assert status == 0, f"{script.path} ended with {status}\n{out[-3000:]}{log[-3000:]}"
    return out
