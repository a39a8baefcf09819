"""Fixtures and reports that the tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Tests are imported without a package; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parent))
# Many processes import SGLang: without the bytecode of its thousands of modules, which the first of
# them writes, each would compile them again, for longer than everything else that it does.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import drivers  # noqa: E402
import scripts  # noqa: E402
import tiny_models  # noqa: E402

# The first draw of text builds tables for seconds, and a machine may be busy: neither is a failure.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("patient")

_STDERR_TAIL = 6000


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny models are built; see `tiny_models.build`."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def llama_snapshot(models_folder: Path) -> Path:
    """A tiny Llama model."""
    return tiny_models.build("llama", models_folder)


@pytest.fixture(scope="session")
def llama_driver(
    llama_snapshot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[drivers.Driver]:
    """A driver of the tiny Llama model with pages of 16 tokens, started as the runtime does it.

    Tests share it: they must leave it running.
    """
    config = drivers.write_config(tmp_path_factory.mktemp("llama-driver"), llama_snapshot)
    with drivers.spawn(config) as driver:
        yield driver
    assert driver.stop() == 0
    assert not driver.region.exists()


@pytest.fixture(scope="session")
def interpreter() -> Iterator[scripts.Interpreter]:
    """For scripts with kernels."""
    with scripts.Interpreter() as interpreter:
        yield interpreter


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Shows what running drivers have logged when a test fails."""
    report = yield
    if report.failed:
        for driver in drivers.Driver.live:
            text = driver.stderr()[-_STDERR_TAIL:]
            report.sections.append((f"stderr of {driver.name}", text))
    return report
