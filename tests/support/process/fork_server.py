"""A stand-in for `sys.executable` that forks drivers and servers from a process with SGLang.

The runtime, the engine and the server start `python -m pie_driver_sglang ...` themselves, and each
such process would import SGLang anew. They are given the path of :func:`interpreter` for `python`;
`forked_python.py` is what they start.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import multiprocessing
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import process as processes
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final, Protocol

import psutil

from support.process import drivers, fork_children
from support.process.inspection import command_line

CLIENT: Final = Path(__file__).with_name("forked_python.py")
_MOST_DESCRIPTORS: Final = 64
_DESCRIPTORS: Final = max(os.sysconf("SC_OPEN_MAX"), 1 << 16)
"""No descriptor has this number, or a higher one."""
_START_S: Final = 120.0
END_S: Final = 10.0
_SERVER: Final = "pie_driver_sglang.frontends.sglang_server"
WORKER: Final = "pie_driver_sglang.ranks.worker"


class Owner(Protocol):
    """The tests' end of a connection."""

    def fileno(self) -> int:
        """Readable when the tests are over."""

    def send(self, value: bool, /) -> None:
        """Tells them that the server listens."""


@contextmanager
def interpreter() -> Iterator[str]:
    """The path of a program that runs this package's modules as `python` does, only sooner."""
    # A socket's path is short.
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        address, program = Path(folder, "socket"), Path(folder, "forked_python")
        command = shlex.join([sys.executable, "-IS", str(CLIENT), str(address)])
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o700)
        ours, theirs = multiprocessing.Pipe()
        process = drivers.fork_call(serve, (str(address), str(program), theirs))
        theirs.close()
        with ours:
            assert ours.poll(_START_S)
            # It listens.
            assert ours.recv()
            yield str(program)
        process.wait(END_S)


class Fork:
    """A fork, and the process that stands for it and ends as it does."""

    def __init__(self, stand_in: subprocess.Popen[bytes], program: str) -> None:
        """Waits until it is there.

        Args:
            stand_in: What :func:`interpreter`'s program became.
            program: That.
        """
        self._stand_in = stand_in
        note = Path(program).with_name(f"socket.{stand_in.pid}")
        end = time.monotonic() + _START_S
        while not (note.exists() and note.read_text()):
            assert stand_in.poll() is None
            assert time.monotonic() < end
            time.sleep(0.005)
        self.pid = int(note.read_text())

    def wait(self, timeout: float | None = None) -> int:
        """The status of the fork."""
        return self._stand_in.wait(timeout)

    def poll(self) -> int | None:
        """The same, None before its end."""
        return self._stand_in.poll()


def family(pid: int) -> list[psutil.Process]:
    """A process's descendants; of one that stands for a fork, the fork's as well."""
    found, left = [], [psutil.Process(pid)]
    while left:
        process = left.pop()
        found.append(process)
        with suppress(psutil.NoSuchProcess):
            left += process.children()
            if (fork := _fork_of(process)) is not None:
                left.append(psutil.Process(fork))
    return found[1:]


def forks(pid: int) -> list[int]:
    """The forks that a process and its descendants stand for, its own first."""
    found = map(_fork_of, [psutil.Process(pid), *family(pid)])
    return [fork for fork in found if fork is not None]


def _fork_of(process: psutil.Process) -> int | None:
    """The fork that a process stands for; None for others, and where the fork is not there yet."""
    words = command_line(process)
    if str(CLIENT) not in words:
        return None
    address = words[words.index(str(CLIENT)) + 1]
    # It writes the number once it has a fork, and removes the file before it ends.
    with suppress(FileNotFoundError, ValueError):
        return int(Path(f"{address}.{process.pid}").read_text())
    return None


