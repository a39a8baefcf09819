"""SGLang's n-gram corpus, updated and asked as its own worker does, with a chain of drafts.

    ngram_sglang.py append|draft|step|memory FOLDER

`FOLDER` holds `text.bin` (uint32) and `case.json`. An update is waited for: before that it is not
seen by the next draft. `memory` prints a summary as JSON, the others run as many operations as each
line of stdin says and write their times in nanoseconds.

The corpus is compiled when it is first made, which needs a C++ compiler and takes a minute.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

# As g++ 12 needs it: the sources use `size_t` without its header.
os.environ.setdefault("CXX", "c++ -include stddef.h")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

CHUNK = 512
# Tokens that are added at once to be timed.
STRETCH = 128


def corpus(case: dict[str, Any]) -> NgramCorpus:
    """An empty one. Its first token is the context's last, not a draft."""
    return NgramCorpus(
        max_trie_depth=case["depth"],
        min_bfs_breadth=1,
        max_bfs_breadth=1,
        draft_token_num=case["drafts"] + 1,
        capacity=case["capacity"],
    )


def put(corpus: NgramCorpus, text: list[int], start: int, end: int, depth: int) -> None:
    """Adds a stretch of the text with the tokens before it, so that its contexts are whole."""
    corpus.batch_put([text[max(start - depth, 0) : end]])
    corpus.synchronize()


def resident() -> int:
    """This process' memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(case: dict[str, Any], text: list[int]) -> dict[str, float]:
    """Bytes for each token of the text."""
    before = resident()
    ours = corpus(case)
    for start in range(0, len(text), CHUNK):
        put(ours, text, start, start + CHUNK, case["depth"])
    each = (resident() - before) / len(text)
    return {"p50": each, "p99": each, "p999": each, "samples": 1, "batch": 1}


def append(case: dict[str, Any], text: list[int]) -> Callable[[], int]:
    """Adds the next tokens; the time is that of one."""
    ours, depth, held = corpus(case), case["depth"], case["held"]
    for start in range(0, held, CHUNK):
        put(ours, text, start, min(start + CHUNK, held), depth)
    at = held

    def run() -> int:
        nonlocal at
        if at + STRETCH > len(text):
            at = held
        begin = perf_counter_ns()
        put(ours, text, at, at + STRETCH, depth)
        elapsed = perf_counter_ns() - begin
        at += STRETCH
        return elapsed // STRETCH

    return run


def batch(case: dict[str, Any], text: list[int], requests: int, adds: bool) -> Callable[[], int]:
    """Drafts for contexts that are stretches of the text, before that perhaps a token for each."""
    ours, depth, length = corpus(case), case["depth"], case["context"]
    stretch = len(text) // requests
    for request in range(requests):
        start = request * stretch
        for at in range(start, start + length, CHUNK):
            put(ours, text, at, at + CHUNK, depth)
    ids = [str(request) for request in range(requests)]
    ends = [request * stretch + length for request in range(requests)]
    steps = 0

    def run() -> int:
        nonlocal steps
        steps = (steps + adds) % (stretch - length)
        tails = [text[end + steps - depth : end + steps] for end in ends]
        lengths = [length + steps] * requests
        begin = perf_counter_ns()
        if adds:
            ours.batch_put(tails)
            ours.synchronize()
        ours.batch_get(ids, tails, lengths)
        return perf_counter_ns() - begin

    return run


def check() -> None:
    """A repeated text must be drafted."""
    case = {"depth": 18, "drafts": 4, "capacity": 10_000}
    ours = corpus(case)
    put(ours, list(range(10)) * 3, 0, 30, 18)
    tokens, _ = ours.batch_get(["0"], [[1, 2, 3]], [3])
    np.testing.assert_array_equal(tokens, [3, 4, 5, 6, 7])


def main(variant: str, folder: Path) -> None:
    """Checks the corpus, then serves a variant."""
    case = json.loads((folder / "case.json").read_text())
    text = np.fromfile(folder / "text.bin", "<u4").tolist()
    check()
    if variant == "memory":
        print(json.dumps(memory(case, text)))
        return
    run = {
        "append": lambda: append(case, text),
        "draft": lambda: batch(case, text, 1, False),
        "step": lambda: batch(case, text, case["requests"], True),
    }[variant]()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        times = np.array([run() for _ in range(int(line))], "<u8")
        sys.stdout.buffer.write(times.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
