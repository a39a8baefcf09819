"""Prefills on a GPU: milliseconds of a pass by the driver's layers and by SGLang's.

    python benches/gpu/prefill_check.py --shapes CONFIG_DIR [--tokens 256,1024,2048,4096,8192,16384]
        [--prompt 562] [--graphs breakable,tc_piecewise] [--graph-tokens 8192]
        [--option KEY=VALUE] [--json FILE]

Random weights in the shape of CONFIG_DIR and random tokens. A pass has so many tokens, as one
prompt and as prompts of `--prompt` tokens. The driver's and SGLang's layers (`driver`, `sglang`)
attend by the same backend, whose kernels are those of SGLang's engine without its prefill graphs.
Short passes run as the driver's graph, too (`graph`): its step with attention, LM head and samplers
of as many requests as it takes, from staged inputs. Passes that a graph can run go that way in a
server. All ways take turns. Before they are timed their hidden states are compared. `--profile`
prints where the time of the longest pass goes.

Before that, SGLang's own runner runs the same passes with its prefill graphs, in a process for each
kind of `--graphs` (`peers/sglang_prefill.py`):

- `breakable`, its default: attention runs between graphs;
- `full`: attention is in the graph;
- `tc_piecewise`: torch.compile cuts the model, and `tc_piecewise:inductor` compiles the parts.

Graphs end at `--graph-tokens`, where SGLang cuts prompts: a longer pass has none. A kind that fails
is left out. What the passes take without graphs in that process says how much two processes differ.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import frame
import torch
from frame import Report
from graph_times import print_kernels
from processes import Runner
from serving import PAGE
from step_check import Steps

from pie_driver_sglang.config.options import DEFAULT_MAX_FORWARD_REQUESTS
from pie_driver_sglang.memory.batch_sizes import (
    LONGEST_SPARSE_GRAPH,
    decode_batch_sizes,
    prefill_batch_sizes,
)
from pie_driver_sglang.memory.graphs import GraphKind, plain_specs

ROUNDS, WARMUP = 5, 2
TOLERANCE: Final = 0.03
"""Of the hidden states' norm, by which bfloat16 may have the ways differ."""
PEER: Final = frame.REPOSITORY / "benches" / "peers" / "sglang_prefill.py"
OWN: Final = ("driver", "graph")
"""Ways of the driver."""
LINE: Final = "prefill {"
"""How a line of the peer's figures begins."""

Peers = Mapping[tuple[int, int], Mapping[str, Mapping[str, Any]]]
"""What the peer found, by tokens and prompts of a pass, then by kind of graphs."""