def serve(address: str, program: str, owner: Owner) -> None:
    """Forks a process for each connection, until the tests are over."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        owner.send(True)
        forks = _Forks(program)
        poll = select.poll()
        for descriptor in (listener.fileno(), owner.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == owner.fileno():
                    forks.end()
                    return
                if descriptor == listener.fileno():
                    for number in forks.begin(listener.accept()[0]):
                        poll.register(number, select.POLLIN)
                elif (numbers := forks.finish(descriptor)) is not None:
                    for number in numbers:
                        poll.unregister(number)
                        os.close(number)


class _Forks:
    """Forks by their stand-ins' connections, both by descriptor."""

    def __init__(self, program: str) -> None:
        self._program = program
        self._running: dict[int, tuple[int, int, int]] = {}
        """Process, connection and the process's descriptor, by either descriptor."""

    def begin(self, connection: socket.socket) -> tuple[int, ...]:
        """Forks what a connection asks for, and returns the descriptors to wait for."""
        length, descriptors, _, _ = socket.recv_fds(connection, 4, _MOST_DESCRIPTORS)
        text = connection.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
        if not text:
            # The stand-in was killed before it could ask.
            connection.close()
            return ()
        request = json.loads(text)
        if request["module"] == _SERVER and _SERVER not in sys.modules:
            _import_server()
        pid = os.fork()
        if pid == 0:
            _become(request, descriptors, self._program)
        for descriptor in descriptors:
            os.close(descriptor)
        if not request["leads_session"]:
            # Here as well: the group may be killed before the fork has joined it.
            _join(pid, request["group"])
        with suppress(BrokenPipeError):
            connection.sendall(pid.to_bytes(4, "little", signed=True))
        entry = pid, connection.detach(), os.pidfd_open(pid)
        self._running[entry[1]] = self._running[entry[2]] = entry
        return entry[1:]

    def finish(self, descriptor: int) -> tuple[int, int] | None:
        """Tells a fork's end to its stand-in, or ends it with that."""
        if descriptor not in self._running:
            # Both ended, and this is the second of them.
            return None
        pid, connection, ended = self._running[descriptor]
        if descriptor == connection:
            _kill(pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            os.write(connection, status.to_bytes(4, "little", signed=True))
        del self._running[connection], self._running[ended]
        return connection, ended

    def end(self) -> None:
        """Ends those that are left."""
        for pid in {pid for pid, _, _ in self._running.values()}:
            _kill(pid)


def _import_server() -> None:
    """Imports SGLang's server, for all that are forked from here on."""
    from pie_driver_sglang.frontends.sglang_server.compat import server_environment

    with server_environment.importing_server():
        pass


def _join(pid: int, group: int) -> None:
    # It is gone, or of another session.
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, group)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)


def _become(request: Mapping[str, Any], descriptors: list[int], program: str) -> None:
    """Runs in the fork, as `python -m` in a new process."""
    status = 70
    try:
        if request["leads_session"]:
            os.setsid()
        else:
            _join(0, request["group"])
        os.chdir(request["folder"])
        variables, module = dict(request["environment"]), request["module"]
        sys.argv = ["-m", *request["arguments"]]
        if others := variables.pop(fork_children.VARIABLE, None):
            fork_children.fork_children(_run_with)
            fork_children.name_process([sys.executable, "-m", module, *request["arguments"]])
        sys.executable = others or program
        if module == WORKER:
            # It ends with its parent, which is the fork server.
            sys.argv[sys.argv.index("--leader") + 1] = str(os.getppid())
        numbers = dict(zip(request["numbers"], descriptors, strict=True))
        status = _run_with(module, variables, numbers)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _run_with(module: str, variables: Mapping[str, str], descriptors: Mapping[int, int]) -> int:
    """Runs a module in a fork, with an environment and descriptors; returns its status."""
    _take_descriptors(descriptors)
    os.environ.clear()
    os.environ.update(variables)
    _forget_the_parent()
    return _run(module)


def _take_descriptors(wanted: Mapping[int, int]) -> None:
    """Puts descriptors in place, by their numbers, and closes all others."""
    above = max([*wanted.keys(), *wanted.values()]) + 1
    moved = {number: fcntl.fcntl(given, fcntl.F_DUPFD, above) for number, given in wanted.items()}
    os.closerange(0, above)
    for number, given in moved.items():
        os.dup2(given, number)
    os.closerange(above, _DESCRIPTORS)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


def _forget_the_parent() -> None:
    """Signals as a new process has them, and nothing of the fork server's."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    processes._children = set()
    processes._parent_process = None
    processes.current_process().name = "MainProcess"
    # Of the environment, which is another one now.
    tempfile.tempdir = None
    tracker = resource_tracker._resource_tracker
    tracker._fd = tracker._pid = None


def _run(module: str) -> int:
    """Runs a module or a script to its end, with all that an interpreter does then."""
    try:
        if module.endswith(".py"):
            sys.argv[0] = module
            sys.path.insert(0, str(Path(module).parent))
            runpy.run_path(module, run_name="__main__")
        else:
            runpy._run_module_as_main(module)
        status = 0
    except SystemExit as end:
        status = 0
        if isinstance(end.code, int):
            status = end.code
        elif end.code is not None:
            sys.stderr.write(f"{end.code}\n")
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
