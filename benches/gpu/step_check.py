"""Graphs of decode steps on a GPU, by how their kernels are cut: microseconds of a step.

    python benches/gpu/step_check.py --shapes CONFIG_DIR [--rows 64,128,256] [--lengths 512,1024]
        [--way "stages=4" --way "few_rows=16" ...] [--peers sglang,compiled]
        [--option KEY=VALUE] [--json FILE]

Random weights, tokens and KV in the shape of CONFIG_DIR, greedy samplers, scattered pages; each
graph is launched back to back. A way changes fields of the attention's `SplitTuning`, or the rows
from which on products are a library's (`few_rows`). `clusters=0` and `row_products=0` leave out the
kernels of one row in CUDA C++, `batch_products=0` those of more, `tuned=0` measured configs.
`mixture_rows=64` leaves steps of more rows of a mixture of experts to SGLang's layers. The driver's
own choice is always the first and the last one, which shows how much the machine drifts.

`--peers` has SGLang's runner run the same steps first (`peers/sglang_runner.py`): `sglang` with its
own graphs, `compiled` with torch.compile in them, which takes minutes. Their graphs are launched
back to back, too. They have logits in float32, but no samplers, and no copies from the host.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import frame
import torch
from frame import Report
from processes import Runner
from serving import PAGE, write_config

from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.memory.graphs import plain_specs

REPEATS = 20
ROUNDS = 3
PEER = frame.REPOSITORY / "benches" / "peers" / "sglang_runner.py"
PEERS = {"sglang": [], "compiled": ["--compile"]}
"""Arguments of the peer's script, by name."""
OPTIONS = ('load_format = "dummy"', f"page_size = {PAGE}", "mem_fraction_static = 0.8")
_PEER_LINE = re.compile(r"runner \S+ (\d+)x(\d+): (\d+) us(?:, (\d+) us of its graph)?")


