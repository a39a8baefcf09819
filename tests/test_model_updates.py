"""Updates of a runtime's model: several drivers, threads, and drivers that restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pie_driver_sglang.errors import StartError, WeightsError
from pie_driver_sglang.frontends.common import model_updates
from pie_driver_sglang.frontends.common.control_socket import ControlSocket
from pie_driver_sglang.frontends.common.model_updates import ModelUpdates, UpdateResult
from support.servers.pie_server import wait_until

pytestmark = pytest.mark.timeout(60)

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class Runtime:
    """What updates need of a runtime; counts its requests."""

    def __init__(self) -> None:
        self.running = 0
        self.is_paused = False
        self.failure: str | None = None

    def wait_ready(self, timeout_s: float) -> bool:
        if self.failure is not None:
            raise StartError(self.failure)
        return True

    def stats(self) -> dict[str, int]:
        return {"running": self.running, "waiting": 0}

    def pause(self, *, retract: bool = False) -> bool:
        self.is_paused = True
        return True

    def resume(self) -> None:
        self.is_paused = False

    def flush_cache(self) -> bool:
        return not self.running and self.failure is None


class Driver:
    """A driver's end of the socket, which answers in a thread."""

    def __init__(self, control: ControlSocket, answer: Answer) -> None:
        name = control.runtime({"options": {}})["options"]["control_socket"]
        self.connection = Client("\0" + name[1:], "AF_UNIX")
        self.told: list[dict[str, Any]] = []
        self.caught_up: list[dict[str, Any]] = []
        self._answer = answer
        self.is_served = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def end(self) -> None:
        with socket.socket(fileno=os.dup(self.connection.fileno())) as own:
            own.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        try:
            self.connection.send_bytes(b"{}")
            self.caught_up = json.loads(self.connection.recv_bytes())
            if self.caught_up:
                answer = self._answer(self.caught_up[0])
                self.connection.send_bytes(json.dumps(answer).encode())
            self.is_served.set()
            while True:
                command = json.loads(self.connection.recv_bytes())
                self.told.append(command)
                answer = self._answer(command)
                self.connection.send_bytes(json.dumps(answer).encode())
        except (OSError, EOFError):
            pass


def done(_: dict[str, Any]) -> dict[str, Any]:
    return {"success": True}


class Bench:
    """Updates of a runtime, and its drivers."""

    def __init__(self) -> None:
        self.runtime, self.socket = Runtime(), ControlSocket()
        self.said: list[str | None] = []
        self.named: list[tuple[str, bool]] = []
        """Names of weights, and whether nothing was computed then."""
        self.updates = ModelUpdates(
            self.runtime,
            self.socket,
            Path("/start"),
            on_unavailable=self.said.append,
            on_version=lambda name: self.named.append((name, self.runtime.is_paused)),
        )

    def driver(self, answer: Answer = done) -> Driver:
        driver = Driver(self.socket, answer)
        assert driver.is_served.wait(20)
        # The socket knows it a moment later.
        with self.socket.steady():
            return driver


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.socket.close()


def test_memory_that_some_replicas_release_is_taken_again(bench: Bench) -> None:
    def full(command: dict[str, Any]) -> dict[str, Any]:
        if command["command"] == "ReleaseMemory":
            return {"success": False, "message": "the disk is full", "hint": ""}
        return {"success": True}

    able = bench.driver()
    bench.driver(full)
    with pytest.raises(WeightsError, match="the disk is full"):
        bench.updates.release(["weights"])
    assert [command["command"] for command in able.told] == ["ReleaseMemory", "ResumeMemory"]
    assert able.told[1]["tags"] == ["weights"]
    assert not bench.runtime.is_paused
    assert bench.updates.unavailable is None


