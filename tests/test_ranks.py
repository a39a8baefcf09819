"""A model on several devices: how its processes start, meet and end. What they answer is compared
with one process's by the other tests, whose drivers run spread as well.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import architectures
import checkpoints
import drivers
import runtime_client as rc
import tiny_models
from pie_driver_sglang import _core
from pie_driver_sglang._core import Extension, Request, Sampler
from pie_driver_sglang.engine.parallel_sampling import MIN_DIVIDED_SLOTS, partition_slots
from pie_driver_sglang.errors import AdapterError, DriverError, RingError
from pie_driver_sglang.ranks import worker
from pie_driver_sglang.ranks.commands import CopyPages, FinishLoad, Forward, pack, unpack
from pie_driver_sglang.ranks.leader import LeaderExecutor
from pie_driver_sglang.ranks.parallel import Workers
from pie_driver_sglang.ranks.types import Span
from reference import Context, Pages, Reference, random_tokens
from test_lifecycle import END_S, is_of_this_run, is_running

LOCAL = ("0100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1 as `/proc/net` writes them."""


def shared_memory(*family: int) -> set[str]:
    """The names in shared memory that are these processes' or nobody's, but for others' regions.

    Other tests run at the same time; what a process outside the family has mapped is its own.
    """
    folder = Path("/dev/shm")
    names = {path.name for path in folder.iterdir()}
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in family:
            # It may have ended.
            with contextlib.suppress(OSError):
                names -= set(re.findall(r" /dev/shm/(\S+)$", (process / "maps").read_text(), re.M))
    names &= {path.name for path in folder.iterdir()}
    return {name for name in names if not name.startswith("pie_shmem_g") or is_of_this_run(name)}


def listening_ports(pid: int) -> list[int]:
    """The ports that a process listens on."""
    return [int(port, 16) for _, port in listening_places(pid)]


def listening(pid: int) -> list[str]:
    """The addresses that a process listens on."""
    return [address for address, _ in listening_places(pid)]


