"""Imports and threads of a start."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.backends import environment as shared_environment
from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.backends.sglang.compat import process
from pie_driver_sglang.engine import device
from pie_driver_sglang.errors import StartError
from support.process import drivers

LIMIT_S = 180.0

UNNEEDED = (
    *("sklearn", "pandas", "pyarrow", "datasets", "sglang.srt.entrypoints.engine"),
    *("scipy", "torchaudio", "mistral_common", "flashinfer", "cutlass"),
    "torch._inductor.compile_fx",
)
"""Modules that a start must not import, each with all that it brings along."""

START = """
import gc, importlib.util, json, sys
from pathlib import Path
from pie_driver_sglang.backends.sglang.start import load_rank
from pie_driver_sglang.ranks.types import ALONE
from pie_driver_sglang.config.config_file import load_config

load_rank(load_config(Path(sys.argv[1])), ALONE)
frozen, collects = gc.get_freeze_count(), gc.isenabled()
modules = sorted(sys.modules)
if importlib.util.find_spec("sklearn"):
    import sklearn.metrics
print(json.dumps([modules, frozen, collects]))
"""
"""Loads a model as the driver does, and says what that has left over."""


@pytest.mark.engine
def test_a_start_imports_what_it_needs(llama_snapshot: Path, tmp_path: Path) -> None:
    config = drivers.write_config(tmp_path, llama_snapshot)
    result = subprocess.run(
        [sys.executable, "-c", START, str(config)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    modules, frozen, collects = json.loads(result.stdout)
    assert set(UNNEEDED) & set(modules) == set()
    models = {name for name in modules if name.startswith("sglang.srt.models.")}
    assert "sglang.srt.models.llama" in models
    assert len(models) < 20, models
    assert frozen > 100_000, "the modules are still looked at by every full collection"
    assert collects


class TestModelModules:
    def test_all_but_the_requested_one(self) -> None:
        others = process.other_model_modules(frozenset({"Qwen3ForCausalLM"}))
        assert "qwen3" not in others
        assert len(others) > 150

    @pytest.mark.parametrize("name", ["UnheardOfForCausalLM", "Qwen3"])
    def test_an_unknown_architecture_is_sought_in_all(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "environ", {})
        environment.prepare("cpu", [name], spins=False)
        assert "SGLANG_DISABLED_MODEL_ARCHS" not in os.environ


class TestImporting:
    def test_collects_again_behind_a_failure(self) -> None:
        frozen = gc.get_freeze_count()
        with pytest.raises(ImportError), shared_environment.importing():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled()
        # Frozen objects may be freed meanwhile, but a failure freezes none.
        assert gc.get_freeze_count() <= frozen

    def test_a_package_is_absent_only_within(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "this", raising=False)
        with shared_environment._absent(["this"]), pytest.raises(ModuleNotFoundError):
            importlib.import_module("this")
        assert "this" not in sys.modules

    def test_what_is_imported_stays(self) -> None:
        with shared_environment._absent(["json"]):
            assert sys.modules["json"] is json
        assert sys.modules["json"] is json


class Driver:
    """A CUDA driver with one device."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def cuInit(self, flags: int) -> int:
        self.calls.append(("cuInit", flags))
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        self.calls.append(("cuDeviceGet", index))
        device._obj.value = 7
        return 0 if index == 0 else 101

    def cuDevicePrimaryCtxRetain(self, _context: Any, device: ctypes.c_int) -> int:
        self.calls.append(("cuDevicePrimaryCtxRetain", device.value))
        return 0


class TestContext:
    def begin(self, name: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        driver = Driver()
        monkeypatch.setattr(ctypes, "CDLL", lambda _name: driver)
        thread = device.begin_context(name)
        assert thread is not None
        assert thread.daemon
        thread.join()
        return driver.calls

    def test_of_the_named_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = self.begin("cuda:0", monkeypatch)
        assert calls == [("cuInit", 0), ("cuDeviceGet", 0), ("cuDevicePrimaryCtxRetain", 7)]

    def test_of_no_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.begin("cuda:1", monkeypatch) == [("cuInit", 0), ("cuDeviceGet", 1)]

    def test_without_a_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "_LIBRARY", "libno-such-driver.so.1")
        thread = device.begin_context("cuda:0")
        assert thread is not None
        thread.join()

    def test_a_missing_driver_is_seen_without_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "_LIBRARY", "libno-such-driver.so.1")
        # Python's sign for a module that must not be imported.
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(StartError, match="cuda:0 does not exist: no CUDA device") as caught:
            device.check_device("cuda:0")
        assert caught.value.hint

    def test_of_no_gpu(self) -> None:
        assert device.begin_context("cpu") is None
