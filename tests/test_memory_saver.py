"""Sleep on a GPU, by a fake of `torch_memory_saver`: order, tags, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pie_driver_sglang.config.option_checks import parse_options
from pie_driver_sglang.engine import memory_saver
from pie_driver_sglang.engine.memory_saver import CudaMemory, private_pool_bytes
from pie_driver_sglang.engine.sleep import DeviceMemory, FixedMemory
from pie_driver_sglang.errors import StartError, WeightsError
from support.models.fake_saver import FakeSaver
from support.models.random_pair import checkpoint
from support.process import drivers, scripts

KV, WEIGHTS = "kv_cache", "weights"


class Memory:
    """Two pools of the fake, and a tensor in none."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.saver = FakeSaver(free)
        with self.saver.region(WEIGHTS, enable_cpu_backup=True):
            self.weight = torch.arange(12.0)
        with self.saver.region(KV):
            self.kv = torch.zeros(1024)
        self.other = torch.ones(3)
        self.memory = CudaMemory(
            {WEIGHTS: lambda: [self.weight, self.other], KV: lambda: [self.kv]}, self.saver
        )


def test_tags_are_paused_and_resumed_once_and_in_pairs() -> None:
    made = Memory()
    memory, saver = made.memory, made.saver
    made.kv.fill_(1.0)
    for tags in ([WEIGHTS], [KV, WEIGHTS, "cuda_graph"], [KV]):
        memory.release(tags)
    assert made.weight.isnan().all()
    assert (memory.is_awake(WEIGHTS), memory.is_awake(KV)) == (False, False)
    with pytest.raises(WeightsError, match="`weights` is released"):
        memory.require_awake(WEIGHTS)
    memory.resume([KV])
    # Nothing of before is there, and no NaN.
    assert not made.kv.any()
    assert made.weight.isnan().all()
    for _ in range(2):
        memory.resume([KV, WEIGHTS, "cuda_graph"])
    assert torch.equal(made.weight, torch.arange(12.0))
    assert torch.equal(made.other, torch.ones(3))
    paired = [call for call in saver.calls if call[0] != "synchronize"]
    assert paired == [("pause", WEIGHTS), ("pause", KV), ("resume", KV), ("resume", WEIGHTS)]
    # KV is written before a command is answered.
    assert saver.calls[-1] == ("synchronize", "")


def test_a_gpu_without_room_is_found_before_the_library_ends_the_process() -> None:
    margin = memory_saver._MARGIN_BYTES
    made = Memory(margin)
    made.memory.release([WEIGHTS, KV])
    made.saver.free -= 1
    with pytest.raises(
        WeightsError, match=r"`weights` and `kv_cache` cannot be resumed: 0\.06 GiB"
    ):
        made.memory.resume([WEIGHTS, KV])
    assert made.saver.paused == [WEIGHTS, KV]
    # One of them fits.
    made.memory.resume([WEIGHTS])
    assert torch.equal(made.weight, torch.arange(12.0))
    made.saver.free += 1
    made.memory.resume([WEIGHTS, KV])
    assert made.saver.paused == []
    assert made.saver.free == margin


def test_what_torch_keeps_of_passes_is_given_back_and_asked_for_at_the_end() -> None:
    made = Memory(memory_saver._MARGIN_BYTES)
    made.saver.cached = 1 << 20
    made.memory.release([KV])
    made.saver.cached = 1 << 10
    made.memory.release([WEIGHTS])
    assert made.saver.cached == 0
    made.saver.free -= 1
    # A trainer may have it until the last tag.
    made.memory.resume([WEIGHTS])
    with pytest.raises(WeightsError, match="`kv_cache` cannot be resumed"):
        made.memory.resume([KV])
    made.saver.free += 1
    made.memory.resume([KV])
    # No longer asked for.
    made.memory.release([KV])
    made.saver.free -= (1 << 20) + (1 << 10)
    made.memory.resume([KV])


def test_what_torch_keeps_of_an_update_is_given_back_before_a_resume() -> None:
    made = Memory(memory_saver._MARGIN_BYTES)
    made.saver.cached = 1 << 20
    made.memory.release([KV, WEIGHTS])
    made.memory.resume([WEIGHTS])
    # The update's tensors have ended, and torch has their memory.
    made.saver.free -= 1 << 20
    made.saver.cached = 1 << 20
    made.memory.resume([KV])
    assert made.saver.free == memory_saver._MARGIN_BYTES + (1 << 20)


def test_a_host_without_room_for_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Memory()
    monkeypatch.setattr(memory_saver, "available_bytes", lambda: made.weight.nbytes - 1)
    with pytest.raises(WeightsError, match="of host memory while they are released"):
        made.memory.release([KV, WEIGHTS])
    assert made.saver.calls == []
    made.memory.release([KV])
    monkeypatch.setattr(memory_saver, "available_bytes", lambda: made.weight.nbytes)
    made.memory.release([WEIGHTS])
    made.memory.resume([WEIGHTS])
    # The library has kept its host memory.
    monkeypatch.setattr(memory_saver, "available_bytes", lambda: 0)
    made.memory.release([WEIGHTS])


