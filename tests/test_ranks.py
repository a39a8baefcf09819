"""A model on several devices: how its processes start, meet and end. What they answer is compared
with one process's by the other tests, whose drivers run spread as well.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.errors import DriverError
from pie_driver_sglang.ranks import worker
from support.models import architectures, damaged_checkpoints, tiny_models
from support.models.reference import Context, Pages, Reference, random_tokens
from support.process import drivers, vllm_drivers
from support.process import runtime_client as rc
from support.process.inspection import END_S, error_line, is_of_this_run, is_running, socket_inodes

LOCAL = ("0100007F", "00000000000000000000000001000000")
"""127.0.0.1 and ::1 as `/proc/net` writes them."""


def shared_memory(*family: int) -> set[str]:
    """The names in shared memory that are these processes' or nobody's, but for others' regions.

    Other tests run at the same time; what a process outside the family has mapped or opened is its
    own.
    """
    names = _inodes()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in family:
            used = _used_inodes(process)
            names = {name: inode for name, inode in names.items() if inode not in used}
    left = names.keys() & _inodes().keys()
    return {name for name in left if not name.startswith("pie_shmem_g") or is_of_this_run(name)}


def _inodes() -> dict[str, int]:
    """The inodes of the names in shared memory."""
    with os.scandir("/dev/shm") as entries:
        return {entry.name: entry.inode() for entry in entries}


def _used_inodes(process: Path) -> set[int]:
    """The inodes in shared memory that a process has mapped or opened; it may have ended.

    By number, because a semaphore is mapped under the name of a temporary file.
    """
    found: set[int] = set()
    with contextlib.suppress(OSError):
        maps = (process / "maps").read_text()
        found.update(map(int, re.findall(r" (\d+) +/dev/shm/", maps)))
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if str(descriptor.readlink()).startswith("/dev/shm/"):
                    found.add(descriptor.stat().st_ino)
    return found


def listening_ports(pid: int) -> list[int]:
    """The ports that a process listens on."""
    return [int(port, 16) for _, port in listening_sockets(pid)]


def listening(pid: int) -> list[str]:
    """The addresses that a process listens on."""
    return [address for address, _ in listening_sockets(pid)]


def listening_sockets(pid: int) -> list[tuple[str, str]]:
    """Address and port of each socket that a process listens on, as `/proc/net` writes them."""
    inodes = socket_inodes(pid)
    found = []
    for name in ("tcp", "tcp6"):
        for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            cells = row.split()
            if cells[9] in inodes and cells[3] == "0A":
                address, _, port = cells[1].partition(":")
                found.append((address, port))
    return found


def greedy_tokens(driver: drivers.Driver | rc.Start, count: int = 3) -> list[list[int]]:
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


Forked = Callable[..., contextlib.AbstractContextManager[rc.Start]]


@pytest.fixture(params=["sglang", "vllm"])
def library(request: pytest.FixtureRequest) -> str:
    """The name of an inference library."""
    return str(request.param)


@pytest.fixture
def forked(library: str, request: pytest.FixtureRequest) -> Forked:
    """`runtime_client.forked` for drivers on the library."""
    if library == "sglang":
        return rc.forked
    program = request.getfixturevalue("vllm_python")
    return functools.partial(vllm_drivers.start, program=program)


@pytest.mark.engine
class TestEnds:
    """No process outlives another one, and nothing is left behind."""

    @pytest.fixture
    def config(self, served_snapshot: Path, tmp_path: Path) -> Path:
        return drivers.write_config(tmp_path, served_snapshot, **drivers.spread(2))

    @pytest.fixture
    def ready(self, config: Path, forked: Forked) -> Iterator[tuple[rc.Start, int]]:
        """A driver and its worker's number."""
        with forked(config) as start:
            start.wait_until_ready()
            [worker] = rc.children(start.process.pid)
            yield start, worker
        rc.eventually(lambda: not is_running(worker), "the worker's end", END_S)

    def test_as_the_runtime_starts_it(
        self, library: str, config: Path, served_snapshot: Path, tmp_path: Path
    ) -> None:
        spawn = drivers.spawn if library == "sglang" else vllm_drivers.spawn
        if library == "vllm" and (reason := vllm_drivers.missing()):
            pytest.skip(reason)
        before = shared_memory()
        # Modules in the working directory are imported by neither process.
        with spawn(config, folder=drivers.set_traps(tmp_path / "traps")) as driver:
            pids = [driver.process.pid, *rc.children(driver.process.pid)]
            # What a stranger that was killed has left is removed by its resource tracker.
            only_region = {driver.region.name}
            rc.eventually(lambda: shared_memory(*pids) - before == only_region, "only the region")
            assert len(pids) == 2
            for pid in pids:
                assert set(listening(pid)) <= set(LOCAL)
            tokens = greedy_tokens(driver)
        assert driver.stop() == 0
        rc.eventually(lambda: shared_memory() <= before, "nothing left behind")
        rc.eventually(lambda: not is_running(pids[1]), "the worker's end", END_S)
        with drivers.fork(drivers.write_config(tmp_path, served_snapshot)) as alone:
            assert greedy_tokens(alone) == tokens

    def test_strangers_cost_no_descriptors(self, ready: tuple[rc.Start, int]) -> None:
        """Ranks on the CPU listen on the loopback interface, but take nobody in any more."""
        start, worker = ready
        greedy_tokens(start)
        pids = [start.process.pid, worker]

        def descriptors() -> list[int]:
            return [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]

        before = descriptors()
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
        greedy_tokens(start)
        assert taken == 0
        # One that is open for a moment only is none that a stranger costs.
        rc.eventually(lambda: descriptors() == before, "as many descriptors as before")

    def test_a_killed_worker_ends_the_driver(self, ready: tuple[rc.Start, int]) -> None:
        start, worker = ready
        greedy_tokens(start)
        os.kill(worker, signal.SIGKILL)
        assert start.process.wait(END_S) == 1
        assert "rank 1 on cpu was killed by signal 9" in error_line(start.log())
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
        assert time.monotonic() - started < 30.0
        assert [reply.aborted for [reply] in results] == [True] * 3  # type: ignore[attr-defined]
        assert start.process.wait(END_S) == 1

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_to_all_is_for_the_driver(
        self, ready: tuple[rc.Start, int], number: signal.Signals
    ) -> None:
        start, worker = ready
        os.kill(worker, number)
        greedy_tokens(start)
        os.kill(start.process.pid, number)
        if number == signal.SIGINT:
            greedy_tokens(start)
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
                assert "rank 1 on cpu was killed by signal 9" in error_line(start.log())
                assert not start.region.exists()

    def test_sigterm_while_a_step_runs(self, ready: tuple[rc.Start, int]) -> None:
        start, _ = ready
        with rc.background(lambda: keep_busy(start, "eager")):
            time.sleep(0.3)
            assert start.stop(END_S) == 0
        assert not start.region.exists()

    @pytest.mark.parametrize("log", [None, "importing", "loading", "warming up"])
    def test_a_driver_killed_while_it_starts(
        self, config: Path, forked: Forked, log: str | None
    ) -> None:
        with forked(config) as start:
            worker = starting_worker(start)
            if log is not None:
                start.wait_for_log(log)
            os.kill(start.process.pid, signal.SIGKILL)
            rc.eventually(lambda: not is_running(worker), "the worker's end", END_S)
            rc.eventually(lambda: not start.region.exists(), "the region's end", END_S)

    @pytest.mark.parametrize("delay", [0.0, 0.3, 1.0])
    def test_a_worker_killed_while_it_starts(
        self, config: Path, forked: Forked, delay: float
    ) -> None:
        with forked(config) as start:
            worker = starting_worker(start)
            time.sleep(delay)
            os.kill(worker, signal.SIGKILL)
            assert start.process.wait(END_S) == 1
            assert "rank 1 on cpu was killed by signal 9" in error_line(start.log())
            is_ready = bool(start.handshake.read_bytes())
            assert is_ready or drivers.CLOSED_EARLY not in start.log()
            assert not start.region.exists()

    def test_a_workers_own_error_is_the_last_line(
        self, config: Path, forked: Forked, served_snapshot: Path, tmp_path: Path
    ) -> None:
        broken = Path(shutil.copytree(served_snapshot, tmp_path / "broken"))
        weights = next(broken.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1000])
        other = drivers.write_config(tmp_path, broken, **drivers.spread(2))
        with forked(config, change=with_another_model, by=str(other)) as start:
            assert start.process.wait(60.0) == 1
            assert "rank 1 on cpu: model.safetensors is " in error_line(start.log())
            assert drivers.CLOSED_EARLY not in start.log()
            assert start.handshake.read_bytes() == b""

    def test_a_worker_that_fails_in_a_command_ends_the_driver(
        self, config: Path, forked: Forked
    ) -> None:
        with forked(config, change=with_a_broken_copy) as start:
            start.wait_until_ready()
            greedy_tokens(start)
            client = _core.Client(f"/{start.region.name}", spin_budget_us=200, timeout_s=2.0)
            with rc.background(lambda: client.copy("D2D", [5], [6])):
                assert start.process.wait(END_S) == 1
            assert "rank 1 on cpu: OSError: no such page" in error_line(start.log())
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
        (
            {},
            damaged_checkpoints.without("1.mlp.up_proj"),
            ["1.mlp.up_proj.weight is missing, (96, 64)"],
        ),
        # SGLang would fill the second rank's part with zeros.
        (
            {},
            damaged_checkpoints.cut("model.layers.1.mlp.gate_proj.weight", 48, 64),
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
    snapshot = damaged_checkpoints.damaged(
        llama_snapshot, tmp_path, change or (lambda _: None), **config
    )
    path = drivers.write_config(tmp_path, snapshot, **drivers.spread(2))
    with pytest.raises(drivers.StartFailedError) as caught, drivers.fork(path):
        pass
    line = error_line(caught.value.stderr)
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
