"""Penalties, biases and masks on a CUDA GPU: they give the best token, and what they cost.

    python benches/gpu/sampling_check.py [--pocket DIR] [--shapes CONFIG_DIR ...]
        [--option KEY=VALUE ...] [--json FILE]

1. `pocket` in bfloat16: sequences with all kinds of penalties and biases, by the graphs and by way
   of Python. Each token is the best one of the row's own logits, adjusted token by token.
2. Random weights in each of the shapes, 64 contexts that decode, 256 of whose tokens count. Round
   trips of a step take turns: with nothing; with penalties, 50 biases, masks, five
   log-probabilities, filters, and all of it in every row; and with all of it in one row. The bars
   hold the medians to multiples of the plain step. What SGLang's own sampling takes is printed
   with it.

Masks are as JSON schemas give them: half of the rows are within a string and have the same dense
mask, which is sent once; each other row allows some other few tokens. `own masks` are 64 dense
masks of bits that have nothing in common, the most that masks can cost. It has no bar.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import frame
import sglang_sampling
from frame import Report, in_turns
from serving import PAGE, driver, round_trip_us, step

from pie_driver_sglang._core import Extension, Request, Sampler, encode_forward

ROWS = 64
CONTEXT = 1024
COUNTED = 256
"""Tokens of each context that count for penalties."""
ROUNDS = 60
BARS = {
    "penalties": 1.05,
    "bias": 1.05,
    "mask": 1.10,
    "top-5": 1.08,
    "all": 1.25,
    "one of 64": 1.03,
}
"""Most times of the plain step, in the median."""
GAP = 0.25
"""Logits that are closer may come in either order in bfloat16."""
PENALTIES = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2}


def request(
    tokens: list[int], start: int, page: int, context: int, samplers: list[Sampler], **more: Any
) -> Request:
    """Tokens at positions `start..`, sampled at the last; `more` is the extension's."""
    mask = more.pop("logit_mask", None)
    extension = Extension(**more) if more else None
    return step(tokens, start, page, context, samplers, logit_mask=mask, extension=extension)


def check_pocket(path: Path, report: Report, options: dict[str, object]) -> None:
    """Sequences of twenty tokens each; prints by how much the worst one is not the best."""
    import torch

    biases = [(300 + 7 * number, 0.5 * (number % 5) - 1.0) for number in range(50)]
    worst = farthest = 0.0
    with driver(path, {"page_size": PAGE, "mem_fraction_static": 0.1, **options}) as (client, _):
        for number in range(4):
            prompt = [(31 * i + 77 * number) % 2000 + 300 for i in range(10)]
            tokens, stored, page = list(prompt), 0, 8 * number
            for step in range(20):
                place = (tokens[stored:], stored, page, number + 1)
                asked = {**PENALTIES, "counted_from": len(prompt), "logit_bias": biases}
                # Every other token on the Python path.
                samplers = [Sampler.greedy(), *([Sampler.entropy()] if step % 2 else [])]
                asked |= {"logprobs": 5, "logprobs_of": [prompt[0]]}
                reply = client.forward([request(*place, samplers, **asked)])
                [[token]], [(_, _, [found])] = reply.tokens, reply.position_logprobs
                [[raw]] = client.forward([request(*place, [Sampler.raw_logits()])]).logits
                logits = torch.tensor(raw)
                for seen, count in Counter(tokens[len(prompt) :]).items():
                    value = float(logits[seen]) - 0.6 * count - 0.3
                    logits[seen] = value * 1.2 if value < 0 else value / 1.2
                for seen, bias in biases:
                    logits[seen] += bias
                worst = max(worst, float(logits.max() - logits[token]))
                farthest = max(farthest, _error(found, logits, token, prompt[0]))
                stored = len(tokens)
                tokens.append(token)
    print(f"    80 tokens, at most {worst:.3f} from the best; log-probabilities {farthest:.3f} off")
    if not report.hold("error of log-probabilities", farthest, at_most=GAP):
        raise SystemExit("a log-probability is wrong")
    if not report.hold("logits from the best token", worst, at_most=GAP):
        raise SystemExit("a token is not the best one")


def _error(place: Any, logits: Any, token: int, given: int) -> float:
    """How far a place's log-probabilities are from those of logits, in float64."""
    expected = logits.double().log_softmax(-1)
    own, top, [of_given] = place
    pairs = [(own, token), (of_given, given), *top]
    best = expected.topk(len(top)).values.tolist()
    errors = [abs(value - float(expected[id])) for value, id in pairs]
    return max(errors + [abs(value - other) for (value, _), other in zip(top, best, strict=True)])


