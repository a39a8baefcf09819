"""The step trace."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang.driver.trace import Trace, open_trace
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.logs import LogSource
from support.process import drivers
from support.process import runtime_client as rc

PHASES = ("parse", "plan", "forward", "sample", "respond")
HEAD = 4
"""Events before the first step."""


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())  # type: ignore[no-any-return]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.fixture
def trace(path: Path) -> Iterator[Trace]:
    """A trace that has begun."""
    trace = open_trace(str(path))
    assert trace is not None
    trace.begin()
    yield trace
    trace.close()


@pytest.fixture
def one_step(trace: Trace, path: Path) -> list[dict[str, Any]]:
    phases = {name: 1000 * (index + 1) for index, name in enumerate(PHASES)}
    trace.step(5_000_000, phases, requests=3, tokens=40)
    return events_of(path)


def test_without_steps_the_array_holds_the_process_name(trace: Trace, path: Path) -> None:
    process, *rows, clock = events_of(path)
    assert (process["name"], process["ph"], process["pid"]) == ("process_name", "M", os.getpid())
    assert process["args"] == {"name": "pie_driver_sglang"}
    assert {row["tid"]: row["args"]["name"] for row in rows} == {1: "graph path", 2: "Python path"}
    assert (clock["name"], clock["ph"]) == ("wall clock", "i")


def test_the_wall_clock_anchors_the_times_of_the_steps(trace: Trace, path: Path) -> None:
    clock = events_of(path)[3]
    args = clock["args"]
    origin_ns = args["unix_ns"] - 1000 * clock["ts"]
    assert abs(origin_ns - (time.time_ns() - time.perf_counter_ns())) < 1e9
    assert datetime.fromisoformat(args["utc"]).timestamp() == pytest.approx(args["unix_ns"] / 1e9)


def test_the_picture_names_group_rank_and_device(path: Path) -> None:
    trace = open_trace(str(path), 1, LogSource(3, 0, "cuda:1"))
    assert trace is not None
    trace.begin()
    trace.close()
    assert events_of(path)[0]["args"]["name"] == "pie_driver_sglang [group 3 rank 0 cuda:1]"


def test_each_path_is_plotted_in_its_own_row(trace: Trace, path: Path) -> None:
    trace.step(1, {"launch": 1}, requests=1, tokens=1, path="graph path")
    trace.step(2, {"forward": 1}, requests=1, tokens=1)
    assert [event["tid"] for event in events_of(path)[HEAD:]] == [1, 1, 2, 2]


def test_traces_take_no_more_than_their_limit(path: Path) -> None:
    trace = open_trace(str(path), 1)
    assert trace is not None
    trace.begin()
    phases = {name: 10 for name in PHASES}
    older, steps, begun = path.with_name("trace.json.1"), 0, 0
    while begun < 3:
        trace.step(steps, phases, requests=steps, tokens=1)
        steps += 1
        begun += len(events_of(path)) == HEAD if path.stat().st_size < 1000 else 0
    sizes = [path.stat().st_size, older.stat().st_size]
    assert sum(sizes) < 2**20 + 2000
    kept = [event for event in events_of(older) if event["name"] == "step"]
    # The newest ones, without a gap.
    numbers = [event["args"]["requests"] for event in kept]
    assert numbers == list(range(steps - len(numbers), steps))
    trace.step(steps, phases, requests=steps, tokens=1)
    assert events_of(path)[HEAD]["args"]["requests"] == steps
    trace.close()


def test_a_trace_that_cannot_begin_anew_ends(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trace = open_trace(str(path), 1)
    assert trace is not None
    trace.begin()
    path.with_name("trace.json.1").mkdir()
    phases = {name: 10 for name in PHASES}
    with caplog.at_level(logging.WARNING, logger="pie_driver_sglang"):
        for number in range(2000):
            trace.step(number, phases, requests=1, tokens=1)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "the trace ends here"
    ]
    assert events_of(path)


def test_a_step_has_its_counts_and_lasts_as_long_as_its_phases(
    one_step: list[dict[str, Any]],
) -> None:
    step = one_step[HEAD]
    assert step["name"] == "step"
    assert step["ph"] == "X"
    assert step["args"] == {"requests": 3, "tokens": 40}
    assert (step["ts"], step["dur"]) == (5000.0, 15.0)  # microseconds


def test_the_phases_lie_one_behind_the_other_within_the_step(
    one_step: list[dict[str, Any]],
) -> None:
    step, *phases = one_step[HEAD:]
    assert [phase["name"] for phase in phases] == list(PHASES)
    assert [phase["ts"] for phase in phases] == [5000.0, 5001.0, 5003.0, 5006.0, 5010.0]
    assert [phase["dur"] for phase in phases] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert phases[-1]["ts"] + phases[-1]["dur"] == step["ts"] + step["dur"]
    assert {(phase["pid"], phase["tid"]) for phase in phases} == {(step["pid"], step["tid"])}


def test_the_file_is_a_whole_array_after_every_step(trace: Trace, path: Path) -> None:
    for count in range(1, 4):
        trace.step(count * 1000, {"forward": 10}, requests=1, tokens=1)
        steps = [event for event in events_of(path) if event["name"] == "step"]
        assert len(steps) == count


def test_no_path_means_no_trace() -> None:
    assert open_trace(None) is None


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limits the size of files, as a full disk does. pytest's own log may be larger."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("limit", [0, 1, 40])
def test_a_full_disk_ends_the_trace_and_nothing_else(
    limit: int,
    trace: Trace,
    path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However much of the last step it takes."""
    trace.step(1, {"parse": 1}, requests=1, tokens=1)
    whole = events_of(path)
    limited = largest_file(path.stat().st_size + limit)
    with caplog.at_level(logging.WARNING, logger="pie_driver_sglang"), limited:
        trace.step(2, {"parse": 1}, requests=1, tokens=1)
        trace.step(3, {"parse": 1}, requests=1, tokens=1)
    (record,) = caplog.records
    assert "the trace ends here: File too large" in record.getMessage()
    assert events_of(path) == whole


