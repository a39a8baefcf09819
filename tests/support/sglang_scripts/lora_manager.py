"""SGLang's LoRA manager when loads fail."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from pie_driver_sglang.checkpoint.regular_file import RegularFile
from support.process import drivers

_numbers = itertools.count()


def load(engine: Any, adapter_id: int, path: str) -> None:
    """Loads an adapter as the serving loop does, but waits for it."""
    read = threading.Event()
    number = next(_numbers)
    engine.begin_load(number, adapter_id, path, read.set)
    assert read.wait(60.0)
    while not engine.finish_load(number):
        pass


def hold_reads(gate: str, client_timeout_s: str = "") -> None:
    """From now on this process, and its forks, read no weights while a file `shut` is there.

    Args:
        gate: A folder; each reader leaves a file `waits-<pid>` there.
        client_timeout_s: What the runtime says that its clients wait.
    """
    if client_timeout_s:
        os.environ["PIE_SHMEM_HARD_TIMEOUT_S"] = client_timeout_s
    chunks = RegularFile.chunks

    def held(file: RegularFile) -> Iterator[memoryview]:
        if file.name == "adapter_model.safetensors":
            Path(gate, f"waits-{os.getpid()}").touch()
            while Path(gate, "shut").exists():
                time.sleep(0.005)
        yield from chunks(file)

    mock.patch.object(RegularFile, "chunks", held).start()


def load_broken(
    config_path: str, good: str, broken: dict[str, str], connection: Connection, stderr: str
) -> None:
    """Loads one adapter, then others that fail.

    Args:
        config_path: `driver.toml`.
        good: An adapter that fits.
        broken: Paths by name.
        connection: Sends for each name the error's type and text, and whether SGLang's manager
            and its slots are as they were. One more of the name "SGLang's own" fails when its
            weights are copied into their slot.
        stderr: Where to log.
    """
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.config.config_file import load_config

    drivers.redirect_output(stderr)
    _, engine = load_engine(load_config(Path(config_path)))
    manager = engine.backend.runner.lora_manager
    load(engine, 1, good)

    def state() -> Any:
        pool = manager.memory_pool
        slots = [slot for slot in pool.buffer_id_to_uid if isinstance(slot, str)]
        tables = (manager.configs, manager.loras, manager.lora_refs)
        used = list(pool.eviction_policy.access_order)
        return [sorted(table) for table in tables], slots, dict(pool.uid_to_buffer_id), used

    def attempt(path: str) -> tuple[str, str, bool]:
        before = state()
        try:
            load(engine, 2, path)
        except Exception as error:
            text = f"{error}; {getattr(error, 'hint', '')}"
            return type(error).__name__, text, state() == before
        return "none", "it was loaded", False

    results = {name: attempt(path) for name, path in broken.items()}
    fails = mock.Mock(side_effect=AssertionError("the shapes differ"))
    pool = manager.memory_pool
    with mock.patch.object(pool, "load_lora_weight_to_buffer", fails):
        results["SGLang's own"] = attempt(good)
    with connection:
        connection.send(results)


def count_loaded(config_path: str, good: str, connection: Connection, stderr: str) -> None:
    """Loads an adapter under many ids, each twice, and fetches some of them again.

    Args:
        config_path: `driver.toml`.
        good: An adapter that fits.
        connection: Sends how many adapters SGLang's manager has after each step.
        stderr: Where to log.
    """
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.config.config_file import load_config

    drivers.redirect_output(stderr)
    _, engine = load_engine(load_config(Path(config_path)))
    manager = engine.backend.runner.lora_manager
    counts = []

    def count() -> None:
        tables = (manager.configs, manager.loras, manager.lora_refs)
        [size] = {len(table) for table in tables}
        counts.append(size)
        assert len(manager.memory_pool.eviction_policy.access_order) <= size

    for number in range(1, 10):
        for _ in range(2):
            load(engine, number, good)
            count()
    for numbers in ([1, 2], [9, 1], [4, 3], [3]):
        assert engine.fetch_adapters(numbers) == {}
        count()
    engine.load_warm_up_adapter()
    engine.drop_warm_up_adapter()
    count()
    with connection:
        connection.send(counts)


def copy_in_steps(config_path: str, good: str, connection: Connection, stderr: str) -> None:
    """Loads an adapter at once, and then the same one a layer at a time.

    Args:
        config_path: `driver.toml`.
        good: An adapter that fits.
        connection: Sends, of each load in steps, how many there were, whether the adapter could be
            used before the last one, and whether its slot has what one copy at once puts there.
        stderr: Where to log.
    """
    import torch

    from pie_driver_sglang.backends.sglang.compat.lora import SlotCopy, slot_tensors
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.config.config_file import load_config
    from pie_driver_sglang.engine.lora import adapters

    drivers.redirect_output(stderr)
    _, engine = load_engine(load_config(Path(config_path)))
    manager, loaded = engine.backend.runner.lora_manager, engine._with_adapters()._resident
    pool = manager.memory_pool

    def content(adapter_id: int) -> list[torch.Tensor]:
        slot = pool.get_buffer_id(loaded[adapter_id].uid)
        return [tensor[slot].clone() for tensor in slot_tensors(manager)]

    def fill_free_slots() -> None:
        """What a slot had before must not matter, beyond an adapter's rank it stays."""
        used = {pool.get_buffer_id(one.uid) for one in loaded.values()}
        for tensor in slot_tensors(manager):
            for slot in set(range(pool.max_loras_per_batch)) - used:
                tensor[slot].fill_(7)

    def load_steps(adapter_id: int, between: Callable[[int], object]) -> tuple[int, bool, bool]:
        fill_free_slots()
        read, number, steps, early = threading.Event(), next(_numbers), 1, False
        engine.begin_load(number, adapter_id, good, read.set)
        assert read.wait(60.0)
        while not engine.finish_load(number):
            early |= adapter_id in loaded
            between(steps)
            steps += 1
        same = [torch.equal(*pair) for pair in zip(content(adapter_id), whole, strict=True)]
        return steps, early, all(same)

    def copy_at_once(copy: Any, _layers: int) -> bool:
        """As SGLang does."""
        uid = copy._prepared.uid
        manager.memory_pool.load_lora_weight_to_buffer(
            uid,
            pool.get_buffer_id(uid),
            manager.loras[uid],
            manager.lora_modules,
            manager.embed_tokens_module,
            manager.lm_head_module,
        )
        return True

    def take_every_slot(step: int) -> None:
        if step == 1:
            manager.fetch_new_loras({None, loaded[1].uid, loaded[2].uid})

    fill_free_slots()
    with mock.patch.object(SlotCopy, "copy", copy_at_once):
        load(engine, 1, good)
    whole = content(1)
    with mock.patch.object(adapters, "_COPY_BYTES", 1):
        results = [load_steps(2, lambda _: None), load_steps(3, take_every_slot)]
        # One that is given up leaves nothing.
        read, number = threading.Event(), next(_numbers)
        engine.begin_load(number, 4, good, read.set)
        assert read.wait(60.0)
        assert not engine.finish_load(number)
        engine.discard_load(number)
    with connection:
        connection.send(
            (results, len(manager.loras), engine.backend.runner.model_config.num_hidden_layers)
        )