def listening_places(pid: int) -> list[tuple[str, str]]:
    """Address and port of each socket that a process listens on, as `/proc/net` writes them."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    found = []
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            cells = row.split()
            if cells[9] in inodes and cells[3] == "0A":
                address, _, port = cells[1].partition(":")
                found.append((address, port))
    return found


def last_words(log: str) -> str:
    """The line that says what went wrong: the last one but for its hint."""
    *_, line, empty, hint = log.rstrip().splitlines()
    assert line.startswith("pie_driver_sglang: ")
    assert empty == ""
    assert hint.startswith("hint: ")
    return line


def ask(driver: drivers.Driver | rc.Start, count: int = 3) -> list[list[int]]:
    """Greedy tokens of a prompt and what follows it."""
    client, tokens, found = driver.client(), [5, 9, 77, 3, 41], []
    start = 0
    for _ in range(count):
        new = tokens[start:]
        greedy = [(len(new) - 1, Sampler.greedy())]
        positions = list(range(start, len(tokens)))
        reply = client.forward([Request(new, positions, [0], len(tokens), greedy)])
        start = len(tokens)
        tokens.append(reply.tokens[0][0])
        found.append(reply.tokens[0])
    return found


def keep_busy(start: rc.Start, path: str) -> None:
    """Asks for one long batch, or for many short ones, until there is no answer any more."""
    client = _core.Client(f"/{start.region.name}", spin_budget_us=200, timeout_s=2.0)
    tokens = 512 if path == "python" else 1
    greedy = [(tokens - 1, Sampler.greedy())]
    request = Request([7] * tokens, list(range(tokens)), list(range(32)), 16, greedy)
    while not client.forward([request] * (250 if path == "python" else 1)).aborted:
        pass


def starting_worker(start: rc.Start) -> int:
    """The worker of a driver that has just been started."""
    # Before its region there is none, but a child of a moment that forks the reaper off.
    rc.eventually(start.region.exists, "the region")
    rc.eventually(lambda: rc.children(start.process.pid), "the worker")
    [worker] = rc.children(start.process.pid)
    return worker


@pytest.mark.engine
class TestEnds:
    """No process outlives another one, and nothing is left behind."""

    @pytest.fixture
    def config(self, llama_snapshot: Path, tmp_path: Path) -> Path:
        return drivers.write_config(tmp_path, llama_snapshot, **drivers.spread(2))

    @pytest.fixture
    def ready(self, config: Path) -> Iterator[tuple[rc.Start, int]]:
        """A driver and its worker's number."""
        with rc.forked(config) as start:
            start.wait_until_ready()
            [worker] = rc.children(start.process.pid)
            yield start, worker
        rc.eventually(lambda: not is_running(worker), "the worker's end", END_S)

    def test_as_the_runtime_starts_it(
        self, config: Path, llama_snapshot: Path, tmp_path: Path
    ) -> None:
        before = shared_memory()
        # Modules in the working directory are imported by neither process.
        with drivers.spawn(config, folder=drivers.set_traps(tmp_path / "traps")) as driver:
            pids = [driver.process.pid, *rc.children(driver.process.pid)]
            # What a stranger that was killed has left is removed by its resource tracker.
            only_region = {driver.region.name}
            rc.eventually(lambda: shared_memory(*pids) - before == only_region, "only the region")
            assert len(pids) == 2
            for pid in pids:
                assert set(listening(pid)) <= set(LOCAL)
            tokens = ask(driver)
        assert driver.stop() == 0
        rc.eventually(lambda: shared_memory() <= before, "nothing left behind")
        rc.eventually(lambda: not is_running(pids[1]), "the worker's end", END_S)
        with drivers.fork(drivers.write_config(tmp_path, llama_snapshot)) as alone:
            assert ask(alone) == tokens

    def test_strangers_cost_no_descriptors(self, ready: tuple[rc.Start, int]) -> None:
        """Ranks on the CPU listen on the loopback interface, but take nobody in any more."""
        start, worker = ready
        ask(start)
        pids = [start.process.pid, worker]
        before = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
        ports = [port for pid in pids for port in listening_ports(pid)]
        assert ports, "gloo listens no more: its sockets need no filter"
        taken = 0
        for port in ports:
            with socket.socket() as stranger:
                stranger.settimeout(0.05)
                with contextlib.suppress(OSError):
                    stranger.connect(("127.0.0.1", port))
                    stranger.send(b"garbage" * 100)
                    taken += 1
        ask(start)
        assert taken == 0
        assert [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids] == before

    def test_a_killed_worker_ends_the_driver(self, ready: tuple[rc.Start, int]) -> None:
        start, worker = ready
        ask(start)
        os.kill(worker, signal.SIGKILL)
        assert start.process.wait(END_S) == 1
        assert "rank 1 on cpu was killed by signal 9" in last_words(start.log())
        assert not start.region.exists()

    @pytest.mark.parametrize("tokens", [1, 512], ids=["graph", "python"])
    def test_requests_behind_a_killed_worker_are_answered(
        self, ready: tuple[rc.Start, int], tokens: int
    ) -> None:
        """The runtime would wait for a minute otherwise."""
        start, worker = ready
        client = start.client()
        pages = list(range(-(-tokens // 16)))
        slots = [(tokens - 1, Sampler.greedy())]
        request = Request([7] * tokens, list(range(tokens)), pages, (tokens - 1) % 16 + 1, slots)
        assert client.forward([request]).tokens
        with contextlib.ExitStack() as stack:
            os.kill(worker, signal.SIGKILL)
            started = time.monotonic()
            results = [
                stack.enter_context(rc.background(lambda: client.forward([request])))
                for _ in range(3)
            ]
        assert time.monotonic() - started < 2.0
        assert [reply.aborted for [reply] in results] == [True] * 3  # type: ignore[attr-defined]
        assert start.process.wait(END_S) == 1

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_to_all_is_for_the_driver(
        self, ready: tuple[rc.Start, int], number: signal.Signals
    ) -> None:
        start, worker = ready
        os.kill(worker, number)
        ask(start)
        os.kill(start.process.pid, number)
        if number == signal.SIGINT:
            ask(start)
            os.kill(start.process.pid, signal.SIGTERM)
        assert start.process.wait(END_S) == 0
        assert not start.region.exists()

    def test_a_killed_driver_takes_its_worker_along(self, ready: tuple[rc.Start, int]) -> None:
        start, worker = ready
        os.kill(start.process.pid, signal.SIGKILL)
        rc.eventually(lambda: not is_running(worker), "the worker's end", END_S)
        rc.eventually(lambda: not start.region.exists(), "the region's end", END_S)

    @pytest.mark.parametrize("path", ["python", "graph"])
    @pytest.mark.parametrize("victim", ["driver", "worker"])
    def test_one_is_killed_while_both_compute(
        self, ready: tuple[rc.Start, int], victim: str, path: str
    ) -> None:
        """The other one may be waiting for it in a collective operation."""
        start, worker = ready
        with rc.background(lambda: keep_busy(start, path)):
            time.sleep(0.5)
            os.kill(start.process.pid if victim == "driver" else worker, signal.SIGKILL)
            if victim == "driver":
                rc.eventually(lambda: not is_running(worker), "the worker's end", END_S)
                rc.eventually(lambda: not start.region.exists(), "the region's end", END_S)
            else:
                assert start.process.wait(END_S) == 1
                assert "rank 1 on cpu was killed by signal 9" in last_words(start.log())
                assert not start.region.exists()

    def test_sigterm_while_a_step_runs(self, ready: tuple[rc.Start, int]) -> None:
        start, _ = ready
        with rc.background(lambda: keep_busy(start, "eager")):
            time.sleep(0.3)
            assert start.stop(END_S) == 0
        assert not start.region.exists()

    @pytest.mark.parametrize("log", [None, "importing SGLang", "loading", "warming up"])
    def test_a_driver_killed_while_it_starts(self, config: Path, log: str | None) -> None:
        with rc.forked(config) as start:
            worker = starting_worker(start)
            if log is not None:
                start.wait_for_log(log)
            os.kill(start.process.pid, signal.SIGKILL)
            rc.eventually(lambda: not is_running(worker), "the worker's end", END_S)
            rc.eventually(lambda: not start.region.exists(), "the region's end", END_S)

    @pytest.mark.parametrize("delay", [0.0, 0.3, 1.0])
    def test_a_worker_killed_while_it_starts(self, config: Path, delay: float) -> None:
        with rc.forked(config) as start:
            worker = starting_worker(start)
            time.sleep(delay)
            os.kill(worker, signal.SIGKILL)
            assert start.process.wait(END_S) == 1
            assert "rank 1 on cpu was killed by signal 9" in last_words(start.log())
            is_ready = bool(start.handshake.read_bytes())
            assert is_ready or drivers.CLOSED_EARLY not in start.log()
            assert not start.region.exists()

    def test_a_workers_own_error_is_the_last_line(
        self, config: Path, llama_snapshot: Path, tmp_path: Path
    ) -> None:
        broken = Path(shutil.copytree(llama_snapshot, tmp_path / "broken"))
        weights = next(broken.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1000])
        other = drivers.write_config(tmp_path, broken, **drivers.spread(2))
        with rc.forked(config, with_another_model, str(other)) as start:
            assert start.process.wait(60.0) == 1
            assert "rank 1 on cpu: model.safetensors is " in last_words(start.log())
            assert drivers.CLOSED_EARLY not in start.log()
            assert start.handshake.read_bytes() == b""

    def test_a_worker_that_fails_in_a_command_ends_the_driver(self, config: Path) -> None:
        with rc.forked(config, with_a_broken_copy, "") as start:
            start.wait_until_ready()
            ask(start)
            client = _core.Client(f"/{start.region.name}", spin_budget_us=200, timeout_s=2.0)
            with rc.background(lambda: client.copy("D2D", [5], [6])):
                assert start.process.wait(5.0) == 1
            assert "rank 1 on cpu: OSError: no such page" in last_words(start.log())
            assert not start.region.exists()


def with_another_model(other: str, arguments: Sequence[str]) -> list[str]:
    """As if the worker's disk were broken, and a progress bar just being drawn."""
    report = worker.report

    def report_behind_a_bar(descriptor: int, error: DriverError) -> None:
        os.write(2, b"loading: 40%")
        report(descriptor, error)

    worker.report = report_behind_a_bar
    at = list(arguments).index("--config") + 1
    return [*arguments[:at], other, *arguments[at + 1 :]]


def with_a_broken_copy(_: str, arguments: Sequence[str]) -> list[str]:
    """Runs in the worker, before it starts."""
    from pie_driver_sglang.engine.backend_executor import BackendExecutor

    copy = BackendExecutor.copy_pages

    def copy_but_page_5(
        engine: BackendExecutor, direction: str, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        if 5 in sources:
            raise OSError("no such page")
        copy(engine, direction, sources, targets)

    BackendExecutor.copy_pages = copy_but_page_5  # type: ignore[method-assign]
    return list(arguments)


class TestWorkers:
    """The leader's side, with processes that do as the test says."""

    @staticmethod
    def workers(script: str, count: int = 1) -> tuple[Workers, list[DriverError]]:
        """Workers that run a script of Python, and what becomes of them."""
        failures: list[DriverError] = []

        def start(arguments: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", script, *arguments]
            return subprocess.Popen(command, pass_fds=descriptors)

        return Workers(Path("c.toml"), ["cpu"] * (count + 1), failures.append, start), failures

    def test_a_report_is_what_is_said(self) -> None:
        report = json.dumps({"message": "no such thing", "hint": "get one"}) + "\n"
        script = f"import os, sys; os.write(int(sys.argv[-1]), {report.encode()!r}); sys.exit(1)"
        workers, failures = self.workers(script)
        rc.eventually(lambda: failures, "the failure")
        with workers:
            assert str(failures[0]) == "rank 1 on cpu: no such thing"
            assert failures[0].hint == "get one"

    @pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"message": 1}', b"\xff\xfe"])
    def test_without_a_report_the_status_is_said(self, garbage: bytes) -> None:
        script = f"import os, sys; os.write(int(sys.argv[-1]), {garbage!r}); sys.exit(3)"
        workers, failures = self.workers(script)
        rc.eventually(lambda: failures, "the failure")
        with workers:
            assert str(failures[0]) == "rank 1 on cpu ended with status 3"

    def test_a_report_counts_before_its_worker_has_ended(self) -> None:
        """One with a GPU may need seconds for that, while its connections are closed already."""
        report = json.dumps({"message": "no memory", "hint": "get some"}) + "\n"
        script = "import os, sys, time;"
        script += f"os.write(int(sys.argv[-1]), {report.encode()!r}); time.sleep(1000)"
        workers, failures = self.workers(script)
        with pytest.raises(ConnectionError), workers:
            raise ConnectionError
        assert [str(failure) for failure in failures] == ["rank 1 on cpu: no memory"]

    def test_a_process_that_a_worker_has_started_holds_nobody_up(self, tmp_path: Path) -> None:
        script = "import os, sys, subprocess;"
        script += "subprocess.Popen(['sleep', '30'], pass_fds=[int(sys.argv[-1])])"
        workers, failures = self.workers(script)
        rc.eventually(lambda: failures, "the failure", END_S)
        started = time.monotonic()
        with workers:
            assert str(failures[0]) == "rank 1 on cpu ended with status 0"
        assert time.monotonic() - started < 2 * END_S

    def test_a_worker_that_cannot_be_started_ends_those_before_it(self) -> None:
        failures: list[DriverError] = []
        started: list[subprocess.Popen[bytes]] = []

        def start(_: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
            if len(started) == 2:
                raise OSError("no more processes")
            command = [sys.executable, "-c", "import time; time.sleep(1000)"]
            started.append(subprocess.Popen(command, pass_fds=descriptors))
            return started[-1]

        with pytest.raises(OSError, match="no more processes"):
            Workers(Path("c.toml"), ["cpu"] * 4, failures.append, start)
        assert [worker.wait(END_S) for worker in started] == [-signal.SIGKILL] * 2
        assert not failures

    def test_workers_are_killed_in_the_end(self) -> None:
        workers, failures = self.workers("import time; time.sleep(1000)", count=3)
        started = time.monotonic()
        pids = rc.children(os.getpid())
        with workers:
            pass
        assert time.monotonic() - started < END_S
        assert not failures
        assert len(set(pids) - set(rc.children(os.getpid()))) >= 3

    def test_a_worker_that_ends_beside_a_failure_has_the_last_word(self) -> None:
        workers, failures = self.workers("import time; time.sleep(0.5)")
        with pytest.raises(KeyError), workers:
            raise KeyError
        assert [str(failure) for failure in failures] == ["rank 1 on cpu ended with status 0"]


class TestCommands:
    """What the leader tells, as a worker hears it."""

    def test_all_of_a_pass_arrives(self) -> None:
        mask = SimpleNamespace(offsets=bytearray(8), words=bytearray(b"1234"))
        span = SimpleNamespace(
            number=7,
            request=1,
            kv=(3, 9),
            continues=True,
            grid=(1, 2, 4),
            pixels=memoryview(b"pixel"),
        )
        images = SimpleNamespace(spans=[span], positions=bytearray(b"positions"))
        told = {
            "tokens": 9,
            "requests": 2,
            "decode": False,
            "seq_lens_sum": 30,
            "updates": 4,
            "slots": 5,
            "mask": mask,
            "adapters": None,
            "images": images,
            "states": bytearray(16),
            "noted": bytes(16),
        }
        heard: Any = unpack(b"".join(pack(Forward.of(SimpleNamespace(**told)))))  # type: ignore[arg-type]
        for name in told.keys() - {"mask", "images"}:
            assert getattr(heard, name) == told[name]
        assert heard.mask == (mask.offsets, mask.words)
        assert heard.images.positions == images.positions
        assert heard.images.spans == [(7, 1, (3, 9), True, (1, 2, 4), b"pixel")]

    def test_pixels_are_sent_from_where_they_lie(self) -> None:
        """Not a copy of them, and no pickle; a worker reads them where the message arrived."""
        sizes = (1_000_000, 12, 0)
        pixels = [np.arange(size, dtype=np.uint8) for size in sizes]
        spans = [
            SimpleNamespace(
                number=number,
                request=0,
                kv=(0, 4),
                continues=False,
                grid=(1, 2, 2),
                pixels=one.data,
            )
            for number, one in enumerate(pixels)
        ]
        others: dict[str, Any] = dict.fromkeys(Forward._fields, 0) | {"mask": None}
        images = SimpleNamespace(spans=spans, positions=bytearray(b"at"))
        command = Forward.of(SimpleNamespace(**others | {"images": images}), known=[2])  # type: ignore[arg-type]
        parts = pack(command)
        assert np.shares_memory(parts[1], pixels[0])
        assert np.shares_memory(parts[2], pixels[1])
        assert len(parts[0]) + len(parts[-1]) < 1000
        broadcast = _core.Broadcast(1)
        follower = _core.Follower(os.dup(broadcast.fd), 0, bytearray(8), spin_budget_us=0)
        received: list[bytes] = []
        with rc.background(lambda: received.append(next(follower))):
            broadcast.send(parts)
        heard = unpack(received[0])
        assert isinstance(heard, Forward)
        views = [span.pixels for span in heard.spans]
        assert [bytes(view) for view in views] == [bytes(pixels[0]), bytes(pixels[1]), b""]
        message = np.frombuffer(received[0], dtype=np.uint8)
        for view in views[:2]:
            seen = np.frombuffer(view, dtype=np.uint8)
            assert np.shares_memory(seen, message)
            assert seen.ctypes.data % 4 == 0

    def test_nothing_of_a_pass_is_forgotten(self) -> None:
        """A field that planner and engine agree on later must be told, too."""
        public = {name for name in dir(_core.Pass) if not name.startswith("_")}
        assert public == set(Forward._fields)
        public = {name for name in dir(_core.ImageSpan) if not name.startswith("_")}
        assert public == set(Span._fields)

    def test_commands_follow_their_block(self) -> None:
        broadcast = _core.Broadcast(1)
        block, other = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
        follower = _core.Follower(os.dup(broadcast.fd), 0, other.data, spin_budget_us=0)
        broadcast.send_block(block.data, 60)
        broadcast.send(pack(CopyPages("D2H", [1], [2])))
        assert unpack(next(follower)) == CopyPages("D2H", [1], [2])
        assert other.tolist() == [*range(60), *[0] * 40]

    @pytest.mark.parametrize(
        ("error", "recovers"), [(AdapterError("unfit"), True), (ValueError("broken"), False)]
    )
    def test_an_adapter_that_all_ranks_refuse_is_no_failure(
        self, error: Exception, recovers: bool
    ) -> None:
        def refuse(_number: int) -> None:
            raise error

        rank: Any = SimpleNamespace(finish_load=refuse)
        broadcast = _core.Broadcast(1)
        follower = _core.Follower(os.dup(broadcast.fd), 0, bytearray(8), spin_budget_us=0)
        leading = LeaderExecutor(rank, broadcast)
        with pytest.raises(type(error)):
            leading.finish_load(7)
        assert leading.recovers is recovers
        command = unpack(next(follower))
        assert command == FinishLoad(7)
        with contextlib.nullcontext() if recovers else pytest.raises(ValueError, match="broken"):
            command.run(rank)

    def test_what_does_not_fit_is_refused(self) -> None:
        broadcast = _core.Broadcast(1)
        block = np.zeros(10, dtype=np.uint8)
        with pytest.raises(ValueError, match="has 10 bytes, not 11"):
            broadcast.send_block(block.data, 11)
        with pytest.raises(RingError, match="2"):
            _core.Follower(os.dup(broadcast.fd), 2, block.data, spin_budget_us=0)
        with pytest.raises(ValueError, match="writable"):
            _core.Follower(os.dup(broadcast.fd), 0, bytes(10), spin_budget_us=0)
        with pytest.raises(ValueError, match="-1"):
            _core.Follower(-1, 0, block.data, spin_budget_us=0)
        follower = _core.Follower(os.dup(broadcast.fd), 0, block.data, spin_budget_us=0)
        with pytest.raises(RingError, match="opened before"):
            _core.Follower(os.dup(broadcast.fd), 0, block.data, spin_budget_us=0)
        broadcast.send_block(np.zeros(20, dtype=np.uint8).data, 20)
        with pytest.raises(RuntimeError, match="20 bytes of a block of 10"):
            next(follower)


class TestSlots:
    """Which slots of a step a rank samples."""

    @pytest.mark.parametrize(
        ("slots", "ranks", "own"),
        [
            (MIN_DIVIDED_SLOTS, 2, [(0, 32), (32, 64)]),
            (MIN_DIVIDED_SLOTS + 8, 4, [(0, 18), (18, 36), (36, 54), (54, 72)]),
            (MIN_DIVIDED_SLOTS - 4, 2, [(0, 60), (0, 60)]),
            (MIN_DIVIDED_SLOTS + 1, 2, [(0, 65), (0, 65)]),
        ],
        ids=["many", "of-four-ranks", "few", "odd"],
    )
    def test_many_are_divided_evenly(
        self, slots: int, ranks: int, own: list[tuple[int, int]]
    ) -> None:
        groups: list[Any] = [
            SimpleNamespace(world_size=ranks, rank_in_group=rank) for rank in range(ranks)
        ]
        found = [partition_slots(slots, group).own for group in groups]
        assert [(part.start, part.stop) for part in found] == own

    def test_a_rank_with_all_logits_samples_all(self) -> None:
        slots = 2 * MIN_DIVIDED_SLOTS
        assert partition_slots(slots, None).own == slice(0, slots)

    @pytest.mark.engine
    def test_their_tokens_are_those_of_one_process(
        self, models_folder: Path, tmp_path: Path
    ) -> None:
        # The model's vocabulary is padded, and its logits are capped.
        snapshot = tiny_models.build("gemma2", models_folder)
        spread, whole = (
            drivers.write_config(
                tmp_path,
                snapshot,
                options={"cuda_graph_max_bs": MIN_DIVIDED_SLOTS},
                **drivers.spread(ranks),
            )
            for ranks in (2, 1)
        )
        with rc.forked(spread, with_counted_samples) as start, drivers.fork(whole) as alone:
            start.wait_until_ready()
            clients = (start.client(), alone.client())
            placed = []
            for batch in slot_batches(alone.caps["vocab_size"]):
                ours, theirs = (client.forward(batch) for client in clients)
                assert ours.tokens == theirs.tokens
                assert len({token for [token] in ours.tokens}) > len(batch) // 3
                placed.append(len(ours.places))
                for own, other in zip(ours.places, theirs.places, strict=True):
                    assert flat(own) == pytest.approx(flat(other), abs=1e-4)
            # The leader has waited for what its worker has sampled.
            counts = re.findall(r"sampled (\d+) slots", start.log())
            # What it warms up with comes first.
            assert counts[-5:] == ["56", "32", "32", "32", "32"]
            assert placed == [0, 0, 0, 0, 42]


def slot_batches(vocab: int) -> Iterator[list[Request]]:
    """Few slots, many, those of rows that are sampled in part, and fewer than a graph has rows."""
    samplers = [
        Sampler.greedy(),
        Sampler.multinomial(0.9, 1234),
        Sampler.multinomial(3.0, 77),
        Sampler.top_k_top_p(1.5, 20, 0.9),
        Sampler.min_p(1.2, 0.05),
    ]
    # Packed as bits, as edges, and none.
    masks = [[1] * vocab, [vocab // 3, 90, 1, 40], None]
    for requests, rows in ((56, 1), (64, 1), (20, 3), (64, 2)):
        contexts = [
            rc.Context(random_tokens(vocab, rows, "slots", page), [page], context_id=1 + page)
            for page in range(requests)
        ]
        yield [
            context.request(samplers[number % 5], logit_mask=masks[number % 3])
            for number, context in enumerate(contexts)
        ]
    # Each rank has log-probabilities of its own slots, of some of them none.
    asked = [
        Extension(logprobs=4, logprobs_of=[page], presence_penalty=1.5) if page % 3 else None
        for page in range(64)
    ]
    yield [
        rc.Context([page], [page], context_id=1 + page).request(
            samplers[page % 5], extension=extension
        )
        for page, extension in enumerate(asked)
    ]


def flat(values: Any) -> list[Any]:
    """The numbers in nested lists and tuples."""
    if not isinstance(values, (list, tuple)):
        return [values]
    return [number for value in values for number in flat(value)]


def with_counted_samples(_: str, arguments: Sequence[str]) -> list[str]:
    """Runs in the worker, before it starts: its log says what it samples."""
    from pie_driver_sglang.engine import eager_steps

    sample = eager_steps.sample_rows

    def sample_counted(logits: Any, params: Any) -> Any:
        os.write(2, f"sampled {len(logits)} slots\n".encode())
        return sample(logits, params)

    eager_steps.sample_rows = sample_counted  # type: ignore[attr-defined]
    return list(arguments)


@pytest.mark.engine
def test_experts_on_two_ranks(tmp_path: Path) -> None:
    snapshot = architectures.build("Qwen3-MoE", tmp_path)
    reference = Reference(snapshot)
    prompt = random_tokens(reference.vocab_size, 40, "experts")
    config = drivers.write_config(tmp_path, snapshot, **drivers.spread(2))
    with drivers.fork(config) as driver:
        context = Context(Pages(driver.caps["total_pages"], 16))
        reply = driver.client().forward([context.append(prompt, rows=range(len(prompt)))])
        assert reference.check(prompt, reply.tokens[0]) > len(prompt) // 2
    assert driver.stop() == 0


@pytest.mark.engine
@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        ({"num_key_value_heads": 1}, None, ["k_proj.weight in model.safetensors is (32, 64)"]),
        ({"intermediate_size": 80}, None, ["mlp.", "(64, 96), but the model's (64, 80)"]),
        ({"num_hidden_layers": 1}, None, ["model.layers.1.", "the model has none (and 8 more)"]),
        ({}, checkpoints.without("1.mlp.up_proj"), ["1.mlp.up_proj.weight is missing, (96, 64)"]),
        # SGLang would fill the second rank's part with zeros.
        (
            {},
            checkpoints.cut("model.layers.1.mlp.gate_proj.weight", 48, 64),
            ["1.mlp.gate_proj.weight in model.safetensors is (48, 64), but the model's (96, 64)"],
        ),
    ],
    ids=["heads-of-keys", "width", "layers", "tensor", "half"],
)
def test_what_does_not_fit_two_ranks(
    config: dict[str, Any],
    change: Any,
    named: list[str],
    llama_snapshot: Path,
    tmp_path: Path,
) -> None:
    """What one rank leaves out another may read: they decide together."""
    snapshot = checkpoints.damaged(llama_snapshot, tmp_path, change or (lambda _: None), **config)
    path = drivers.write_config(tmp_path, snapshot, **drivers.spread(2))
    with pytest.raises(drivers.StartFailedError) as caught, drivers.fork(path):
        pass
    line = last_words(caught.value.stderr)
    assert all(text in line for text in ("do not fit", *named)), line


@pytest.mark.engine
def test_replicas_serve_side_by_side(models_folder: Path, tmp_path: Path) -> None:
    """Data parallelism is a driver for each replica, told apart by its group."""
    snapshot = tiny_models.build("llama", models_folder)
    reference = Reference(snapshot)
    configs = [drivers.write_config(tmp_path, snapshot) for _ in range(2)]
    with drivers.fork(configs[0]) as first, drivers.fork(configs[1]) as second:
        replicas = (first, second)
        assert first.region != second.region
        groups = [driver.handshake[0]["group_id"] for driver in replicas]
        assert groups == [rc.group_id(config) for config in configs]
        pools = [Pages(driver.caps["total_pages"], 16) for driver in replicas]
        clients = [driver.client() for driver in replicas]
        # Contexts in turns; both replicas use the same page numbers for different texts.
        contexts = [Context(pools[number % 2]) for number in range(8)]
        pending = []
        for number, context in enumerate(contexts):
            prompt = random_tokens(reference.vocab_size, 20 + number, "replica", number)
            pending.append(context.append(prompt))
        found: list[list[int]] = [[] for _ in contexts]
        for _ in range(6):
            for replica, client in enumerate(clients):
                own = range(replica, len(contexts), 2)
                reply = client.forward([pending[number] for number in own])
                for number, tokens in zip(own, reply.tokens, strict=True):
                    found[number] += tokens
                    pending[number] = contexts[number].append(tokens)
        for context, tokens in zip(contexts, found, strict=True):
            assert len(tokens) == 6
            # The last one is sent below.
            reference.check(context.tokens[:-1], tokens)
        # One that ends leaves the other alone.
        assert first.stop() == 0
        assert clients[1].forward(pending[1::2]).tokens
    assert second.stop() == 0
    assert not first.region.exists()
    assert not second.region.exists()
