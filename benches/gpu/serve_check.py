"""Serves models on a CUDA GPU through the installed wheel, and checks and times the answers.

    python benches/gpu/serve_check.py [--pocket DIR] [--shapes CONFIG_DIR] [--backends A,B]
        [--json FILE]

Two parts, both against a driver process spawned as the Pie runtime does it:

1. `pocket` in bfloat16: the greedy tokens must be those of `transformers` (eager attention, float32
   on the CPU, the same weights) wherever the reference's two best logits are more than `MIN_GAP`
   apart.
2. Random weights in the shape of CONFIG_DIR: decode steps at a context of 512 by batch size, as the
   client sees them (round trip, p50 over the steps), with the driver's own probes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import frame
from frame import Report
from serving import MIN_GAP, PAGE, driver, step

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request

CONTEXT = 512
STEPS = 50


def check_pocket(
    model: Path, backend: str, new_tokens: int = 48, *, device: str = "cuda:0"
) -> tuple[int, int]:
    """Greedy parity of four contexts decoded together: tokens that are decided, and those wrong."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = [[(7 * i + 11 * c) % 2000 + 300 for i in range(5 + 30 * c)] for c in range(4)]
    with driver(model, {"attention_backend": backend, "page_size": PAGE}, device) as (client, _):
        ids = [list(prompt) for prompt in prompts]
        batch = [step(prompt, 0, 200 * c, c + 1) for c, prompt in enumerate(prompts)]
        for _ in range(new_tokens):
            for context, (token,) in zip(ids, client.forward(batch).tokens, strict=True):
                context.append(token)
            batch = [step(all_[-1:], len(all_) - 1, 200 * c, c + 1) for c, all_ in enumerate(ids)]
    clear = wrong = 0
    for prompt, got in zip(prompts, ids, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([got[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        for token, gap, expected in zip(
            got[len(prompt) :],
            (best.values[:, 0] - best.values[:, 1]).tolist(),
            best.indices[:, 0].tolist(),
            strict=True,
        ):
            clear += gap > MIN_GAP
            wrong += gap > MIN_GAP and token != expected
    print(f"    {4 * new_tokens} tokens, {clear} with a gap > {MIN_GAP}, {wrong} of those differ")
    return clear, wrong


def time_shapes(model: Path, backend: str, report: Report) -> None:
    """Decode steps by batch size."""
    options = {"attention_backend": backend, "page_size": PAGE, "load_format": "dummy"}
    with driver(model, options) as (client, caps):
        print(f"    {caps['total_pages']} pages of {caps['kv_page_size']} tokens")
        print("    batch   step p50 us   driver: plan  h2d  launch  sync")
        for size in (1, 8, 64, 256):
            stride = 2 * CONTEXT // PAGE
            prompt = [3 + i % 1000 for i in range(CONTEXT)]
            for c in range(size):
                client.forward([step(prompt, 0, c * stride, c + 1)])
            times, probes = [], (0, 0, 0, 0, 0, 0)
            for n in range(STEPS):
                batch = [step([5], CONTEXT + n, c * stride, c + 1) for c in range(size)]
                # With a request that has no token the answer is an archive, which has probes.
                batch.append(Request([], [], [], 1))
                started = time.perf_counter_ns()
                probes = client.forward(batch).probes
                times.append((time.perf_counter_ns() - started) / 1000)
            _, plan, h2d, launch, sync, _ = probes
            p50 = statistics.median(times)
            print(f"    {size:5}   {p50:11.0f}   {plan:12} {h2d:4} {launch:7} {sync:5}")
            report.add(
                backend=backend, batch=size, context=CONTEXT, p50_us=p50,
                plan_us=plan, h2d_us=h2d, launch_us=launch, sync_us=sync,
            )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "pocket", "shapes")
    made.add_argument("--backends", default="triton,flashinfer")
    return made


def main() -> None:
    """Checks and times every backend."""
    arguments = parser().parse_args()
    print(f"python {sys.version.split()[0]}, {_core.build_info()}")
    with Report(__file__, arguments) as report:
        for backend in arguments.backends.split(","):
            print(f"pocket, bfloat16, {backend}")
            clear, wrong = check_pocket(arguments.pocket, backend)
            report.add(backend=backend, decided_tokens=clear, wrong_tokens=wrong)
            if not report.hold(f"{backend}: wrong tokens", wrong, at_most=0):
                raise SystemExit("greedy tokens differ from the reference")
            if arguments.shapes:
                print(f"{arguments.shapes.name} shape, random weights, {backend}")
                time_shapes(arguments.shapes, backend, report)


if __name__ == "__main__":
    main()
