"""One `Engine` for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie_driver_sglang.frontends.offline.engine import Engine
from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.process import engines

PAGES = 96
"""Of 16 tokens: less than 32 requests need, so that some are retracted."""
CHUNK = 48
"""Tokens of a step: most prompts are cut."""
OF_DRIVERS = ("HF_HUB_OFFLINE", "TORCH_COMPILE_DISABLE", "NCCL_CUMEM_ENABLE", "OMP_WAIT_POLICY")
"""Of the environment: set for the libraries of a driver, in its own process alone."""


@pytest.fixture(scope="package")
def engine(forked_python: str) -> Iterator[Engine]:
    lines: list[tuple[float, str]] = []
    before = {name: os.environ.get(name) for name in OF_DRIVERS}
    # No step is larger than a chunk.
    with engines.small(
        forked_python,
        PAGES,
        chunked_prefill_size=CHUNK,
        max_step_ms=0,
        on_start=lambda seconds, line: lines.append((seconds, line)),
    ) as found:
        active = found.get_server_info()["active"]
        assert (active["scheduler"], active["layers"]) == ("pie", "sglang")
        assert active["reasons"]["layers"] == "not fused: the fused layers need a GPU"
        assert [seconds for seconds, _ in lines] == sorted(seconds for seconds, _ in lines)
        assert any("loading" in line for _, line in lines)
        yield found
        assert {name: os.environ.get(name) for name in OF_DRIVERS} == before
    pids = found.get_server_info()["internal_states"][0]["driver_pids"]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(scope="package")
def reference() -> Reference:
    return Reference(POCKET)
