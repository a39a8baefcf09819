"""Decodes with SGLang's own NGRAM worker and the corpus that the plugin puts into it.

The forward pass is left out: a text that is known beforehand says which drafts come true. Prints a
line for each case. Run it with ``SGLANG_PLUGINS`` as a user would.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

NODES = 8
DEPTH = 6


def stand_in_for_kernels() -> None:
    """`ngram_worker` imports one CUDA kernel, which nothing here calls."""
    if importlib.util.find_spec("sgl_kernel") is not None:
        try:
            import sgl_kernel.speculative  # noqa: F401
        except ImportError:
            for name in [name for name in sys.modules if name.startswith("sgl_kernel")]:
                del sys.modules[name]
        else:
            return
    kernels, speculative = (
        types.ModuleType(name) for name in ("sgl_kernel", "sgl_kernel.speculative")
    )
    kernels.speculative = speculative  # type: ignore[attr-defined]
    speculative.reconstruct_indices_from_tree_mask = None  # type: ignore[attr-defined]
    sys.modules.update({module.__name__: module for module in (kernels, speculative)})


def text(request: int) -> Iterator[int]:
    """What a request says: rounds of its own, and now and then a token that was never there."""
    at = 0
    while True:
        yield 1000 * request + at % 11 if at % 37 else 50_000 + 1000 * request + at
        at += 1


class Request(SimpleNamespace):
    """As much of SGLang's request as the worker looks at."""

    def __init__(self, number: int, prompt: int) -> None:
        text_of = text(number)
        self.truth = [next(text_of) for _ in range(2000)]
        super().__init__(
            rid=f"request-{number}",
            origin_input_ids=self.truth[:prompt],
            output_ids=[],
            said=prompt,
        )


def accepted(tokens: np.ndarray, links: tuple[list[int], list[int]], truth: list[int]) -> list[int]:
    """The tokens that verification gives: drafts that are true, and the one behind them."""
    children, siblings = links
    node, said = 0, []
    while True:
        said.append(truth[len(said)])
        child = children[node]
        while child >= 0 and tokens[child] != said[-1]:
            child = siblings[child]
        if child < 0:
            return said
        node = child


def worker_of(overlap: bool, breadth: int) -> Any:
    from sglang.srt.speculative import ngram_worker

    settings = SimpleNamespace(
        disable_overlap_schedule=not overlap,
        page_size=1,
        device="cpu",
        speculative_num_draft_tokens=NODES,
        speculative_eagle_topk=breadth,
        speculative_num_steps=NODES - 1,
        speculative_ngram_max_trie_depth=DEPTH,
        speculative_ngram_min_bfs_breadth=1,
        speculative_ngram_max_bfs_breadth=breadth,
        speculative_ngram_match_type="BFS",
        speculative_ngram_capacity=10_000,
        speculative_ngram_external_sam_budget=0,
        speculative_ngram_external_corpus_max_tokens=1,
        speculative_ngram_external_corpus_path=None,
    )
    target = SimpleNamespace(model_runner=SimpleNamespace(max_running_requests=3))
    return ngram_worker.NGRAMWorker(settings, 0, SimpleNamespace(tp_rank=0), 0, target)


def check_trees(tokens: np.ndarray, mask: np.ndarray, requests: list[Request]) -> None:
    assert tokens.dtype == np.int64 and mask.dtype == np.bool_
    trees, masks = tokens.reshape(-1, NODES), mask.reshape(-1, NODES, NODES)
    assert len(trees) == len(requests)
    for tree, rows, request in zip(trees, masks, requests, strict=True):
        assert tree[0] == request.truth[request.said - 1]
        assert rows.diagonal().all() and not np.triu(rows, 1).any() and rows[:, 0].all()


def step(worker: Any, requests: list[Request], before: list[list[int]]) -> list[list[int]]:
    """One decode; `before` is what the last one said, which is not noted yet if steps overlap."""
    from sglang.srt.speculative import ngram_worker

    flat = [[*said, *[0] * (NODES - len(said))] for said in before]
    info = SimpleNamespace(
        accept_tokens=torch.tensor(flat, dtype=torch.int32).flatten(),
        accept_lens=torch.tensor([len(said) for said in before], dtype=torch.int32),
    )
    batch = SimpleNamespace(reqs=requests, spec_info=info, grammar_needs_sync=lambda: False)
    tokens, mask = worker._prepare_draft_tokens(batch)
    check_trees(tokens, mask, requests)
    next_token, next_sibling = ngram_worker._derive_tree_links(mask, len(requests), NODES)
    said = []
    for number, request in enumerate(requests):
        links = next_token[number].tolist(), next_sibling[number].tolist()
        tree = tokens.reshape(-1, NODES)[number]
        said.append(accepted(tree, links, request.truth[request.said :]))
    worker._update_ngram_corpus(batch)
    return said


def decode(overlap: bool, breadth: int) -> tuple[float, float]:
    """Tokens a step of requests that come and go, of all steps and of their first ones."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    worker = worker_of(overlap, breadth)
    counts: list[int] = []
    firsts: list[int] = []
    for wave in range(3):
        requests = [Request(3 * wave + number, 30 + 20 * number) for number in range(3)]
        batch = SimpleNamespace(reqs=requests, forward_mode=ForwardMode.EXTEND)
        worker.forward_batch_generation(batch)
        said = [[request.truth[request.said]] for request in requests]
        for number in range(60):
            for request, tokens in zip(requests, said, strict=True):
                request.said += len(tokens)
                if not overlap:
                    request.output_ids += tokens
            before, said = said, step(worker, requests, said)
            for request, tokens in zip(requests, before, strict=True):
                if overlap:
                    request.output_ids += tokens
            counts += map(len, said)
            firsts += map(len, said if number == 0 else [])
        worker.ngram_corpus.erase_match_state([request.rid for request in requests])
    return sum(counts) / len(counts), sum(firsts) / len(firsts)


def main() -> None:
    stand_in_for_kernels()
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative import ngram_worker

    # The plugin's hook goes around it.
    ngram_worker.NGRAMWorker.forward_batch_generation = lambda _worker, _batch: None
    load_plugins()
    print("corpus", ngram_worker.NgramCorpus.__module__)
    if ngram_worker.NgramCorpus.__module__.startswith("pie_driver_sglang"):
        for overlap in (False, True):
            for breadth in (1, 8):
                speed, first = decode(overlap, breadth)
                print(f"overlap {overlap}, breadth {breadth}: {speed:.2f}, {first:.2f} at first")


if __name__ == "__main__":
    main()
