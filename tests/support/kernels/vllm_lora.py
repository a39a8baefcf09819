"""Slots and kernels of LoRA adapters on vLLM's layers.

    PYTHONPATH=tests:VLLM_SITE python tests/support/kernels/vllm_lora.py CONFIG ADAPTER...

CONFIG is a `driver.toml` of a model in float32 on the CPU with two slots for adapters, and there
are three adapters of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pie_driver_sglang.backends.vllm.library import LIBRARY
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.vllm_options import LORA_RANKS
from pie_driver_sglang.memory.host import Budget
from pie_driver_sglang.ranks.types import ALONE

ROWS, INPUTS, RANK, SLOTS = 12, 24, 8, 3
WIDTHS = (16, 8)
"""Of the parts of a fused layer."""


def check_kernels() -> None:
    """Products by adapters are those of vLLM's own class, and rows without one stay as they are."""
    import torch
    from vllm.config.lora import MaxLoRARanks
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from pie_driver_sglang.backends.vllm.compat.lora import HostPunica

    assert get_args(MaxLoRARanks) == LORA_RANKS
    torch.manual_seed(0)
    inputs, before = torch.randn(ROWS, INPUTS), torch.randn(ROWS, sum(WIDTHS))
    down = tuple(torch.randn(SLOTS, 1, RANK, INPUTS) for _ in WIDTHS)
    up = tuple(torch.randn(SLOTS, 1, width, RANK) for width in WIDTHS)

    def run(kind: Any, ids: Sequence[int]) -> list[Any]:
        """A fused linear layer, an embedding, and an LM head with a padded vocabulary."""
        punica = kind(ROWS, ROWS, torch.device("cpu"))
        names = [slot + 1 for slot in range(SLOTS)]
        mapping = LoRAMapping(tuple(ids), tuple(ids), is_prefill=True)
        punica.update_metadata(mapping, names, SLOTS + 1, 100)
        outputs = [before.clone(), before[:, : WIDTHS[0]].clone(), before.clone()]
        punica.add_lora_linear(outputs[0], inputs, down, up, 1.0, WIDTHS)
        punica.add_lora_embedding(outputs[1], inputs[:, :RANK], up[0])
        punica.add_lora_logits(outputs[2], inputs, down[0], up[0], 1.0)
        return outputs

    everywhere = [1 + row % SLOTS for row in range(ROWS)]
    expected = run(PunicaWrapperCPU, everywhere)
    for ours, theirs in zip(run(HostPunica, everywhere), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)
    some = [slot if row % 2 else 0 for row, slot in enumerate(everywhere)]
    without = torch.tensor(some) == 0
    for mixed, whole in zip(run(HostPunica, some), run(HostPunica, everywhere), strict=True):
        assert torch.equal(mixed[without], before[without, : mixed.shape[1]])
        assert torch.allclose(mixed[~without], whole[~without], atol=1e-5)
    # When vLLM's class leaves such rows alone, ours is for speed only.
    assert not torch.equal(run(PunicaWrapperCPU, some)[0][without], before[without])


def check_slots(config_path: str, adapters: Sequence[str]) -> None:
    """A copy in steps puts into a slot what one copy does, even if others take the slot meanwhile.

    The least recently used adapter leaves, and what it had does not stay.
    """
    import torch

    from pie_driver_sglang.engine.lora.files import read

    _, executor = LIBRARY.load_rank(load_config(Path(config_path), LIBRARY.rules), ALONE)
    lora: Any = executor.backend.lora
    assert lora.slots == 2
    assert lora.slot_bytes == executor.plan.adapters
    layers = lora._wrapped.layers
    prepared = []
    for number, path in enumerate(adapters):
        with read(path, lora.layers(), lora.max_rank, lora.dtype, Budget()) as (_, adapter):
            found = lora.prepare(str(number), adapter.rank, adapter.targets, adapter.tensors)
            prepared.append(found)

    def contents(uid: str) -> list[Any]:
        slot = lora.slot_of(uid)
        return [stack[slot].clone() for layer in layers for stack in layer.slots]

    def same(one: list[Any], other: list[Any]) -> bool:
        return all(torch.equal(*pair) for pair in zip(one, other, strict=True))

    expected = []
    for each in prepared:
        lora.put(each)
        expected.append(contents(each.uid))
        lora.forget(each.uid)
    assert not same(expected[0], expected[1])
    # In steps, with nothing between them.
    copy = lora.begin_copy(prepared[0])
    assert copy.layers == len(layers)
    assert copy.copy(len(layers) // 2) is False
    while not copy.copy(1):
        pass
    assert same(contents("0"), expected[0])
    # The slot goes to another one in the middle: the others fill both.
    copy = lora.begin_copy(prepared[1])
    assert copy.copy(2) is False
    lora.put(prepared[2])
    lora.bind_rows(["0", None, "2"])
    assert lora.slot_of("1") is None
    assert copy.copy(1) is True
    assert same(contents("1"), expected[1])
    # It took the place of the one that had its slot for longest.
    assert lora.slot_of("2") is None
    assert same(contents("0"), expected[0])
    lora.bind_rows(["2", "2"])
    assert same(contents("2"), expected[2])
    assert lora.slot_of("0") is None


if __name__ == "__main__":
    check_kernels()
    check_slots(sys.argv[1], sys.argv[2:])
