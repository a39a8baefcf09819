"""The processes of one model: how the leader starts and watches the workers.

The leader is rank 0, the process that the runtime started. It starts a worker for each other device
and sends commands over a :class:`~pie_driver_sglang._core.Broadcast`. Nothing of this has a name:
the rendezvous is an anonymous file, and shared memory ends with the processes. The operating system
kills the workers of a dead leader; a leader whose worker ends reports the reason and ends, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pie_driver_sglang import _core
from pie_driver_sglang.errors import DriverError, StartError
from pie_driver_sglang.ranks.types import Rank

GRACE_S = 1.0
"""How long a failing leader waits for the report of a worker, which may have the cause."""
END_S = 2.0
"""How long a leader waits for workers that it has killed; they end without it as well."""
_MAX_REPORT_CHARS = 4000
_DESCRIPTORS = Path("/proc/self/fd")


class Process(Protocol):
    """A worker's process."""

    def wait(self) -> int:
        """Waits for its end; returns its status, or less its signal's number."""

    def kill(self) -> None:
        """Ends it, unless it has ended."""


Start = Callable[[Sequence[str], Sequence[int]], Process]
"""Starts a worker with arguments, and with descriptors that it inherits."""


class Workers:
    """The workers of a model: a process for each rank except the leader.

    Within a ``with`` block, the end of a worker ends this process.
    """

    def __init__(
        self,
        config: Path,
        devices: Sequence[str],
        library: str,
        fail: Callable[[DriverError], object],
        start: Start | None = None,
    ) -> None:
        """Starts a process for each device after the first, which is the leader's own.

        Args:
            config: `driver.toml`.
            devices: One for each rank.
            library: What runs the model: `Library.module`.
            fail: Reports the error of a worker, and ends this process; called on any thread.
            start: How to start a worker; by default in a new interpreter.
        """
        self.rank = Rank(0, len(devices), os.memfd_create("pie-rendezvous"))
        self.broadcast = _core.Broadcast(len(devices) - 1)
        self._fail = fail
        self._lock = threading.Lock()
        self._over = False
        self._processes: list[Process] = []
        self._watches: list[threading.Thread] = []
        try:
            for index in range(1, len(devices)):
                arguments = ["--config", str(config), "--library", library, "--rank", str(index)]
                self._start(config, f"rank {index} on {devices[index]}", arguments, start)
        except BaseException:
            self._kill()
            raise

    def _start(
        self, config: Path, what: str, arguments: Sequence[str], start: Start | None
    ) -> None:
        reader, writer = os.pipe()
        descriptors = [self.rank.rendezvous, self.broadcast.fd, writer]
        names = ("--rendezvous-fd", "--broadcast-fd", "--report-fd")
        arguments = [*arguments, "--leader", str(os.getpid())]
        for name, descriptor in zip(names, descriptors, strict=True):
            arguments += [name, str(descriptor)]
        if config.parent == _DESCRIPTORS:
            # The file has no other name.
            descriptors.append(int(config.name))
        try:
            process = (start or _start_interpreter)(arguments, descriptors)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        listening = threading.Thread(target=self._listen, args=(what, reader), daemon=True)
        waiting = threading.Thread(target=self._wait, args=(what, process, listening), daemon=True)
        self._processes.append(process)
        self._watches += [listening, waiting]
        listening.start()
        waiting.start()

    def _listen(self, what: str, reader: int) -> None:
        """Waits for a worker's report, which precedes its end: on a GPU that may take long."""
        with os.fdopen(reader, "rb") as pipe:
            error = _received(what, pipe.readline())
        if error is not None:
            self._end(error)

    def _wait(self, what: str, process: Process, listening: threading.Thread) -> None:
        status = process.wait()
        # The pipe may stay open in another process; the report has been read by then anyway.
        listening.join(GRACE_S / 2)
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        hint = "look for its last lines above, and for the kernel's in `dmesg`"
        self._end(StartError(f"{what} {ended}", hint))

    def _end(self, error: DriverError) -> None:
        with self._lock:
            if not self._over:
                self._over = True
                self._fail(error)

    def __enter__(self) -> Self:
        """Returns the workers."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the workers. After an error, a worker's own report may still replace it."""
        until = time.monotonic() + GRACE_S
        while error is not None and not self._over and time.monotonic() < until:
            time.sleep(0.01)
        self._kill()

    def _kill(self) -> None:
        """Kills all workers; their ends are not failures."""
        with self._lock:
            self._over = True
        for process in self._processes:
            process.kill()
        until = time.monotonic() + END_S
        for watch in self._watches:
            watch.join(max(0.0, until - time.monotonic()))


def report(descriptor: int, error: DriverError) -> None:
    """Sends the leader the error that ends this worker."""
    sent = {"message": error.message[:_MAX_REPORT_CHARS], "hint": error.hint[:_MAX_REPORT_CHARS]}
    os.write(descriptor, json.dumps(sent).encode() + b"\n")


def _received(what: str, line: bytes) -> DriverError | None:
    """The error that a worker has reported; None without a report."""
    try:
        found = json.loads(line)
        return StartError(f"{what}: {found['message']}", str(found["hint"]))
    except (ValueError, LookupError, TypeError):
        return None


def _start_interpreter(arguments: Sequence[str], descriptors: Sequence[int]) -> Process:
    return subprocess.Popen(
        # -P: nothing is imported from the working directory.
        [sys.executable, "-P", "-m", "pie_driver_sglang.ranks.worker", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
    )
