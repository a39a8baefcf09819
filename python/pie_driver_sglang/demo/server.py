"""The server that the demo starts: `pie-sglang serve`, until the demo ends."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import StartError
from pie_driver_sglang.frontends.gateway.smg import free_port

_START_S: Final = 1200.0
_STOP_S: Final = 30.0
_INFO_S: Final = 30.0
_LOG_LINES: Final = 25


@contextlib.contextmanager
def serving(
    model: Path, name: str, device: str, log: Path, on_wait: Callable[[float, str], None]
) -> Iterator[str]:
    """Serves a model on a free port of the loopback interface and yields the server's address.

    Args:
        model: The model's folder.
        name: What clients call it.
        device: `cpu` or `cuda`.
        log: The file for what the server prints.
        on_wait: Called about ten times a second with the seconds so far and the log's last line.

    Raises:
        StartError: The server ends before it is ready, or takes too long.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "pie_driver_sglang", "serve", str(model)]
    command += ["--served-model-name", name, "--device", device, "--port", str(port)]
    command += ["--scheduler", "pie", "--tool-call-parser", "qwen25", "--enable-cache-report"]
    # A model of this size may write nothing but white space where JSON permits it.
    command += ["--constrained-json-disable-any-whitespace"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        _wait(process, url, log, on_wait)
        yield url
    finally:
        # A second Ctrl-C must not leave the server behind.
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            # Again, it ends at once, with all its processes.
            process.terminate()
            process.wait()
        finally:
            signal.signal(signal.SIGINT, previous)


def _wait(
    process: subprocess.Popen[bytes], url: str, log: Path, on_wait: Callable[[float, str], None]
) -> None:
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < _START_S:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if process.poll() is not None:
            tail = "\n".join(lines[-_LOG_LINES:])
            raise StartError(f"the server ended with status {process.returncode}\n\n{tail}")
        if _is_ready(url):
            return
        on_wait(elapsed, lines[-1] if lines else "")
        time.sleep(0.1)
    raise StartError(
        f"the server was not ready after {_START_S:.0f} s",
        "try a smaller model, or look for what else keeps the device busy",
    )


def active_parts(url: str) -> dict[str, Any]:
    """The components that serve the model, and the reasons for slower ones, from `/server_info`."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=_INFO_S) as answer:
        found: dict[str, Any] = json.load(answer)["active"]
        return found


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def end_by_sigterm() -> None:
    """Has SIGTERM end the demo as Ctrl-C does, so that it stops its server."""

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
