"""Fixtures and reports that the tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Tests are imported without a package; their helpers are the package `support`.
_TESTS = Path(__file__).parent
sys.path.insert(0, str(_TESTS))
# Many processes import SGLang: without the bytecode of its thousands of modules, which the first of
# them writes, each would compile them again, for longer than everything else that it does.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Servers under test have drivers that are forked already; see `support.process.fork_server`.
os.environ.setdefault("PIE_ENABLE_FORK_SERVER", "0")

from support.models import tiny_models  # noqa: E402
from support.process import drivers, fork_server, scripts, vllm_drivers  # noqa: E402
from support.servers.sglang_frontend import compat_messages  # noqa: E402

# The first draw of text builds tables for seconds, and a machine may be busy: neither is a failure.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("patient")

_STDERR_TAIL = 6000
_LONGEST = (
    *("interpreter", "drivers", "test_vllm_paged", "serve", "test_real_models", "test_hostile"),
    *("engine", "test_leftovers", "test_examples", "test_radix_plugin", "adapters"),
    *("test_serve_workers", "test_hub", "test_serve_edge", "test_weight_updates"),
)
"""Groups that take minutes, the longest first: begun last, they would leave a core idle."""
_DRIVERS = frozenset({"each_driver", "either_driver", "vllm_driver", "vllm_python"})
"""Fixtures with a driver on vLLM: one process runs the files that use them, and imports it once."""
_ADAPTERS = frozenset({"library"})
"""The same of drivers with adapters, which start for themselves."""
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
def served_snapshot(models_folder: Path) -> Path:
    """A tiny Llama model that both libraries can run."""
    return tiny_models.build("llama-32", models_folder)


@pytest.fixture(scope="session")
def llama_driver(
    served_snapshot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[drivers.Driver]:
    """A driver of the tiny Llama model with pages of 16 tokens.

    Tests share it: they must leave it running.
    """
    config = drivers.write_config(tmp_path_factory.mktemp("llama-driver"), served_snapshot)
    with drivers.running(config) as driver:
        yield driver


@pytest.fixture(scope="session")
def spread_driver(
    served_snapshot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[drivers.Driver]:
    """The same with two ranks."""
    folder = tmp_path_factory.mktemp("spread-driver")
    with drivers.fork(drivers.write_config(folder, served_snapshot, **drivers.spread(2))) as driver:
        yield driver
    assert driver.stop() == 0


@pytest.fixture(scope="session")
def vllm_python() -> Iterator[str]:
    """An interpreter for drivers on vLLM, which forks them from a process that has it."""
    if reason := vllm_drivers.missing():
        pytest.skip(reason)
    with vllm_drivers.interpreter() as program:
        yield program


@pytest.fixture(scope="session")
def vllm_driver(
    served_snapshot: Path, vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[drivers.Driver]:
    """A driver of the tiny Llama model on vLLM."""
    config = drivers.write_config(tmp_path_factory.mktemp("vllm-driver"), served_snapshot)
    with vllm_drivers.fork(config, vllm_python) as driver:
        yield driver
    assert driver.stop() == 0
    assert not driver.region.exists()


@pytest.fixture(scope="session")
def spread_vllm_driver(
    served_snapshot: Path, vllm_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[drivers.Driver]:
    """The same with two ranks."""
    folder = tmp_path_factory.mktemp("spread-vllm-driver")
    config = drivers.write_config(folder, served_snapshot, **drivers.spread(2))
    with vllm_drivers.fork(config, vllm_python) as driver:
        yield driver
    assert driver.stop() == 0
    assert not driver.region.exists()


@pytest.fixture(
    params=["llama_driver", "spread_driver", "vllm_driver", "spread_vllm_driver"],
    ids=["tp1", "tp2", "vllm", "vllm-tp2"],
)
def each_driver(request: pytest.FixtureRequest) -> drivers.Driver:
    """A driver with one process or with two, on SGLang or on vLLM."""
    found: drivers.Driver = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session", params=["llama_driver", "vllm_driver"], ids=["sglang", "vllm"])
def either_driver(request: pytest.FixtureRequest) -> drivers.Driver:
    """A driver on SGLang, or on vLLM."""
    found: drivers.Driver = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def reference(served_snapshot: Path) -> Any:
    """The model of these drivers by transformers."""
    from support.models.reference import Reference

    drivers.start_fork_server()
    return Reference(served_snapshot)


@pytest.fixture(scope="module")
def compat() -> Iterator[Any]:
    """The compat module of messages of SGLang's server."""
    with compat_messages() as found:
        yield found


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The tokenizer of the model in the repository."""
    from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer

    return ModelTokenizer(tiny_models.POCKET)


@pytest.fixture(scope="session")
def spawned_driver(
    llama_snapshot: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[drivers.Driver]:
    """The same, started as the runtime does it, for tests of what a start leaves behind."""
    config = drivers.write_config(tmp_path_factory.mktemp("spawned-driver"), llama_snapshot)
    with drivers.spawn(config) as driver:
        yield driver
    assert driver.stop() == 0
    assert not driver.region.exists()


@pytest.fixture(scope="session")
def forked_python() -> Iterator[str]:
    """Replaces `sys.executable`: forks drivers and servers; see `support.process.fork_server`."""
    with fork_server.interpreter() as program:
        yield program


@pytest.fixture
def forks(forked_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what the test starts by `sys.executable` forked."""
    monkeypatch.setattr(sys, "executable", forked_python)


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
        config.stash[_INTERPRETER] = scripts.Interpreter(yields=not _is_worker(config))
    return config.stash[_INTERPRETER]


def _is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of several that share the tests (`pytest -n`)."""
    return hasattr(config, "workerinput")


def _uses(item: pytest.Item, fixtures: Container[str]) -> bool:
    return any(name in fixtures for name in getattr(item, "fixturenames", ()))


def _uses_interpreter(item: pytest.Item) -> bool:
    return _uses(item, {"interpreter"})


def _group(item: pytest.Item, on_drivers: Container[Path], on_adapters: Container[Path]) -> str:
    """Tests of one group run in one process (`--dist loadgroup`).

    They share what takes long to make: the interpreter, the drivers on SGLang and vLLM, the server
    of a folder, or the driver of a file or of a parameter of it.
    """
    if _uses_interpreter(item):
        return "interpreter"
    if item.path in on_adapters:
        return "adapters"
    if item.path in on_drivers:
        return "drivers"
    folder = item.path.parent
    name = item.path.stem if folder == _TESTS else folder.name
    call = getattr(item, "callspec", None)
    served = None if call is None else call.params.get("served")
    if served == "vllm":
        return "drivers"
    return name if served is None else f"{name}-{served}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what imports SGLang, and shares tests out: first what takes longest."""
    on_drivers, on_adapters = (
        {item.path for item in items if _uses(item, fixtures)} for fixtures in (_DRIVERS, _ADAPTERS)
    )
    for item in items:
        if _uses_interpreter(item):
            # Its process does.
            item.add_marker(pytest.mark.engine)
    if not _is_worker(config):
        return
    groups = {item: _group(item, on_drivers, on_adapters) for item in items}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    places = {group: place for place, group in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(groups[item], len(places)))


@pytest.fixture(scope="session", autouse=True)
def beside(request: pytest.FixtureRequest) -> None:
    """Begins what takes long and waits for nothing, while other tests run."""
    items = request.session.items
    if any(item.get_closest_marker("engine") for item in items):
        drivers.start_fork_server()
    if _is_worker(request.config):
        # Other processes run tests meanwhile, and only one of them those of the interpreter.
        return
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