def test_ranks_and_replicas_do_not_count_on_the_same_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of three that release their weights at once, two find room."""
    models = [Memory() for _ in range(3)]
    left = [2 * models[0].weight.nbytes]
    checks = threading.Barrier(len(models))

    def available() -> int:
        found = left[0]
        # All would have checked by now, if they could.
        with contextlib.suppress(threading.BrokenBarrierError):
            checks.wait(0.5)
        return found

    def pause(saver: FakeSaver, tag: str) -> None:
        left[0] -= models[0].weight.nbytes
        FakeSaver.pause(saver, tag)

    monkeypatch.setattr(memory_saver, "available_bytes", available)
    for made in models:
        monkeypatch.setattr(made.saver, "pause", functools.partial(pause, made.saver))
    with ThreadPoolExecutor() as pool:
        ended = [pool.submit(made.memory.release, [WEIGHTS]) for made in models]
        errors = [future.exception() for future in ended]
    [refused] = [error for error in errors if error is not None]
    assert "of host memory while they are released" in str(refused)
    assert left == [0]


def test_memory_outside_of_pools_is_not_said_to_be_released() -> None:
    made = Memory()
    memory = CudaMemory({WEIGHTS: lambda: [made.other]}, made.saver)
    with pytest.raises(WeightsError, match="`weights` is in no pool"):
        memory.release([WEIGHTS])
    assert memory.is_awake(WEIGHTS)


def test_the_log_has_sizes_and_seconds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        made = Memory()
        made.memory.release([KV])
        made.memory.resume([KV])
    begin, released, resumed = [record.getMessage() for record in caplog.records]
    assert begin == "memory that can be released: `weights` 0.00 GiB, `kv_cache` 0.00 GiB"
    assert released.startswith("released `kv_cache`: 0.00 GiB in 0.")
    assert resumed.startswith("resumed `kv_cache`: 0.00 GiB in 0.")


def test_a_gpu_releases_nothing_without_the_option() -> None:
    memory: DeviceMemory = FixedMemory({WEIGHTS: list, KV: list})
    for tags in ([WEIGHTS], ["cuda_graph"]):
        with pytest.raises(WeightsError, match="`enable_memory_saver`, which is off") as caught:
            memory.release(tags)
        assert "`enable_memory_saver=true`" in caught.value.hint
    memory.resume([WEIGHTS])


@pytest.mark.parametrize(("device", "expected"), [("cpu", False), ("cuda:1", True)])
def test_only_a_gpu_needs_it(device: str, expected: bool) -> None:
    kind = device.partition(":")[0]
    assert not memory_saver.saves_memory(kind, parse_options({}, device))
    options = parse_options({"enable_memory_saver": True}, device)
    assert memory_saver.saves_memory(kind, options) == expected


def test_pools_of_pointers() -> None:
    def segment(address: int, size: int, pool: tuple[int, int]) -> dict[str, Any]:
        return {"address": address, "total_size": size, "segment_pool_id": pool}

    segments = [
        segment(1000, 100, (0, 0)),
        segment(2000, 100, (0, 1)),
        # Of the same pool, and not used.
        segment(3000, 50, (0, 1)),
        segment(4000, 10, (1, 0)),
    ]
    cases: list[tuple[list[int], int]] = [
        ([], 0),
        ([1000, 1099], 0),
        ([2099, 1000], 150),
        ([2100, 1999], 0),
        ([2000, 4009], 160),
        ([4010], 0),
    ]
    for pointers, expected in cases:
        assert private_pool_bytes(segments, pointers) == expected, pointers


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "expandable_segments:True")
    with pytest.raises(StartError, match=f"{name} has `expandable_segments:True`"):
        memory_saver.choose_hook_mode()


@pytest.mark.engine
def test_the_library_has_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it runs without a GPU: a property or an argument that is gone fails here."""
    import inspect

    from sglang.srt.utils import torch_memory_saver_adapter as adapter
    from torch_memory_saver import torch_memory_saver
    from torch_memory_saver.hooks.base import HookUtilBase
    from torch_memory_saver.hooks.mode_torch import HookUtilModeTorch

    # What SGLang allocates by is what the driver pauses.
    assert adapter._memory_saver is torch_memory_saver
    settings: dict[str, Any] = {}
    monkeypatch.setattr(torch_memory_saver, "_impl_ctor_kwargs", settings)
    memory_saver.choose_hook_mode()
    assert settings == {"hook_mode": "torch"}
    assert HookUtilModeTorch in HookUtilBase.__subclasses__()
    kind = type(torch_memory_saver)
    assert isinstance(vars(kind)["retain_cpu_backup"], property)
    calls: list[Callable[..., Any]] = [kind.pause, kind.resume]
    assert all(list(inspect.signature(call).parameters)[1] == "tag" for call in calls)
    assert {"tag", "enable_cpu_backup"} <= inspect.signature(kind.region).parameters.keys()


@pytest.mark.engine
@pytest.mark.timeout(300)
def test_a_model_that_sglang_has_loaded_in_regions(tmp_path: Path) -> None:
    """It sleeps by tags, and computes as before at the same addresses; new weights stay."""
    old, new = (checkpoint(tmp_path / str(seed), seed) for seed in (1, 2))
    config = drivers.write_config(tmp_path, old.folder)
    out = scripts.run("tests/support/sglang_scripts/memory_saver.py", str(config), str(new.folder))
    found = json.loads(out.splitlines()[-1])
    assert found.pop("keeps") == {WEIGHTS: True, KV: False}
    # The block table is not KV, although SGLang's own is.
    assert not found.pop("table_in_pool")
    assert "`weights` is released" in found.pop("refused")
    assert "cannot be resumed" in found.pop("too_little")
    assert found.pop("still_paused") == [KV, WEIGHTS]
    assert found.pop("calls") == [
        ["pause", KV], ["pause", WEIGHTS], ["resume", KV], ["resume", WEIGHTS]
    ]  # fmt: skip
    assert found == dict.fromkeys(found, True)
