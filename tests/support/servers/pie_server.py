"""`pie-sglang serve` in a process of its own, and requests to it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from support.models.tiny_models import POCKET
from support.process import fork_children, fork_server
from support.process.inspection import command_line
from support.servers.sglang_server import Server, free_ports

START_S: Final = 400.0
PROMPT: Final = "def f(x):"


def wait_until(done: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@contextlib.contextmanager
def running(
    folder: Path,
    *flags: str,
    model: Path = POCKET,
    device: str = "cpu",
    python: str = sys.executable,
    driver_python: str = "",
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """A server by the command, as a user starts it; ended by SIGTERM, with nothing left.

    Its processes are forked if `python` is :func:`fork_server.interpreter`. Then `driver_python`,
    the same or :func:`vllm_drivers.interpreter`, may start the drivers; all other processes are
    children of each other, as `fork_children` says.
    """
    [port] = free_ports(1)
    words = ["--model-path", str(model), "--device", device, "--port", str(port), *flags]
    with serving(folder, *words, python=python, driver_python=driver_python) as process:
        yield Server(f"http://127.0.0.1:{port}", folder / "log"), process


@contextlib.contextmanager
def serving(
    folder: Path,
    *words: str,
    end_s: float = 60,
    python: str = sys.executable,
    driver_python: str = "",
) -> Iterator[subprocess.Popen[bytes]]:
    """`pie-sglang serve` with these words, once it serves, its output in `log`; ended by SIGTERM.

    Nothing is left of it after `end_s`: no process, no region, no file besides its output.
    """
    log = folder / "log"
    command = [python, "-m", "pie_driver_sglang", "serve", *words]
    # A short path, which the server takes for the sockets in it as well.
    temporary = Path(tempfile.mkdtemp(prefix="serve-", dir="/tmp"))
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    if driver_python:
        environment[fork_children.VARIABLE] = driver_python
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        wait_until(
            lambda: b"curl" in log.read_bytes() or process.poll() is not None, START_S, "start"
        )
        assert process.poll() is None
        family = fork_server.family(process.pid)
        assert any("--config" in command_line(each) for each in family)
        yield process
        family += fork_server.family(process.pid)
        names = regions(family)
        assert names & shared_memory(), "the drivers' regions are there while they serve"
        process.send_signal(signal.SIGTERM)
        assert process.wait(end_s) == 0
        assert psutil.wait_procs(family, end_s)[1] == []
        assert not names & shared_memory()
        assert [*folder.iterdir(), *temporary.iterdir()] == [log]
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-6000:])
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        shutil.rmtree(temporary, ignore_errors=True)


def regions(family: Iterable[psutil.Process]) -> set[str]:
    """The regions that processes have mapped."""
    found: set[str] = set()
    for process in family:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            found.update(re.findall(r"/dev/shm/(pie_shmem_g\d+)", maps))
    return found


def generate(server: Server, text: str = PROMPT, **params: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 12, **params}
    found: dict[str, Any] = json.loads(
        server.fetch("/generate", {"text": text, "sampling_params": params})
    )
    return found


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(server.fetch("/server_info"))["internal_states"][0]
    return found


def refusal(server: Server, body: dict[str, Any], path: str = "/generate") -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as error:
        server.fetch(path, body)
    return error.value.code, error.value.read().decode()
