"""The fork server: what it forks, what stands for a fork, and when it must not fork."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pie_driver_sglang import _core
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.fork_server import client, cuda_properties, server, starter
from support.process import drivers
from support.process.runtime_client import eventually

END_S = 30.0
LIMIT_S = 180.0
GPU_IMPORTS = """
import json, os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.fork_server import server
from pie_driver_sglang.fork_server.cuda_properties import answering
environment.prepare("cuda", ["Qwen3ForCausalLM"], spins=False)
with (
    environment.importing_sglang("cuda", is_driver=True, capability=9),
    answering([json.loads(sys.argv[1])]),
):
    server._import_driver(on_gpu=True)
print(json.dumps([len(os.listdir("/proc/self/task")), sorted(sys.modules)]))
"""
"""What the fork server imports on a GPU host."""
H200 = {
    **dict.fromkeys(cuda_properties._ATTRIBUTES, 1),
    "name": "NVIDIA H200",
    "total_memory": 150 << 30,
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "shared_memory_per_block_optin": 232_448,
}


def serve(address: str, options: Namespace, threads: bool) -> None:
    """A fork server in a process that has SGLang already."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        for name in server.READ_BY_IMPORTS:
            # The process that it is forked from has imported all models.
            os.environ.pop(name, None)
        forks = server.ForkServer(listener, options, os.pidfd_open(os.getppid()))
        forks.preload()
        if threads:
            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
        Path(f"{address}.ready").touch()
        forks.serve()


class Standing:
    """A driver that the fork server was asked for, by the process that stands for it."""

    def __init__(self, address: str, config: Path) -> None:
        reader, writer = os.pipe()
        log = config.with_suffix(".log")
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pie_driver_sglang", "--config", str(config)),
                    *("--handshake-fd", str(writer)),
                ],
                env={**os.environ, client.ADDRESS_VARIABLE: address},
                pass_fds=[writer],
                stderr=stderr,
                process_group=0,
            )
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            self.lines = [json.loads(line) for line in pipe.read().splitlines()]
        self.log = log.read_text
        self.name = self.lines[0]["shmem_name"] if self.lines else ""

    def driver(self) -> psutil.Process:
        """The driver itself: of the same group."""
        group = self.process.pid
        for each in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError):
                if each.pid != group and os.getpgid(each.pid) == group:
                    return each
        raise AssertionError("no other process is in its group")

    def serves(self) -> bool:
        """Whether it answers a request."""
        _core.Client(self.name).health()
        return True


