"""Checks probes and logit masks on a CUDA GPU, and times batches of mixed samplers.

    python benches/gpu/probe_check.py [--pocket DIR] [--shapes CONFIG_DIR] [--json FILE]

1. `pocket` in bfloat16: every sampler kind, with and without a mask. The logits are compared with
   `transformers` (float32, CPU), all else with float64 distributions of the returned logits. Prints
   the largest difference of each kind.
2. Random weights in the shape of CONFIG_DIR, 256 contexts that decode: step times with one kind of
   token sampler each, with all of them, with probes, and with masks.
"""

from __future__ import annotations

import argparse
import math
import statistics
from pathlib import Path
from typing import Any

import frame
from frame import Report
from serving import PAGE, driver, load_reference, round_trip_us, step

from pie_driver_sglang._core import Client, Sampler, encode_forward

MASKS: tuple[list[int] | None, ...] = (None, [300, 200, 50, 700], [1000, 2**32 - 1])
TOLERANCE = 1e-4
LOGITS_TOLERANCE = 0.5
"""Of bfloat16 against float32; pocket's logits reach 30."""
SIZE = 256
CONTEXT = 512
STEPS = 30


def check(
    client: Client, model: Any, tokens: list[int], mask: list[int] | None
) -> dict[str, float]:
    """The largest difference of each kind of output from the reference."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    vocabulary = logits.shape[-1]
    if mask is not None:
        allowed = torch.zeros(vocabulary, dtype=torch.bool)
        end = 0
        for number, run in enumerate(mask):
            start, end = end, min(end + run, vocabulary)
            allowed[start:end] = number % 2 == 1
        logits = logits.masked_fill(~allowed, -math.inf)
    reference = logits[-1]
    labels = [5, 301, 1500, vocabulary]
    kinds = [Sampler.greedy(), Sampler.raw_logits(), Sampler.entropy(), Sampler.logprobs(labels)]
    kinds += [Sampler.dist(0.7, 8), Sampler.dist(1.0, 0), Sampler.top_p(1.0, 0.8)]
    reply = client.forward([step(tokens, 0, 0, 0, kinds, logit_mask=mask)])
    greedy, drawn = reply.tokens[0]
    [raw], [entropy], [logprobs] = reply.logits[0], reply.entropies[0], reply.logprobs[0]
    few, everything = reply.dists[0]
    finite = reference.isfinite()
    row = torch.tensor(raw, dtype=torch.float64)
    assert torch.equal(row.isfinite(), finite), "the mask forbids other tokens"
    assert bool(finite[drawn]), f"token {drawn} is forbidden"
    logs = row.log_softmax(-1)
    wanted = [float(logs[label]) if label < vocabulary else -math.inf for label in labels]
    gaps = [abs(a - b) for a, b in zip(logprobs, wanted, strict=True) if a != b]
    tempered, plain = (row / 0.7).softmax(-1), row.softmax(-1)
    return {
        "greedy": float(row.max() - row[greedy]),
        "logits": float((row - reference)[finite].abs().max()),
        "entropy": abs(entropy - float(torch.special.entr(plain).sum())),
        "logprobs": max(gaps, default=0.0),
        "dist": max(abs(p - float(tempered[t])) for t, p in zip(*few, strict=True)),
        "whole dist": max(abs(p - float(plain[t])) for t, p in zip(*everything, strict=True)),
    }


def check_pocket(path: Path, report: Report) -> None:
    """Every kind, for every mask."""
    model = load_reference(path)
    worst: dict[str, float] = {}
    with driver(path, {"page_size": PAGE}) as (client, _):
        for number in range(8):
            tokens = [(7 * i + 131 * number) % 2000 + 300 for i in range(3 + 9 * number)]
            for mask in MASKS:
                for kind, gap in check(client, model, tokens, mask).items():
                    worst[kind] = max(gap, worst.get(kind, 0.0))
    print("    largest differences: " + ", ".join(f"{k} {v:.1e}" for k, v in worst.items()))
    limits = dict.fromkeys(worst, TOLERANCE) | {"logits": LOGITS_TOLERANCE}
    held = [report.hold(kind, gap, at_most=limits[kind]) for kind, gap in worst.items()]
    if not all(held):
        raise SystemExit("probes differ from the reference")


def time_samplers(path: Path, report: Report) -> None:
    """Step times of 256 contexts by what they sample."""
    greedy = Sampler.greedy()
    tokens = {
        "greedy": greedy,
        "multinomial": Sampler.multinomial(1.0),
        "top-k": Sampler.top_k(1.0, 40),
        "top-p": Sampler.top_p(1.0, 0.9),
        "min-p": Sampler.min_p(1.0, 0.05),
        "top-k, top-p": Sampler.top_k_top_p(1.0, 40, 0.9),
    }
    all_kinds = list(tokens.values())
    probes = [Sampler.logprobs([1, 2]), Sampler.entropy(), Sampler.dist(1.0, 5)]
    cases: dict[str, tuple[list[list[Sampler]], list[int] | None]] = {
        name: ([[sampler]] * SIZE, None) for name, sampler in tokens.items()
    }
    cases["all kinds"] = ([[all_kinds[c % 6]] for c in range(SIZE)], None)
    cases["greedy and a probe"] = ([[greedy, probes[c % 3]] for c in range(SIZE)], None)
    cases["greedy, masked"] = ([[greedy]] * SIZE, [10, 50_000, 5, 10])
    cases["greedy and a probe, masked"] = (cases["greedy and a probe"][0], [10, 50_000, 5, 10])
    with driver(path, {"page_size": PAGE, "load_format": "dummy"}) as (client, _):
        stride = 2 * CONTEXT // PAGE
        for c in range(SIZE):
            client.forward([step([3] * CONTEXT, 0, c * stride, c + 1, [])])
        times: dict[str, list[float]] = {name: [] for name in cases}
        plans: dict[str, list[int]] = {name: [] for name in cases}
        for n in range(STEPS):
            for name, (samplers, mask) in cases.items():
                batch = [
                    step([5], CONTEXT + n % 8, c * stride, c + 1, samplers[c], logit_mask=mask)
                    for c in range(SIZE)
                ]
                times[name].append(round_trip_us(client, encode_forward(batch)) / 1e3)
                # As the driver says it, which a reply that is not decoded does not show.
                plans[name].append(client.forward(batch).probes[1])
    base = {name: statistics.median(values[5:]) for name, values in times.items()}
    for name, milliseconds in base.items():
        # Fast replies do not say it.
        planned = statistics.median(plans[name][5:])
        plan = f", plan {planned:.0f} us" if planned else ""
        print(f"    {name:26} {milliseconds:7.2f} ms{plan}")
        report.add(batch=SIZE, context=CONTEXT, samplers=name, ms=milliseconds, plan_us=planned)
    dearest = max(base[name] for name in tokens)
    print(f"    all kinds / slowest kind: {base['all kinds'] / dearest:.2f}")


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    return frame.parser(__doc__, "pocket", "shapes")


def main() -> None:
    """Checks, then times."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        print("pocket, bfloat16")
        check_pocket(arguments.pocket, report)
        if arguments.shapes:
            print(f"{arguments.shapes.name} shape, random weights, {SIZE} contexts of {CONTEXT}")
            time_samplers(arguments.shapes, report)


if __name__ == "__main__":
    main()