def test_an_older_trace_is_replaced_when_the_new_one_begins(path: Path) -> None:
    path.write_text("of an earlier run, " * 100)
    trace = open_trace(str(path))
    assert trace is not None
    assert path.read_text().startswith("of an earlier run")
    trace.begin()
    trace.close()
    assert len(events_of(path)) == HEAD


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


def unix_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


@pytest.mark.filterwarnings("ignore:unclosed")
@pytest.mark.parametrize("make", [pipe, device, unix_socket])
def test_what_could_block_is_refused(make: Callable[[Path], None], path: Path) -> None:
    make(path)
    with pytest.raises(ConfigError, match="trace_file") as caught:
        open_trace(str(path))
    assert caught.value.hint


def test_a_pipe_with_a_reader_is_refused(path: Path) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(ConfigError, match="is not a regular file"):
        open_trace(str(path))
    os.close(reader)


@pytest.mark.parametrize("name", ["missing/trace.json", "."])
def test_a_file_that_cannot_be_written_is_a_configuration_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="trace_file") as caught:
        open_trace(str(tmp_path / name))
    assert caught.value.hint


@pytest.mark.engine
def test_a_driver_records_its_batches_and_nothing_else(
    llama_snapshot: Path, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    config = drivers.write_config(tmp_path, llama_snapshot, options={"trace_file": str(path)})
    with drivers.fork(config) as driver:
        client = driver.client()
        client.health()
        client.copy("D2D", [1], [2])
        serve_two_batches(client)
        rc.eventually(lambda: path.read_text().count('"step"') >= 2, "the second step")
        # However it ends.
        assert driver.stop(sig=signal.SIGKILL) == -signal.SIGKILL
    events = events_of(path)
    # Both are short enough for the graph path.
    phases = ("parse", "plan", "launch", "wait", "respond")
    assert [event["name"] for event in events[HEAD:]] == ["step", *phases] * 2
    steps = [event for event in events if event["name"] == "step"]
    assert [step["args"] for step in steps] == [
        {"requests": 1, "tokens": 5},
        {"requests": 2, "tokens": 2},
    ]
    assert steps[0]["ts"] + steps[0]["dur"] <= steps[1]["ts"]
    assert all(event["dur"] >= 0 for event in events[HEAD:])
    assert {event["pid"] for event in events} == {driver.process.pid}
    assert all(phase["dur"] > 0 for phase in events if phase["name"] == "launch")


def serve_two_batches(client: _core.Client) -> None:
    """A prefill of five tokens, then a decode of two requests."""
    first = rc.Context([5, 6, 7, 8, 9], [3])
    (tokens,) = client.forward([first.request()]).tokens
    first.take(tokens[0])
    client.forward([first.request(), rc.Context([7], [4]).request()])
