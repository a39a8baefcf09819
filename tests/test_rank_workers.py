"""Workers of a tensor-parallel group: their processes, commands and slots."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Extension, Request, Sampler
from pie_driver_sglang.engine.parallel_sampling import MIN_DIVIDED_SLOTS, partition_slots
from pie_driver_sglang.errors import AdapterError, DriverError, RingError
from pie_driver_sglang.ranks import parallel
from pie_driver_sglang.ranks.commands import CopyPages, FinishLoad, Forward, pack, unpack
from pie_driver_sglang.ranks.leader import LeaderExecutor
from pie_driver_sglang.ranks.parallel import Workers
from pie_driver_sglang.ranks.types import Span
from support.models import architectures, tiny_models
from support.models.reference import random_tokens
from support.process import drivers, vllm_drivers
from support.process import runtime_client as rc
from support.process.inspection import END_S


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a worker says is waited for on a busy machine as well."""
    monkeypatch.setattr(parallel, "GRACE_S", END_S)


class TestWorkers:
    """The leader's side, with processes that do as the test says."""

    @staticmethod
    def workers(script: str, count: int = 1) -> tuple[Workers, list[DriverError]]:
        """Workers that run a script of Python, and what becomes of them."""
        failures: list[DriverError] = []

        def start(arguments: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", script, *arguments]
            return subprocess.Popen(command, pass_fds=descriptors)

        devices = ["cpu"] * (count + 1)
        return Workers(Path("c.toml"), devices, "library", failures.append, start), failures

    def test_a_workers_report_is_the_error(self) -> None:
        report = json.dumps({"message": "no such thing", "hint": "get one"}) + "\n"
        script = f"import os, sys; os.write(int(sys.argv[-1]), {report.encode()!r}); sys.exit(1)"
        workers, failures = self.workers(script)
        rc.eventually(lambda: failures, "the failure")
        with workers:
            assert str(failures[0]) == "rank 1 on cpu: no such thing"
            assert failures[0].hint == "get one"

    @pytest.mark.parametrize("garbage", [b"", b"{", b"[]", b'{"message": 1}', b"\xff\xfe"])
    def test_without_a_report_the_status_is_the_error(self, garbage: bytes) -> None:
        script = f"import os, sys; os.write(int(sys.argv[-1]), {garbage!r}); sys.exit(3)"
        workers, failures = self.workers(script)
        rc.eventually(lambda: failures, "the failure")
        with workers:
            assert str(failures[0]) == "rank 1 on cpu ended with status 3"

    @pytest.mark.usefixtures("patient")
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
            Workers(Path("c.toml"), ["cpu"] * 4, "library", failures.append, start)
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

    @pytest.mark.usefixtures("patient")
    def test_an_ended_worker_decides_the_error_line(self) -> None:
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
            "token_history": bytes(16),
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
    @pytest.mark.parametrize("library", ["sglang", "vllm"])
    def test_their_tokens_are_those_of_one_process(
        self, library: str, request: pytest.FixtureRequest, models_folder: Path, tmp_path: Path
    ) -> None:
        # The model's vocabulary is padded, and its logits are capped.
        if library == "sglang":
            snapshot, option = tiny_models.build("gemma2", models_folder), "cuda_graph_max_bs"
            forked, fork = rc.forked, drivers.fork
        else:
            program = request.getfixturevalue("vllm_python")
            snapshot = architectures.build("Gemma 2", models_folder / "wide", wide=True)
            option = "max_num_seqs"
            forked = functools.partial(vllm_drivers.start, program=program)
            fork = functools.partial(vllm_drivers.fork, program=program)
        spread, whole = (
            drivers.write_config(
                tmp_path,
                snapshot,
                options={option: MIN_DIVIDED_SLOTS},
                **drivers.spread(ranks),
            )
            for ranks in (2, 1)
        )
        with forked(spread, change=with_counted_samples) as start, fork(whole) as alone:
            start.wait_until_ready()
            clients = (start.client(), alone.client())
            placed = []
            for batch in slot_batches(alone.caps["vocab_size"]):
                ours, theirs = (client.forward(batch) for client in clients)
                assert ours.tokens == theirs.tokens
                assert len({token for [token] in ours.tokens}) > len(batch) // 3
                placed.append(len(ours.position_logprobs))
                for own, other in zip(
                    ours.position_logprobs, theirs.position_logprobs, strict=True
                ):
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
    requested = [
        Extension(logprobs=4, logprobs_of=[page], presence_penalty=1.5) if page % 3 else None
        for page in range(64)
    ]
    yield [
        rc.Context([page], [page], context_id=1 + page).request(
            samplers[page % 5], extension=extension
        )
        for page, extension in enumerate(requested)
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
