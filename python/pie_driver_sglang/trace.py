"""Chrome trace events of the steps, for Perfetto or chrome://tracing."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from pie_driver_sglang.errors import ConfigError

logger = logging.getLogger(__name__)


class Trace:
    """Appends one event per step and one per phase of it.

    The file is a JSON array without its end, which the trace format allows, so it is readable
    whenever the driver stops. Every step is flushed. A file that can no longer be written ends the
    trace, not the driver.
    """

    def __init__(self, file: TextIO) -> None:
        """Writes the head of the array."""
        self._file: TextIO | None = file
        self._pid = os.getpid()
        process = {"name": "process_name", "ph": "M", "pid": self._pid}
        file.write("[\n" + json.dumps({**process, "args": {"name": "pie_driver_sglang"}}))
        file.flush()

    def step(
        self, started_ns: int, phases: Mapping[str, int], *, requests: int, tokens: int
    ) -> None:
        """Records one step.

        Args:
            started_ns: `time.perf_counter_ns()` of its start.
            phases: Nanoseconds of each phase, in order; they are drawn one behind the other.
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
        try:
            self._file.write("".join(",\n" + json.dumps(event) for event in events))
            self._file.flush()
        except OSError as error:
            logger.warning("the trace ends here: %s", error.strerror or error)
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _event(self, name: str, started_ns: int, duration_ns: int) -> dict[str, object]:
        times = {"ts": started_ns / 1000, "dur": duration_ns / 1000}
        return {"name": name, "ph": "X", "pid": self._pid, "tid": 1, **times}


def open_trace(path: str | None) -> Trace | None:
    """Opens the trace file, replacing an older one; None without a path.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path is None:
        return None
    try:
        return Trace(Path(path).open("w", encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"option `trace_file`: cannot write {path}: {error.strerror}",
            "name a file in a folder that exists and is writable",
        ) from error