def extensions(vocab: int) -> dict[str, dict[str, Any]]:
    """What each case asks for in a row."""
    draw = random.Random(1)
    penalties = {**PENALTIES, "counted_from": CONTEXT - COUNTED}
    bias = {"logit_bias": [(draw.randrange(vocab // 50) * 50 + n, 1.5) for n in range(50)]}
    mask = {"mask": bits(draw, vocab)}
    top = {"logprobs": 5, "logprobs_scaled": True}
    filters = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
    everything = {**penalties, **bias, **mask, **top, **filters}
    cases: dict[str, dict[str, Any]] = {
        "plain": {}, "penalties": penalties, "bias": bias, "mask": mask, "top-5": top,
        "filters": filters, "all": everything,
    }  # fmt: skip
    return {name: {"temperature": 0.8, **asked} for name, asked in cases.items()}


def bits(draw: random.Random, vocab: int) -> list[int]:
    """A mask that allows about half of the tokens."""
    return [draw.getrandbits(32) for _ in range(-(-vocab // 32))]


def few(draw: random.Random, vocab: int) -> list[int]:
    """A mask that allows some of the tokens, as lengths of runs."""
    allowed = sorted(draw.sample(range(1, vocab, 2), draw.randrange(1, 40)))
    before = [-1, *allowed]
    return [n for last, id in zip(before, allowed, strict=False) for n in (id - last - 1, 1)]


def masked(rows: list[dict[str, Any]], draw: random.Random, vocab: int) -> list[dict[str, Any]]:
    """Rows with a mask each, as of schemas; every other one has the first one's."""
    found = []
    for number, row in enumerate(rows):
        if number % 2:
            rest = {name: value for name, value in row.items() if name != "mask"}
            found.append({**rest, "logit_mask": few(draw, vocab)})
        else:
            found.append({**row, "mask": [], "shares_mask": True} if number else row)
    return found


def time_cases(shapes: Path, report: Report, options: dict[str, object]) -> None:
    """Round trips of a step of 64 rows, by what the rows ask for."""
    vocab = json.loads((shapes / "config.json").read_text())["vocab_size"]
    asked = extensions(vocab)
    draw = random.Random(2)
    rows = {name: [more] * ROWS for name, more in asked.items()}
    for name in ("mask", "all"):
        rows[name] = masked(rows[name], draw, vocab)
    rows["own masks"] = [{**asked["mask"], "mask": bits(draw, vocab)} for _ in range(ROWS)]
    rows["one of 64"] = [asked["all"], *[asked["plain"]] * (ROWS - 1)]
    stride = CONTEXT // PAGE + 1
    settings = {"page_size": PAGE, "load_format": "dummy", **options}
    with driver(shapes, settings) as (client, _):
        for row in range(ROWS):
            # Each token several times, as in text.
            prompt = [draw.randrange(300, 600) for _ in range(CONTEXT)]
            # Recorded as they are stored.
            more = asked["penalties"]
            client.forward([request(prompt, 0, row * stride, row + 1, [Sampler.greedy()], **more)])
        frames = {
            name: encode_forward(
                [
                    request([5], CONTEXT, row * stride, row + 1, [Sampler.greedy()], **more)
                    for row, more in enumerate(listed)
                ]
            )
            for name, listed in rows.items()
        }
        ways = {
            name: functools.partial(round_trip_us, client, bytes_)
            for name, bytes_ in frames.items()
        }
        times = in_turns(ways, ROUNDS, warmup=5)
    medians = {name: statistics.median(found) for name, found in times.items()}
    plain = medians["plain"]
    extra = sglang_sampling.extra_us(ROWS, vocab)
    for name, took in medians.items():
        ratio = took / plain
        # Of the same step, if SGLang's takes as long as ours.
        theirs = 1 + extra[name] / plain if name in extra else None
        shown = f", SGLang's sampling {theirs:.3f}" if theirs else ""
        print(f"    {name:10} {took:8.0f} us  {ratio:.3f} of plain{shown}", flush=True)
        report.add(shapes=shapes.name, case=name, rows=ROWS, us=took, ratio=ratio, sglang=theirs)
    for name, bar in BARS.items():
        ratio = medians[name] / medians["plain"]
        report.hold(f"{shapes.name}: {name} / plain", ratio, at_most=bar)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "pocket", "option")
    made.add_argument("--shapes", action="append", default=[], **frame.SHAPES)
    return made


def main() -> None:
    """Checks, then times."""
    arguments = parser().parse_args()
    options = tomllib.loads("\n".join(arguments.option))
    with Report(__file__, arguments) as report:
        print("pocket, bfloat16")
        check_pocket(arguments.pocket, report, options)
        for shapes in arguments.shapes:
            print(f"{shapes.name} shape, random weights, {ROWS} contexts of {CONTEXT}")
            time_cases(shapes, report, options)


if __name__ == "__main__":
    main()
