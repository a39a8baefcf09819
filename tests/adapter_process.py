"""SGLang's LoRA manager under loads that fail, in a process that has SGLang."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import drivers


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
    from pie_driver_sglang.config import load_config
    from pie_driver_sglang.sglang.load import load_engine

    drivers.redirect_output(stderr)
    _, engine = load_engine(load_config(Path(config_path)))
    manager = engine.runner.lora_manager
    engine.load_adapter(1, good)

    def state() -> Any:
        pool = manager.memory_pool
        slots = [slot for slot in pool.buffer_id_to_uid if isinstance(slot, str)]
        tables = (manager.configs, manager.loras, manager.lora_refs)
        used = list(pool.eviction_policy.access_order)
        return [sorted(table) for table in tables], slots, dict(pool.uid_to_buffer_id), used

    def attempt(path: str) -> tuple[str, str, bool]:
        before = state()
        try:
            engine.load_adapter(2, path)
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
    from pie_driver_sglang.config import load_config
    from pie_driver_sglang.sglang.load import load_engine

    drivers.redirect_output(stderr)
    _, engine = load_engine(load_config(Path(config_path)))
    manager = engine.runner.lora_manager
    counts = []

    def count() -> None:
        tables = (manager.configs, manager.loras, manager.lora_refs)
        [size] = {len(table) for table in tables}
        counts.append(size)
        assert len(manager.memory_pool.eviction_policy.access_order) <= size

    for number in range(1, 10):
        for _ in range(2):
            engine.load_adapter(number, good)
            count()
    for numbers in ([1, 2], [9, 1], [4, 3], [3]):
        assert engine.fetch_adapters(numbers) == {}
        count()
    with engine.rehearsal_adapter():
        pass
    count()
    with connection:
        connection.send(counts)
