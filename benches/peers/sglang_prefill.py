"""SGLang's `ModelRunner` on prefills, without graphs and with its prefill graphs: milliseconds.

    sglang_prefill.py MODEL BACKEND PASSES [--graphs breakable] [--most 8192] [--page-size 16]
        [--device cuda]

PASSES is JSON: for each pass the lengths of its prompts. `--graphs` names SGLang's kind of prefill
graphs: `breakable` (its default), `full`, `tc_piecewise` with its compiler (`eager` or `inductor`)
after a colon, or `disabled`. They are captured for the sizes of the passes, up to `--most` tokens:
SGLang captures up to its `chunked_prefill_size`. A pass runs as SGLang's scheduler has it run, up
to the final norm, and both ways take turns. Prints a line of JSON for each pass; `why` says why
there was no graph. A MODEL without weights gets random ones. SGLang has no graphs on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from sglang_runner import boot

ROUNDS, WARMUP = 5, 2


def prefill_settings(arguments: argparse.Namespace, sizes: list[int]) -> dict[str, Any]:
    """Of a runner that captures prefills of these numbers of tokens."""
    backend, _, compiler = arguments.graphs.partition(":")
    requests = max(map(len, arguments.passes))
    prefill: dict[str, Any] = {"backend": backend, "bs": sizes}
    if backend == "full":
        prefill["full_prefill_max_req"] = requests
    if compiler:
        prefill["tc_compiler"] = compiler
    longest = max(map(sum, arguments.passes))
    return {
        "device": arguments.device, "attention_backend": arguments.backend,
        "page_size": arguments.page_size, "mem_fraction_static": arguments.mem_fraction,
        # Each prompt may leave a part of a page empty, and one page is padding.
        "max_total_tokens": longest + (requests + 2) * arguments.page_size,
        "max_running_requests": requests, "disable_decode_cuda_graph": True,
        "cuda_graph_config": {"prefill": prefill},
    }  # fmt: skip


def end_before_logits(runner: Any) -> None:
    """Has passes end with their hidden states."""
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    def forward(_input_ids: Any, states: Any, *_: Any, **__: Any) -> LogitsProcessorOutput:
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=states)

    runner.model.logits_processor.forward = forward


class Prefill:
    """Prompts in scattered pages, as one pass."""

    def __init__(self, runner: Any, lengths: list[int], page_size: int) -> None:
        self.tokens, self._lengths, self._runner = sum(lengths), lengths, runner
        device, table = runner.device, runner.req_to_token_pool.req_to_token
        pages = [-(-length // page_size) for length in lengths]
        # Page 0 is SGLang's padding.
        order = (1 + torch.randperm(sum(pages))).split(pages)
        slots_by_request = []
        for row, (length, own) in enumerate(zip(lengths, order, strict=True)):
            slots = (own[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
            table[row, :length] = slots.to(table)
            slots_by_request.append(slots)
        self._slots = torch.cat(slots_by_request).to(device)
        self._positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        vocabulary = runner.model_config.vocab_size
        self._ids = torch.randint(vocabulary, (self.tokens,), device=device)
        self._rows = torch.arange(len(lengths), device=device)
        self._sizes = torch.tensor(lengths)
        self._lens = self._sizes.to(device)

    def run(self, graphs: Any) -> Any:
        """Runs it by a runner of graphs, or without graphs (None)."""
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        lens, lengths = self._lens, self._lengths
        none = [0] * len(lengths)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND, batch_size=len(lengths), input_ids=self._ids,
            req_pool_indices=self._rows, seq_lens=lens, out_cache_loc=self._slots,
            seq_lens_sum=self.tokens, seq_lens_cpu=self._sizes, orig_seq_lens=lens,
            positions=self._positions, capture_hidden_mode=CaptureHiddenMode.NULL,
            extend_num_tokens=self.tokens, extend_seq_lens=lens.int(),
            extend_prefix_lens=torch.zeros_like(lens).int(),
            extend_start_loc=(lens.cumsum(0) - lens).int(), extend_seq_lens_cpu=lengths,
            extend_prefix_lens_cpu=none, extend_logprob_start_lens_cpu=none,
        )  # fmt: skip
        self._runner.prefill_cuda_graph_runner = graphs
        return self._runner.forward(batch)

    def milliseconds(self, graphs: Any) -> float:
        """Of a run, launches included."""
        synchronize = torch.cuda.synchronize if self._lens.is_cuda else lambda: None
        synchronize()
        started = time.perf_counter()
        self.run(graphs)
        synchronize()
        return (time.perf_counter() - started) * 1e3


def medians(ways: dict[str, Any]) -> dict[str, float]:
    """Of ways that take turns."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARMUP + ROUNDS):
        for name, way in ways.items():
            took = way()
            if turn >= WARMUP:
                times[name].append(took)
    return {name: statistics.median(took) for name, took in times.items()}


def measured(one: Prefill, graphs: Any) -> dict[str, Any]:
    """Milliseconds of a pass, and how far the hidden states of a graph are off."""
    eager = one.run(None).logits_output.hidden_states.clone().double()
    ways = {"eager_ms": functools.partial(one.milliseconds, None)}
    found: dict[str, Any] = {"off": None, "why": None}
    output = one.run(graphs)
    if output.can_run_graph:
        states = output.logits_output.hidden_states[: one.tokens].double()
        found["off"] = float((states - eager).norm() / eager.norm())
        ways["graph_ms"] = functools.partial(one.milliseconds, graphs)
    else:
        longest = max(getattr(graphs, "capture_num_tokens", [0]))
        beyond = f"its graphs end at {longest} tokens"
        found["why"] = beyond if one.tokens > longest > 0 else "it has no graph for this pass"
    return {**found, **medians(ways)}


def main() -> None:
    """Every pass."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("backend")
    parser.add_argument("passes", type=json.loads)
    parser.add_argument("--graphs", default="breakable")
    parser.add_argument("--most", type=int, default=8192)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--mem-fraction", type=float, default=0.85)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    all_sizes = {sum(lengths) for lengths in arguments.passes}
    sizes = sorted(size for size in all_sizes if size <= arguments.most)
    if not sizes:
        # SGLang cannot begin without any.
        sizes, arguments.graphs = [min(all_sizes)], "disabled"
    runner = boot(arguments.model, prefill_settings(arguments, sizes), end_before_logits)
    graphs = runner.prefill_cuda_graph_runner
    with torch.inference_mode():
        for lengths in arguments.passes:
            one = Prefill(runner, lengths, arguments.page_size)
            about = {"tokens": one.tokens, "prompts": len(lengths), "graphs": arguments.graphs}
            print(f"prefill {json.dumps({**about, **measured(one, graphs)})}", flush=True)


if __name__ == "__main__":
    main()
