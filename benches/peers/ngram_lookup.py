"""Prompt lookup as vLLM drafts: no index, each draft searches its context's tokens, in numba.

    ngram_lookup.py draft|step FOLDER

`FOLDER` holds `text.bin` (uint32) and `case.json`. The longest end of a context, of 2 to 4 tokens,
that occurs in it before is looked for, and what followed its first occurrence is drafted.
"""

import json
import sys
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

Tokens = NDArray[np.uint32]


@njit(cache=False)
def lookup(tokens: Tokens, shortest: int, longest: int, drafts: int) -> Tokens:
    """What followed the first occurrence of the longest end of `tokens` that occurs before."""
    # Read backwards, the end is a prefix: the prefix function of Knuth, Morris and Pratt, whose
    # values are cut off at `longest`, says at each place how much of the end occurs there.
    size = len(tokens)
    border = np.zeros(longest, np.int64)
    matched = best = start = 0
    for back in range(1, size):
        token = tokens[size - 1 - back]
        while matched > 0 and (matched == longest or token != tokens[size - 1 - matched]):
            matched = border[matched - 1]
        if token == tokens[size - 1 - matched]:
            matched += 1
        if back < longest:
            border[back] = matched
        if matched >= best:
            best, start = matched, size - 1 - back + matched
    if best < shortest:
        return tokens[:0]
    return tokens[start : min(start + drafts, size)]


@njit(cache=False)
def step(contexts: Tokens, length: int, drafts: int) -> int:
    """Looks up all contexts of a batch; they have the same length."""
    count = 0
    for request in range(len(contexts)):
        count += len(lookup(contexts[request, :length], 2, 4, drafts))
    return count


def check() -> None:
    """Small cases, by hand."""
    cases = [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1]),
        ([1, 2, 9, 1, 2, 8, 1, 2], [9, 1, 2]),
        ([7, 1, 2, 9, 5, 1, 2, 8, 7, 1, 2], [9, 5, 1]),
        ([5, 5, 5, 5, 5, 5, 5], [5, 5, 5]),
        ([1, 2, 3, 4], []),
    ]
    for tokens, wanted in cases:
        found = lookup(np.array(tokens, np.uint32), 2, 4, 3)
        np.testing.assert_array_equal(found, wanted)


def main(variant: str, folder: Path) -> None:
    """Checks the lookup, then runs as many operations as each line of stdin says."""
    case: dict[str, Any] = json.loads((folder / "case.json").read_text())
    text = np.fromfile(folder / "text.bin", np.uint32)
    check()
    requests = {"draft": 1, "step": case["requests"]}[variant]
    stretch = len(text) // requests
    contexts = text[: stretch * requests].reshape(requests, stretch)
    length, drafts = case["context"], case["drafts"]
    step(contexts, length, drafts)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    steps = 0
    for line in sys.stdin:
        times = np.empty(int(line), "<u8")
        for index in range(len(times)):
            steps = (steps + (variant == "step")) % (stretch - length)
            begin = perf_counter_ns()
            step(contexts, length + steps, drafts)
            times[index] = perf_counter_ns() - begin
        sys.stdout.buffer.write(times.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
