"""`python -m pie_driver_sglang.observability.profile_merge`: one Chrome trace of a profile.

It merges the steps of replicas, which the native runtime has written, with the operators and
kernels of their ranks, which torch's profiler has. A process of its own, because traces are large
and the frontend serves meanwhile.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

Event = dict[str, Any]

_NAMED: Final = "process_name"
_NICE: Final = 10
"""The drivers and the frontend have priority."""
_RANK_IDS: Final = 2**40
"""Ids of flows and operators are below it in the trace of a rank."""


class Traces(NamedTuple):
    """The traces of a profile.

    Attributes:
        steps: The file of each replica's steps.
        drivers: For each driver the file of each rank; none if only steps were profiled.
    """

    steps: Sequence[str]
    drivers: Sequence[Sequence[str]]


class Window(NamedTuple):
    """A time span, in microseconds."""

    begin: float
    end: float

    def holds(self, event: Event) -> bool:
        """Whether an event overlaps it."""
        begin = event["ts"]
        return bool(begin <= self.end and begin + event.get("dur", 0.0) >= self.begin)


class _Shown(NamedTuple):
    """How the events of a rank are told apart."""

    label: str
    first_id: int


def merge(traces: Traces, target: Path, *, cut: bool) -> None:
    """Write a gzipped Chrome trace; it appears once it is complete.

    Times are microseconds since the start of the first replica's trace of steps.

    Args:
        traces: What to merge.
        target: The file.
        cut: Leave out operators and kernels before the first step and after the last one.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: A file is not a trace.
    """
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with gzip.open(part, "wt", compresslevel=3, encoding="utf-8") as file:
            _write(file, _events(traces, cut=cut))
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _write(file: TextIO, events: Iterator[Event]) -> None:
    file.write('{"displayTimeUnit": "ms", "traceEvents": [')
    separator = "\n"
    for event in events:
        file.write(separator + json.dumps(event))
        separator = ",\n"
    file.write("\n]}\n")


def _events(traces: Traces, *, cut: bool) -> Iterator[Event]:
    pids: dict[tuple[int, Any], int] = {}
    all_steps = [json.loads(Path(path).read_text(encoding="utf-8")) for path in traces.steps]
    first_ns = _begun_ns(all_steps[0])
    for replica, steps in enumerate(all_steps):
        _shift(steps, (_begun_ns(steps) - first_ns) / 1e3)
        for event in steps:
            yield {**event, "pid": pids.setdefault((-1, replica), len(pids))}
    window = _window(itertools.chain(*all_steps))
    ranks = [
        (f"driver {driver} rank {rank}", path)
        for driver, paths in enumerate(traces.drivers)
        for rank, path in enumerate(paths)
    ]
    for number, (label, path) in enumerate(ranks):
        trace = json.loads(Path(path).read_text(encoding="utf-8", errors="replace"))
        events = trace["traceEvents"]
        _shift(events, (int(trace["baseTimeNanoseconds"]) - first_ns) / 1e3)
        shown = _Shown(label, number * _RANK_IDS)
        for event in events:
            if event["ph"] == "M" or not cut or (window and window.holds(event)):
                pid = pids.setdefault((number, event["pid"]), len(pids))
                yield _of_rank(event, shown, pid)


def _begun_ns(steps: Sequence[Event]) -> int:
    """The wall-clock time of a trace's start, in nanoseconds since 1970."""
    for event in steps:
        if event["name"] == "wall clock":
            return int(event["args"]["unix_ns"])
    raise ValueError("the trace of the steps has no wall clock")


def _shift(events: Iterable[Event], by_us: float) -> None:
    """Shift the times of events."""
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] + by_us, 3)


def _window(events: Iterable[Event]) -> Window | None:
    """What events with a duration span together."""
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X"]
    return Window(min(spans)[0], max(end for _, end in spans)) if spans else None


def _of_rank(event: Event, shown: _Shown, pid: int) -> Event:
    """An event of torch's trace, told apart from those of other ranks."""
    found = {**event, "pid": pid}
    if isinstance(event.get("id"), int):
        found["id"] = event["id"] + shown.first_id
    if event["name"] == _NAMED and event["ph"] == "M":
        found["args"] = {"name": f"{shown.label}: {event['args']['name']}"}
    return found


def main() -> int:
    """Merge what standard input names: `steps`, `drivers`, `target` and `cut`, in JSON."""
    os.nice(_NICE)
    given = json.load(sys.stdin)
    traces = Traces(given["steps"], given["drivers"])
    try:
        merge(traces, Path(given["target"]), cut=given["cut"])
    except (OSError, ValueError, KeyError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
