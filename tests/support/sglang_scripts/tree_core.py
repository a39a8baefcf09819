"""Compares the tree core of `pie_radix` with those of SGLang 0.5.23, in its unified cache.

Random moves of a scheduler are made in one world for each core: matches, locks, insertions,
requests that compute in chunks, evictions. What each shows must be the same. Prints as JSON how
many moves of each kind did, and which faulty cores were seen.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import register_tree_core_backend
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from pie_driver_sglang.sglang_plugins.tree_core import TreeCore

POLICIES: Final = ("lru", "lfu", "fifo", "filo", "mru", "slru", "priority")
PAGES: Final = 48
ROWS: Final = 8
LONGEST: Final = 12
"""Pages of the longest text."""
WEIGHTS: Final = {
    "match": 3,
    "insert": 2,
    "start": 3,
    "chunk": 5,
    "decode": 6,
    "finish": 2,
    "hold": 1,
    "drop": 1,
    "evict": 1,
    "order": 1,
}
"""How often each move is made."""


class WithoutNamespaces(TreeCore):
    """Shares what must not be shared."""

    def _match(self, key: RadixKey) -> tuple[int, int]:
        return super()._match(RadixKey(key.token_ids, is_bigram=key.is_bigram, limit=key.limit))

    def begin_insert(self, params: InsertParams) -> Any:
        key = RadixKey(params.key.token_ids, is_bigram=params.key.is_bigram)
        return super().begin_insert(dataclasses.replace(params, key=key))


class MruInstead(TreeCore):
    """Evicts in another order."""

    def __init__(self, params: Any) -> None:
        super().__init__(dataclasses.replace(params, eviction_policy="mru"))


class KeepsLocks(TreeCore):
    """Forgets to unlock."""

    def dec_lock_ref(self, node_id: int, params: Any, skip_swa: bool = False) -> Any:
        return None


class KeepsTwice(TreeCore):
    """Does not give back the slots that a request brings twice."""

    def begin_insert(self, params: InsertParams) -> Any:
        step = super().begin_insert(params)
        step.actions.clear()
        return step


FAULTS: Final = (WithoutNamespaces, MruInstead, KeepsLocks, KeepsTwice)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What worlds are made with."""

    page_size: int = 1
    policy: str = "lru"
    eagle: bool = False


