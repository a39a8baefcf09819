"""Sleep by tags of a model that SGLang has loaded within regions; prints what was found as JSON.

    python tests/support/sglang_scripts/memory_saver.py CONFIG OTHER

CONFIG is a `driver.toml` of a model on the CPU, OTHER a folder with other weights of the model. A
`FakeSaver` takes the place of `torch_memory_saver`; loading, regions and commands are the driver's.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from sglang.srt import constants
from sglang.srt.utils import torch_memory_saver_adapter

from pie_driver_sglang import _core
from pie_driver_sglang.backends.sglang.load import load_engine
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.engine import memory_saver
from pie_driver_sglang.engine.control_commands import (
    CUDA_GRAPH_TAG,
    KV_CACHE_TAG,
    WEIGHTS_TAG,
    CheckWeights,
    DiskUpdate,
    ReleaseMemory,
    ResumeMemory,
)
from pie_driver_sglang.errors import WeightsError
from support.kernels.model_decode import Contexts, decode
from support.models.fake_saver import FakeSaver

ALL = (KV_CACHE_TAG, WEIGHTS_TAG, CUDA_GRAPH_TAG)


def main(path: str, other: str) -> None:
    """Loads the model, and has it sleep in several orders."""
    assert set(constants.GPU_MEMORY_ALL_TYPES) == set(ALL)
    saver = FakeSaver()
    config = load_config(Path(path))
    with (
        mock.patch.object(torch_memory_saver_adapter, "_memory_saver", saver),
        mock.patch.object(memory_saver, "saves_memory", lambda *_: True),
        mock.patch.object(memory_saver, "choose_hook_mode"),
        mock.patch.object(memory_saver, "TorchMemorySaver", lambda _: saver),
    ):
        name = f"/pie_shmem_g{config.driver.group_id}"
        server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
        # The region has no client: only its planner is used.
        server.unlink()
        planner, engine = load_engine(config)
        server.serve(planner, engine.block, logging.info)
    info, control = engine.model_info, engine.weights

    def logits() -> Any:
        # The same pages each time.
        return decode(server, engine, Contexts(0, info.page_size, info.vocab_size))

    def pointers() -> list[int]:
        own = [tensor for _, tensor in engine.backend.weights.named_tensors()]
        return [tensor.data_ptr() for tensor in (*own, *engine.backend.kv_pages())]

    def lie_in(tag: str, tensors: Any) -> bool:
        starts = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return starts <= saver.pools[tag].storages.keys()

    before, addresses = logits(), pointers()
    found: dict[str, Any] = {
        "keeps": {tag: pool.keeps for tag, pool in saver.pools.items()},
        "weights_in_pool": lie_in(WEIGHTS_TAG, (x for _, x in
                                  engine.backend.weights.named_parameters())),
        "kv_in_pool": lie_in(KV_CACHE_TAG, engine.backend.kv_pages()),
        "table_in_pool": lie_in(KV_CACHE_TAG, [engine.block_table.slots]),
    }  # fmt: skip

    saver.calls.clear()
    control.run(ReleaseMemory(ALL))
    # A second time is nothing.
    control.run(ReleaseMemory(ALL))
    found["asleep_is_garbage"] = all(
        bool((x.view(torch.uint8) == 0xFF).all()) for x in engine.backend.kv_pages()
    )
    control.run(ResumeMemory(ALL))
    found["calls"] = [call for call in saver.calls if call[0] != "synchronize"]
    found["same_addresses"] = pointers() == addresses
    found["kv_is_zeros"] = not any(bool(x.any()) for x in engine.backend.kv_pages())
    found["same_logits"] = torch.equal(logits(), before)

    # As a trainer: weights first, then new ones, then KV.
    control.run(ReleaseMemory([KV_CACHE_TAG]))
    control.run(ReleaseMemory([WEIGHTS_TAG]))
    found["refused"] = refusal(control, DiskUpdate(other))
    control.run(ResumeMemory([WEIGHTS_TAG]))
    control.run(DiskUpdate(other))
    sums = control.run(CheckWeights("checksum"))["ranks"]
    control.run(ResumeMemory([KV_CACHE_TAG]))
    updated = logits()
    found["other_logits"] = not torch.allclose(updated, before)
    control.run(ReleaseMemory(ALL))
    saver.free -= 1 << 60
    found["too_little"] = refusal(control, ResumeMemory(ALL))
    found["still_paused"] = sorted(saver.paused)
    saver.free += 1 << 60
    control.run(ResumeMemory(ALL))
    found["updated_stays"] = torch.equal(logits(), updated)
    found["same_sums"] = control.run(CheckWeights("checksum"))["ranks"] == sums
    print(json.dumps(found))


def refusal(control: Any, command: Any) -> str:
    """The message of a command that is refused."""
    try:
        control.run(command)
    except WeightsError as error:
        return error.with_hint
    raise AssertionError(f"{command} was not refused")


if __name__ == "__main__":
    main(*sys.argv[1:])
