"""Logits of decodes with LoRA adapters by the fused layers, against SGLang's.

    PYTHONPATH=tests TRITON_INTERPRET=1 python tests/support/kernels/lora_model.py CONFIG ADAPTER...

CONFIG is a `driver.toml` of a dense model in float32 on the CPU with `enable_lora`. The last
adapter changes the LM head.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from pie_driver_sglang import _core
from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig
from support.kernels.model_decode import LENGTHS, STEPS, TOLERANCE, Contexts

BOUND = (1, -1, 2, 1, 3)
"""The adapter of each context."""


class BoundPass:
    """A staged pass whose requests have adapters."""

    def __init__(self, staged: Any, numbers: list[int]) -> None:
        self._staged = staged
        self.adapters = np.array(numbers, np.int64).tobytes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._staged, name)


def decode(
    server: Any,
    engine: Any,
    contexts: Contexts,
    numbers: list[int],
    patch: Callable[[], AbstractContextManager[None]] | None = None,
) -> Any:
    """``[steps, contexts, vocabulary]`` logits; SGLang prefills, and decodes without a patch."""
    import torch

    found = []
    for step in range(-1, STEPS):
        batch = server.warm_up(contexts.frame(step))
        while (staged := batch.stage()) is not None:
            patched = staged.decode and patch is not None
            with patch() if patched else nullcontext():
                engine.forward(staged if patched else BoundPass(staged, numbers))
            with torch.inference_mode():
                logits = engine.logits(torch.arange(staged.tokens))
            while (group := batch.stage_slots()) is not None:
                batch.put_outputs(engine.sample(group).tokens.numpy())
        batch.commit()
        if step >= 0:
            found.append(logits)
    return torch.stack(found)


def load(engine: Any, folders: list[str]) -> None:
    """Loads adapters under the ids 1, 2 and so on."""
    for number, folder in enumerate(folders, 1):
        read: list[bool] = []
        engine.begin_load(number, number, folder, lambda: read.append(True))  # noqa: B023
        while not engine.finish_load(number):
            pass


def differences(config: DriverConfig, folders: list[str]) -> list[float]:
    """The largest difference of a logit, of each path but SGLang's before norms are folded."""
    import torch

    from pie_driver_sglang.backends.sglang.attention import paged
    from pie_driver_sglang.backends.sglang.load import load_engine
    from pie_driver_sglang.engine.layers import lora as lora_module
    from pie_driver_sglang.engine.layers.selection import fuse_layers
    from pie_driver_sglang.kernels.gemm.lora import LoraRows

    name = f"/pie_shmem_g{config.driver.group_id}"
    server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
    # The region has no client: only its planner is used.
    server.unlink()
    planner, engine = load_engine(config)
    server.serve(planner, engine.block, print)
    engine.steps = None
    load(engine, folders)
    size = (engine.model_info.page_size, engine.model_info.vocab_size)
    every = list(BOUND)
    expected = decode(server, engine, Contexts(0, *size), every)
    plain = decode(server, engine, Contexts(0, *size), [-1] * len(LENGTHS), nullcontext)
    changed = (plain - expected).abs().amax((0, 2))
    assert [bool(change > 0.05) for change in changed] == [number > 0 for number in BOUND], changed
    own = engine.backend
    paged.install(own.runner, engine.block_table)
    device = SimpleNamespace(multi_processor_count=4)
    with mock.patch("torch.cuda.get_device_properties", return_value=device):
        own.runner.init_attention_backends()
    dense = fuse_layers(own, applies_adapters=True)
    assert dense.applies_adapters
    engine._adapters.fold(own.folded)
    load(engine, folders)
    slots = dict(engine._adapters.graph_slots())
    assert sorted(slots) == [*range(1, len(folders))], "the last one changes the LM head"
    slot_ranks = own.lora.adapter_slots.slot_ranks
    assert all(int(slot_ranks[slot]) > 0 for slot in slots.values())

    def patch(numbers: list[int] = every) -> AbstractContextManager[None]:
        entries = [slots.get(number, -1) for number in numbers]
        rows = LoraRows(torch.tensor(entries, dtype=torch.int32), slot_ranks)
        found: AbstractContextManager[None] = dense.patched_lora_decode(rows)
        return found

    found = [decode(server, engine, Contexts(64, *size), every)]
    with mock.patch.object(lora_module, "lora_shrink", wraps=lora_module.lora_shrink) as applied:
        found.append(decode(server, engine, Contexts(128, *size), every, patch))
    assert applied.called
    with mock.patch.object(dense, "_max_small_rows", return_value=0):
        found.append(decode(server, engine, Contexts(192, *size), every, patch))
    for number, bound in enumerate(BOUND):
        contexts = Contexts(256, *size, only=number)
        alone = decode(server, engine, contexts, [bound], lambda: patch([bound]))  # noqa: B023
        found.append(alone + (expected - expected[:, number : number + 1]))
    return [float((logits - expected).abs().max()) for logits in found]


if __name__ == "__main__":
    loaded = load_config(Path(sys.argv[1]))
    environment.prepare("cpu", loaded.model.hf_config["architectures"], spins=False)
    errors = differences(loaded, sys.argv[2:])
    print(*(f"{error:.1e}" for error in errors))
    sys.exit(not max(errors) < TOLERANCE)
