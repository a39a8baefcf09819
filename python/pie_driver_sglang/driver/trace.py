"""Chrome trace events of the steps, for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.logs import LogSource
from pie_driver_sglang.memory.units import MIB

logger = logging.getLogger(__name__)

_END = b"\n]\n"
_HINT = "name a file in a folder that exists and is writable"
_THREADS: Final[Mapping[str, int]] = {"graph path": 1, "Python path": 2}
"""Threads of the trace, by path."""


class Trace:
    """Appends one event per step and one per phase of it.

    The file is a complete JSON array after every step: each step overwrites the closing bracket
    with its events and a new one, in one call. At half of the maximum size the file is rotated to
    `<path>.1`. A write error ends the trace, not the driver.
    """

    def __init__(self, file: int, path: str, max_mib: int, source: LogSource | None) -> None:
        """Own the descriptor of a regular file; call :meth:`begin` before the steps.

        Args:
            file: Open for writing.
            path: Its path.
            max_mib: Maximum MiB of the file and the rotated one.
            source: The name of the process in the trace; None for a single driver.
        """
        self._file: int | None = file
        self._path = path
        self._max_bytes = max_mib * MIB // 2
        self._pid = os.getpid()
        self._name = f"pie_driver_sglang {source}" if source else "pie_driver_sglang"
        self._size = 0
        """Bytes of the array without the closing bracket."""

    def begin(self) -> None:
        """Truncate the file and write its metadata: thread names and the wall clock."""
        if self._file is None:
            return
        try:
            os.ftruncate(self._file, 0)
        except OSError as error:
            self._end(error)
            return
        self._size = 0
        self._append("[\n" + _joined(self._head()))

    def step(
        self,
        started_ns: int,
        phases: Mapping[str, int],
        *,
        requests: int,
        tokens: int,
        path: str = "Python path",
    ) -> None:
        """Record one step.

        Args:
            started_ns: `time.perf_counter_ns()` of its start.
            phases: Nanoseconds of each phase, in order.
            requests: Requests of the batch.
            tokens: Tokens that the model computed.
            path: `graph path` or `Python path`.
        """
        if self._file is None:
            return
        args = {"requests": requests, "tokens": tokens}
        thread = _THREADS[path]
        events = [self._event("step", thread, started_ns, sum(phases.values())) | {"args": args}]
        for name, duration_ns in phases.items():
            events.append(self._event(name, thread, started_ns, duration_ns))
            started_ns += duration_ns
        self._append(",\n" + _joined(events))
        if self._size >= self._max_bytes:
            self._rotate()

    def close(self) -> None:
        """Close the file; later steps are not recorded."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _head(self) -> Iterable[dict[str, object]]:
        yield {**self._about("process_name", 0), "args": {"name": self._name}}
        for name, thread in _THREADS.items():
            yield {**self._about("thread_name", thread), "args": {"name": name}}
        # The steps' clock has an arbitrary origin.
        now_ns, wall_ns = time.perf_counter_ns(), time.time_ns()
        utc = datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat(timespec="microseconds")
        clock = {"name": "wall clock", "ph": "i", "s": "g", "pid": self._pid, "tid": 1}
        yield {**clock, "ts": now_ns / 1000, "args": {"utc": utc, "unix_ns": wall_ns}}

    def _about(self, name: str, thread: int) -> dict[str, object]:
        return {"name": name, "ph": "M", "pid": self._pid, "tid": thread}

    def _rotate(self) -> None:
        assert self._file is not None
        try:
            # Renamed first; O_EXCL makes sure that the new file is ours.
            Path(self._path).replace(f"{self._path}.1")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOCTTY
            file = os.open(self._path, flags, 0o666)
        except OSError as error:
            self._end(error)
            return
        os.close(self._file)
        self._file = file
        self.begin()

    def _append(self, text: str) -> None:
        assert self._file is not None
        data = text.encode()
        try:
            _write(self._file, data + _END, self._size)
            self._size += len(data)
        except OSError as error:
            # Restore the closing bracket.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
                _write(self._file, _END, self._size)
            self._end(error)

    def _end(self, error: OSError) -> None:
        logger.warning("the trace ends here: %s", error.strerror or error)
        self.close()

    def _event(
        self, name: str, thread: int, started_ns: int, duration_ns: int
    ) -> dict[str, object]:
        times = {"ts": started_ns / 1000, "dur": duration_ns / 1000}
        return {"name": name, "ph": "X", "pid": self._pid, "tid": thread, **times}


def _joined(events: Iterable[dict[str, object]]) -> str:
    return ",\n".join(map(json.dumps, events))


def _write(file: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


def open_trace(
    path: str | None, max_mib: int = 1024, source: LogSource | None = None
) -> Trace | None:
    """Open the trace file, without truncating it; None without a path.

    Args:
        path: The file.
        max_mib: Maximum MiB of the file and the rotated one.
        source: The process, for the trace.

    Raises:
        ConfigError: The file cannot be written, or is not a regular file.
    """
    if path is None:
        return None
    try:
        # Non-blocking, so that a pipe without a reader is rejected.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        raise ConfigError(
            f"option `trace_file`: cannot write {quoted(path)}: {error.strerror}", _HINT
        ) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigError(f"option `trace_file`: {quoted(path)} is not a regular file", _HINT)
    return Trace(file, path, max_mib, source)