def pin_loaded(config_path: str, good: str, connection: Connection, stderr: str) -> None:
    """Loads an adapter as for a GPU, and uses it.

    Args:
        config_path: `driver.toml`.
        good: An adapter that fits.
        connection: Sends the device and the thread of each move into pinned memory, and the threads
            that took a rank's part of the weights.
        stderr: Where to log.
    """
    import torch
    from sglang.srt.lora.lora import LoRAAdapter

    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.config.config_file import load_config

    drivers.redirect_output(stderr)
    _, engine = load_engine(load_config(Path(config_path)))
    engine.backend.runner.lora_manager.device = torch.device("cuda:1")
    current: list[str] = []
    pinned: list[tuple[str, str]] = []
    slicing: set[str] = set()

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def pin(_adapter: LoRAAdapter) -> None:
        pinned.append((current[-1], threading.current_thread().name))

    for modules in engine.backend.runner.lora_manager.lora_modules:
        for module in modules.values():
            for name in ("slice_lora_a_weights", "slice_lora_b_weights"):
                _note_threads(module, name, slicing)
    device = mock.patch.object(torch.cuda, "device", on)
    with device, mock.patch.object(LoRAAdapter, "pin_weights_in_cpu", pin):
        load(engine, 1, good)
        assert engine.fetch_adapters([1]) == {}
    with connection:
        connection.send((pinned, slicing))


