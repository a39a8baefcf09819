"""`pie-sglang serve --front gateway` in a process of its own."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from support.models.tiny_models import POCKET
from support.process import fork_server
from support.process.inspection import command_line
from support.servers.pie_server import serving
from support.servers.sglang_server import Server, free_ports

ADMIN: Final = "key-of-the-admin"


class GatewayServer(Server):
    """A running server.

    Attributes:
        process: The command.
        metrics: The port of the metrics.
    """

    process: psutil.Process
    metrics: int

    def drivers(self) -> list[psutil.Process]:
        """The processes that compute."""
        family = fork_server.family(self.process.pid)
        return [process for process in family if "--config" in command_line(process)]

    def loads(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.fetch("/loads"))["loads"]
        return found


@contextlib.contextmanager
def running(
    folder: Path, *flags: str, python: str = sys.executable, driver_python: str = ""
) -> Iterator[GatewayServer]:
    """As :func:`pie_server.running`, for the gateway."""
    port, metrics = free_ports(2)
    words = ["--front", "gateway", "--model-path", str(POCKET), "--served-model-name", "pocket"]
    words += ["--device", "cpu", "--port", str(port), "--prometheus-port", str(metrics), *flags]
    words += ["--admin-api-key", ADMIN]
    pythons = {"python": python, "driver_python": driver_python}
    with serving(folder, *words, end_s=90, **pythons) as process:
        frontend = GatewayServer(f"http://127.0.0.1:{port}", folder / "log", ADMIN)
        frontend.process, frontend.metrics = psutil.Process(process.pid), metrics
        yield frontend
