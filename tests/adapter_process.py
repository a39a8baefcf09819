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
    import torch

    from pie_driver_sglang.config import load_config
    from pie_driver_sglang.sglang.load import load_engine

    drivers.redirect_output(stderr)
    _, engine = load_engine(load_config(Path(config_path)))
    manager = engine._runner.lora_manager
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
    assert torch.is_inference_mode_enabled() is False
    with connection:
        connection.send(results)
