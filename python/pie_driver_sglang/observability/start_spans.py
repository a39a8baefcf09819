"""The time line of a start: what this process did between its start and its first request.

Spans are recorded process-wide, as their places are in all layers. Times are those of
`time.monotonic`, which is one clock for all processes of a host, so that a driver's spans and its
frontend's make one time line.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ORIGIN_VARIABLE: Final = "PIE_START_ORIGIN"
"""The environment variable with the start of the command, in seconds of `time.monotonic`."""
_LOGGED_S: Final = 0.05
"""Shorter spans are left out of the log line."""


class StartSpan(NamedTuple):
    """A part of a start.

    Attributes:
        name: What was done.
        begin_s: Begin, in seconds of `time.monotonic`.
        end_s: End.
    """

    name: str
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.begin_s


class _Process:
    """The time line of the process `pid`; a fork begins one of its own."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.spans: list[StartSpan] = []
        self.began_s = _creation_s()


_process: list[_Process] = []


def _own() -> _Process:
    if not _process or _process[0].pid != os.getpid():
        _process[:] = [_Process()]
    return _process[0]


def _creation_s() -> float:
    """When this process was created, in seconds of `time.monotonic`, to a hundredth."""
    # The program's name, in parentheses, may have any characters; the 22nd field is the start.
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    created = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - created)


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Record what is done within it, also if that fails."""
    begin = time.monotonic()
    try:
        yield
    finally:
        add(name, begin, time.monotonic())


def add(name: str, begin_s: float, end_s: float) -> None:
    """Record a span of known times, in seconds of `time.monotonic`."""
    _own().spans.append(StartSpan(name, begin_s, end_s))


def recorded() -> list[StartSpan]:
    """The spans of this process so far, in the order of their ends."""
    return list(_own().spans)


def restart(began_s: float, spans: Iterable[StartSpan] = ()) -> None:
    """Begin a time line in a fork, which has inherited another one.

    Args:
        began_s: When it was asked for, in seconds of `time.monotonic`.
        spans: Those of the inherited ones that delayed it.
    """
    own = _own()
    own.began_s, own.spans[:] = began_s, spans


def process_start() -> float:
    """When this process was started, in seconds of `time.monotonic`, to a hundredth."""
    return _own().began_s


def rest(name: str) -> None:
    """Record the time from the last span's end, or the process's start, until now."""
    last = max((each.end_s for each in _own().spans), default=process_start())
    add(name, last, time.monotonic())


def origin() -> float:
    """When the command was started that this process belongs to; else this process's start."""
    with contextlib.suppress(KeyError, ValueError):
        return float(os.environ[ORIGIN_VARIABLE])
    return process_start()


def as_list(spans: Iterable[StartSpan], process: str, origin_s: float) -> list[dict[str, Any]]:
    """Spans as JSON values, by begin.

    Args:
        spans: Of one process.
        process: Its name.
        origin_s: What begins are relative to, in seconds of `time.monotonic`.
    """
    return [
        {
            "process": process,
            "name": name,
            "begin_s": round(begin - origin_s, 3),
            "seconds": round(end - begin, 3),
        }
        for name, begin, end in sorted(spans, key=lambda each: (each.begin_s, -each.end_s))
    ]


def summary(spans: Sequence[StartSpan], begin_s: float, end_s: float) -> str:
    """A start as a log line: its seconds, and those of its longer parts that are in no other.

    Args:
        spans: Of one process.
        begin_s: Its start, in seconds of `time.monotonic`.
        end_s: When it was ready.
    """
    parts, covered = [], begin_s
    for each in sorted(spans, key=lambda each: (each.begin_s, -each.end_s)):
        if each.begin_s < covered - 1e-6:
            continue
        if each.seconds >= _LOGGED_S:
            parts.append(f"{each.name} {each.seconds:.1f}")
        covered = each.end_s
    return f"start: {end_s - begin_s:.1f} s ({', '.join(parts)})"


def time_line(listed: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a time line as of `as_list`."""
    return [
        f"{each['begin_s']:8.2f} {each['seconds']:8.2f}  {each['process']}: {each['name']}"
        for each in listed
    ]
