"""The serving loop on a fake engine: failures, recurrent state, probes, and stops."""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request
from pie_driver_sglang.driver.serving_loop import run_batch, serve, warm_up
from pie_driver_sglang.engine.executor import ModelInfo
from pie_driver_sglang.errors import LostError
from pie_driver_sglang.kernels.sampling.reference import Outputs
from support.process import drivers
from support.process import runtime_client as rc
from support.process.valid_requests import MALFORMED

# --- without a model ----------------------------------------------------------------------------


class FakeEngine:
    """Computes nothing; fails when told to."""

    recovers = True

    def __init__(self, planner: _core.Planner) -> None:
        self.block: npt.NDArray[np.uint8] = np.zeros(planner.block_bytes, dtype=np.uint8)
        _, offset, capacity = dict(planner.layout)["top_ks"]
        self.top_ks = self.block[offset : offset + 4 * capacity].view(np.int32)
        self.error: BaseException | None = None
        self.fails_in = ""
        self.passes = 0
        self.copies: list[tuple[str, list[int], list[int]]] = []
        self.state_copies: list[tuple[list[int], list[int]]] = []
        self.states: list[list[int]] = []
        self.host_pages = self.state_slots = 0
        self.token = 42
        self.loss: str | None = None
        self.copy_ns = 0
        self.waited_ns = 0
        self.at_forward: Callable[[], object] = lambda: None
        self.at_copy: Callable[[], object] = lambda: None

    @property
    def model_info(self) -> ModelInfo:
        sizes = {"host_pages": self.host_pages, "state_slots": self.state_slots}
        return ModelInfo(64, 16, 300, 512, "llama3", "float32", "none", **sizes)

    def find_loss(self) -> str | None:
        return self.loss

    def forward(self, batch: _core.Pass) -> None:
        self.passes += 1
        if batch.states is not None:
            self.states.append(np.frombuffer(batch.states, np.int64).tolist())
        self.waited_ns += self.copy_ns
        self.at_forward()
        self.fail("forward")

    def sample(self, group: _core.SlotGroup) -> Outputs:
        self.fail("sample")
        tokens = group.greedy + group.plain + group.filtered
        listed = int(self.top_ks[tokens : tokens + group.dists].sum())
        return Outputs(
            torch.full((tokens,), self.token),
            torch.zeros(listed, dtype=torch.int64),
            *map(torch.zeros, (listed, 300 * group.logits, len(group.labels) // 16)),
            torch.zeros(group.entropies),
        )

    def take_waits(self) -> tuple[int, int]:
        self.fail("take_waits")
        waited, self.waited_ns = self.waited_ns, 0
        return waited, 0

    def copy_pages(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.fail("copy_pages")
        self.at_copy()
        self.copies.append((direction, list(sources), list(targets)))

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.fail("copy_states")
        self.state_copies.append((list(sources), list(targets)))

    def fail(self, where: str) -> None:
        if self.error is not None and self.fails_in == where:
            raise self.error


class Served(NamedTuple):
    """A server with a fake engine, and a client of it."""

    client: _core.Client
    engine: FakeEngine
    reports: list[tuple[str, str]]
    name: str


def make_planner(states: int = 0) -> _core.Planner:
    return _core.Planner(
        states=states,
        page_size=16,
        total_pages=64,
        vocab_size=300,
        max_positions=512,
        row_pages=36,
        max_requests=16,
        chunk_tokens=64,
        max_slots=32,
        random_seed=42,
    )


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """A driver without recurrent state, or with as many slots as the parameter says."""
    name = f"/pie_shmem_g{drivers.new_group_id()}"
    server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
    planner = make_planner(getattr(request, "param", 0))
    engine = FakeEngine(planner)
    reports: list[tuple[str, str]] = []
    server.serve(planner, engine.block.data, lambda kind, text: reports.append((kind, text)))
    ended: list[BaseException] = []

    def run() -> None:
        try:
            serve(server, engine, None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    client = _core.Client(name, timeout_s=20.0)
    try:
        yield Served(client, engine, reports, name)
        engine.at_copy = server.stop
        client.copy("D2D", [0], [0])
    finally:
        thread.join(20.0)
        Path("/dev/shm", name.removeprefix("/")).unlink(missing_ok=True)
    assert not thread.is_alive()
    assert not ended


def small(count: int = 1, **changed: Any) -> list[Request]:
    return [rc.Context([5, 6], [index]).request(**changed) for index in range(count)]


@contextlib.contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="pie_driver_sglang"):
        yield caplog.records


class TestStates:
    """Slots of recurrent state on their way from a frame to the engine."""

    @pytest.mark.parametrize("served", [4], indirect=True)
    def test_requests(self, served: Served) -> None:
        requests = [
            rc.Context([5, 6], [0]).request(state_slot=3, state_reset=True),
            rc.Context([5, 6], [1]).request(state_slot=0),
        ]
        assert served.client.forward(requests).tokens == [[42], [42]]
        assert served.engine.states == [[4, 1, 1, 0]]
        for bad in ({"state_slot": 4}, {"state_slot": 0, "drafts": [1]}):
            reply = served.client.forward([rc.Context([5, 6], [0]).request(**bad)])
            assert reply.tokens == [[]]
        assert served.client.forward(small(1)).tokens == [[]]
        kinds = [kind for kind, _ in served.reports]
        assert kinds == ["state-slot", "state-drafts", "state-slot"]

    @pytest.mark.parametrize("served", [4], indirect=True)
    def test_copies(self, served: Served) -> None:
        assert served.client.copy("D2D", [3, 1], [1, 2], states=True) == 0
        assert served.engine.state_copies == [([3], [1]), ([1], [2])]
        assert served.client.copy("D2D", [4], [1], states=True) == 3
        assert served.client.copy("D2H", [1], [1], states=True) == 4
        assert served.client.copy("D2D", [4], [1]) == 0
        assert served.engine.copies == [("D2D", [4], [1])]

    def test_a_model_without_them(self, served: Served) -> None:
        assert served.client.copy("D2D", [0], [1], states=True) == 4
        assert served.client.forward(small(1, state_slot=9)).tokens == [[42]]
        assert served.engine.states == []

    @pytest.mark.parametrize("slots", [1, 3])
    def test_the_warm_up(self, slots: int) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        planner = make_planner(slots)
        engine = FakeEngine(planner)
        engine.state_slots = slots
        reports: list[tuple[str, str]] = []
        server.serve(planner, engine.block.data, lambda kind, text: reports.append((kind, text)))
        try:
            warm_up(server, engine)
        finally:
            server.unlink()
        assert not reports
        assert engine.state_copies == [([0], [0])]
        # One, all of them, a prefill, all together, a mask.
        together = [part for slot in range(slots) for part in (slot + 1, 1)]
        assert engine.states[:3] == [[1, 1], together, [1, 1]]
        assert sorted(engine.states[3][::2]) == [*range(1, slots + 1)]


class TestProbes:
    """A batch's probes count its own waits alone."""

    def test_a_failed_batch_leaves_nothing_to_the_next(self, served: Served) -> None:
        # A request without a sampler makes the answer an archive, which has probes.
        frame = [*small(1), Request([5], [0], [9], 1)]
        served.engine.copy_ns = 7_000_000
        served.engine.fails_in, served.engine.error = "sample", RuntimeError("late")
        assert served.client.forward(frame).aborted
        served.engine.copy_ns, served.engine.error = 2_000_000, None
        reply = served.client.forward(frame)
        assert not reply.fast
        assert reply.probes[2] == 2000

    def test_the_warm_up_leaves_nothing_to_the_first_batch(self) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        planner = make_planner()
        engine = FakeEngine(planner)
        server.serve(planner, engine.block.data, lambda kind, text: None)
        engine.copy_ns = 3_000_000
        warm_up(server, engine)
        engine.copy_ns = 1_000_000
        batch = server.warm_up(_core.encode_forward(small(1)))
        assert run_batch(batch, engine).h2d_ns == 1_000_000
        server.unlink()

    @pytest.mark.parametrize(
        ("host_pages", "directions"), [(0, ["D2D"]), (1, ["D2D", "D2H", "H2D", "H2H"])]
    )
    def test_the_warm_up_copies_as_the_runtime_may(
        self, host_pages: int, directions: list[str]
    ) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        server.unlink()
        planner = make_planner()
        engine = FakeEngine(planner)
        engine.host_pages = host_pages
        server.serve(planner, engine.block.data, lambda kind, text: None, host_pages=host_pages)
        warm_up(server, engine)
        assert engine.copies == [(direction, [0], [0]) for direction in directions]


def call_fails(client: _core.Client, where: str) -> bool:
    """Asks for what fails there; whether the answer says so."""
    if where == "copy_pages":
        return client.copy("D2D", [1], [2]) == 5
    return client.forward(small()).aborted


class TestEngineFailure:
    """An exception costs its frame alone."""

    @pytest.mark.parametrize("where", ["forward", "sample", "take_waits"])
    @pytest.mark.parametrize(
        "error", [RuntimeError("out of luck"), MemoryError(), ValueError(), KeyError("key")]
    )
    def test_the_batch_is_aborted_and_the_next_one_is_served(
        self,
        served: Served,
        where: str,
        error: Exception,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        served.engine.error, served.engine.fails_in = error, where
        with logged(caplog) as records:
            reply = served.client.forward(small(3))
            rc.eventually(lambda: records, "the log line")
            served.client.health()
        assert reply.aborted
        assert reply.status == rc.ABORT_STATUS
        (record,) = records
        assert record.exc_info is not None
        assert record.exc_info[1] is error
        assert "3 requests and 6 tokens" in record.getMessage()
        served.engine.error = None
        assert served.client.forward(small(3)).tokens == [[42]] * 3

    def test_a_failure_in_a_later_pass(self, served: Served) -> None:
        long = rc.Context([5] * 200, list(range(13))).request()
        served.engine.fails_in, served.engine.error = "sample", RuntimeError("late")
        assert served.client.forward([long]).aborted
        assert served.engine.passes == 4  # 200 tokens in passes of 64.
        served.engine.error = None
        assert served.client.forward([long]).tokens == [[42]]

    @pytest.mark.parametrize("token", [300, -1, 2**40])
    def test_tokens_of_logits_that_are_no_numbers(self, served: Served, token: int) -> None:
        served.engine.token = token
        reply = served.client.forward([*small(2), Request([5], [0], [9], 1)])
        assert (reply.aborted, reply.tokens) == (False, [[], [], []])
        served.engine.token = 7
        assert served.client.forward(small()).tokens == [[7]]

    def test_many_failures_in_a_row(self, served: Served) -> None:
        served.engine.error, served.engine.fails_in = RuntimeError("again"), "forward"
        for _ in range(200):
            assert served.client.forward(small(4)).aborted
        served.engine.error = None
        assert served.client.forward(small(4)).tokens == [[42]] * 4

    @pytest.mark.parametrize("where", ["forward", "sample", "copy_pages"])
    def test_a_failed_rank_of_several_ends_the_driver(self, where: str) -> None:
        """The others wait for it in a collective operation; the request is aborted."""

        def spoil(engine: FakeEngine) -> None:
            engine.recovers = False
            engine.error, engine.fails_in = RuntimeError("no luck"), where

        with pytest.raises(RuntimeError, match="no luck"):
            self.serve_one(spoil, where)

    @pytest.mark.parametrize("where", ["forward", "sample", "copy_pages"])
    def test_a_device_that_is_lost(self, where: str, caplog: pytest.LogCaptureFixture) -> None:
        """The request is answered; then serving ends, without a traceback in the log."""

        def spoil(engine: FakeEngine) -> None:
            engine.loss = "cuda:0 can run nothing any more: an illegal memory access"
            engine.error, engine.fails_in = RuntimeError("no luck"), where

        with caplog.at_level(logging.INFO), pytest.raises(LostError, match="cuda:0") as caught:
            self.serve_one(spoil, where)
        assert "start the driver again" in caught.value.hint
        assert str(caught.value.__cause__) == "no luck"
        assert not caplog.records

    @staticmethod
    def serve_one(spoil: Callable[[FakeEngine], None], where: str) -> None:
        """Serves until the loop ends by itself; one request comes, and is answered by an abort."""
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        planner = make_planner()
        engine = FakeEngine(planner)
        spoil(engine)
        server.serve(planner, engine.block.data, lambda kind, text: None)
        client = _core.Client(name, timeout_s=20.0)
        with rc.background(lambda: call_fails(client, where)) as answers:
            try:
                serve(server, engine, None)
            finally:
                server.unlink()
        assert answers == [True]

    def test_a_copy_that_fails(self, served: Served, caplog: pytest.LogCaptureFixture) -> None:
        served.engine.error, served.engine.fails_in = RuntimeError("no copy"), "copy_pages"
        with logged(caplog) as records:
            assert served.client.copy("D2D", [1, 2], [3, 4]) == 5
            rc.eventually(lambda: records, "the log line")
        (record,) = records
        assert record.exc_info is not None
        assert "D2D copy of 2 pages" in record.getMessage()
        served.engine.error = None
        assert served.client.copy("D2D", [1, 2], [3, 4]) == 0
        assert served.engine.copies == [("D2D", [1, 2], [3, 4])]
        # Lists that overlap come in parts.
        assert served.client.copy("D2D", [1, 2], [2, 3]) == 0
        assert served.engine.copies[1:] == [("D2D", [1], [2]), ("D2D", [2], [3])]

    def test_a_client_that_gives_up_is_reported(self, served: Served) -> None:
        path = Path("/dev/shm", served.name.removeprefix("/"))
        with rc.Region(path, writable=True) as region:
            frame = _core.encode_forward(small())
            waiting = threading.Event()
            served.engine.at_forward = lambda: waiting.wait(10.0)
            with rc.background(lambda: served.client.call(frame)):
                rc.eventually(lambda: served.engine.passes, "the forward pass")
                slot = next(s for s in range(region.slots) if not region.answered(s))
                region.send(slot, rc.health_frame())  # The slot is used again.
                waiting.set()
                rc.eventually(lambda: region.answered(slot), "the answer")
        rc.eventually(lambda: served.reports, "the report")
        assert [kind for kind, _ in served.reports] == ["stale"]


class TestWithoutPython:
    """What needs no model is answered by the native half."""

    FLOOD = 3000

    def test_requests_without_tokens_do_not_enter_the_loop(self, served: Served) -> None:
        idle = Request([], [], [1], 4, context_id=3)
        for _ in range(self.FLOOD):
            assert served.client.forward([idle, idle]).tokens == [[], []]
        assert served.engine.passes == 0
        assert served.reports == []

    def test_frames_without_requests(self, served: Served) -> None:
        for _ in range(self.FLOOD):
            assert served.client.forward([]).tokens == []
        assert served.engine.passes == 0

    def test_health_and_empty_copies(self, served: Served) -> None:
        for _ in range(self.FLOOD):
            assert served.client.health() == 0
            assert served.client.copy("D2D", [], []) == 0
        assert served.engine.copies == []
        assert served.reports == []

    def test_batches_of_faulty_requests_only(self, served: Served) -> None:
        for _ in range(300):
            assert served.client.forward(small(2, pages=[99])).tokens == [[], []]
        assert served.engine.passes == 0
        assert {kind for kind, _ in served.reports} == {"page-id"}
        # The answer comes before the report.
        rc.eventually(lambda: len(served.reports) == 600, "the last report")

    def test_bad_frames_are_reported_and_answered(self, served: Served) -> None:
        for number in range(300):
            answer = rc.decode(served.client.call(struct.pack(">I", 0x7F000000 + number) * 100))
            assert answer.status == MALFORMED
        assert served.engine.passes == 0
        assert {kind for kind, _ in served.reports} == {"malformed"}

    def test_an_idle_request_beside_a_working_one(self, served: Served) -> None:
        idle = Request([], [], [1], 4)
        reply = served.client.forward([idle, *small(), idle])
        assert reply.tokens == [[], [42], []]
        assert served.engine.passes == 1

    def test_several_clients_at_once(self, served: Served) -> None:
        def call(number: int) -> None:
            for _ in range(200):
                if number % 2:
                    assert served.client.forward(small(3)).tokens == [[42]] * 3
                else:
                    assert rc.decode(served.client.call(b"junk")).status == MALFORMED

        with contextlib.ExitStack() as stack:
            results = [
                stack.enter_context(rc.background(lambda number=number: call(number)))  # type: ignore[misc]
                for number in range(4)
            ]
        assert results == [[None]] * 4
        assert served.engine.passes == 400


class TestStop:
    """The end of the iteration."""

    def test_requests_that_wait_are_aborted(self) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        client = _core.Client(name, timeout_s=10.0)
        with (
            rc.background(client.health) as health,
            rc.background(lambda: call_fails(client, "forward")) as requested,
        ):
            with rc.Region(Path("/dev/shm", name.removeprefix("/"))) as region:
                rc.eventually(
                    lambda: sum(not region.answered(slot) for slot in range(region.slots)) == 2,
                    "the requests",
                )
            server.unlink()
        assert requested == [True]
        assert health == [rc.ABORT_STATUS]

    def test_a_waiting_server_is_stopped_by_another_thread(self) -> None:
        name = f"/pie_shmem_g{drivers.new_group_id()}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        planner = make_planner()
        engine = FakeEngine(planner)
        server.serve(planner, engine.block.data, lambda _kind, _text: None)
        thread = threading.Thread(target=serve, args=(server, engine, None), daemon=True)
        thread.start()
        try:
            assert _core.Client(name).health() == 0  # The thread waits by now.
            server.stop()
            thread.join(10.0)
            assert not thread.is_alive()
        finally:
            Path("/dev/shm", name.removeprefix("/")).unlink(missing_ok=True)
