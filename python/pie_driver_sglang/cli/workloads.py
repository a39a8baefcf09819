"""Synthetic requests, the same for every engine and every run."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import ConfigError

#: The standard workload: prompt and output lengths are uniform in this range.
REQUESTS: Final = 256
LENGTHS: Final = (100, 1024)
#: The shared-prefix workload: tokens of the prefix, and lengths of the suffixes.
SHARED_TOKENS: Final = 1024
SUFFIX_LENGTHS: Final = (16, 128)
ANSWER_TOKENS: Final = 64
_LARGEST_TOKEN: Final = 10_000
WORKLOADS: Final = ("standard", "shared-prefix")


class Workload(NamedTuple):
    """Requests that are submitted at once.

    Attributes:
        prompts: Token ids of each.
        outputs: Output tokens of each, with `ignore_eos`.
        temperature: Of the sampling.
        keeps_prefixes: Whether the engine uses a prefix cache.
    """

    prompts: list[list[int]]
    outputs: list[int]
    temperature: float
    keeps_prefixes: bool

    def sampling(self) -> list[dict[str, Any]]:
        """Sampling parameters, by the names of SGLang."""
        common = {"temperature": self.temperature, "ignore_eos": True}
        return [{**common, "max_new_tokens": count} for count in self.outputs]


def make_workload(
    name: str, *, requests: int, longest: int, vocabulary: int, seed: int = 0
) -> Workload:
    """Generate a workload.

    Args:
        name: One of `WORKLOADS`.
        requests: How many; the standard is 256.
        longest: Most tokens of a prompt and of an output; the standard is 1,024. Shorter ones
            shorten the shared prefix, too.
        vocabulary: Tokens are below it.
        seed: Another one draws other requests.

    Raises:
        ConfigError: There is no such workload, or a number is out of range.
    """
    least = LENGTHS[0] if longest >= LENGTHS[0] else 1
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}", f"choose one of {', '.join(WORKLOADS)}")
    if requests < 1 or longest < 2:
        raise ConfigError(
            f"{requests} requests of up to {longest} tokens are no workload",
            "ask for at least 1 request and 2 tokens",
        )
    draw = random.Random(seed).randint
    if name == "standard":
        prompts = [_tokens(draw, draw(least, longest), vocabulary) for _ in range(requests)]
        outputs = [draw(least, longest) for _ in range(requests)]
        return Workload(prompts, outputs, 0.6, False)
    shared = _tokens(draw, min(SHARED_TOKENS, longest), vocabulary)
    most = min(SUFFIX_LENGTHS[1], longest)
    ends = [
        _tokens(draw, draw(min(SUFFIX_LENGTHS[0], most), most), vocabulary) for _ in range(requests)
    ]
    answers = [min(ANSWER_TOKENS, longest)] * requests
    return Workload([shared + end for end in ends], answers, 0.0, True)


def _tokens(draw: Any, count: int, vocabulary: int) -> list[int]:
    return [draw(0, _LARGEST_TOKEN) % vocabulary for _ in range(count)]


def quantiles(values: list[float]) -> Mapping[str, float]:
    """Mean and the percentiles 50, 90 and 99; empty for no values."""
    if not values:
        return MappingProxyType({})
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[max(0, math.ceil(len(ordered) * share) - 1)]

    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    mean = sum(values) / len(values)
    return MappingProxyType({"mean": mean, **{name: at(share) for name, share in shares.items()}})
