"""Contexts that begin with the same pages, compared with as many that have pages of their own.

    python benches/gpu/prefix_check.py [--pocket DIR] [--shapes DIR] [--json FILE]
        [--batches 16,64,256] [--contexts 2048] [--common 256,512,1024,1920]
        [--option KEY=VALUE ...]

1. `pocket` in bfloat16: contexts with a common beginning say the same, shared or not. Prints how
   many of the greedy tokens differ up to a context's first difference.
2. Random weights in the shape of DIR: decode steps through the ring, p50 in microseconds, by how
   many tokens of each context all have in common.

`--device cpu` tries the script out; there every row reads all of its KV.
"""

from __future__ import annotations

import argparse
import statistics
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import frame
from frame import Report
from serving import PAGE, driver, round_trip_us

from pie_driver_sglang._core import Client, Request, Sampler, encode_forward

STEPS = 60
SAID = 24
"""Tokens that each context of `pocket` says."""
FEW = 0.02
"""Of tokens, which may differ by rounding."""


class Contexts(NamedTuple):
    """Contexts of equal lengths, all of which begin with the same tokens."""

    count: int
    common: int
    own: int
    shared: bool
    """Whether their beginnings are the same pages, too."""

    def pages(self, context: int, tokens: int) -> list[int]:
        """Of so many tokens of a context."""
        most = -(-(self.common + self.own + SAID + STEPS) // PAGE)
        first = self.common // PAGE if self.shared else 0
        own = range(first + context * most, first + context * most + most)
        listed = [*range(first), *own] if self.shared else list(own)
        return listed[: -(-tokens // PAGE)]

    def request(self, context: int, tokens: Sequence[int], start: int) -> Request:
        """Tokens from a position on, sampled at the last."""
        end = start + len(tokens)
        return Request(
            list(tokens), list(range(start, end)), self.pages(context, end), (end - 1) % PAGE + 1,
            [(len(tokens) - 1, Sampler.greedy())], context_id=context + 1,
        )  # fmt: skip

    def fill(self, client: Client) -> list[int]:
        """Stores all contexts; the token that each says."""
        beginning = [3 + i % 1000 for i in range(self.common)]
        said = []
        for context in range(self.count):
            if context == 0 or not self.shared:
                for start in range(0, self.common, 2048):
                    part = beginning[start : start + 2048]
                    client.forward([self.request(context, part, start)])
            own = [5 + (7 * i + 31 * context) % 1500 for i in range(self.own)]
            [[token]] = client.forward([self.request(context, own, self.common)]).tokens
            said.append(token)
        return said


def say(client: Client, contexts: Contexts) -> list[list[int]]:
    """Greedy tokens of each context."""
    said = [[token] for token in contexts.fill(client)]
    for number in range(SAID):
        place = contexts.common + contexts.own + number
        batch = [contexts.request(c, said[c][-1:], place) for c in range(contexts.count)]
        for own, [token] in zip(said, client.forward(batch).tokens, strict=True):
            own.append(token)
    return said


def check_pocket(pocket: Path, device: str, options: dict[str, object]) -> float:
    """The same words from shared pages and from own ones; returns the share that differs."""
    with driver(pocket, {"page_size": PAGE, **options}, device) as (client, _):
        found = [
            say(client, Contexts(count=48, common=768, own=20, shared=shared))
            for shared in (False, True)
        ]
    differ = total = 0
    for alone, shared in zip(*found, strict=True):
        same = [a == b for a, b in zip(alone, shared, strict=True)]
        until = same.index(False) + 1 if False in same else len(same)
        differ += until - sum(same[:until])
        total += until
    print(f"    {differ} of {total} tokens differ with shared pages")
    return differ / total


def time_steps(client: Client, contexts: Contexts) -> list[float]:
    """The p10, p50 and p90 of a step in microseconds."""
    contexts.fill(client)
    samples = []
    for number in range(STEPS):
        place = contexts.common + contexts.own + number
        frame = encode_forward([contexts.request(c, [5], place) for c in range(contexts.count)])
        samples.append(round_trip_us(client, frame))
    deciles = statistics.quantiles(samples[10:], n=10)
    return [deciles[0], deciles[4], deciles[8]]


def check_steps(arguments: argparse.Namespace, options: dict[str, object], report: Report) -> None:
    """By batch, and by how much is common."""
    dummy = {"page_size": PAGE, "load_format": "dummy", **options}
    with driver(arguments.shapes, dummy, arguments.device) as (client, _):
        for context in map(int, arguments.contexts.split(",")):
            for batch in map(int, arguments.batches.split(",")):
                alone = None
                for common in (0, *map(int, arguments.common.split(","))):
                    contexts = Contexts(batch, common, context - common, shared=True)
                    p10, p50, p90 = time_steps(client, contexts)
                    alone = alone or p50
                    row = {"batch": batch, "context": context, "common": common}
                    row |= {"p10_us": p10, "p50_us": p50, "p90_us": p90}
                    report.add(**row)
                    print(
                        f"    {batch:>3} x {context}, {common:>5} in common: {p50:>7.0f} us "
                        f"({p10:.0f} to {p90:.0f}), {alone / p50:.2f} times as fast",
                        flush=True,
                    )


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "pocket", "shapes", "device", "option")
    made.add_argument("--batches", default="16,64,256")
    made.add_argument("--contexts", default="2048")
    made.add_argument("--common", default="256,512,1024,1920", help="tokens")
    return made


def main() -> None:
    """Runs both parts."""
    arguments = parser().parse_args()
    options = tomllib.loads("\n".join(arguments.option))
    with Report(__file__, arguments) as report:
        share = check_pocket(arguments.pocket, arguments.device, options)
        if not report.hold("share of tokens that differ", share, at_most=FEW):
            raise SystemExit("more than rounding explains")
        if arguments.shapes:
            check_steps(arguments, options, report)


if __name__ == "__main__":
    main()
