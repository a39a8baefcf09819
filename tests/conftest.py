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
_INTERPRETER = pytest.StashKey[scripts.Interpreter]()


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
def interpreter(pytestconfig: pytest.Config) -> scripts.Interpreter:
    """For scripts with kernels."""
    return _interpreter(pytestconfig)


@pytest.fixture
def interpreted(request: pytest.FixtureRequest, interpreter: scripts.Interpreter) -> str:
    """What the script that the test's marker `interpreted` names has printed."""
    mark = request.node.get_closest_marker("interpreted")
    return interpreter.run(*mark.args)


def _interpreter(config: pytest.Config) -> scripts.Interpreter:
    if _INTERPRETER not in config.stash:
        config.stash[_INTERPRETER] = scripts.Interpreter()
    return config.stash[_INTERPRETER]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Its process imports SGLang."""
    for item in items:
        if "interpreter" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session", autouse=True)
def beside(request: pytest.FixtureRequest) -> None:
    """Begins what takes long and waits for nothing, while other tests run."""
    items = request.session.items
    if any(item.get_closest_marker("engine") for item in items):
        drivers.start_fork_server()
    for item in items:
        for mark in item.iter_markers("interpreted"):
            _interpreter(request.config).begin(*mark.args)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the process of the interpreter."""
    if _INTERPRETER in config.stash:
        config.stash[_INTERPRETER].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Shows what running drivers have logged when a test fails."""
    report = yield
    if report.failed:
        for driver in drivers.Driver.live:
            text = driver.stderr()[-_STDERR_TAIL:]
            report.sections.append((f"stderr of {driver.name}", text))
    return report
