"""Prefix indexes from Python: the native one, and SGLang's `RadixCache`.

    radix_python.py ours|sglang:match_lock|miss|conversations FOLDER

`FOLDER` holds `text.bin` (uint32), texts one after the other, and `case.json`. That has `lengths`
of the texts, `hit`, the tokens of the last one that are found, `page`, and `turns`. A turn is the
number of a text, the tokens that are looked up, and those that are inserted then. Runs as many
operations as each line of stdin says, and writes their times in nanoseconds.

A lookup is timed with its lock, from an array of tokens to an array of slots or pages. SGLang's
tree frees nothing here.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]


class Ours:
    """`RadixIndex`, with page ids."""

    def __init__(self, page: int) -> None:
        from pie_driver_sglang import RadixIndex

        self._index, self._page, self._next = RadixIndex(page), page, 0

    def find(self, text: array[int]) -> tuple[int, int]:
        """Looks a text up and locks it: tokens that were found, and nanoseconds."""
        begin = perf_counter_ns()
        found = self._index.match_and_lock(text)
        elapsed = perf_counter_ns() - begin
        found.unlock()
        return len(found.pages) * self._page, elapsed

    def insert(self, text: array[int]) -> int:
        """Inserts a text: nanoseconds."""
        pages = np.arange(self._next, self._next + len(text) // self._page)
        self._next += len(pages)
        begin = perf_counter_ns()
        self._index.insert(text, pages)
        return perf_counter_ns() - begin


class Sglang:
    """SGLang's tree, with slots."""

    def __init__(self, page: int) -> None:
        import torch
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self._tree = RadixCache.create_simulated(page_size=page)
        self._match, self._insert, self._key = MatchPrefixParams, InsertParams, RadixKey
        self._arange, self._next = torch.arange, 0

    def find(self, text: array[int]) -> tuple[int, int]:
        """Looks a text up and locks it: tokens that were found, and nanoseconds."""
        begin = perf_counter_ns()
        found = self._tree.match_prefix(self._match(key=self._key(text)))
        self._tree.inc_lock_ref(found.last_device_node)
        elapsed = perf_counter_ns() - begin
        self._tree.dec_lock_ref(found.last_device_node)
        return len(found.device_indices), elapsed

    def insert(self, text: array[int]) -> int:
        """Inserts a text: nanoseconds."""
        slots = self._arange(self._next, self._next + len(text))
        self._next += len(text)
        begin = perf_counter_ns()
        self._tree.insert(self._insert(key=self._key(text), value=slots))
        return perf_counter_ns() - begin


def lookups(make: Any, case: dict[str, Any], texts: list[array[int]]) -> Callable[[], int]:
    """Lookups of the last text in an index of the others, and of itself if it is to be found."""
    index, wanted = make(case["page"]), texts[-1]
    for text in texts if case["hit"] else texts[:-1]:
        index.insert(text)
    if index.find(wanted)[0] != case["hit"]:
        raise AssertionError("another number of tokens was found")
    return lambda: int(index.find(wanted)[1])


def conversations(make: Any, case: dict[str, Any], texts: list[array[int]]) -> Callable[[], int]:
    """Turns, from the start again when all are done; a time is that of one."""
    index, turns, at = make(case["page"]), case["turns"], 0

    def run() -> int:
        nonlocal index, at
        if at == len(turns):
            index, at = make(case["page"]), 0
        text, prompt, end = turns[at]
        at += 1
        found = index.find(texts[text][:prompt])[1]
        return int(found + index.insert(texts[text][:end]))

    return run


def main(variant: str, folder: Path) -> None:
    """Serves a variant."""
    case = json.loads((folder / "case.json").read_text())
    tokens = np.fromfile(folder / "text.bin", "<u4").astype(np.int64)
    texts = np.split(tokens, np.cumsum(case["lengths"])[:-1])
    side, task = variant.split(":")
    make = {"ours": Ours, "sglang": Sglang}[side]
    start = conversations if task == "conversations" else lookups
    run = start(make, case, [array("q", text.tobytes()) for text in texts])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        times = np.array([run() for _ in range(int(line))], "<u8")
        sys.stdout.buffer.write(times.tobytes())
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
