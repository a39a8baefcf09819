"""Steps with prefill and decode tokens: by one attention kernel, and by a prefill kernel.

    PYTHONPATH=tests TRITON_INTERPRET=1 python tests/support/kernels/mixed_steps.py CONFIG

CONFIG is a `driver.toml` of a model in float32 on the CPU, with eight requests at once. In the
place of FlashAttention-3, which needs a GPU, is dense attention. Prints the largest difference of
logits.
"""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.config.driver_config import DriverConfig
from support.kernels.shared_prefix_steps import Recorder, load_paged, main, store

PAGE = 16
STORED = (30, 1, 47, 0, 0, 16)
"""Tokens of each context before the step."""
ADDED = (1, 3, 1, 8, 2, 7)
"""Tokens of the step: decodes, drafts, new prompts, and one that continues from what is stored."""


class Contexts:
    """Contexts with pages of their own."""

    def __init__(self, first_page: int) -> None:
        draw = random.Random(7)
        self._tokens = [
            [draw.randrange(200) for _ in range(before + now)]
            for before, now in zip(STORED, ADDED, strict=True)
        ]
        self._first_page = first_page

    def before(self) -> list[bytes]:
        """Frames that store what the step continues from."""
        return [
            _core.encode_forward([self._request(context, 0, end)])
            for context, end in enumerate(STORED)
            if end
        ]

    def step(self) -> bytes:
        """All contexts, one token of each sampled."""
        ends = [before + now for before, now in zip(STORED, ADDED, strict=True)]
        return _core.encode_forward(
            [self._request(context, STORED[context], end) for context, end in enumerate(ends)]
        )

    def _request(self, context: int, start: int, end: int) -> Request:
        pages = list(range(self._first_page + 4 * context, self._first_page + 4 * context + 4))
        slots = [(end - start - 1, Sampler.greedy())]
        return Request(
            self._tokens[context][start:end], list(range(start, end)), pages[: -(-end // PAGE)],
            (end - 1) % PAGE + 1, slots,
        )  # fmt: skip


def attend_dense(
    queries: Any, keys: Any, values: Any, out: Any, prompts: Any, rule: Any, page_size: int
) -> None:
    """What `attend_prompts` computes: prompts as they see their pages, and zeros."""
    import torch

    group = queries.shape[1] // keys.shape[1]
    bounds = prompts.starts.tolist()
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        kv_len = int(prompts.kv_lens[number])
        slots = (prompts.pages[number][:, None] * page_size + torch.arange(page_size)).flatten()
        own_keys, own_values = (
            part[slots[:kv_len].long()].repeat_interleave(group, 1) for part in (keys, values)
        )
        for row in range(start, end):
            seen = kv_len - (end - 1 - row)
            if kv_len == 0:
                out[row] = 0
                continue
            scores = torch.einsum("hd,thd->ht", queries[row], own_keys[:seen]) * rule.scale
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), own_values[:seen])


def difference(config: DriverConfig) -> float:
    """The largest of a logit."""
    from pie_driver_sglang.engine.attention import paged

    server, planner, engine = load_paged(config)
    recorder = Recorder(engine, [4, 8, 64], [])
    server.serve(planner, engine.block.data, print, graph_path=recorder.graph_path)
    attention = engine.backend.decode_attention
    other = mock.Mock(wraps=attend_dense)
    with mock.patch.object(paged, "_LEAST_HEADS", 1):
        found = []
        for number, by_other in enumerate((False, True)):
            attention._attend_prompts = other if by_other else None
            contexts = Contexts(4 * len(STORED) * number)
            for frame in contexts.before():
                store(server, engine, frame)
            recorder.logits.clear()
            assert server.warm_up_graph_path(contexts.step())
            found.append(recorder.logits[-1][: len(STORED)])
            assert bool(other.call_count) == by_other
    assert recorder.graphs == [2, 2], recorder.graphs
    assert other.call_count == len(attention._layers)
    return float((found[0] - found[1]).abs().max())


if __name__ == "__main__":
    main(difference)
