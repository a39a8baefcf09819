"""Servers after a SIGKILL of one process: the others end, and nothing is left over."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from pie_driver_sglang.fork_server.starter import ENABLED
from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.process import fork_children, fork_server, runtime_client
from support.process.inspection import command_line, is_running
from support.servers.pie_server import START_S, regions, shared_memory, wait_until
from support.servers.sglang_server import Server, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

_FORK_SERVER: Final = "pie_driver_sglang.fork_server.server"
END_S: Final = 180.0
"""A worker that is replaced first imports SGLang, which takes a minute on a busy machine."""
ENGINE: Final = f"""
import sys
from pie_driver_sglang import Engine
with Engine(model_path={str(POCKET)!r}, device="cpu") as engine:
    sys.stderr.write("curl")
    sys.stderr.flush()
    sys.stdin.read()
"""


def _command_line(process: psutil.Process | None) -> str:
    return "" if process is None else " ".join(command_line(process))


def _parent(process: psutil.Process) -> psutil.Process | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.parent()
    return None


class Started:
    """A server that serves, its processes, and the names in shared memory that are its own."""

    def __init__(self, process: subprocess.Popen[Any], folder: Path) -> None:
        self.process = process
        # Of the process itself where another stands for it.
        self._pid = next(iter(fork_server.forks(process.pid)), process.pid)
        self.family = list[psutil.Process]()
        tokens = [path.name.removeprefix("pie-sglang-") for path in folder.glob("pie-sglang-*")]
        self._marks = set(tokens)
        self.look()
        assert self.names()

    def look(self) -> None:
        """Finds what has been started since it was last looked."""
        found = [psutil.Process(self._pid), *fork_server.family(self._pid)]
        self.family += [each for each in found if each not in self.family]
        self._marks |= regions(found)

    def names(self) -> set[str]:
        return {name for name in shared_memory() if any(mark in name for mark in self._marks)}

    def find(self, words: str) -> psutil.Process:
        """The first process with these words in its command line, or the fork it stands for."""
        found = [each for each in self.family if words in _command_line(each)]
        assert found, f"no process has {words!r} in its command line"
        forks = [each for each in found if _FORK_SERVER in _command_line(_parent(each))]
        return (forks or found)[0]

    def kill(self, words: str) -> None:
        """Kills the process that `find` returns."""
        self.find(words).kill()

    def is_over(self) -> bool:
        self.process.poll()
        return not any(is_running(each.pid) for each in self.family)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A temporary folder with a short path, because sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="left-", dir="/tmp") as path:
        yield Path(path)


@contextmanager
def started(
    folder: Path, *command: str, ready: bytes = b"curl", python: str = sys.executable
) -> Iterator[Started]:
    """What has printed `ready`; its processes are forks if `python` is `forked_python`."""
    log = folder / "log"
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    if python != sys.executable:
        environment |= {fork_children.VARIABLE: sys.executable, ENABLED: "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
        )
    try:
        wait_until(
            lambda: ready in log.read_bytes() or process.poll() is not None, START_S, "start"
        )
        assert process.poll() is None, log.read_text()
        yield Started(process, folder)
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        process.terminate()
        # The second SIGTERM ends it at once.
        timer = threading.Timer(END_S, process.terminate)
        timer.start()
        process.communicate()
        timer.cancel()


def serve(*flags: str, port: int | None = None) -> list[str]:
    port = port or free_ports(1)[0]
    words = ["--model-path", str(POCKET), "--device", "cpu", "--port", str(port), *flags]
    return ["-m", "pie_driver_sglang", "serve", *words]


def check(found: Started, folder: Path) -> None:
    wait_until(found.is_over, END_S, "the end of every process")
    wait_until(lambda: not found.names(), END_S, "the end of what is in shared memory")
    left = lambda: [path for path in folder.rglob("*") if path.name != "log"]  # noqa: E731
    wait_until(lambda: not left(), END_S, f"the end of the files: {left()}")


def test_new_interpreters(folder: Path) -> None:
    """As all processes are on a GPU: each imports SGLang, and the runtime starts the driver.

    uvicorn parses HTTP in C, its choice, which SGLang leaves to it: by Python a stream's tokens
    cost more.
    """
    [port] = free_ports(1)
    server = Server(f"http://127.0.0.1:{port}", folder / "log")
    with started(folder, *serve("--scheduler", "pie", port=port)) as found:
        tokens, _ = server.generate([31, 32, 33], 12)
        assert tokens == Reference(POCKET).greedy([31, 32, 33], 12)[0]
        front_end = found.find("pie_driver_sglang.frontends.sglang_server")
        assert any("httptools" in mapped.path for mapped in front_end.memory_maps())
        found.kill("pie_driver_sglang serve")
        check(found, folder)


@pytest.mark.parametrize(
    "words",
    [
        "pie_driver_sglang serve",
        "pie_driver_sglang.frontends.sglang_server",
        "sglang::scheduler",
        "sglang::detokenizer",
        _FORK_SERVER,
    ],
)
def test_sglangs_server(words: str, folder: Path, forked_python: str) -> None:
    with started(folder, *serve(), python=forked_python) as found:
        found.kill(words)
        if words == _FORK_SERVER:
            # The driver has died, and a new interpreter replaces it.
            found.process.terminate()
        check(found, folder)


@pytest.mark.parametrize(
    "words",
    [
        "pie_driver_sglang.frontends.sglang_server",
        "sglang::tokenizer_worker",
        "sglang::fork_server",
    ],
)
def test_sglangs_server_with_workers(words: str, folder: Path, forked_python: str) -> None:
    """Their semaphores have names, which the tracker would remove."""
    flags = serve("--tokenizer-worker-num", "2")
    with started(folder, *flags, python=forked_python) as found:
        assert any("multi_tokenizer_args" in name for name in found.names())
        found.kill("multiprocessing.resource_tracker")
        found.kill(words)
        if words != "pie_driver_sglang.frontends.sglang_server":
            # Workers are replaced.
            found.process.terminate()
        check(found, folder)


@pytest.mark.parametrize(
    "words", ["sglang::data_parallel_controller", "sglang::fork_server", "sglang::scheduler"]
)
def test_sglangs_server_with_replicas(words: str, folder: Path, forked_python: str) -> None:
    flags = serve("--dp-size", "2")
    with started(folder, *flags, python=forked_python) as found:
        found.kill(words)
        check(found, folder)


def of(folder: Path) -> list[psutil.Process]:
    """The processes whose temporary files are in a folder."""
    found = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if each.environ().get("TMPDIR", "").startswith(str(folder)):
                found.append(each)
    return found


def begun(folder: Path, command: list[str], python: str = sys.executable) -> subprocess.Popen[str]:
    """A start, with a fork server for drivers."""
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", ENABLED: "1"}
    if python != sys.executable:
        environment[fork_children.VARIABLE] = sys.executable
    return subprocess.Popen(
        [python, *command],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_replicas_that_are_stopped(folder: Path, forked_python: str) -> None:
    """Their schedulers end one after the other, which is no failure of one."""
    with started(folder, *serve("--dp-size", "2"), python=forked_python) as found:
        found.process.terminate()
        check(found, folder)
        assert "hit an exception" not in (folder / "log").read_text()


def test_a_start_that_is_interrupted(folder: Path) -> None:
    """While the fork server and the HTTP server import SGLang side by side."""
    with begun(folder, serve("--dp-size", "2")) as process:
        words = {_FORK_SERVER, "pie_driver_sglang.frontends.sglang_server"}

        def have_started() -> bool:
            lines = [_command_line(each) for each in of(folder)]
            return all(any(word in line for line in lines) for word in words)

        wait_until(have_started, END_S, "both have started")
        found = Started(process, folder)
        process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
        check(found, folder)
    wait_until(lambda: of(folder) == [], END_S, "the end of every process")


def test_a_start_that_is_refused_after_the_imports(folder: Path, forked_python: str) -> None:
    flags = serve("--dp-size", "2", "--ssl-certfile", "cert.pem")
    with begun(folder, flags, forked_python) as process:
        _, text = process.communicate(timeout=END_S)
    assert process.returncode == 1
    [line] = [line for line in text.splitlines() if line.startswith("pie-sglang: ")]
    assert "ssl" in line
    wait_until(lambda: of(folder) == [], END_S, "the end of every process")
    assert list(folder.iterdir()) == []


def test_workers_that_are_ended_during_their_warm_up(folder: Path, forked_python: str) -> None:
    """Their warm-up requests get no answer then, and their socket stays open."""
    flags, ready = serve("--tokenizer-worker-num", "2"), b"Application startup complete"
    with started(folder, *flags, ready=ready, python=forked_python) as found:
        found.process.terminate()
        check(found, folder)


def test_a_rank_and_a_driver_with_its_reaper(folder: Path, forked_python: str) -> None:
    """Their server lives on, and loses no answer."""
    [port] = free_ports(1)
    server = Server(f"http://127.0.0.1:{port}", folder / "log")
    flags = serve("--scheduler", "pie", "--tp-size", "2", port=port)
    with started(folder, *flags, python=forked_python) as found:
        *_, expected = server.stream([31, 32, 33], 120)

        def kill_both() -> None:
            driver = found.find("pie_driver_sglang --config")
            os.kill(runtime_client.reaper(driver.pid), signal.SIGKILL)
            driver.kill()

        kills = (lambda: found.kill("ranks.worker"), kill_both)
        for number, kill in enumerate(kills, 1):
            parts = server.stream([31, 32, 33], 120)
            next(parts)
            # What an earlier kill has had started is there.
            found.look()
            kill()
            assert list(parts)[-1] == expected
            state = json.loads(server.fetch("/server_info"))["internal_states"][0]
            assert state["restarts"] == number
        found.look()
        found.process.terminate()
        check(found, folder)


def test_the_gateway(folder: Path, forked_python: str) -> None:
    pytest.importorskip("smg")
    flags = serve("--front", "gateway", "--prometheus-port", "0")
    with started(folder, *flags, python=forked_python) as found:
        found.kill("smg::router")
        check(found, folder)


def test_the_gateways_services(folder: Path, forked_python: str) -> None:
    flags = ("--front", "gateway", "--no-gateway", "--grpc-port", "0")
    command = ["-m", "pie_driver_sglang", "serve", "--model-path", str(POCKET), "--device", "cpu"]
    ready = b"Start it by"
    with started(folder, *command, *flags, ready=ready, python=forked_python) as found:
        found.kill("pie_driver_sglang serve")
        check(found, folder)


def test_an_engine_in_a_script(folder: Path) -> None:
    with started(folder, "-c", ENGINE) as found:
        found.process.kill()
        check(found, folder)
