"""One server for all tests of this folder."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.servers.pie_server import running
from support.servers.sglang_server import Server

ADMIN = "key-of-the-admin"


@pytest.fixture(scope="package")
def started(
    forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """The server and its first process."""
    flags = ["--scheduler", "pie", "--enable-metrics", "--enable-streaming-session"]
    flags += ["--admin-api-key", ADMIN]
    folder = tmp_path_factory.mktemp("serve")
    with running(folder, *flags, python=forked_python) as (server, process):
        server.key = ADMIN
        yield server, process


@pytest.fixture(scope="package")
def server(started: tuple[Server, subprocess.Popen[bytes]]) -> Server:
    return started[0]


@pytest.fixture(scope="package")
def client(server: Server) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference(POCKET)
