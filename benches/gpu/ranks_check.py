"""A model on several GPUs: its tokens, its decode steps, and what a step costs the host.

    python benches/gpu/ranks_check.py --out DIR [--pocket DIR] [--shapes CONFIG_DIR] \
        [--ranks 1,2,4] [--parts tokens,steps] \
        [--attention triton,pie] [--option KEY=VALUE ...] \
        [--batches 1,8,64,256] [--contexts 512,2048] [--profile]

1. `tokens`: `pocket` in bfloat16 on every number of GPUs: greedy tokens against transformers in
   float32, both paths over random steps, and steps of many slots against those of one GPU.
2. `steps`: random weights in the shape of CONFIG_DIR. Decode steps through the ring, as the client
   sees them, and the very same graphs launched back to back on all ranks at once are timed in
   turns. Their difference is the host's overhead, as far as the GPUs keep their pace;
   next to it is what the driver reports of its own work, which is everything but waiting for
   tokens. `--profile` lists what kernels of each graph take on the first GPU, by name, which slows
   them a little.

The record is DIR/ranks_check.json, everything that was printed goes to DIR/ranks_check.log. The
status is 1 when a part failed.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import frame
import torch
from frame import Report
from graph_path_check import MOST_ULPS, PROFILED, STEPS, check_walk, take_turns
from graph_times import print_kernels
from processes import Runner
from repeat_step import Repeat
from sampler_check import Filter, weights_of
from serving import MIN_GAP, PAGE, compare_greedy, decode_greedily, driver, driver_here, step

from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.ranks.commands import pack

SAID = 48
"""Greedy tokens of each context."""
PART_S = {"tokens": 200.0, "steps": 240.0}
SLOTS, PROMPT = 192, 20
"""Contexts of a step whose slots are divided, and tokens of each before it."""
SAMPLERS = (
    (Sampler.greedy(), Filter(top_k=1)),
    (Sampler.multinomial(0.9, 1234), Filter(0.9)),
    (Sampler.top_k_top_p(1.0, 40, 0.9), Filter(1.0, top_k=40, top_p=0.9)),
    (Sampler.min_p(1.0, 0.05), Filter(1.0, min_p=0.05)),
)
"""What the slots of such a step want, and what that keeps of a distribution."""
MOST = 0.25
"""Of tokens, which rounding may change. Ranks that have each other's rows change nearly all."""
FOLDER = Path(__file__).resolve().parent


def devices(ranks: int) -> str:
    """The first GPUs."""
    return ",".join(f"cuda:{index}" for index in range(ranks))