class Steps:
    """An engine whose graphs are captured anew for every way."""

    def __init__(self, folder: Path, shapes: Path, options: Sequence[str] = ()) -> None:
        model = frame.model_folder(shapes, folder)
        config = load_config(write_config(folder, model, (*OPTIONS, *options), spin_budget_us=None))
        environment.prepare("cuda:0", config.model.hf_config["architectures"], spins=False)
        # The graph path's own graphs would only take time.
        from pie_driver_sglang.backends.sglang.compat.pools import kv_pages
        from pie_driver_sglang.backends.sglang.load import load_engine
        from pie_driver_sglang.engine import build

        with mock.patch.object(build, "_steps", lambda *_: None):
            _, self.engine = load_engine(config)
        for stored in kv_pages(self.engine.backend.runner.token_to_kv_pool):
            # There are no random numbers in FP8.
            if stored.dtype.itemsize > 1:
                stored.normal_(std=0.05)

    def time(
        self, rows: list[int], lengths: list[int], way: dict[str, Any], report: Report
    ) -> None:
        """Prints a line for each length."""
        from pie_driver_sglang.engine.attention.paged import PagedDecode
        from pie_driver_sglang.engine.cuda_graphs import CudaGraphRunner
        from pie_driver_sglang.engine.layers import dense
        from pie_driver_sglang.engine.layers.small_batch import SmallBatchLayers
        from pie_driver_sglang.kernels.attention import split_plan

        usual, changed = split_plan.split_tuning, dict(way)
        few_rows = changed.pop("few_rows", dense._MAX_ROWS)
        left_out = []
        if changed.pop("clusters", 1) == 0:
            left_out.append(mock.patch.object(PagedDecode, "_clustered", lambda *_: None))
        if changed.pop("row_products", 1) == 0:
            left_out.append(mock.patch.object(self.engine.fused, "_gemv", None))
        if changed.pop("tuned", 1) == 0:
            default = SmallBatchLayers.default_configs
            left_out.append(mock.patch.object(SmallBatchLayers, "find_configs", default))
        max_rows = changed.pop("mixture_rows", None)
        if max_rows is not None:
            left_out.append(mock.patch.object(self.engine.fused._layers, "max_rows", max_rows))

        def tuning(*args: Any, **named: Any) -> Any:
            return replace(usual(*args, **named), **changed)

        with contextlib.ExitStack() as patches:
            if changed.pop("batch_products", 1) == 0:
                patches.enter_context(self._without_batches())
            patches.enter_context(mock.patch.object(dense, "_MAX_ROWS", few_rows))
            patches.enter_context(mock.patch.object(split_plan, "split_tuning", tuning))
            for patch in left_out:
                patches.enter_context(patch)
            steps = CudaGraphRunner(self.engine, plain_specs(rows), max(rows))
        for length in lengths:
            slots = self._place(max(rows), length)
            found = {count: self._step(steps, count, length, slots) for count in rows}
            figures = "  ".join(f"{count}: {us:.0f}" for count, us in found.items())
            print(f"{way or 'as it is'} at {length}: {figures}", flush=True)
            report.add(way=way, length=length, us_by_rows=found)

    @contextlib.contextmanager
    def _without_batches(self) -> Iterator[None]:
        """Within, layers have no kernels of batches."""
        from pie_driver_sglang.engine.layers.selection import fuse_layers
        from pie_driver_sglang.kernels.gemm import wgmma

        with mock.patch.object(wgmma, "supports_wgmma", lambda _: False):
            # Graphs use its memory after this has ended.
            self._layers = fuse_layers(self.engine.backend)
        with mock.patch.object(self.engine, "fused", self._layers):
            yield

    def _place(self, rows: int, length: int) -> torch.Tensor:
        """Scattered pages for every row of the block table: ``[rows, tokens]`` slots."""
        runner = self.engine.backend.runner
        pages = -(-length // PAGE)
        free = runner.max_total_num_tokens // PAGE - 1
        own = torch.randperm(free, device="cuda")[: rows * pages] + 1
        slots = own.view(rows, pages, 1) * PAGE + torch.arange(PAGE, device="cuda")
        table = runner.req_to_token_pool.req_to_token
        table[1 : rows + 1, : pages * PAGE] = slots.flatten(1).int()
        return slots.flatten(1)

    def _step(self, steps: Any, rows: int, length: int, slots: torch.Tensor) -> float:
        fields = next(graph.host for graph in steps._graphs if graph.rows == rows)
        for field in fields.values():
            field.zero_()
        fields["seq_lens"].fill_(length)
        fields["positions"].fill_(length - 1)
        fields["req_pool_indices"][:] = torch.arange(1, rows + 1)
        fields["out_cache_loc"][:] = slots[:rows, length - 1].cpu()
        # Rows of the same text would take the same experts.
        fields["input_ids"][:] = torch.randint(self.engine.model_info.vocab_size, (rows,))
        torch.cuda.synchronize()
        return min(steps.time(rows, REPEATS) for _ in range(ROUNDS))


def peer_figures(output: str) -> dict[int, dict[str, dict[int, float]]]:
    """Microseconds by context, then of steps (`step`) and of their graphs (`graph`), by rows."""
    found: dict[int, dict[str, dict[int, float]]] = {}
    for rows, length, step, graph in _PEER_LINE.findall(output):
        times = found.setdefault(int(length), {"step": {}, "graph": {}})
        times["step"][int(rows)] = float(step)
        if graph:
            times["graph"][int(rows)] = float(graph)
    return found


def run_peers(arguments: argparse.Namespace, folder: Path, report: Report) -> None:
    """Has SGLang's runner run the steps; a peer that fails is left out."""
    names = [name for name in arguments.peers.split(",") if name]
    runner = Runner(folder / "peers.log", arguments.peer_limit * len(names))
    for name in names:
        command: list[object] = [sys.executable, PEER, folder, arguments.peer_backend, *PEERS[name]]
        command += ["--batches", arguments.rows, "--contexts", arguments.lengths]
        command += ["--page-size", PAGE, "--steps", 50]
        output = runner.run(name, command, arguments.peer_limit)
        for length, times in peer_figures(output).items():
            shown = "  ".join(f"{count}: {us:.0f}" for count, us in times["graph"].items())
            print(f"{name} at {length}, graphs alone: {shown}", flush=True)
            # With a way, so that no one takes it for ours.
            way = {"peer": name, "backend": arguments.peer_backend}
            report.add(way=way, length=length, us_by_rows=times["graph"], step_us=times["step"])
    runner.close()
    for what in runner.failed:
        print(f"without {what}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "option")
    made.add_argument("--shapes", required=True, **frame.SHAPES)
    made.add_argument("--rows", default="1,16,64,128,256")
    made.add_argument("--lengths", default="512,1024")
    made.add_argument("--way", action="append", default=[], help="KEY=VALUE, with comma")
    made.add_argument("--peers", default="", help="of sglang and compiled, with comma")
    made.add_argument("--peer-backend", default="fa3", help="the peers' attention")
    made.add_argument("--peer-limit", type=float, default=420.0, help="seconds for a peer")
    return made


def main() -> None:
    """Every way, between two runs of the usual one."""
    arguments = parser().parse_args()
    rows, lengths = (
        [int(part) for part in text.split(",")] for text in (arguments.rows, arguments.lengths)
    )
    ways = [
        {key: int(value) for key, _, value in (part.partition("=") for part in way.split(","))}
        for way in arguments.way
    ]
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        if arguments.peers:
            # The engine takes the memory that they need.
            run_peers(arguments, frame.model_folder(arguments.shapes, Path(folder)), report)
        steps = Steps(Path(folder), arguments.shapes, arguments.option)
        for way in ({}, *ways, {}):
            steps.time(rows, lengths, way, report)
    # The interpreter's end would wait for SGLang's threads.
    os._exit(0)


if __name__ == "__main__":
    main()
