"""The radix trees of SGLang 0.5.23 and of `pie_radix` in SGLang's unified cache, on a CPU.

    PYTHONPATH=python python benches/tree_cores/tree_cores.py [--json FILE]

Needs SGLang 0.5.23. `pie` is `sglang_plugins.tree_core.TreeCore`, `rust` SGLang's default, `python`
its core in Python. The cores take turns, so a drift of the machine hits all alike, and each match
must have the length that it has in the others. Times are microseconds a call, medians. Memory is
what a process grows by, for each node.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

CORES: Final = ("pie", "rust", "python")
PAGE_SIZES: Final = (1, 16)
SYSTEM: Final = 1000
"""Tokens that all conversations begin with."""
CONVERSATIONS: Final = 200
TURNS: Final = 8
TURN: Final = (140, 420)
"""Tokens of a turn."""
HIT: Final = 2048
NODES: Final = 40_000
SEED: Final = 57


def make_cache(core: str, page_size: int, tokens: int) -> Any:
    """A unified cache of KV of whole sequences."""
    import torch
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
        get_tree_core_factory,
        register_tree_core_backend,
    )
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from pie_driver_sglang.sglang_plugins.tree_core import TreeCore

    if get_tree_core_factory("pie") is None:
        register_tree_core_backend("pie", lambda params, _: TreeCore(params))
    allocator: Any = (
        TokenToKVPoolAllocator(tokens, torch.float32, "cpu", None, False)
        if page_size == 1
        else PagedTokenToKVPoolAllocator(tokens, page_size, torch.float32, "cpu", None, False)
    )
    return UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(1, 16, "cpu", False),
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
        )
    )


class Side:
    """A core with its times."""

    def __init__(self, core: str, page_size: int, tokens: int) -> None:
        self.core, self.page_size = core, page_size
        self.cache = make_cache(core, page_size, tokens)
        self.times: dict[str, list[float]] = defaultdict(list)

    def timed(self, what: str, call: Callable[[], Any], count: int = 1) -> Any:
        """The result of a call, whose time counts as that of so many."""
        start = time.perf_counter_ns()
        result = call()
        self.times[what].append((time.perf_counter_ns() - start) / 1000 / count)
        return result

    def match(self, what: str, tokens: array[int]) -> Any:
        """A match of a text."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        params = MatchPrefixParams(key=RadixKey(tokens))
        return self.timed(what, lambda: self.cache.tree_core.match_prefix(params))

    def insert(self, what: str, tokens: array[int], found: Any, slots: Any) -> Any:
        """An insertion of a text of which a prefix was found, with the slots of the rest."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        whole = len(tokens) // self.page_size * self.page_size
        key = RadixKey(tokens[:whole])
        params = InsertParams(key=key, value=slots[:whole], prev_prefix_len=found.device_prefix_len)
        return self.timed(what, lambda: self.cache.insert(params))

    def turn(self, tokens: array[int]) -> int:
        """A turn of a conversation; the length of its match."""
        import torch

        core, cache = self.cache.tree_core, self.cache
        found = self.match("turn: match", tokens)
        node = found.last_device_node
        lock = self.timed("turn: lock", lambda: cache.lock(node))
        slots = self.timed(
            "turn: slots", lambda: core.collect_full_device_indices(node, core.root_node_handle())
        )
        pages = -(-(len(tokens) - len(slots)) // self.page_size)
        new = cache.token_to_kv_pool_allocator.alloc(pages * self.page_size)
        self.insert("turn: insert", tokens, found, torch.cat([slots, new]))
        self.timed("turn: unlock", lambda: cache.unlock(lock))
        return int(found.device_prefix_len)

    def evict(self) -> int:
        """An eviction of 1,000 tokens at least; how many."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        params = EvictParams(num_tokens=1000)
        result = self.timed("evict 1,000 tokens", lambda: self.cache.evict(params))
        return int(result.num_tokens_evicted)


