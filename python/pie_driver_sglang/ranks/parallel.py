"""The processes that one model is spread over: its leader's view of the others.

The leader is rank 0, the process that the runtime started. It starts one more for each other device
and tells them over a :class:`~pie_driver_sglang._core.Broadcast` what to run. Nothing of this has a
name: ranks meet in an anonymous file, and whatever they share ends with them. A worker dies with
its leader, by the kernel; a leader whose worker ends says why and ends, too.
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
"""How long a leader that fails waits for a worker to say why it ends, which may be the reason."""
END_S = 2.0
"""How long a leader waits for the workers that it has killed. Their end needs no more of it."""
_MAX_REPORT_CHARS = 4000


class Process(Protocol):
    """A worker's process."""

    def wait(self) -> int:
        """Waits for its end; returns its status, or less its signal's number."""

    def kill(self) -> None:
        """Ends it, unless it has ended."""


Start = Callable[[Sequence[str], Sequence[int]], Process]
"""Starts a worker with arguments, and with descriptors that it inherits."""


class Workers:
    """The ranks of a model beside the leader, in processes of their own.

    Within a ``with`` block their deaths end this process.
    """

    def __init__(
        self,
        config: Path,
        devices: Sequence[str],
        fail: Callable[[DriverError], object],
        start: Start | None = None,
    ) -> None:
        """Starts a process for each device but the first, which is the leader's own.

        Args:
            config: `driver.toml`.
            devices: One for each rank.
            fail: Says what ended a worker, and ends this process from any thread.
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
                self._start(index, config, devices[index], start or _start_interpreter)
        except BaseException:
            self._kill()
            raise

    def _start(self, index: int, config: Path, device: str, start: Start) -> None:
        reader, writer = os.pipe()
        descriptors = (self.rank.rendezvous, self.broadcast.fd, writer)
        names = ("--rendezvous-fd", "--broadcast-fd", "--report-fd")
        arguments = ["--config", str(config), "--rank", str(index), "--leader", str(os.getpid())]
        for name, descriptor in zip(names, descriptors, strict=True):
            arguments += [name, str(descriptor)]
        try:
            process = start(arguments, descriptors)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        what = f"rank {index} on {device}"
        listening = threading.Thread(target=self._listen, args=(what, reader), daemon=True)
        waiting = threading.Thread(target=self._wait, args=(what, process, listening), daemon=True)
        self._processes.append(process)
        self._watches += [listening, waiting]
        listening.start()
        waiting.start()

    def _listen(self, what: str, reader: int) -> None:
        """What a worker says of its end comes before its end, which can take long on a GPU."""
        with os.fdopen(reader, "rb") as pipe:
            error = _told(what, pipe.readline())
        if error is not None:
            self._end(error)

    def _wait(self, what: str, process: Process, listening: threading.Thread) -> None:
        status = process.wait()
        # The pipe's end may have been inherited: what has been said is read by then, all the same.
        listening.join(GRACE_S / 2)
        ended = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        hint = "look for its last words above, and for the kernel's in `dmesg`"
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
        """Ends the workers. After an error, a worker that ends by itself has the last word."""
        until = time.monotonic() + GRACE_S
        while error is not None and not self._over and time.monotonic() < until:
            time.sleep(0.01)
        self._kill()

    def _kill(self) -> None:
        """Ends all workers that were started; what they say of it is no failure."""
        with self._lock:
            self._over = True
        for process in self._processes:
            process.kill()
        until = time.monotonic() + END_S
        for watch in self._watches:
            watch.join(max(0.0, until - time.monotonic()))


def report(descriptor: int, error: DriverError) -> None:
    """Tells the leader what ends this worker."""
    told = {"message": error.message[:_MAX_REPORT_CHARS], "hint": error.hint[:_MAX_REPORT_CHARS]}
    os.write(descriptor, json.dumps(told).encode() + b"\n")


def _told(what: str, line: bytes) -> DriverError | None:
    """What ended a worker, as it says itself; None if it does not."""
    try:
        told = json.loads(line)
        return StartError(f"{what}: {told['message']}", str(told["hint"]))
    except (ValueError, LookupError, TypeError):
        return None


def _start_interpreter(arguments: Sequence[str], descriptors: Sequence[int]) -> Process:
    return subprocess.Popen(
        # -P: nothing is imported from the working directory.
        [sys.executable, "-P", "-m", "pie_driver_sglang.ranks.worker", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
    )
