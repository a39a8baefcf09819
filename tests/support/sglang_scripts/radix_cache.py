"""Compares SGLang's `RadixCache` with the plugin's cache, and with a faulty one.

Prints as JSON how many moves of each kind showed the same, and which faults were seen.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from array import array
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_policy import SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import DecLockRefResult, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from pie_driver_sglang.sglang_plugins.radix_cache import RadixCache as Ours
from support.sglang_scripts.radix_simulation import (
    DifferentError,
    Moves,
    Setting,
    World,
    hash_in_python,
    play,
)

POLICIES = ("lru", "lfu", "fifo", "filo", "mru", "slru", "priority")
MOVES = 80


class MruInstead(RadixCache):
    """Evicts in another order."""

    def __init__(self, params: Any) -> None:
        super().__init__(dataclasses.replace(params, eviction_policy="mru"))


class WithoutNamespaces(RadixCache):
    """Shares what must not be shared."""

    def match_prefix(self, params: Any) -> Any:
        params.key.extra_key = None
        return super().match_prefix(params)

    def insert(self, params: Any) -> Any:
        params.key.extra_key = None
        return super().insert(params)


class KeepsLocks(RadixCache):
    """Forgets to unlock."""

    def dec_lock_ref(self, node: Any, params: Any = None) -> DecLockRefResult:
        return DecLockRefResult(delta=0)


class SilentRemovals(RadixCache):
    """Says nothing of what it evicts."""

    def _record_remove_event(self, node: Any, medium: Any = None) -> None:
        pass


def agree() -> Counter[str]:
    """Moves that showed the same in SGLang's cache and in the plugin's."""
    moves: Counter[str] = Counter()
    cases = itertools.product((1, 16), POLICIES, (False, True))
    for seed, (page_size, policy, eagle) in enumerate(cases):
        setting = Setting(page_size, policy, eagle, disable_finished_insert=seed % 5 == 4)
        moves.update(play([RadixCache, Ours], setting, seed, MOVES))
    return moves


def faults() -> list[str]:
    """Faulty caches that some game told from SGLang's."""
    seen = []
    for fault in (MruInstead, WithoutNamespaces, KeepsLocks, SilentRemovals):
        try:
            for seed in range(5):
                for _ in play([RadixCache, fault], Setting(), seed, 200):
                    pass
        except (DifferentError, AssertionError, RuntimeError):
            seen.append(fault.__name__)
    return seen


def dfs_orders() -> list[list[str]]:
    """The order that SGLang's policy `dfs-weight` gives waiting requests, by each cache."""
    texts = {"a": [1, 2, 3, 4], "b": [1, 2, 5], "c": [1, 2, 3, 9], "d": [7], "e": [1, 2, 3, 4, 8]}
    orders = []
    for make in (RadixCache, Ours):
        cache = World(make, Setting()).cache
        for tokens in texts.values():
            key = RadixKey(array("q", tokens))
            value = torch.arange(1, 1 + len(tokens))
            cache.insert(InsertParams(key=key, value=value))
        waiting = []
        for rid, tokens in texts.items():
            found = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
            waiting.append(SimpleNamespace(rid=rid, last_node=found.last_device_node))
        SchedulePolicy._sort_by_dfs_weight(waiting, cache)
        orders.append([request.rid for request in waiting])
    return orders


class Declines(Ours):
    """Uses no prefix below six tokens."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, min_hit=6)


def declined() -> dict[str, Any]:
    """Matches of a cache that declines short ones, and slots that it has lost after a game."""
    world = World(Declines, Setting())
    text = array("q", range(1, 21))
    world.insert(text, None, {})
    matches = [len(world.match(text[:length], None, None)) for length in (5, 6, 20)]
    lost = []
    for seed in range(3):
        world, mover = World(Declines, Setting()), Moves(Setting(), seed)
        for _ in range(200):
            mover([world])
        for number in list(world.kv_lens):
            world.finish(number, True)
        while world.held:
            world.drop(0)
        world.evict(Setting().pages)
        lost.append(Setting().pages - len(world.state()["free"]))
    return {"matches": matches, "lost": lost}


def main() -> None:
    """Prints what was found."""
    hash_in_python()
    found = {"moves": agree(), "faults": faults(), "dfs": dfs_orders(), "declined": declined()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