def slot_answers(
    model: Path, options: dict[str, object], device: str, dtype: str
) -> tuple[list[int], list[torch.Tensor]]:
    """The tokens of a step of many slots, of all kinds, some with masks, and their logits."""
    context_pages = -(-(PROMPT + 1) // PAGE)
    prompts = [[(7 * i + 11 * c) % 2000 + 300 for i in range(PROMPT)] for c in range(SLOTS)]
    with driver(model, options, device, dtype=dtype) as (client, caps):
        client.forward(
            [step(prompt, 0, context_pages * c, c + 1) for c, prompt in enumerate(prompts)]
        )
        # Of the last ones the first half is forbidden.
        half = caps["vocab_size"] // 2
        masks = (None, [0, caps["vocab_size"]], [half, caps["vocab_size"] - half])

        def again(c: int, sampler: Sampler) -> Request:
            page, mask = context_pages * c, masks[c % len(masks)]
            return step([300 + c], PROMPT, page, c + 1, [sampler], logit_mask=mask)

        kinds = [sampler for sampler, _ in SAMPLERS]
        batch = [again(c, kinds[c % len(kinds)]) for c in range(SLOTS)]
        tokens = [token for [token] in client.forward(batch).tokens]
        logits = []
        for first in range(0, SLOTS, 48):
            probes = [again(c, Sampler.raw_logits()) for c in range(first, first + 48)]
            logits += [torch.tensor(row) for [row] in client.forward(probes).logits]
    return tokens, logits


def check_slots(
    model: Path, options: dict[str, object], one: str, several: str, dtype: str = "bfloat16"
) -> None:
    """Ranks divide the slots of a large step: its tokens are those of one device.

    Logits differ by rounding. Where a token is the one whose share of the unit interval the slot's
    number lies in, two rows of logits say by how much of that interval their tokens differ.
    """
    alone, shared = (slot_answers(model, options, device, dtype) for device in (one, several))
    differ = sum(a != b for a, b in zip(alone[0], shared[0], strict=True))
    rows = zip(alone[1], shared[1], strict=True)
    expected = sum(apart(a, b, SAMPLERS[c % len(SAMPLERS)][1]) for c, (a, b) in enumerate(rows))
    print(
        f"    {SLOTS} slots of a step: {differ} differ from one GPU's, {expected:.1f} expected of "
        "the difference of their logits"
    )
    # Probes are computed eagerly, so their logits are off by other roundings of the same kind.
    if differ > 2 * expected + 4 * math.sqrt(expected) + 1 or expected > MOST * SLOTS:
        raise SystemExit("more than rounding explains")


def apart(one: torch.Tensor, other: torch.Tensor, kept: Filter) -> float:
    """How likely the tokens of two rows of logits differ that are drawn by the same number."""
    first, second = (weights_of(row, kept, 0.0) for row in (one, other))
    ends = torch.minimum(first.cumsum(0), second.cumsum(0))
    starts = torch.maximum(first.cumsum(0) - first, second.cumsum(0) - second)
    return 1.0 - float((ends - starts).clamp(min=0.0).sum())


class Host:
    """What steps of the graph path take on the host, as the driver's clock has it."""

    def __init__(self) -> None:
        self._taken: list[float] = []

    def step(
        self,
        started_ns: int,
        phases: Mapping[str, int],
        *,
        requests: int,
        tokens: int,
        path: str = "Python path",
    ) -> None:
        """Takes note of a step, as `Trace.step` does."""
        # Only steps of the graph path wait in one place.
        if "wait" in phases:
            self._taken.append((sum(phases.values()) - phases["wait"]) / 1000)

    def take(self) -> float:
        """Microseconds of the median step so far; forgets them."""
        taken, self._taken = self._taken, []
        return statistics.median(taken)


def time_steps(model: Path, arguments: argparse.Namespace) -> None:
    """Prints a row of JSON for each context and batch."""
    host = Host()
    options = [f"page_size = {PAGE}", f'attention_backend = "{arguments.attention}"']
    options += ['load_format = "dummy"', *arguments.option]
    here = driver_here(model, options, devices(arguments.count), tracer=host, steps=True)
    with here as (name, own, workers):
        for context in map(int, arguments.contexts.split(",")):
            for batch in map(int, arguments.batches.split(",")):
                if batch * (context // PAGE + 2) > own.model_info.total_pages:
                    print(f"{batch} contexts of {context} exceed the pool", flush=True)
                    continue
                again = functools.partial(repeat, Repeat(batch, STEPS), own, workers)
                row = take_turns(name, batch, context, again)
                speed = {"tokens_per_s": batch / row["p50_us"] * 1e6}
                row |= {"host_us": host.take(), "ranks": arguments.count, **speed}
                print(json.dumps(row), flush=True)
                if arguments.profile:
                    print_kernels(functools.partial(repeat, Repeat(batch, PROFILED), own, workers))
    # Ranks that end one after the other have nothing more to say to each other.
    os._exit(0)


def repeat(again: Repeat, own: Any, workers: Any) -> float:
    """Microseconds of a graph that all ranks launch back to back."""
    if workers is not None:
        workers.broadcast.send(pack(again))
    return again.run(own)


def summary(rows: list[dict[str, float]]) -> list[str]:
    """Speed and overhead by the number of GPUs, against one."""
    alone = {(row["batch"], row["context"]): row for row in rows if row["ranks"] == 1}
    lines = []
    for row in rows:
        base = alone.get((row["batch"], row["context"]))
        line = f"tp {row['ranks']}  {row['batch']:>3} x {row['context']:>4}:"
        line += f" {row['p50_us']:>7.0f} us, GPU {row['gpu_us']:>7.0f},"
        line += f" host {row['overhead_us']:>5.0f}, its own {row['host_us']:>5.0f},"
        line += f" {row['tokens_per_s']:>7.0f} tokens/s"
        if base is not None:
            line += f", {base['p50_us'] / row['p50_us']:.2f} of one GPU's speed"
        lines.append(line)
    return lines


def play(arguments: argparse.Namespace, report: Report) -> None:
    """Runs both parts for every number of GPUs, in processes of their own."""
    runner = Runner(arguments.out / "ranks_check.log", arguments.budget_s)
    rows: list[dict[str, Any]] = []
    for part in arguments.parts.split(","):
        for count in map(int, arguments.ranks.split(",")):
            command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
            found = runner.run(f"{part} {count}", [*command, "--count", count], PART_S[part])
            if part == "tokens":
                lines = [line.strip() for line in found.splitlines()]
                report.add(part=part, ranks=count, said=lines)
            else:
                lines = [line for line in found.splitlines() if line.startswith('{"')]
                for row in map(json.loads, lines):
                    rows.append(row)
                    report.add(part=part, **row)
    for line in summary(rows):
        runner.say(line)
    report.hold("parts that failed", len(runner.failed), at_most=0)


def check_tokens(arguments: argparse.Namespace) -> None:
    """The first part for one number of GPUs; ends the process where tokens are wrong."""
    names, pocket = devices(arguments.count), arguments.pocket
    chosen: dict[str, object] = {"attention_backend": arguments.attention, "page_size": PAGE}
    with driver(pocket, chosen, names) as (client, _):
        ids = decode_greedily(client, SAID)
    clear, wrong = compare_greedy(pocket, ids)
    print(f"    {4 * SAID} tokens, {clear} with a gap > {MIN_GAP}, {wrong} of those differ")
    if wrong:
        raise SystemExit("greedy tokens differ from the reference")
    options = [f'attention_backend = "{arguments.attention}"', *arguments.option]
    walk = check_walk(pocket, arguments.steps, options, names)
    if walk["worst_ulps"] > MOST_ULPS:
        raise SystemExit("more than rounding explains")
    if arguments.count > 1:
        check_slots(pocket, chosen, devices(1), names)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "pocket", "shapes", "option")
    made.add_argument("--ranks", default="1,2,4", help="numbers of GPUs")
    made.add_argument("--parts", default="tokens,steps")
    made.add_argument("--attention", default="triton,pie")
    made.add_argument("--steps", type=int, default=200, help="random steps over both paths")
    made.add_argument("--batches", default="1,8,64,256")
    made.add_argument("--contexts", default="512,2048")
    made.add_argument("--profile", action="store_true", help="list the kernels of each graph")
    made.add_argument("--budget-s", type=float, default=520.0, help="seconds for all parts")
    made.add_argument("--part", choices=PART_S, help=argparse.SUPPRESS)
    made.add_argument("--count", type=int, default=1, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Runs the parts."""
    arguments = parser().parse_args()
    # The other ranks must find the command above.
    paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    if arguments.part == "tokens":
        check_tokens(arguments)
    elif arguments.part == "steps":
        with tempfile.TemporaryDirectory() as folder:
            time_steps(frame.model_folder(arguments.shapes, Path(folder)), arguments)
    else:
        with Report(__file__, arguments) as report:
            play(arguments, report)


if __name__ == "__main__":
    main()