def texts(random_: random.Random) -> Iterator[list[array[int]]]:
    """The conversations, each turn after turn."""
    system = [random_.randrange(50_000) for _ in range(SYSTEM)]
    for _ in range(CONVERSATIONS):
        text, turns = list(system), []
        for _ in range(TURNS):
            text += [random_.randrange(50_000) for _ in range(random_.randint(*TURN))]
            turns.append(array("q", text))
        yield turns


def agree(results: list[int], what: str) -> None:
    """Raises unless all cores have shown the same."""
    if len(set(results)) > 1:
        raise AssertionError(f"{what}: {dict(zip(CORES, results, strict=True))}")


def compare(page_size: int) -> list[dict[str, Any]]:
    """The times of all cores with pages of a size."""
    random_ = random.Random(SEED)
    talks = list(texts(random_))
    longest = SYSTEM + TURNS * TURN[1] + page_size
    sides = [Side(core, page_size, CONVERSATIONS * longest) for core in CORES]
    for turn in range(TURNS):
        for talk in talks:
            random_.shuffle(sides)
            agree([side.turn(talk[turn]) for side in sides], f"turn {turn}")
    hits = [talk[-1][:HIT] for talk in talks]
    misses = [array("q", [60_000 + index] * HIT) for index in range(CONVERSATIONS)]
    for what, keys in (("match of 2,048 tokens", hits), ("miss of 2,048 tokens", misses)):
        for key in keys:
            random_.shuffle(sides)
            found = [side.match(what, key).device_prefix_len for side in sides]
            agree(found, what)
    while any([side.cache.evictable_size() for side in sides]):
        random_.shuffle(sides)
        agree([side.evict() for side in sides], "evicted tokens")
    return [
        {"page_size": page_size, "what": what}
        | {side.core: round(statistics.median(side.times[what]), 2) for side in sides}
        for what in sides[0].times
    ]


def grown(core: str, page_size: int) -> float:
    """Bytes by which this process grows for each node of a page."""
    import torch

    cache = make_cache(core, page_size, (NODES + 100) * page_size)
    side = Side.__new__(Side)
    side.cache, side.page_size, side.times = cache, page_size, defaultdict(list)
    random_ = random.Random(SEED)
    slots = torch.arange(page_size)

    def fill(count: int) -> None:
        for _ in range(count):
            text = array("q", [random_.randrange(1 << 20) for _ in range(page_size)])
            side.insert("", text, cache.tree_core.empty_match_result, slots)
        side.times.clear()

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    # What is allocated once, and the page table of the slots.
    getattr(getattr(cache.tree_core, "_slots", None), "_slots", torch.zeros(1)).fill_(1)
    fill(100)
    before = resident()
    fill(NODES)
    return (resident() - before) / NODES


def memory(page_size: int) -> dict[str, Any]:
    """Bytes a node of every core, each in a process of its own."""
    row: dict[str, Any] = {"page_size": page_size, "what": "memory of a node of a page, bytes"}
    for core in CORES:
        command = [sys.executable, __file__, "--grown", core, str(page_size)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        row[core] = round(float(out.splitlines()[-1]))
    return row


def record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The record with what identifies it."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True
    )
    model = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "check": "tree_cores",
        "commit": commit.stdout.strip(),
        "device": f"{model[0].split(': ')[1] if model else platform.processor()}, one thread",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("sglang", "torch")},
        "command": "PYTHONPATH=python python benches/tree_cores/tree_cores.py --json FILE",
        "rows": rows,
    }


def main() -> None:
    """Prints the table, and writes the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--grown", nargs=2)
    given = parser.parse_args()
    if given.grown is not None:
        print(grown(given.grown[0], int(given.grown[1])))
        return
    rows: list[dict[str, Any]] = []
    for page_size in PAGE_SIZES:
        for row in [*compare(page_size), memory(page_size)]:
            rows.append(row)
            values = "  ".join(f"{core} {row[core]:>9}" for core in CORES)
            print(f"pages of {page_size:2}  {row['what']:34}  {values}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(record(rows), indent=1) + "\n")


if __name__ == "__main__":
    main()
