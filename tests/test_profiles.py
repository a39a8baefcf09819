"""Profiles: steps of the runtime, with the operators of every rank's driver, in one file."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest

from pie_driver_sglang import Engine
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.profiles import (
    MOST_STEPS,
    Profiles,
    _Profile,
    read_request,
)
from pie_driver_sglang.observability.profile_merge import Traces, merge
from support.models.random_pair import PROMPT, Checkpoint, checkpoint

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

SECOND_NS: Final = 1_700_000_000_000_000_000


def sampled(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def read(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] in ("prompt", "decode")]


def write(path: Path, trace: Any) -> str:
    path.write_text(json.dumps(trace))
    return str(path)


class TestMerge:
    """Traces that are made by hand, with times that are known."""

    def traces(self, folder: Path) -> Traces:
        steps, drivers = [], []
        for number in range(2):
            begun = SECOND_NS + number * 1_000_000
            clock = {"name": "wall clock", "ph": "i", "pid": number, "tid": 1, "ts": 0}
            step = {"name": "decode", "ph": "X", "pid": number, "tid": 1, "ts": 100.0, "dur": 50.0}
            trace = [{**clock, "args": {"unix_ns": begun}}, step]
            steps.append(write(folder / f"steps.{number}", trace))
            drivers.append([self.rank(folder, f"{number}.{rank}", begun) for rank in range(2)])
        return Traces(steps, drivers)

    def rank(self, folder: Path, name: str, begun: int) -> str:
        # Another origin, as each process has.
        base = SECOND_NS - 5_000_000
        inner = (begun - base) / 1e3 + 120.0
        of = {"pid": 7, "tid": 7, "ts": inner}
        events = [
            {"name": "process_name", "ph": "M", "pid": 7, "args": {"name": "python"}},
            {**of, "name": "mm", "ph": "X", "dur": 5.0},
            {**of, "name": "flow", "ph": "s", "id": 3},
            {**of, "name": "late", "ph": "X", "ts": inner + 5000.0, "dur": 5.0},
            {**of, "name": "around", "ph": "X", "pid": "Spans", "ts": inner - 300.0, "dur": 9e3},
        ]
        trace = {"baseTimeNanoseconds": base, "traceEvents": events}
        return write(folder / f"rank.{name}", trace)

    @pytest.mark.parametrize("cut", [False, True])
    def test_times_are_of_one_clock_and_ranks_are_apart(self, tmp_path: Path, cut: bool) -> None:
        target = tmp_path / "out.json.gz"
        merge(self.traces(tmp_path), target, cut=cut)
        events = read(target)
        times = {(event["name"], event["ts"]) for event in events if event["ph"] == "X"}
        assert {("decode", 100.0), ("decode", 1100.0), ("mm", 120.0), ("mm", 1120.0)} <= times
        assert (("late", 5120.0) in times) is not cut
        assert ("around", -180.0) in times
        products = [event["pid"] for event in events if event["name"] == "mm"]
        assert len({*products, *(step["pid"] for step in steps_of(events))}) == 6
        assert len({event["id"] for event in events if event["ph"] == "s"}) == 4
        names = {event["args"]["name"] for event in events if event["ph"] == "M"}
        assert names == {f"driver {at} rank {rank}: python" for at in (0, 1) for rank in (0, 1)}
        assert all(type(event["pid"]) is int for event in events)

    def test_a_file_that_is_no_trace_leaves_nothing(self, tmp_path: Path) -> None:
        traces = self.traces(tmp_path)._replace(drivers=[[write(tmp_path / "rank", {})]])
        before = set(tmp_path.iterdir())
        with pytest.raises(KeyError):
            merge(traces, tmp_path / "out.json.gz", cut=False)
        assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"activities": ["CPU", "MEM"]}, "activity 'MEM'"),
        ({"profile_by_stage": True}, "`profile_by_stage`"),
        ({"profile_stages": ["decode"]}, "`profile_stages`"),
        ({"num_steps": -1}, "negative"),
        ({"num_steps": True}, "`num_steps` is True"),
        ({"start_step": 1.5}, "`start_step` is 1.5"),
        ({"with_stack": "yes"}, "`with_stack` is 'yes'"),
        ({"activities": "CPU"}, "`activities` is 'CPU'"),
        ({"output_dir": 5}, "`output_dir` is 5"),
    ],
)
def test_what_is_no_profile_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_request(fields, "p")
    assert words in refusal.value.with_hint
    assert "\n" not in refusal.value.with_hint
    assert refusal.value.hint


def test_the_environment_has_sglangs_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", "/elsewhere")
    monkeypatch.setenv("SGLANG_PROFILE_WITH_STACK", "false")
    request = read_request({"profile_prefix": "mine"}, "p-TP-0")
    assert request.path == Path("/elsewhere/mine-p-TP-0.trace.json.gz")
    assert (request.activities, request.with_stack) == (("CPU", "GPU"), False)
    assert (request.record_shapes, request.is_cut) == (True, False)


class InterruptedSocket:
    """A signal handler closes the profiles while a driver is asked; then it answers."""

    profiles: Profiles

    def call(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        self.profiles.close()
        return [{"success": True, "files": []}]


class IdleRuntime:
    """Writes no steps."""

    def start_trace(self, *_: Any, **__: Any) -> None:
        """Nothing runs."""

    def end_trace(self) -> list[Any]:
        return []

    def stats(self) -> dict[str, int]:
        return {"steps": 0}


def test_a_signal_handler_ends_a_profile_that_starts(tmp_path: Path) -> None:
    socket: Any = InterruptedSocket()
    socket.profiles = profiles = Profiles(IdleRuntime(), socket)
    request = read_request({"output_dir": str(tmp_path)}, "p")
    thread = threading.Thread(target=profiles.start, args=(request,), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert not list(tmp_path.iterdir())


class RecordingSocket:
    """Its drivers do whatever they are told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def call(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        self.told.append(command["command"])
        return [{"success": True, "files": []}]


@pytest.mark.parametrize("num_steps", [None, 5])
def test_drivers_that_end_write_no_profile(tmp_path: Path, num_steps: int | None) -> None:
    """One may be stuck in a step, and the end of an engine would wait for it."""
    socket: Any = RecordingSocket()
    profiles = Profiles(IdleRuntime(), socket)
    arguments = {"output_dir": str(tmp_path), "num_steps": num_steps}
    with mock.patch.object(_Profile, "_is_closed", return_value=False):
        profiles.start(read_request(arguments, "p"))
        assert list(tmp_path.iterdir())
        profiles.close()
    assert socket.told == ["StartProfile"]
    assert not list(tmp_path.iterdir())


class TracingRuntime(IdleRuntime):
    """Writes the steps of two replicas, which are complete at once."""

    def start_trace(self, path: Path, *, skip: int, steps: int | None) -> None:
        self.asked, self.files = steps, [path.with_name(f"{path.name}.{n}") for n in range(2)]
        clock = {"name": "wall clock", "ph": "i", "pid": 0, "tid": 1, "ts": 0}
        trace = [{**clock, "args": {"unix_ns": SECOND_NS}}]
        for file in self.files:
            file.write_text(json.dumps(trace) + "\n")

    def end_trace(self) -> list[Any]:
        return [(file, 3, None) for file in self.files]


class HalfSocket:
    """The second of two drivers cannot write its profile."""

    def call(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        if command["command"] == "StartProfile":
            return [{"success": True}] * 2
        operator = {"name": "aten::mm", "ph": "X", "pid": 7, "tid": 7, "ts": 10.0, "dur": 5.0}
        trace = {"baseTimeNanoseconds": SECOND_NS, "traceEvents": [operator]}
        file = write(Path(command["folder"]) / "rank.json", trace)
        failure = {"success": False, "message": "the disk is full", "hint": "make room"}
        return [{"success": True, "files": [file]}, failure]


def test_a_replica_that_fails_leaves_the_others_kernels(tmp_path: Path) -> None:
    profiles = Profiles(TracingRuntime(), HalfSocket())  # type: ignore[arg-type]
    with mock.patch.object(_Profile, "_is_closed", return_value=False):
        profiles.start(read_request({"output_dir": str(tmp_path)}, "p"))
        with pytest.raises(ConfigError, match="not complete: the disk is full"):
            profiles.stop()
    [file] = tmp_path.iterdir()
    assert [event["name"] for event in read(file)].count("aten::mm") == 1


@pytest.mark.parametrize(
    ("fields", "most"),
    [({}, MOST_STEPS), ({"num_steps": 20_000}, 20_000), ({"activities": []}, None)],
)
def test_a_profile_with_kernels_ends_by_itself(
    fields: dict[str, Any], most: int | None, tmp_path: Path
) -> None:
    runtime = TracingRuntime()
    profiles = Profiles(runtime, RecordingSocket())  # type: ignore[arg-type]
    with mock.patch.object(_Profile, "_is_closed", return_value=False):
        profiles.start(read_request({"output_dir": str(tmp_path), **fields}, "p"))
        profiles.close()
    assert runtime.asked == most


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return checkpoint(tmp_path_factory.mktemp("profiles") / "model", 1)


@pytest.fixture(scope="module")
def engine(model: Checkpoint, forked_python: str) -> Iterator[Engine]:
    with started(model, forked_python) as engine:
        yield engine


def started(model: Checkpoint, python: str, **options: Any) -> Engine:
    # Not only for the start: the engine starts the process that merges as well.
    with mock.patch.object(sys, "executable", python):
        folder = str(model.folder)
        return Engine(model_path=folder, device="cpu", skip_tokenizer_init=True, **options)


def operators_within(events: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """The matrix products of a rank that lie within a step."""
    [pid] = {
        event["pid"]
        for event in events
        if event["ph"] == "M" and event["args"].get("name") == f"driver 0 rank {rank}: python"
    } or {None}
    steps = steps_of(events)
    return [
        event
        for event in events
        if event["pid"] == pid
        and event["name"] in ("aten::mm", "aten::addmm", "aten::linear")
        and any(
            step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"]
            for step in steps
        )
    ]


@pytest.mark.engine
class TestEngine:
    def test_steps_have_their_operators(self, engine: Engine, tmp_path: Path) -> None:
        path = engine.start_profile(output_dir=str(tmp_path), profile_id="p")
        with pytest.raises(ConfigError, match="under way already"):
            engine.start_profile(output_dir=str(tmp_path))
        engine.generate(input_ids=PROMPT, sampling_params=sampled(5))
        assert engine.stop_profile() == f"5 steps in {path}"
        assert [file.name for file in tmp_path.iterdir()] == ["p-TP-0.trace.json.gz"]
        events = read(Path(path))
        assert [step["name"] for step in steps_of(events)] == ["prompt", *["decode"] * 4]
        found = operators_within(events, 0)
        assert len(found) >= 5
        assert any(event["args"].get("Input Dims") for event in found)
        assert any(event.get("cat") == "python_function" for event in events)
        with pytest.raises(ConfigError, match="no profile is under way"):
            engine.stop_profile()

    def test_less_is_recorded_on_request(self, engine: Engine, tmp_path: Path) -> None:
        bare = {"with_stack": False, "record_shapes": False}
        path = engine.start_profile(output_dir=str(tmp_path), activities=["CPU"], **bare)
        engine.generate(input_ids=PROMPT, sampling_params=sampled(2))
        engine.stop_profile()
        events = read(Path(path))
        assert operators_within(events, 0)
        assert not any(event.get("cat") == "python_function" for event in events)
        assert not any("Input Dims" in event.get("args", {}) for event in events)
        path = engine.start_profile(output_dir=str(tmp_path), profile_id="s", activities=[])
        engine.generate(input_ids=PROMPT, sampling_params=sampled(2))
        engine.stop_profile()
        assert {event.get("cat") for event in read(Path(path))} == {None}

    def test_a_number_of_steps_ends_it(self, engine: Engine, tmp_path: Path) -> None:
        path = Path(engine.start_profile(output_dir=str(tmp_path), profile_id="n", num_steps=3))
        engine.generate(input_ids=PROMPT, sampling_params=sampled(8))
        # It waits for the file of the first.
        engine.start_profile(output_dir=str(tmp_path), profile_id="next", start_step=10**9)
        events = read(path)
        steps = steps_of(events)
        assert len(steps) == 3
        end = max(step["ts"] + step["dur"] for step in steps)
        assert operators_within(events, 0)
        assert all(event["ts"] <= end for event in events if event["ph"] == "X")
        assert engine.stop_profile().startswith("0 steps in ")
        assert sorted(file.name[0] for file in tmp_path.iterdir()) == ["n", "n"]

    def test_it_begins_at_a_step(self, engine: Engine, tmp_path: Path) -> None:
        count = engine.get_server_info()["internal_states"][0]["steps"]
        wanted = {"start_step": count + 4, "num_steps": 2}
        path = Path(engine.start_profile(output_dir=str(tmp_path), **wanted))
        engine.generate(input_ids=PROMPT, sampling_params=sampled(12))
        assert engine.stop_profile() == f"2 steps in {path}"
        events = read(path)
        assert [step["name"] for step in steps_of(events)] == ["decode", "decode"]
        assert operators_within(events, 0)

    def test_requests_continue_meanwhile(self, engine: Engine, tmp_path: Path) -> None:
        expected = engine.generate(input_ids=PROMPT, sampling_params=sampled(64))["output_ids"]
        answers: list[list[int]] = []

        def ask() -> None:
            found = engine.generate(input_ids=PROMPT, sampling_params=sampled(64))
            answers.append(found["output_ids"])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(3):
            engine.start_profile(output_dir=str(tmp_path), profile_id=str(number))
            engine.stop_profile()
        for thread in threads:
            thread.join()
        assert answers == [expected] * 4

    def test_a_refused_one_leaves_another_trace_alone(self, engine: Engine, tmp_path: Path) -> None:
        with engine.trace_steps(tmp_path / "steps.json"):
            with pytest.raises(ConfigError, match="traced already"):
                engine.start_profile(output_dir=str(tmp_path))
            engine.generate(input_ids=PROMPT, sampling_params=sampled(5))
        assert len(steps_of(json.loads((tmp_path / "steps.json").read_text()))) == 5

    def test_one_that_was_given_up_is_replaced(self, engine: Engine, tmp_path: Path) -> None:
        """A driver that has started it after the time limit still records."""
        late = {"activities": ["CPU"], "with_stack": True, "record_shapes": True}
        [answer] = engine._profiles._socket.call({"command": "StartProfile", **late})
        assert answer["success"]
        path = engine.start_profile(output_dir=str(tmp_path), with_stack=False)
        engine.generate(input_ids=PROMPT, sampling_params=sampled(2))
        engine.stop_profile()
        events = read(Path(path))
        assert operators_within(events, 0)
        assert not any(event.get("cat") == "python_function" for event in events)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({"activities": ["GPU"]}, "the device is cpu"),
            ({"output_dir": "/proc/nothing"}, "cannot be written"),
            ({"folder": "/tmp"}, "no argument 'folder'"),
            ({"profile_prefix": "x" * 250}, "File name too long"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, engine: Engine, arguments: dict[str, Any], words: str, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=words):
            engine.start_profile(**{"output_dir": str(tmp_path), **arguments})
        assert not list(tmp_path.iterdir())
        with pytest.raises(ConfigError, match="no profile is under way"):
            engine.stop_profile()


@pytest.mark.engine
def test_two_ranks_are_in_one_file(model: Checkpoint, forked_python: str, tmp_path: Path) -> None:
    with started(model, forked_python, tp_size=2) as engine:
        path = engine.start_profile(output_dir=str(tmp_path), merge_profiles=True)
        engine.generate(input_ids=PROMPT, sampling_params=sampled(4))
        assert engine.stop_profile() == f"4 steps in {path}"
    events = read(Path(path))
    assert len(steps_of(events)) == 4
    assert operators_within(events, 0)
    assert operators_within(events, 1)


@pytest.mark.engine
def test_a_driver_that_dies_leaves_the_steps(
    model: Checkpoint, forked_python: str, tmp_path: Path
) -> None:
    with started(model, forked_python) as engine:
        path = engine.start_profile(output_dir=str(tmp_path))
        engine.generate(input_ids=PROMPT, sampling_params=sampled(3))
        [pid] = engine.get_server_info()["internal_states"][0]["driver_pids"]
        os.kill(pid, signal.SIGKILL)
        engine.generate(input_ids=PROMPT, sampling_params=sampled(3))
        with pytest.raises(ConfigError, match="is not complete"):
            engine.stop_profile()
        assert len(steps_of(read(Path(path)))) >= 6
        engine.start_profile(output_dir=str(tmp_path), profile_id="again")
        engine.generate(input_ids=PROMPT, sampling_params=sampled(3))
        engine.stop_profile()
    assert operators_within(read(tmp_path / "again-TP-0.trace.json.gz"), 0)