class World:
    """One cache with what SGLang's scheduler keeps around it."""

    def __init__(self, core: str, setting: Setting) -> None:
        self.setting = setting
        page_size, size = setting.page_size, PAGES * setting.page_size
        self.rows = ReqToTokenPool(ROWS, 2 * LONGEST * page_size, "cpu", False)
        self.allocator: Any = (
            TokenToKVPoolAllocator(size, torch.float32, "cpu", None, False)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", None, False)
        )
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                is_eagle=setting.eagle,
                eviction_policy=setting.policy,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        self.held: list[Any] = []
        self.requests: dict[int, Any] = {}

    def match(self, tokens: array[int], space: tuple[Any, Any], limit: int | None) -> list[int]:
        """Looks a prefix up; its slots."""
        return self._match(tokens, space, limit)[0]

    def hold(self, tokens: array[int], space: tuple[Any, Any]) -> list[int]:
        """Looks a prefix up and locks it."""
        found, node = self._match(tokens, space, None)
        self.held.append(self.cache.lock(node))
        return found

    def drop(self, index: int) -> None:
        """Unlocks what `hold` has locked."""
        self.cache.unlock(self.held.pop(index))

    def insert(self, tokens: array[int], space: tuple[Any, Any], priority: int) -> int | None:
        """Puts a text into the cache, with slots of its own; None if it does not fit."""
        key = self._key(tokens, space)
        key = key.page_aligned(self.setting.page_size)
        slots = self._allocate(len(key))
        if slots is None:
            return None
        result = self.cache.insert(InsertParams(key=key, value=slots, priority=priority))
        return int(result.prefix_len)

    def evict(self, tokens: int) -> int:
        """Evicts so many tokens, at least."""
        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def start(self, number: int, prompt: array[int], space: tuple[Any, Any], priority: int) -> Any:
        """A request comes in; nothing is computed yet."""
        found, node = self._match(prompt, space, max(len(prompt) - 1, 0))
        request = SimpleNamespace(
            rid=str(number),
            origin_input_ids=prompt,
            full_untruncated_fill_ids=array("q", prompt),
            extra_key=space[0],
            cache_salt=space[1],
            priority=priority,
            session_id=None,
            kv_rotation_base=None,
            session=None,
            is_over=False,
            lock=self.cache.lock(node),
            last_node=node,
            matched=len(found),
            computed=len(found),
            kv=SimpleNamespace(
                req_pool_idx=self.rows.free_slots.pop(0),
                cache_protected_len=len(found),
                cache_inserted_len=0,
            ),
        )
        request.finished = lambda: request.is_over
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        row[: len(found)] = torch.tensor(found, dtype=row.dtype)
        self.requests[number] = request
        return found

    def chunk(self, number: int, tokens: int) -> list[int] | None:
        """Computes the next tokens of a request and caches them; its slots."""
        request = self.requests[number]
        end = min(request.computed + tokens, len(request.full_untruncated_fill_ids))
        if not self._extend(request, end):
            return None
        self.cache.checkpoint_into_tree(request, up_to=end)
        row: list[int] = self.rows.req_to_token[request.kv.req_pool_idx, :end].tolist()
        return [*row, request.kv.cache_protected_len]

    def decode(self, number: int, token: int) -> bool:
        """A token is sampled and its KV stored, once the prompt is computed."""
        request = self.requests[number]
        if request.computed < len(request.full_untruncated_fill_ids):
            return False
        request.full_untruncated_fill_ids.append(token)
        if self._extend(request, request.computed + 1):
            return True
        request.full_untruncated_fill_ids.pop()
        return False

    def finish(self, number: int, is_kept: bool) -> None:
        """A request is over; what it computed stays in the cache if it is asked for."""
        request = self.requests.pop(number)
        request.is_over = True
        if is_kept and request.computed > request.matched:
            self.cache.checkpoint_into_tree(request, up_to=request.computed)
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        start = request.kv.cache_protected_len
        if start < request.computed:
            self.allocator.free_segment(row[start : request.computed].long(), start_pos=start)
        self.cache.unlock(request.lock)
        self.rows.free_slots.insert(0, request.kv.req_pool_idx)

    def order(self, texts: list[tuple[array[int], tuple[Any, Any]]]) -> list[int]:
        """The order of the policy `dfs-weight` of requests with these texts."""
        nodes = [self._match(tokens, space, None)[1] for tokens, space in texts]
        order: list[int] = self.cache.dfs_weight_order(nodes)
        return order

    def state(self) -> dict[str, Any]:
        """What every move shows besides its own result, in a cache that finds itself sane."""
        self.cache.sanity_check()
        self._sort_free()
        return {
            "evictable": self.cache.evictable_size(),
            "protected": self.cache.protected_size(),
            "total": self.cache.total_size(),
            "free": self.allocator.free_pages.tolist(),
            "slots": sorted(self.cache.all_values_flatten().tolist()),
        }

    def _key(
        self, tokens: array[int], space: tuple[Any, Any], limit: int | None = None
    ) -> RadixKey:
        extra, salt = space
        eagle = self.setting.eagle
        return RadixKey(tokens, extra, is_bigram=eagle, cache_salt=salt, limit=limit)

    def _match(
        self, tokens: array[int], space: tuple[Any, Any], limit: int | None
    ) -> tuple[list[int], int]:
        key = self._key(tokens, space, limit)
        found = self.cache.match_prefix(MatchPrefixParams(key=key))
        node = found.last_device_node
        assert found.last_host_node == found.best_match_node == node
        slots = self.cache.path_device_indices(node)
        assert slots.dtype == torch.int64
        assert len(slots) == found.device_prefix_len
        return slots.tolist(), node

    def _sort_free(self) -> None:
        """The order of free slots differs where one call frees the slots of many leaves."""
        self.allocator.merge_and_sort_free()
        self.allocator.free_pages, _ = torch.sort(self.allocator.free_pages)

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        missing = tokens - self.allocator.available_size()
        if missing > 0:
            self.evict(missing)
        self._sort_free()
        slots: torch.Tensor | None = self.allocator.alloc(tokens)
        return slots

    def _extend(self, request: Any, end: int) -> bool:
        """Gives positions slots: first the rest of a page that is begun, then new pages."""
        size, start = self.setting.page_size, request.computed
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        first = min(-(-start // size) * size, end)
        slots = self._allocate(-(-(end - first) // size) * size)
        if slots is None:
            return False
        if start < first:
            row[start:first] = row[start - 1] + 1 + torch.arange(first - start)
        row[first:end] = slots[: end - first]
        request.computed = end
        return True


class Moves:
    """Random moves that a scheduler could make, on texts that share prefixes."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.random = setting, random.Random(seed)
        self.longest = LONGEST * setting.page_size
        self.texts = [self._tokens(self.random.randint(0, self.longest)) for _ in range(4)]
        self.running: list[int] = []
        self.held = 0
        self.started = 0

    def _tokens(self, count: int) -> list[int]:
        return [self.random.choice([1, 2, 3, 70_000, 1_000_000_007]) for _ in range(count)]

    def text(self, least: int = 0) -> array[int]:
        """One that begins like others, as often as not."""
        if self.random.random() < 0.1:
            self.texts[self.random.randrange(len(self.texts))] = self._tokens(self.longest)
        begin = self.random.choice(self.texts)
        begin = begin[: self.random.randint(0, len(begin))]
        more = self._tokens(self.random.randint(least, 3 * self.setting.page_size))
        return array("q", (begin + more)[: self.longest])

    def space(self) -> tuple[str | None, str | None]:
        """An extra key and a salt."""
        return self.random.choice([None, None, "", "lora"]), self.random.choice([None, None, "x"])

    def __call__(self) -> tuple[str, Callable[[World], object]]:
        """The name of a move, and the move."""
        pick = self.random
        [name] = pick.choices(list(WEIGHTS), list(WEIGHTS.values()))
        if name == "start" and len(self.running) < ROWS:
            number, self.started = self.started, self.started + 1
            self.running.append(number)
            arguments = (number, self.text(least=1), self.space(), pick.randint(0, 2))
            return name, lambda world: world.start(*arguments)
        if name in {"chunk", "decode", "finish"} and self.running:
            number = pick.choice(self.running)
            if name == "chunk":
                tokens = pick.randint(1, 3 * self.setting.page_size)
                return name, lambda world: world.chunk(number, tokens)
            if name == "decode":
                token = pick.randint(1, 3)
                return name, lambda world: world.decode(number, token)
            self.running.remove(number)
            is_kept = pick.random() < 0.8
            return name, lambda world: world.finish(number, is_kept)
        if name == "hold" and self.held < 3:
            self.held += 1
            tokens, space = self.text(), self.space()
            return name, lambda world: world.hold(tokens, space)
        if name == "drop" and self.held:
            self.held -= 1
            index = pick.randint(0, self.held)
            return name, lambda world: world.drop(index)
        if name == "insert":
            tokens, space, priority = self.text(), self.space(), pick.randint(0, 3)
            return name, lambda world: world.insert(tokens, space, priority)
        if name == "evict":
            count = pick.randint(0, 4 * self.setting.page_size)
            return name, lambda world: world.evict(count)
        if name == "order":
            # Of different weights: the order of equal ones is that of a dictionary.
            tokens, space = self.text(), self.space()
            texts = [(tokens, space), (self.text(), space), (tokens, space)]
            return name, lambda world: world.order(texts)
        tokens, space = self.text(), self.space()
        limit = pick.choice([None, pick.randint(0, len(tokens) + 1)])
        return "match", lambda world: world.match(tokens, space, limit)


class DifferentError(AssertionError):
    """Two worlds showed something else."""


def play(cores: list[str], setting: Setting, seed: int, moves: int) -> Iterator[str]:
    """Makes moves in a world of each core, and yields each one's name.

    Raises:
        DifferentError: Says after which move what differed.
    """
    worlds = [World(core, setting) for core in cores]
    draw, log = Moves(setting, seed), []
    for _ in range(moves):
        name, move = draw()
        shown = [{"shown": move(world), **world.state()} for world in worlds]
        log.append(name)
        for core, found in zip(cores[1:], shown[1:], strict=True):
            for what, value in shown[0].items():
                if found[what] != value:
                    raise DifferentError(
                        f"{setting}, seed {seed}, move {len(log)}, {what}: {cores[0]} {value}, "
                        f"{core} {found[what]}; after {log[-8:]}"
                    )
        yield name


def faults() -> list[str]:
    """Faulty cores that some game told from SGLang's."""
    seen = []
    for fault in FAULTS:
        register_tree_core_backend(fault.__name__, lambda params, _, fault=fault: fault(params))
        try:
            for seed in range(8):
                for _ in play(["python", fault.__name__], Setting(), seed, 200):
                    pass
        except (DifferentError, AssertionError, RuntimeError):
            seen.append(fault.__name__)
    return seen


def main() -> None:
    """Prints what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--moves", type=int, default=80)
    parser.add_argument("--policies", nargs="*", default=POLICIES)
    given = parser.parse_args()
    register_tree_core_backend("pie", lambda params, _: TreeCore(params))
    moves: Counter[str] = Counter()
    cases = itertools.product((1, 16), given.policies, (False, True))
    for seed, (page_size, policy, eagle) in enumerate(cases):
        setting = Setting(page_size, policy, eagle)
        moves.update(play(["python", "rust", "pie"], setting, seed, given.moves))
    print(json.dumps({"moves": moves, "faults": faults()}))


if __name__ == "__main__":
    main()
