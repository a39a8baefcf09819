"""One server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.servers.pie_server import running
from support.servers.sglang_server import Server

ADMIN = "key-of-the-admin"


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--scheduler", "pie", "--enable-metrics", "--enable-streaming-session"]
    flags += ["--admin-api-key", ADMIN]
    with running(tmp_path_factory.mktemp("serve"), *flags) as (server, _):
        server.key = ADMIN
        yield server


@pytest.fixture(scope="package")
def client(server: Server) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference(POCKET)