def test_a_driver_that_starts_during_an_update_loads_the_new_weights(
    bench: Bench, tmp_path: Path
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(command: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        assert goes_on.wait(20)
        return {"success": True}

    bench.driver(slow)
    bench.driver().end()
    update = threading.Thread(target=bench.updates.update_from_disk, args=[str(tmp_path)])
    update.start()
    assert begun.wait(20)
    late = Driver(bench.socket, done)
    assert not late.is_served.wait(0.3)
    goes_on.set()
    update.join()
    assert late.is_served.wait(20)
    assert late.caught_up == [{"command": "DiskUpdate", "folder": str(tmp_path)}]


def test_a_download_does_not_hold_up_a_wake(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ends = threading.Event(), threading.Event()

    def download(*_: object, **__: object) -> Path:
        begun.set()
        assert ends.wait(20)
        return tmp_path

    monkeypatch.setattr(model_updates, "model_folder", download)
    bench.driver()
    bench.updates.release(["kv_cache"])
    update = threading.Thread(target=bench.updates.update_from_disk, args=["some/model"])
    update.start()
    assert begun.wait(20)
    bench.updates.resume_memory()
    assert bench.updates.unavailable is None
    ends.set()
    update.join(20)


@pytest.mark.parametrize("call", ["pause", "resume"])
def test_requests_that_an_update_waits_for_are_computed(
    bench: Bench, tmp_path: Path, call: str
) -> None:
    """Also after a call that resumes nothing; a pause lets the update begin."""
    bench.driver()
    bench.runtime.running = 1
    found = []

    def update() -> None:
        found.append(bench.updates.update_from_disk(str(tmp_path), flush=False))

    updating = threading.Thread(target=update)
    updating.start()
    wait_until(lambda: bench.updates.is_draining, 20, "it does not drain")
    if call == "pause":
        bench.updates.pause("in_place")
    else:
        bench.updates.resume()
        assert not bench.runtime.is_paused
        bench.runtime.running = 0
    updating.join(20)
    assert found == [UpdateResult(True, "Succeeded to update model weights.")]
    assert bench.runtime.is_paused == (call == "pause")
    bench.updates.resume()
    assert not bench.runtime.is_paused


@pytest.mark.parametrize("fault", [None, "refuses", "ends"])
def test_replicas_serve_the_same_weights_after_a_failed_update(
    bench: Bench, tmp_path: Path, fault: str | None
) -> None:
    """The first takes the new weights, and then has to load the former ones again."""

    def first(command: dict[str, Any]) -> dict[str, Any]:
        if command["folder"] == "/start" and fault == "ends":
            driver.end()
        success = command["folder"] != "/start" or fault is None
        return {"success": success, "message": "out of memory", "hint": ""}

    def second(command: dict[str, Any]) -> dict[str, Any]:
        return {"success": command["folder"] == "/start", "message": "no such file", "hint": ""}

    driver = bench.driver(first)
    bench.driver(second)
    result = bench.updates.update_from_disk(str(tmp_path))
    assert (result.success, "no such file" in result.message) == (False, True)
    reason = bench.updates.unavailable
    if fault != "refuses":
        assert reason is None
        return
    assert reason is not None
    assert "another cannot load the former weights again: out of memory" in reason
    assert bench.runtime.is_paused


def test_new_weights_are_named_before_they_compute(bench: Bench, tmp_path: Path) -> None:
    fails = False

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        if fails:
            return {"success": False, "message": "the file is cut", "hint": ""}
        return {"success": True, "lacking": 0}

    bench.driver(answer)
    assert bench.updates.update_from_disk(str(tmp_path), version="disk").success
    assert bench.updates.update_from_disk(str(tmp_path)).success
    assert bench.updates.update_from_tensors(b"", version="tensors").success
    assert bench.updates.update_from_group({}, version="group").success
    fails = True
    assert not bench.updates.update_from_disk(str(tmp_path), version="none").success
    assert not bench.updates.update_from_tensors(b"", version="none").success
    assert bench.named == [("disk", True), ("tensors", True), ("group", True)]
    assert not bench.runtime.is_paused


def test_a_folder_that_is_gone_when_a_driver_restarts(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "step-1"
    folder.mkdir()
    first = bench.driver()
    assert bench.updates.update_from_disk(str(folder)).success
    folder.rmdir()
    first.end()
    assert bench.driver().caught_up == []
    with pytest.raises(WeightsError, match="step-1', is gone"), bench.updates.admitting():
        pass
    assert bench.said[-1] == bench.updates.unavailable
    assert bench.updates.update_from_disk(str(tmp_path)).success
    with bench.updates.admitting():
        assert bench.said[-1] is None


def test_a_folder_that_cannot_be_loaded_when_a_driver_restarts(
    bench: Bench, tmp_path: Path
) -> None:
    def broken(_: dict[str, Any]) -> dict[str, Any]:
        return {"success": False, "message": "the file is cut", "hint": ""}

    first = bench.driver()
    assert bench.updates.update_from_disk(str(tmp_path)).success
    first.end()
    # It ends, and the one after it starts with the weights of the start.
    bench.driver(broken).end()
    assert bench.driver().caught_up == []
    with pytest.raises(WeightsError, match="the file is cut"), bench.updates.admitting():
        pass
    assert bench.updates.update_from_disk(str(tmp_path)).success
    with bench.updates.admitting():
        assert bench.said[-1] is None


def test_a_signal_handler_is_not_left_waiting_for_its_own_thread(
    bench: Bench, tmp_path: Path
) -> None:
    refused: list[str] = []

    def handler(*_: object) -> None:
        with pytest.raises(WeightsError, match="signal handler") as error:
            bench.updates.admitting().__enter__()
        refused.append(str(error.value))
        refused.append(bench.updates.update_from_disk(str(tmp_path)).message)
        bench.runtime.running = 0

    bench.driver()
    bench.runtime.running = 1
    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        assert bench.updates.update_from_disk(str(tmp_path)).success
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(refused) == 2
    assert "signal handler" in refused[1]


def test_an_update_does_not_wait_for_drivers_that_are_gone(bench: Bench, tmp_path: Path) -> None:
    """Their runtime flushes nothing, so an update would wait for ten minutes."""
    bench.runtime.failure = "cannot find the model"
    success, message = bench.updates.update_from_disk(str(tmp_path))
    assert (success, message) == (False, "cannot find the model")


def test_an_update_ends_with_its_engine(bench: Bench, tmp_path: Path) -> None:
    bench.driver()
    bench.runtime.running = 1
    threading.Timer(0.2, bench.socket.close).start()
    for _ in range(2):
        success, message = bench.updates.update_from_disk(str(tmp_path))
        assert (success, "is shut down" in message) == (False, True), message


def test_nothing_is_computed_during_a_check(bench: Bench) -> None:
    """It reads all weights, for longer than a step may take."""
    states: list[bool] = []

    def check(_: dict[str, Any]) -> dict[str, Any]:
        states.append(bench.runtime.is_paused)
        return {"success": True, "ranks": [{"a": "b"}]}

    bench.driver(check)
    bench.runtime.running = 1
    assert bench.updates.check("checksum") == [{"a": "b"}]
    assert states == [True]
    assert not bench.runtime.is_paused


def test_values_are_checked_before_requests_are_waited_for(bench: Bench) -> None:
    bench.driver()
    bench.runtime.running = 1
    with pytest.raises(WeightsError, match="the tag is 'x'"):
        bench.updates.release(["x"])
    for rows in ("3", 2.5, None):
        with pytest.raises(WeightsError, match="number of rows"):
            bench.updates.read("a", rows)  # type: ignore[arg-type]


def test_a_connection_that_says_nothing_keeps_no_driver_out(bench: Bench) -> None:
    name = bench.socket.runtime({"options": {}})["options"]["control_socket"]
    with Client("\0" + name[1:], "AF_UNIX"):
        bench.driver()


@pytest.mark.filterwarnings("ignore")
def test_a_failure_of_any_kind_is_no_success(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's reply to a release has no other field for it than its id."""
    from pie_driver_sglang.frontends.sglang_server.weight_messages import handlers

    def call(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(bench.socket, "call", call)
    said = handlers(bench.updates)["ReleaseMemoryOccupationReqInput"](SimpleNamespace(tags=None))
    assert (said["success"], "new thread" in said["rid"]) == (False, True)
    assert "new thread" in caplog.text


def test_a_session_keeps_trainers_apart(bench: Bench) -> None:
    """SGLang 0.5.23 wants one around updates; here they need none."""
    from pie_driver_sglang.frontends.sglang_server.weight_messages import handlers

    answers = handlers(bench.updates)
    begin, end = answers["BeginWeightUpdateReqInput"], answers["EndWeightUpdateReqInput"]
    message = SimpleNamespace(selector="target")
    assert "no weight-update session is open" in end(message)["message"]
    for _ in range(2):
        assert begin(message)["success"]
        said = begin(message)
        assert (said["success"], "call `/end_weight_update`" in said["message"]) == (False, True)
        assert end(message)["success"]


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("UpdateWeightsFromTensorReqInput", "selector", "draft", "there is no draft model"),
        ("UpdateWeightsFromDistributedReqInput", "selector", "draft", "there is no draft model"),
        ("BeginWeightUpdateReqInput", "selector", "draft", "there is no draft model"),
        ("CheckWeightsReqInput", "skip_tensor_list", ["norm"], "all tensors are checked"),
    ],
)
def test_fields_of_newer_messages_are_not_ignored(
    bench: Bench, name: str, field: str, value: Any, words: str
) -> None:
    from pie_driver_sglang.frontends.sglang_server.weight_messages import handlers

    said = handlers(bench.updates)[name](SimpleNamespace(**{field: value}))
    assert (said["success"], f"`{field}` is " in said["message"]) == (False, True)
    assert words in said["message"]


def test_a_command_that_a_driver_does_not_end(bench: Bench, tmp_path: Path) -> None:
    """Its caller is told so, and so is the next one, until the driver has ended it."""
    bench.socket.runtime({"options": {}, "ready_timeout_s": -599.5})
    ends = threading.Event()
    is_read = ("command", "ReadWeight")

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        assert is_read not in command.items() or ends.wait(20)
        return {"success": True, "rows": [command.get("name")]}

    driver = bench.driver(answer)
    with pytest.raises(WeightsError, match=r"has not answered `ReadWeight` within 0\.5 s"):
        bench.updates.read("a", 1)
    with pytest.raises(WeightsError, match="has not ended `ReadWeight` yet") as raised:
        bench.updates.read("b", 1)
    assert "`ready_timeout_s`" in raised.value.hint
    ends.set()
    for _ in range(100):
        try:
            found = bench.updates.read("c", 1)
        except WeightsError:
            threading.Event().wait(0.1)
        else:
            break
    # Not the answer for `a`.
    assert found == ["c"]
    assert [command["name"] for command in driver.told] == ["a", "c"]
    assert bench.updates.unavailable is None


def test_an_update_that_a_driver_does_not_end_leaves_unknown_weights(
    bench: Bench, tmp_path: Path
) -> None:
    bench.socket.runtime({"options": {}, "ready_timeout_s": -599.5})
    ends = threading.Event()

    def answer(_: dict[str, Any]) -> dict[str, Any]:
        assert ends.wait(20)
        return {"success": True}

    bench.driver(answer)
    bench.driver()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    success, message = bench.updates.update_from_disk(str(tmp_path))
    assert (success, "`DiskUpdate` within 0.5 s" in message) == (False, True), message
    assert "its weights are unknown: update all weights" in str(bench.said[-1])
    with pytest.raises(WeightsError, match="weights are unknown"), bench.updates.admitting():
        pass
    ends.set()
    for _ in range(100):
        success, message = bench.updates.update_from_disk(str(tmp_path))
        if success:
            break
        threading.Event().wait(0.1)
    assert success, message
    assert bench.updates.unavailable is None


@pytest.mark.parametrize("is_reset", [False, True])
def test_it_says_which_driver_has_not_answered(
    bench: Bench, tmp_path: Path, is_reset: bool
) -> None:
    """`reset_tensors` writes weights, as an update does."""
    bench.socket.runtime({"options": {}, "ready_timeout_s": -599.5})
    ends = threading.Event()

    def late(_: dict[str, Any]) -> dict[str, Any]:
        assert ends.wait(20)
        return {"success": True}

    bench.driver(lambda _: {"success": False, "message": "the file is cut", "hint": ""})
    bench.driver(late)
    if is_reset:
        with pytest.raises(WeightsError, match="the file is cut"):
            bench.updates.check("reset_tensors")
    else:
        assert "the file is cut" in bench.updates.update_from_disk(str(tmp_path)).message
    ends.set()
    reason = str(bench.said[-1])
    assert "within 0.5 s, so its weights are unknown" in reason
    assert "cut" not in reason
