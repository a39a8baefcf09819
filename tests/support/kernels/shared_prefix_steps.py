"""Decodes that share a prefix, with and without shared-prefix groups.

    PYTHONPATH=tests TRITON_INTERPRET=1 python tests/support/kernels/shared_prefix_steps.py CONFIG

CONFIG is a `driver.toml` of a model in float32 on the CPU. Prints the largest difference of logits.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.memory.graphs import GraphKind, GraphSpec, plain_specs

PAGE = 16
COUNT = 6
"""Contexts."""
COMMON = 640
"""Tokens that they have in common, fewer of which would save too little."""
OWN = 5
STEPS = 1
TOLERANCE = 1e-4


class Contexts:
    """Contexts that begin with the same tokens, in the same pages or in their own."""

    def __init__(self, first_page: int, *, shared: bool) -> None:
        draw = random.Random(3)
        self._common = [draw.randrange(200) for _ in range(COMMON)]
        self._own = [[draw.randrange(200) for _ in range(OWN + STEPS)] for _ in range(COUNT)]
        self._first, self._shared = first_page, shared

    def prompts(self) -> list[bytes]:
        """Frames that store them."""
        prefixes = [0] if self._shared else range(COUNT)
        frames = [[self._request(c, self._common, 0)] for c in prefixes]
        own = [[self._request(c, self._own[c][:OWN], COMMON)] for c in range(COUNT)]
        return [_core.encode_forward(requests) for requests in (*frames, *own)]

    def decode(self, step: int) -> bytes:
        """A frame of one token of each."""
        place = OWN + step
        requests = [
            self._request(c, self._own[c][place : place + 1], COMMON + place) for c in range(COUNT)
        ]
        return _core.encode_forward(requests)

    def _request(self, context: int, tokens: list[int], start: int) -> Request:
        end = start + len(tokens)
        common, each = COMMON // PAGE, 1
        prefix = self._first + (0 if self._shared else context * common)
        own = self._first + common * (1 if self._shared else COUNT) + context * each
        listed = [*range(prefix, prefix + common), own][: -(-end // PAGE)]
        slots = [(len(tokens) - 1, Sampler.greedy())]
        return Request(tokens, list(range(start, end)), listed, (end - 1) % PAGE + 1, slots)


class Recorder:
    """Steps whose logits and graphs are kept."""

    def __init__(self, engine: Any, rows: list[int], grouped: list[int]) -> None:
        from pie_driver_sglang.engine.eager_steps import CpuGraphRunner

        self.graphs: list[int] = []
        self.logits: list[Any] = []
        recorder = self

        class Steps(CpuGraphRunner):
            def run(self, number: int) -> None:
                recorder.graphs.append(number)
                super().run(number)

        head_logits = engine.head_logits

        def keep(*args: Any) -> Any:
            rows = head_logits(*args)
            self.logits.append(rows.part.clone())
            return rows

        engine.head_logits = keep
        self.graph_path = Steps(
            engine,
            [*plain_specs(rows), *(GraphSpec(GraphKind.GROUPED, count) for count in grouped)],
            8,
        ).graph_path()


def store(server: Any, engine: Any, frame: bytes) -> None:
    """Runs a prompt."""
    batch = server.warm_up(frame)
    while (staged := batch.stage()) is not None:
        engine.forward(staged)
        while (group := batch.stage_slots()) is not None:
            batch.put_outputs(engine.sample(group).tokens.numpy())
    batch.commit()


def load_paged(config: DriverConfig) -> tuple[Any, Any, Any]:
    """A server without a client, a planner, and an engine that decodes by pages."""
    from pie_driver_sglang.backends.sglang.attention import paged
    from pie_driver_sglang.backends.sglang.load import load_engine

    name = f"/pie_shmem_g{config.driver.group_id}"
    server = _core.Server(name, _core.ExitGuard.inert(), spin_budget_us=0)
    # The region has no client: only its planner is used.
    server.unlink()
    planner, engine = load_engine(config)
    paged.install(engine.backend.runner, engine.block_table)
    # There is no device to ask on the CPU.
    device = SimpleNamespace(multi_processor_count=4)
    with mock.patch("torch.cuda.get_device_properties", return_value=device):
        engine.backend.runner.init_attention_backends()
    return server, planner, engine


def difference(config: DriverConfig) -> float:
    """The largest of a logit."""
    import torch

    server, planner, engine = load_paged(config)
    assert engine.backend.decode_attention.shares_prefixes
    recorder = Recorder(engine, [4, 8], [8])
    server.serve(planner, engine.block.data, print, graph_path=recorder.graph_path)
    found = []
    pages = (COUNT + 1) * (COMMON // PAGE + 1)
    for number, shared in enumerate((False, True)):
        contexts = Contexts(number * pages, shared=shared)
        for frame in contexts.prompts():
            store(server, engine, frame)
        recorder.logits.clear()
        for step in range(STEPS):
            assert server.warm_up_graph_path(contexts.decode(step))
        found.append(torch.stack(recorder.logits)[:, :COUNT])
    # The second graph knows no groups, the third one does.
    assert recorder.graphs == [1] * STEPS + [2] * STEPS, recorder.graphs
    return float((found[0] - found[1]).abs().max())


def main(difference: Callable[[DriverConfig], float]) -> None:
    """Runs a script that prints the largest difference, which must be small."""
    loaded = load_config(Path(sys.argv[1]))
    environment.prepare("cpu", loaded.model.hf_config["architectures"], spins=False)
    largest = difference(loaded)
    print(f"largest difference {largest:.1e}")
    sys.exit(largest > TOLERANCE)


if __name__ == "__main__":
    main(difference)
