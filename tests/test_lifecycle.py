"""Start, handshake and every end of a driver."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.config.arch import TEMPLATE_NAMES
from support.models import tiny_models
from support.process import drivers
from support.process import runtime_client as rc
from support.process.inspection import (
    END_S,
    failure_line,
    hf_config,
    is_running,
    leftover_regions,
    network_inodes,
    socket_inodes,
)

pytestmark = pytest.mark.engine
UNLIMITED = 2**32 - 1


def long_prefill() -> list[Request]:
    """A batch that computes for seconds: many whole contexts in the same pages."""
    tokens = 512
    sampler = [(tokens - 1, Sampler.greedy())]
    request = Request([7] * tokens, list(range(tokens)), list(range(32)), 16, sampler)
    return [request] * 250


@pytest.fixture(scope="module")
def ready(
    llama_snapshot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, rc.Start]]:
    """A ready driver with stdout and stderr apart, and its configuration."""
    config = drivers.write_config(tmp_path_factory.mktemp("ready"), llama_snapshot)
    with rc.forked(config) as start:
        start.wait_until_ready()
        yield config, start


class TestHandshake:
    """What the runtime reads."""

    def test_two_lines_in_order_and_then_the_end(self, spawned_driver: drivers.Driver) -> None:
        # The harness reads up to the end of the file: it came while the driver runs.
        group, sentinel = spawned_driver.handshake
        assert list(group) == ["group_id", "shmem_name", "caps"]
        assert sentinel == {"ready": True, "num_groups": 1}
        assert group["shmem_name"] == f"/pie_shmem_g{group['group_id']}"
        assert group["caps"]["shmem_name"] == group["shmem_name"]
        assert is_running(spawned_driver.process.pid)

    def test_no_descriptor_of_the_pipe_stays_open(self, spawned_driver: drivers.Driver) -> None:
        folder = Path(f"/proc/{spawned_driver.process.pid}/fd")
        targets = {}
        for path in folder.iterdir():
            # It may be closed meanwhile.
            with contextlib.suppress(FileNotFoundError):
                targets[path.name] = str(path.readlink())
        assert targets["0"] == "/dev/null"
        assert not [name for name, target in targets.items() if target.startswith("pipe:")]

    def test_the_limits(self, spawned_driver: drivers.Driver) -> None:
        caps = spawned_driver.caps
        assert caps["kv_page_size"] == 16
        assert caps["max_model_len"] == tiny_models.CONTEXT
        assert caps["max_forward_tokens"] >= caps["max_model_len"]
        assert caps["total_pages"] * 16 >= 2 * caps["max_model_len"]
        assert caps["max_page_refs"] >= caps["max_model_len"] // 16
        assert caps["max_forward_requests"] == 256
        assert caps["vocab_size"] == tiny_models.VOCABULARY
        assert caps["swap_pool_size"] == 0
        for name in ("logit_rows", "prob_rows", "custom_mask_bytes", "sampler_rows"):
            assert caps[f"max_{name}"] == UNLIMITED

    def test_every_count_is_an_integer_of_32_bits(self, spawned_driver: drivers.Driver) -> None:
        strings = {"arch_name", "activation_dtype", "snapshot_dir", "shmem_name"}
        flags = {"system_speculation_supported", "enable_system_speculation"}
        for name, value in spawned_driver.caps.items():
            if name in strings:
                assert type(value) is str
            elif name in flags:
                assert type(value) is bool
            else:
                assert type(value) is int
                assert 0 <= value <= UNLIMITED

    def test_the_names(self, spawned_driver: drivers.Driver, llama_snapshot: Path) -> None:
        caps = spawned_driver.caps
        assert caps["arch_name"] == "llama3"
        assert caps["arch_name"] in TEMPLATE_NAMES
        assert caps["activation_dtype"] == "float32"
        assert caps["snapshot_dir"] == str(llama_snapshot)

    def test_the_region_is_the_one_that_was_announced(self, spawned_driver: drivers.Driver) -> None:
        with rc.Region(spawned_driver.region) as region:
            assert (region.magic, region.version) == (0x50494534, 2)
            assert region.schema_hash == bytes.fromhex("89d0c2d1b78cbb75")
            assert region.slots >= 1
            both = region.request_bytes + region.response_bytes
            assert region.stride == -(-(64 + both) // 64) * 64
            size = spawned_driver.region.stat().st_size
            assert size >= 64 + region.slots * region.stride
            caps = spawned_driver.caps
            needed = 4 * caps["max_page_refs"] + 32 * caps["max_forward_tokens"]
            assert region.request_bytes >= needed + 96 * caps["max_forward_requests"]
        assert spawned_driver.region.stat().st_mode & 0o777 == 0o600

    def test_the_highest_page_and_the_last_position_can_be_used(
        self, spawned_driver: drivers.Driver
    ) -> None:
        caps = spawned_driver.caps
        count = caps["max_model_len"]
        pages = [caps["total_pages"] - 1 - index for index in range(count // 16)]
        context = rc.Context([9] * count, pages)
        (tokens,) = spawned_driver.client().forward([context.request()]).tokens
        assert len(tokens) == 1

    def test_nothing_is_printed_on_stdout(self, ready: tuple[Path, rc.Start]) -> None:
        start = ready[1]
        assert start.client().health() == 0
        assert start.stdout.read_bytes() == b""
        assert "serving" in start.log()

    def test_the_region_exists_long_before_the_lines(
        self, llama_snapshot: Path, tmp_path: Path
    ) -> None:
        with rc.forked(drivers.write_config(tmp_path, llama_snapshot)) as start:
            rc.eventually(start.region.exists, "the region")
            assert start.lines() == []
            start.wait_until_ready()
            assert start.region.exists()
            assert start.stop() == 0

    def test_a_context_that_rope_scaling_stretches(
        self, models_folder: Path, tmp_path: Path
    ) -> None:
        source = tiny_models.build("llama", models_folder)
        snapshot = Path(shutil.copytree(source, tmp_path / "llama"))
        scaling = {"rope_type": "linear", "factor": 5.0, "rope_theta": 10000.0}
        hf_config(
            snapshot, max_position_embeddings=65_536, rope_scaling=scaling, rope_parameters=scaling
        )
        with drivers.fork(drivers.write_config(tmp_path, snapshot)) as driver:
            assert driver.caps["max_model_len"] == 5 * 65_536
            assert driver.caps["max_forward_tokens"] >= 5 * 65_536
            assert driver.caps["max_page_refs"] >= 5 * 65_536 // 16

    def test_the_log_names_the_package_and_stays_short(
        self, spawned_driver: drivers.Driver
    ) -> None:
        own = [
            line for line in spawned_driver.stderr().splitlines() if "pie_driver_sglang:" in line
        ]
        assert 3 <= len(own) <= 200
        moment = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}"
        pattern = moment + r" \[group \d+ rank 0 cpu\] (INFO|WARNING|ERROR) pie_driver_sglang: \S"
        assert all(re.match(pattern, line) for line in own)


class TestNetwork:
    """A driver talks through shared memory alone."""

    def test_the_driver_has_no_network_socket(self, spawned_driver: drivers.Driver) -> None:
        pid = spawned_driver.process.pid
        assert not socket_inodes(pid) & network_inodes(pid)

    @pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
    def test_such_a_socket_would_be_seen(self, kind: socket.SocketKind) -> None:
        with socket.socket(socket.AF_INET, kind) as probe:
            probe.bind(("127.0.0.1", 0))
            if kind == socket.SOCK_STREAM:
                probe.listen()
            assert socket_inodes(os.getpid()) & network_inodes(os.getpid())

    def test_no_other_process_belongs_to_the_driver(self, spawned_driver: drivers.Driver) -> None:
        assert not rc.children(spawned_driver.process.pid)


def assert_ends(start: rc.Start) -> None:
    """Sends SIGTERM twice, as the runtime does: status 0 in time, and no region."""
    os.kill(start.process.pid, signal.SIGTERM)
    with contextlib.suppress(ProcessLookupError):
        os.kill(start.process.pid, signal.SIGTERM)
    assert start.process.wait(END_S) == 0, start.log()
    assert not start.region.exists()
    assert "INFO pie_driver_sglang: stopped by SIGTERM" in start.log().splitlines()[-1]


def handles_sigterm(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


class TestTerminate:
    """SIGTERM at any moment."""

    @pytest.fixture
    def config(self, llama_snapshot: Path, tmp_path: Path) -> Path:
        return drivers.write_config(tmp_path, llama_snapshot)

    def test_while_the_interpreter_starts(self, config: Path) -> None:
        # Before the first line of the driver runs, the signal ends any process by itself.
        with rc.started(config) as start:
            assert start.stop(END_S) in (0, -signal.SIGTERM)
            assert not start.region.exists()
            assert start.lines() == []

    def test_as_soon_as_it_handles_the_signal(self, config: Path) -> None:
        with rc.started(config) as start:
            rc.eventually(lambda: handles_sigterm(start.process.pid), "the signal handler")
            assert_ends(start)
            assert start.lines() == []

    def test_as_soon_as_the_region_exists(self, config: Path) -> None:
        with rc.started(config) as start:
            rc.eventually(start.region.exists, "the region")
            assert_ends(start)
            assert start.lines() == []

    @pytest.mark.parametrize("delay_s", [0.0, 0.5, 2.5])
    def test_while_it_imports_sglang(self, config: Path, delay_s: float) -> None:
        with rc.started(config) as start:
            start.wait_for_log("importing SGLang")
            time.sleep(delay_s)
            assert_ends(start)
            assert start.lines() == []

    @pytest.mark.parametrize("text", ["loading", "warming up"])
    def test_while_it_loads_and_warms_up(self, config: Path, text: str) -> None:
        with rc.forked(config) as start:
            start.wait_for_log(f": {text}")
            assert_ends(start)

    @pytest.mark.parametrize("spin", [0, rc.NEVER_PARK], ids=["parked", "spinning"])
    def test_while_it_waits_for_requests(
        self, llama_snapshot: Path, tmp_path: Path, spin: int | str
    ) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot, spin_budget_us=spin)
        with rc.forked(config) as start:
            start.wait_until_ready()
            assert start.client().health() == 0
            assert_ends(start)
            assert start.stdout.read_bytes() == b""

    def test_while_a_forward_runs(self, config: Path) -> None:
        with rc.forked(config) as start:
            start.wait_until_ready()
            client = start.client()
            with (
                rc.Region(start.region) as region,
                rc.background(lambda: client.forward(long_prefill())) as results,
            ):
                rc.eventually(region.in_flight, "the request")
                time.sleep(0.2)
                assert region.in_flight(), "the batch is too small for this test"
                assert_ends(start)
                rc.eventually(lambda: bool(results), "the client's answer")
            [reply] = results
            assert isinstance(reply, _core.Reply)
            assert reply.aborted

    def test_ctrl_c_is_left_to_the_runtime(self, spawned_driver: drivers.Driver) -> None:
        for _ in range(3):
            os.kill(spawned_driver.process.pid, signal.SIGINT)
            assert spawned_driver.client().health() == 0
        assert "KeyboardInterrupt" not in spawned_driver.stderr()

    def test_usr1_writes_the_stacks_to_the_log(self, spawned_driver: drivers.Driver) -> None:
        os.kill(spawned_driver.process.pid, signal.SIGUSR1)
        rc.eventually(lambda: "in serve\n" in spawned_driver.stderr(), "the stack of the main loop")
        assert spawned_driver.client().health() == 0

    def test_ctrl_c_while_it_starts(self, config: Path) -> None:
        with rc.forked(config) as start:
            start.wait_for_log(": loading")
            os.kill(start.process.pid, signal.SIGINT)
            start.wait_until_ready()
            assert start.stop(END_S) == 0


PARENT = """
import subprocess, sys
print(subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL).pid, flush=True)
sys.stdin.read()
"""


class TestParentDeath:
    """A driver does not outlive the runtime, even one that is killed."""

    def test_while_it_imports_sglang(self, llama_snapshot: Path, tmp_path: Path) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot)
        region = Path(f"/dev/shm/pie_shmem_g{rc.group_id(config)}")
        handshake = tmp_path / "handshake"
        with (
            rc.adopting_orphans(),
            subprocess.Popen(
                [sys.executable, "-c", PARENT, *rc.command(config, handshake)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ) as parent,
        ):
            assert parent.stdout is not None
            driver = int(parent.stdout.readline())
            rc.eventually(region.exists, "the region")
            parent.kill()
            assert rc.orphan_status(driver, END_S) == 0
        assert not region.exists()
        assert handshake.read_bytes() == b""

    @pytest.mark.parametrize("spin", [0, rc.NEVER_PARK], ids=["parked", "spinning"])
    def test_while_it_serves(self, llama_snapshot: Path, tmp_path: Path, spin: int | str) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot, spin_budget_us=spin)
        names = ("handshake", "stdout", "stderr", "pid")
        files = [tmp_path / name for name in names]
        for path in files:
            path.touch()
        with rc.adopting_orphans():
            arguments = (str(config), *map(str, files))
            parent = drivers.fork_call(rc.drive_in_child, arguments)
            rc.eventually(lambda: b"ready" in files[0].read_bytes(), "the handshake", 180.0)
            driver = int(files[3].read_text())
            os.kill(parent.pid, signal.SIGKILL)
            assert parent.wait(10.0) == -signal.SIGKILL
            assert rc.orphan_status(driver, END_S) == 0
        last = files[2].read_text().splitlines()[-1]
        assert "pie_driver_sglang: the runtime that started this driver has ended" in last
        assert not Path(f"/dev/shm/pie_shmem_g{rc.group_id(config)}").exists()


class TestRegionName:
    """One driver per group id, and neither lock nor region is left over by a crash."""

    def test_a_killed_drivers_region_is_removed(self, llama_snapshot: Path, tmp_path: Path) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot)
        killed = drivers.fork(config)
        assert killed.stop(sig=signal.SIGKILL) == -signal.SIGKILL
        rc.eventually(lambda: not killed.region.exists(), "the region's end", END_S)
        with drivers.fork(config) as driver:
            assert driver.name == killed.name
            assert driver.client().health() == 0
            assert "belongs to a running process" not in driver.stderr()
        assert driver.stop() == 0
        assert not driver.region.exists()

    def test_what_a_driver_and_its_reaper_leave_is_replaced(
        self, llama_snapshot: Path, tmp_path: Path
    ) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot)
        killed = drivers.fork(config)
        os.kill(rc.reaper(killed.process.pid), signal.SIGKILL)
        assert killed.stop(sig=signal.SIGKILL) == -signal.SIGKILL
        assert killed.region.exists()
        stale = killed.region.stat().st_ino
        with drivers.fork(config) as driver:
            assert driver.name == killed.name
            assert driver.region.stat().st_ino != stale
            assert driver.client().health() == 0
            assert "belongs to a running process" not in driver.stderr()
        assert driver.stop() == 0
        assert not driver.region.exists()

    def test_one_whose_whole_group_is_killed(self, llama_snapshot: Path, tmp_path: Path) -> None:
        """What removes the region is of no group, and keeps none of the driver's files open."""
        config = drivers.write_config(tmp_path, llama_snapshot)
        region = Path(f"/dev/shm/pie_shmem_g{rc.group_id(config)}")
        with subprocess.Popen(
            rc.command(config, tmp_path / "handshake"),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        ) as driver:
            rc.eventually(region.exists, "the region")
            assert rc.children(driver.pid) == []
            os.killpg(driver.pid, signal.SIGKILL)
            assert driver.stderr is not None
            driver.stderr.read()
            assert driver.wait(END_S) == -signal.SIGKILL
        rc.eventually(lambda: not region.exists(), "the region's end", END_S)

    def test_a_file_that_is_no_region_is_replaced(
        self, llama_snapshot: Path, tmp_path: Path
    ) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot)
        path = Path(f"/dev/shm/pie_shmem_g{rc.group_id(config)}")
        path.write_bytes(b"of somebody else")
        with drivers.fork(config) as driver:
            assert driver.client().health() == 0
        assert not path.exists()

    def test_a_second_driver_of_a_live_group_is_refused(
        self, spawned_driver: drivers.Driver, llama_snapshot: Path, tmp_path: Path
    ) -> None:
        group = spawned_driver.handshake[0]["group_id"]
        before = spawned_driver.region.stat().st_ino
        trace = tmp_path / "trace.json"
        trace.write_text("of the live driver")
        options = {"trace_file": str(trace)}
        config = drivers.write_config(tmp_path, llama_snapshot, options=options, group_id=group)
        with pytest.raises(drivers.StartFailedError) as caught:
            drivers.spawn(config)
        assert caught.value.returncode == 1
        message = failure_line(caught.value.stderr)
        assert spawned_driver.name in message
        assert f"pid {spawned_driver.process.pid}" in message
        assert spawned_driver.region.stat().st_ino == before
        assert trace.read_text() == "of the live driver"
        assert spawned_driver.client().health() == 0

    def test_a_second_driver_takes_over_when_the_first_one_leaves(
        self, llama_snapshot: Path, tmp_path: Path
    ) -> None:
        config = drivers.write_config(tmp_path, llama_snapshot)
        first = drivers.fork(config)
        with rc.forked(config) as second:
            time.sleep(0.3)
            assert first.stop() == 0
            second.wait_until_ready()
            assert second.client().health() == 0
            assert second.stop(END_S) == 0
            assert not second.region.exists()

    def test_each_region_is_removed_with_its_own_driver(
        self, ready: tuple[Path, rc.Start], llama_snapshot: Path, tmp_path: Path
    ) -> None:
        with drivers.fork(drivers.write_config(tmp_path, llama_snapshot)) as driver:
            assert driver.region != ready[1].region
        assert not driver.region.exists()
        assert ready[1].client().health() == 0


def test_no_test_of_this_file_left_a_region(ready: tuple[Path, rc.Start]) -> None:
    start = ready[1]
    assert start.stop(END_S) == 0
    assert not leftover_regions()