@pytest.fixture
def address(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The socket of a fork server; parameters are its options."""
    given: dict[str, Any] = {"threads": False, "architectures": ["LlamaForCausalLM"]}
    given |= getattr(request, "param", {})
    options = Namespace(device="cpu", architectures=given["architectures"], ranks=1)
    path = str(tmp_path / "socket")
    process = drivers.fork_call(serve, (path, options, given["threads"]))
    until = time.monotonic() + drivers.START_TIMEOUT_S
    while not Path(f"{path}.ready").exists():
        assert process.poll() is None, "it cannot import"
        assert time.monotonic() < until
        time.sleep(0.02)
    yield path
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    process.wait(END_S)


@pytest.fixture
def config(llama_snapshot: Path, tmp_path: Path) -> Path:
    # The time line has spans of any length, the line of level `info` only longer ones.
    return drivers.write_config(tmp_path, llama_snapshot, options={"log_level": "debug"})


@pytest.mark.engine
class TestForks:
    def test_a_driver_serves_and_ends_as_told(self, address: str, config: Path) -> None:
        first = Standing(address, config)
        assert first.serves()
        driver = first.driver()
        assert driver.parent() != psutil.Process(), "it is a fork of the fork server"
        eventually(lambda: "driver: fork\n" in first.log(), "its time line names the fork")
        first.process.terminate()
        assert first.process.wait(END_S) == 0
        assert not driver.is_running()
        second = Standing(address, config)
        assert second.serves(), "the fork server forks again"
        second.process.terminate()
        assert second.process.wait(END_S) == 0

    def test_the_death_of_either_is_that_of_both(self, address: str, config: Path) -> None:
        first = Standing(address, config)
        first.driver().kill()
        assert first.process.wait(END_S) == -signal.SIGKILL
        second = Standing(address, config)
        driver = second.driver()
        second.process.kill()
        second.process.wait(END_S)
        driver.wait(END_S)

    def test_a_driver_dies_with_the_fork_server(self, address: str, config: Path) -> None:
        started = Standing(address, config)
        driver = started.driver()
        forks = driver.parent()
        assert forks is not None
        forks.kill()
        assert started.process.wait(END_S) == 1
        driver.wait(END_S)
        assert "the fork server has ended" in started.log()

    def test_a_wrong_configuration_is_reported(self, address: str, config: Path) -> None:
        config.write_text(config.read_text().replace("[model]", "[modell]"))
        started = Standing(address, config)
        assert started.process.wait(END_S) == 1
        assert started.lines == []
        assert "modell" in started.log()

    @pytest.mark.parametrize("address", [{"threads": True}], indirect=True)
    def test_with_threads_the_process_becomes_the_driver(self, address: str, config: Path) -> None:
        first = Standing(address, config)
        assert first.serves()
        assert not Path(address).exists() or _refuses(address), "it forks for nobody else"
        first.process.terminate()
        assert first.process.wait(END_S) == 0

    @pytest.mark.parametrize("address", [{"architectures": ["Qwen3ForCausalLM"]}], indirect=True)
    def test_a_driver_of_another_model_imports_anew(self, address: str, config: Path) -> None:
        started = Standing(address, config)
        assert "SGLANG_DISABLED_MODEL_ARCHS" in started.log()
        assert started.serves()
        started.process.terminate()
        assert started.process.wait(END_S) == 0


def _refuses(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(address) != 0


class TestClient:
    def test_without_a_fork_server_the_process_runs_the_module(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(client.ADDRESS_VARIABLE, raising=False)
        assert client.run_in_fork("pie_driver_sglang", []) is None
        monkeypatch.setenv(client.ADDRESS_VARIABLE, str(tmp_path / "nobody"))
        assert client.run_in_fork("pie_driver_sglang", []) is None

    def test_a_fork_server_that_ends_declines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        address = str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()

            def decline() -> None:
                connection, _ = listener.accept()
                connection.close()

            thread = threading.Thread(target=decline)
            thread.start()
            monkeypatch.setenv(client.ADDRESS_VARIABLE, address)
            assert client.run_in_fork("pie_driver_sglang", []) is None
            thread.join()


class TestAccept:
    def test_descriptors_are_closed_where_no_fork_can_be_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> int:
            raise BlockingIOError("no more processes")

        monkeypatch.setattr(os, "fork", fail)
        monkeypatch.setattr(server, "fork_refusal", lambda: None)
        address = str(tmp_path / "socket")
        with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as peer:
            listener.bind(address)
            listener.listen()
            peer.connect(address)
            reader, writer = os.pipe()
            client._send(peer, server.DRIVER, [], [writer])
            os.close(writer)
            assert server.ForkServer(listener, Namespace(), -1)._accept() == ()
            assert peer.recv(1) == b"", "the process that asks runs the module itself"
        os.set_blocking(reader, False)
        assert os.read(reader, 1) == b"", "nobody holds the other end"
        os.close(reader)

    def test_a_fork_that_has_lost_the_fork_server_ends(self) -> None:
        """Before it has an exit guard, which would take another process for its parent."""
        lost = Namespace(pid=1 << 22, spans=[])
        if not (pid := os.fork()):
            server._become({"numbers": []}, [], lost)  # type: ignore[arg-type]
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

    def test_signals_that_are_ignored_stay_so(self) -> None:
        previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            if not (pid := os.fork()):
                server._forget_the_parent([signal.SIGHUP])
                os.kill(os.getpid(), signal.SIGHUP)
                server._forget_the_parent([])
                os.kill(os.getpid(), signal.SIGHUP)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGHUP
        finally:
            signal.signal(signal.SIGHUP, previous)


class TestStarter:
    def test_a_wrong_value_of_the_variable_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(starter.ENABLED, "true")
        with pytest.raises(ConfigError, match="PIE_ENABLE_FORK_SERVER` is 'true'"):
            starter.is_enabled("cpu")
        monkeypatch.setenv(starter.ENABLED, "")
        assert starter.is_enabled("cpu")

    def test_without_descriptors_of_processes_there_is_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(_pid: int) -> int:
            raise OSError("not implemented")

        monkeypatch.setattr(os, "pidfd_open", refuse)
        monkeypatch.setattr(subprocess, "Popen", None)
        monkeypatch.delenv(client.ADDRESS_VARIABLE, raising=False)
        monkeypatch.setenv(starter.ENABLED, "1")
        with starter.fork_server("cpu", []):
            assert client.ADDRESS_VARIABLE not in os.environ

    @pytest.mark.engine
    @pytest.mark.usefixtures("forks")
    def test_drivers_end_with_what_started_the_server(
        self, config: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(starter.ENABLED, "1")
        with starter.fork_server("cpu", ["LlamaForCausalLM"]):
            folder = Path(os.environ[client.ADDRESS_VARIABLE]).parent
            started = Standing(os.environ[client.ADDRESS_VARIABLE], config)
            assert started.serves()
            eventually(lambda: "fork" in started.log(), "the time line of its start")
        assert started.process.wait(END_S) == 1
        assert client.ADDRESS_VARIABLE not in os.environ
        assert not folder.exists()

    def test_one_that_is_disabled_or_there_is_not_started(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(subprocess, "Popen", None)
        monkeypatch.delenv(client.ADDRESS_VARIABLE, raising=False)
        monkeypatch.setenv(starter.ENABLED, "0")
        with starter.fork_server("cpu", []):
            assert client.ADDRESS_VARIABLE not in os.environ
        monkeypatch.delenv(starter.ENABLED)
        assert starter.is_enabled("cpu")
        with starter.fork_server("cuda", []):
            assert client.ADDRESS_VARIABLE not in os.environ, "on a GPU it must be asked for"
        monkeypatch.setenv(client.ADDRESS_VARIABLE, "/of/the/parent")
        with starter.fork_server("cpu", []):
            assert os.environ[client.ADDRESS_VARIABLE] == "/of/the/parent"


@pytest.mark.engine
def test_imports_for_a_gpu_do_not_initialize_cuda(tmp_path: Path) -> None:
    """SGLang is imported as on a machine with an H200, over a libcuda that tells who calls it."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc to build a libcuda with")
    stub = Path(__file__).parent / "support" / "process" / "libcuda_stub.c"
    library = tmp_path / "libcuda.so.1"
    build = ["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o"]
    subprocess.run([*build, str(library), str(stub)], check=True)
    ended = subprocess.run(
        [sys.executable, "-c", GPU_IMPORTS, json.dumps(H200)],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "cuInit" not in ended.stderr, ended.stderr[-3000:]
    threads, modules = json.loads(ended.stdout)
    assert threads == 1, "its locks would stay locked in a fork"
    assert {"sgl_kernel", "sglang.srt.layers.attention.flashattention_backend"} <= set(modules)


class TestCudaProperties:
    def test_torch_and_triton_answer_until_the_end(self) -> None:
        import torch
        from triton.runtime.driver import driver

        before, active = torch.cuda.is_available(), driver._active
        with cuda_properties.answering([H200]):
            kept = torch.cuda.is_available
            assert kept()
            assert torch.cuda.get_device_capability("cuda:0") == (9, 0)
            assert torch.cuda.get_device_properties(torch.device("cuda", 0)).name == "NVIDIA H200"
            assert driver.active.get_current_target().arch == 90
            assert driver.active.utils.get_device_properties(0)["max_shared_mem"] == 232_448
            assert not torch.cuda.is_initialized()
        assert kept() == torch.cuda.is_available() == before, "a kept reference asks CUDA again"
        assert driver._active is active

    def test_without_a_gpu_there_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_properties, "_LIBRARY", "libof-no-gpu.so")
        assert cuda_properties.read_properties() == []

    def test_reads_by_a_child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda_properties, "_query", lambda: [{"pid": os.getpid()}])
        [found] = cuda_properties.read_properties()
        assert found["pid"] != os.getpid()

    def test_an_open_device_is_cuda(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "nvidia-uvm"
        monkeypatch.setattr(cuda_properties, "_INITIALIZED", str(file))
        assert not cuda_properties.is_cuda_initialized()
        with file.open("w"):
            assert cuda_properties.is_cuda_initialized()
            monkeypatch.setattr(server, "_thread_names", lambda: ["main"])
            assert server.fork_refusal() == "CUDA is initialized"
        monkeypatch.setattr(server, "_thread_names", lambda: ["main", "worker"])
        assert server.fork_refusal() == "it has 2 threads: main, worker"