class Prefill:
    """Prompts in scattered pages, as one pass."""

    def __init__(self, engine: Any, lengths: list[int]) -> None:
        from pie_driver_sglang.engine.backend import Extends, PassInputs

        runner, device = engine.backend.runner, "cuda"
        table = runner.req_to_token_pool.req_to_token
        if len(lengths) >= len(table):
            raise ValueError(f"{len(lengths)} prompts, and the table has {len(table)} rows")
        pages = [-(-length // PAGE) for length in lengths]
        free = torch.randperm(runner.max_total_num_tokens // PAGE - 1)[: sum(pages)] + 1
        slots_by_request = []
        for row, (length, own) in enumerate(zip(lengths, free.split(pages), strict=True), 1):
            slots = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()
            table[row, : len(slots)] = slots.to(table)
            slots_by_request.append(slots[:length])
        total, sizes = sum(lengths), torch.tensor(lengths)
        on_device = sizes.to(device)
        vocabulary = engine.model_info.vocab_size
        self._engine = engine
        self._inputs = PassInputs(
            input_ids=torch.randint(vocabulary, (total,), device=device),
            positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
            mrope_positions=None,
            out_cache_loc=torch.cat(slots_by_request).to(device),
            req_pool_indices=torch.arange(1, len(lengths) + 1, device=device),
            seq_lens=on_device,
            seq_lens_cpu=sizes,
            seq_lens_sum=total,
        )
        starts = on_device.cumsum(0) - on_device
        none = [0] * len(lengths)
        self._extends = Extends(
            on_device.int(), torch.zeros_like(on_device).int(), starts.int(), lengths, none
        )

    def run(self, layers: Any) -> torch.Tensor:
        """Runs it by the driver's layers, or by SGLang's (None); ``[tokens, width]`` states."""
        context = self._engine.backend.make_context(self._inputs, self._extends)
        with contextlib.nullcontext() if layers is None else layers.patched_prefill():
            states: torch.Tensor = self._engine.backend.forward(context).states
        return states

    def stage(self, fields: Mapping[str, torch.Tensor]) -> None:
        """Writes it as rows of a graph, after which those of the padding page may follow."""
        inputs, lengths = self._inputs, self._inputs.seq_lens_cpu
        rows = {
            "input_ids": inputs.input_ids,
            "positions": inputs.positions,
            # A row sees what comes before it.
            "seq_lens": inputs.positions + 1,
            "out_cache_loc": inputs.out_cache_loc,
            "req_pool_indices": torch.arange(1, len(lengths) + 1).repeat_interleave(lengths),
        }
        for name, values in rows.items():
            fields[name][: len(values)] = values.cpu()


class Graph:
    """A pass as the driver's graph of at least so many rows."""

    def __init__(self, engine: Any, rows: int, one: Prefill) -> None:
        from pie_driver_sglang.engine.cuda_graphs import CudaGraphRunner
        from pie_driver_sglang.engine.graph_runner import stage_blank

        steps = CudaGraphRunner(engine, plain_specs([rows]), DEFAULT_MAX_FORWARD_REQUESTS)
        self._states: torch.Tensor = engine.hidden.states
        self._graph = steps._captured[rows, GraphKind.PLAIN]
        # It owns the memory that the graph reads.
        self._steps = steps
        staged = steps._plain(rows)
        stage_blank(staged)
        one.stage(staged.host)

    def run(self) -> torch.Tensor:
        """Runs it; ``[rows, width]`` states, the pass's first, valid until the next run."""
        self._graph.replay()
        return self._states


def milliseconds(run: Callable[[], object]) -> float:
    """Of a run, launches included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def graph_rows(tokens: int, *, sparse: bool) -> int | None:
    """Rows of the graph of the driver that runs a pass of so many tokens."""
    most = DEFAULT_MAX_FORWARD_REQUESTS
    longer = prefill_batch_sizes(most, LONGEST_SPARSE_GRAPH, sparse=sparse)
    sizes = [*decode_batch_sizes(most), *longer]
    return next((rows for rows in sizes if rows >= tokens), None)


def prompts(tokens: int, each: int) -> list[int]:
    """Lengths of prompts that make a pass of so many tokens."""
    whole, rest = divmod(tokens, each)
    return [each] * whole + [rest] * (rest > 0)


def passes(arguments: argparse.Namespace) -> list[tuple[int, int]]:
    """Tokens of each pass, and of its prompts."""
    return [
        (tokens, each)
        for tokens in map(int, arguments.tokens.split(","))
        for each in sorted({tokens, min(tokens, arguments.prompt)})
    ]


def figures(output: str) -> list[dict[str, Any]]:
    """What the peer has printed, a pass each."""
    start = len(LINE) - 1
    return [json.loads(line[start:]) for line in output.splitlines() if line.startswith(LINE)]


def with_graphs(arguments: argparse.Namespace, folder: Path) -> Peers:
    """Has SGLang's runner run the passes with each kind of its graphs; what fails is missing."""
    kinds = [kind for kind in arguments.graphs.split(",") if kind]
    runner = Runner(folder / "peers.log", arguments.peer_limit * len(kinds))
    lengths = json.dumps([prompts(*one) for one in passes(arguments)])
    found: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for kind in kinds:
        command: list[object] = [sys.executable, PEER, folder, arguments.peer_backend, lengths]
        command += ["--graphs", kind, "--most", arguments.graph_tokens, "--page-size", PAGE]
        for row in figures(runner.run(f"SGLang, {kind}", command, arguments.peer_limit)):
            found.setdefault((row["tokens"], row["prompts"]), {})[kind] = row
    runner.close()
    for what in runner.failed:
        print(f"without {what}", flush=True)
    return found


def show(tokens: int, each: int, found: Mapping[str, float], theirs: Mapping[str, Any]) -> None:
    """Prints a pass, and why a peer has no graph for it."""
    shown = ", ".join(f"{way} {took:.1f} ms" for way, took in found.items())
    own = min(found[way] for way in OWN if way in found)
    ratios = ", ".join(f"{took / own:.3f}" for way, took in found.items() if way not in OWN)
    print(f"{tokens} tokens in prompts of {each}: {shown}; over ours: {ratios}", flush=True)
    for kind, row in theirs.items():
        if row["why"] is not None:
            print(f"    SGLang, {kind}: {row['why']}; {row['eager_ms']:.1f} ms", flush=True)
        else:
            eager, off = row["eager_ms"], row["off"]
            print(
                f"    SGLang, {kind}: {eager:.1f} ms without, states off by {off:.4f}", flush=True
            )


def check(engine: Any, arguments: argparse.Namespace, report: Report, peers: Peers) -> None:
    """Every pass in both ways, next to what SGLang took with its graphs."""
    print(f"layers: {type(engine.fused).__name__}", flush=True)
    sparse = engine.backend.info.is_sparse
    for tokens, each in passes(arguments):
        lengths = prompts(tokens, each)
        one = Prefill(engine, lengths)
        ways = {
            "driver": functools.partial(one.run, engine.fused),
            "sglang": functools.partial(one.run, None),
        }
        rows = graph_rows(tokens, sparse=sparse)
        if rows is not None:
            ways["graph"] = Graph(engine, rows, one).run
        states = {way: run()[:tokens].clone().double() for way, run in ways.items()}
        theirs = states.pop("sglang")
        offs = {way: float((own - theirs).norm() / theirs.norm()) for way, own in states.items()}
        report.hold(f"{tokens} tokens in prompts of {each}", max(offs.values()), at_most=TOLERANCE)
        calls = {way: functools.partial(milliseconds, run) for way, run in ways.items()}
        times = frame.in_turns(calls, ROUNDS, warmup=WARMUP)
        found = {way: statistics.median(took) for way, took in times.items()}
        others = peers.get((tokens, len(lengths)), {})
        found |= {kind: row["graph_ms"] for kind, row in others.items() if "graph_ms" in row}
        report.add(tokens=tokens, prompt=each, ms=found, off=offs, graphs=others)
        show(tokens, each, found, others)
    if arguments.profile:
        for way, run in ways.items():
            print(way)
            print_kernels(run)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "option")
    made.add_argument("--shapes", required=True, **frame.SHAPES)
    made.add_argument(
        "--tokens", default="256,1024,2048,4096,8192,16384", help="of a pass, with comma"
    )
    made.add_argument("--prompt", type=int, default=562, help="tokens of a prompt")
    made.add_argument("--graphs", default="breakable", help="SGLang's kinds, with comma; or none")
    made.add_argument("--graph-tokens", type=int, default=8192, help="of SGLang's longest graph")
    made.add_argument("--peer-backend", default="fa3", help="SGLang's attention with its graphs")
    made.add_argument(
        "--peer-limit", type=float, default=150.0, help="seconds for a kind of graphs"
    )
    made.add_argument("--profile", action="store_true", help="print kernels of the last pass")
    return made


def main() -> None:
    """Every pass of one shape."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        # The engine takes the memory that they need.
        peers = with_graphs(arguments, frame.model_folder(arguments.shapes, Path(folder)))
        steps = Steps(Path(folder), arguments.shapes, arguments.option)
        with torch.inference_mode():
            check(steps.engine, arguments, report, peers)
    # The interpreter's end would wait for SGLang's threads.
    os._exit(0)


if __name__ == "__main__":
    main()