def _note_threads(module: Any, name: str, threads: set[str]) -> None:
    own = getattr(module, name)

    def recorded(weights: Any) -> Any:
        threads.add(threading.current_thread().name)
        return own(weights)

    setattr(module, name, recorded)


class Load(NamedTuple):
    """Load an adapter, each rank from a path of its own."""

    adapter_id: int
    paths: tuple[str, str]
    broken: int | None = None
    """A rank on which SGLang fails to copy the weights."""

    def run(self, engine: Any, rank: int) -> None:
        fails = mock.patch.object(
            engine.backend.runner.lora_manager.memory_pool,
            "load_lora_weight_to_buffer",
            side_effect=AssertionError("the shapes differ"),
        )
        with fails if self.broken == rank else contextlib.nullcontext():
            load(engine, self.adapter_id, self.paths[rank])


class Fetch(NamedTuple):
    """Fetch adapters, for which each rank names where its files are now."""

    adapter_ids: list[int]
    moved: tuple[tuple[str, str] | None, tuple[str, str] | None] = (None, None)
    """What a rank renames before."""

    def run(self, engine: Any, rank: int) -> dict[int, str]:
        if (names := self.moved[rank]) is not None:
            Path(names[0]).rename(names[1])
        lost: dict[int, str] = engine.fetch_adapters(self.adapter_ids)
        return lost


def run_on_ranks(
    config_path: str, steps: Sequence[Load | Fetch], connection: Connection, stderr: str
) -> None:
    """Takes the same steps on both ranks of a model.

    Args:
        config_path: `driver.toml` of a model on two devices.
        steps: What to do.
        connection: Sends for each rank and step what it said, and what SGLang's manager has then.
        stderr: Where to log.
    """
    drivers.redirect_output(stderr)
    rendezvous = os.memfd_create("rendezvous")
    ours, theirs = multiprocessing.Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            theirs.send(_steps_of(1, config_path, steps, rendezvous))
        finally:
            os._exit(0)
    theirs.close()
    results = [_steps_of(0, config_path, steps, rendezvous), ours.recv()]
    os.waitpid(pid, 0)
    with connection:
        connection.send(results)


def _steps_of(
    number: int, config_path: str, steps: Sequence[Load | Fetch], rendezvous: int
) -> list[tuple[str, Any]]:
    from pie_driver_sglang.backends.sglang.start import load_rank
    from pie_driver_sglang.config.config_file import load_config
    from pie_driver_sglang.errors import AdapterError
    from pie_driver_sglang.ranks.types import Rank

    _, engine = load_rank(load_config(Path(config_path)), Rank(number, 2, rendezvous))
    manager = engine.backend.runner.lora_manager
    results = []
    for step in steps:
        try:
            said = str(step.run(engine, number) or "")
        except AdapterError as error:
            said = f"{error}; {error.hint}"
        slots = [slot for slot in manager.memory_pool.buffer_id_to_uid if isinstance(slot, str)]
        tables = (manager.configs, manager.loras, manager.lora_refs)
        results.append((said, ([sorted(table) for table in tables], sorted(slots))))
    return results


def pin_on_threads(connection: Connection, stderr: str) -> None:
    """Pins tensors while a LoRA manager for the CPU could be made.

    Args:
        connection: Sends whether torch was asked to pin, on the thread that makes managers and on
            another one.
        stderr: Where to log.
    """
    import torch

    from pie_driver_sglang.backends.sglang.compat import lora

    drivers.redirect_output(stderr)

    def requested() -> list[bool]:
        pins = (lambda: torch.tensor([1], pin_memory=True), lambda: torch.tensor([1]).pin_memory())
        return [_is_pinned(pin) for pin in pins]

    there: list[bool] = []
    thread = threading.Thread(target=lambda: there.extend(requested()))
    with lora.on_the_host():
        here = requested()
        thread.start()
        thread.join()
    with connection:
        connection.send((here, there))


def _is_pinned(make: Callable[[], Any]) -> bool:
    """Whether a tensor is pinned, or would be if there were a GPU's driver."""
    try:
        return bool(make().is_pinned())
    except RuntimeError:
        return True
