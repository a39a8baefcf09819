"""Chrome trace events of the steps, for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Mapping

from pie_driver_sglang.errors import ConfigError, quoted

logger = logging.getLogger(__name__)

_END = b"\n]\n"
_HINT = "name a file in a folder that exists and is writable"


class Trace:
    """Appends one event per step and one per phase of it.

    The file is a whole JSON array after every step, however the driver ends: each step overwrites
    the array's end with its events and a new end, in one call. A file that can no longer be
    written ends the trace, not the driver.
    """

    def __init__(self, file: int) -> None:
        """Takes over the descriptor of a regular file; :meth:`begin` comes before the steps."""
        self._file: int | None = file
        self._pid = os.getpid()
        self._size = 0
        """Bytes of the array without its end."""

    def begin(self) -> None:
        """Empties the file and writes the array's first event."""
        if self._file is None:
            return
        process = {"name": "process_name", "ph": "M", "pid": self._pid}
        try:
            os.ftruncate(self._file, 0)
        except OSError as error:
            self._give_up(error)
            return
        self._append("[\n" + json.dumps({**process, "args": {"name": "pie_driver_sglang"}}))

    def step(
        self, started_ns: int, phases: Mapping[str, int], *, requests: int, tokens: int
    ) -> None:
        """Records one step.

        Args:
            started_ns: `time.perf_counter_ns()` of its start.
            phases: Nanoseconds of each phase, in order; they are drawn one after the other.
            requests: Requests of the batch.
            tokens: Rows that the model computed.
        """
        if self._file is None:
            return
        args = {"requests": requests, "tokens": tokens}
        events = [self._event("step", started_ns, sum(phases.values())) | {"args": args}]
        for name, duration_ns in phases.items():
            events.append(self._event(name, started_ns, duration_ns))
            started_ns += duration_ns
        self._append("".join(",\n" + json.dumps(event) for event in events))

    def close(self) -> None:
        """Closes the file; what follows is not recorded."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _append(self, text: str) -> None:
        assert self._file is not None
        data = text.encode()
        try:
            _write(self._file, data + _END, self._size)
            self._size += len(data)
        except OSError as error:
            # What was there before has room for its end.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
                _write(self._file, _END, self._size)
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("the trace ends here: %s", error.strerror or error)
        self.close()

    def _event(self, name: str, started_ns: int, duration_ns: int) -> dict[str, object]:
        times = {"ts": started_ns / 1000, "dur": duration_ns / 1000}
        return {"name": name, "ph": "X", "pid": self._pid, "tid": 1, **times}


def _write(file: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, offset)
        rest, offset = rest[written:], offset + written


def open_trace(path: str | None) -> Trace | None:
    """Opens the trace file, without a change to what it holds; None without a path.

    Raises:
        ConfigError: The file cannot be written, or is not a regular file.
    """
    if path is None:
        return None
    try:
        # A pipe without a reader is refused instead of waited for.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    except OSError as error:
        raise ConfigError(
            f"option `trace_file`: cannot write {quoted(path)}: {error.strerror}", _HINT
        ) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigError(f"option `trace_file`: {quoted(path)} is not a regular file", _HINT)
    return Trace(file)
