"""The graph path on a GPU: its tokens against the Python path's, and what a step costs the host.

    python benches/gpu/graph_path_check.py [--pocket DIR] [--shapes CONFIG_DIR] [--steps N]
        [--json FILE] [--attention BACKEND] [--option KEY=VALUE ...] [--profile]

1. `pocket` in bfloat16, N random steps of joins, leaves, forks, moved pages and drafts, each sent
   over both paths: tokens are equal, or their logits at most two bfloat16 ulps apart.
2. Random weights in the shape of CONFIG_DIR, in one process with the driver's loop and a client
   process. Timed are the round trip of a greedy decode step by batch and context, and the very
   same graph launched back to back. They take turns, since a GPU at its power limit changes its
   clock. Their difference, in the median turn, is the host's overhead.
   `--profile` lists what kernels of each graph take, by name, which slows them a little.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import frame
from frame import Report
from serving import NEVER_PARK, PAGE, driver, driver_here, round_trip_us, step

from pie_driver_sglang import _core
from pie_driver_sglang._core import Client

sys.path.insert(0, str(frame.REPOSITORY / "tests"))

from path_walk import Walk

BATCHES = (1, 8, 64, 256)
CONTEXTS = (512, 2048)
TURNS = 20
STEPS = 12
"""Steps of a turn, and launches of one; the first is not counted."""
PROFILED = 5
MOST_ULPS = 2


def check_walk(
    model: Path, steps: int, options: list[str], device: str = "cuda:0"
) -> dict[str, float]:
    """Both paths over a random walk; options are lines of `[driver.options]`."""
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    options = [f"page_size = {PAGE}", "mem_fraction_static = 0.1", *options]
    with driver(model, tomllib.loads("\n".join(options)), device) as (client, caps):
        walk = Walk(client, min(caps["total_pages"], 4000), PAGE, vocab, seed=1)
        walk.run(steps)
    ulps = [d.gap / 2.0 ** (math.floor(math.log2(abs(d.best))) - 7) for d in walk.differences]
    worst = max(ulps, default=0.0)
    print(f"    {steps} steps, {walk.compared} tokens, {len(ulps)} differ, at most "
          f"{worst:.2f} bf16 ulps apart")  # fmt: skip
    return {"steps": steps, "tokens": walk.compared, "differ": len(ulps), "worst_ulps": worst}


def time_steps(model: Path, options: list[str], profiled: bool, report: Report) -> None:
    """Decode steps through the ring, and the same graphs back to back."""
    lines = ['load_format = "dummy"', f"page_size = {PAGE}", *options]
    with driver_here(model, lines) as (name, engine, _):
        for context, batch in itertools.product(CONTEXTS, BATCHES):
            repeat = functools.partial(engine.steps.time, batch, repeats=STEPS)
            row = take_turns(name, batch, context, repeat)
            report.add(**row)
            line = (f"{key} {value:.0f}" for key, value in row.items())
            print("    " + "  ".join(line), flush=True)
            if profiled:
                from graph_times import print_kernels

                print_kernels(functools.partial(engine.steps.time, batch, repeats=PROFILED))


def take_turns(
    name: str, batch: int, context: int, repeat: Callable[[], float]
) -> dict[str, float]:
    """Times steps of a client process, and the same graph as `repeat` does, in microseconds."""
    command = [sys.executable, __file__, "--client", name, str(batch), str(context)]
    samples, graph, overhead = [], [], []
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(TURNS):
            print(file=process.stdin, flush=True)
            line = process.stdout.readline()
            if not line:
                raise SystemExit("the client has failed")
            took = json.loads(line)[1:]
            samples += took
            graph.append(repeat())
            overhead.append(statistics.median(took) - graph[-1])
        process.stdin.close()
        if process.wait():
            raise SystemExit("the client has failed")
    return {
        "batch": batch,
        "context": context,
        "p50_us": statistics.median(samples),
        "p90_us": statistics.quantiles(samples, n=10)[-1],
        "gpu_us": statistics.median(graph),
        "overhead_us": statistics.median(overhead),
    }


def client(name: str, batch: int, context: int) -> None:
    """Prefills contexts; for each line of input times decode steps of all, request to reply."""
    link = Client(name, spin_budget_us=NEVER_PARK)
    stride = context // PAGE + 2
    prompt = [3 + i % 1000 for i in range(context)]
    for c in range(batch):
        link.forward([step(prompt, 0, c * stride, c + 1)])
    frame = _core.encode_forward([step([5], context, c * stride, c + 1) for c in range(batch)])
    for _ in sys.stdin:
        print(json.dumps([round_trip_us(link, frame) for _ in range(STEPS)]), flush=True)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "pocket", "shapes", "option")
    made.add_argument("--steps", type=int, default=2000, help="of the random walk; 0 for none")
    made.add_argument("--attention", help="named to the driver, which chooses by default")
    made.add_argument("--profile", action="store_true", help="list the kernels of each graph")
    return made


def main() -> None:
    """Runs the parts."""
    if sys.argv[1:2] == ["--client"]:
        client(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    arguments = parser().parse_args()
    options = arguments.option
    if arguments.attention:
        options = [f'attention_backend = "{arguments.attention}"', *options]
    print(f"python {sys.version.split()[0]}, {_core.build_info()}")
    with Report(__file__, arguments) as report:
        if arguments.steps:
            print("both paths, pocket, bfloat16")
            walk = check_walk(arguments.pocket, arguments.steps, options)
            report.add(**walk)
            if not report.hold("bfloat16 ulps apart", walk["worst_ulps"], at_most=MOST_ULPS):
                raise SystemExit("more than rounding explains")
        if arguments.shapes:
            print(f"{arguments.shapes.name} shape, random weights, decode steps")
            time_steps(arguments.shapes, options, arguments.profile, report)


if __name__ == "__main__":
    main()
