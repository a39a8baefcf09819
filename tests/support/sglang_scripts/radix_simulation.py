"""Random operations of SGLang's scheduler on a prefix cache and SGLang's pools.

A `World` is one cache with its allocator, its rows and real `Req` objects. `play` makes the same
moves in two worlds and compares what each move shows: matched slots, freed duplicates, evicted
counts and slots, locks, sizes, rows and events. No model runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import (
    PagedTokenToKVPoolAllocator,
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.cpp_utils import native_hash
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

ROWS = 8
"""Requests at once."""
Make = Callable[[CacheInitParams], Any]


def get_hash(
    raw: array[int],
    logical_len: int,
    unit_width: int,
    is_bigram: bool,
    prior_digest: bytes | None,
    page_size: int | None,
) -> list[str]:
    """SGLang's hashes of pages, which it compiles from C++ when an event needs one."""
    assert page_size is not None
    tokens = np.asarray(raw, "<u4")
    units = np.stack([tokens[:-1], tokens[1:]], 1) if is_bigram else tokens.reshape(-1, unit_width)
    hashes, digest = [], prior_digest or b""
    for start in range(0, logical_len, page_size):
        digest = hashlib.sha256(digest + units[start : start + page_size].tobytes()).digest()
        hashes.append(digest.hex())
    return hashes


def hash_in_python() -> None:
    """Spares this process the two minutes in which a C++ compiler makes SGLang's hash."""
    module = SimpleNamespace(get_hash=get_hash)
    native_hash._load_native_hash_module = lambda: module


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a pair of worlds is made with."""

    page_size: int = 1
    policy: str = "lru"
    eagle: bool = False
    disable_finished_insert: bool = False
    pages: int = 48

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return 12 * self.page_size


class World:
    """One cache with what SGLang's scheduler keeps around it."""

    def __init__(self, make: Make, setting: Setting) -> None:
        self.setting = setting
        page_size, size = setting.page_size, setting.pages * setting.page_size
        self.rows = ReqToTokenPool(ROWS, 2 * setting.longest, "cpu", False)
        self.allocator = (
            TokenToKVPoolAllocator(size, torch.float32, "cpu", None, False)
            if page_size == 1
            else PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", None, False)
        )
        self.cache = make(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                is_eagle=setting.eagle,
                eviction_policy=setting.policy,
                disable_finished_insert=setting.disable_finished_insert,
                enable_kv_cache_events=True,
            )
        )
        self.requests: dict[int, Req] = {}
        self.kv_lens: dict[int, int] = {}
        self.held: list[Any] = []

    # Moves. Each returns what it shows.

    def match(self, tokens: array[int], extra: str | None, limit: int | None) -> list[int]:
        """Looks a prefix up."""
        return self._match(tokens, extra, limit)[0]

    def hold(self, tokens: array[int], extra: str | None) -> tuple[list[int], int]:
        """Looks a prefix up and locks it."""
        found, node = self._match(tokens, extra, None)
        self.held.append(node)
        return found, self.cache.inc_lock_ref(node).delta

    def drop(self, index: int) -> int:
        """Unlocks what `hold` has locked."""
        return self.cache.dec_lock_ref(self.held.pop(index)).delta

    def insert(self, tokens: array[int], extra: str | None, how: dict[str, Any]) -> int | None:
        """Puts a text into the cache, with slots of its own; None if it does not fit."""
        key = RadixKey(tokens, extra, is_bigram=self.setting.eagle)
        whole = len(key.page_aligned(self.setting.page_size))
        slots = self._allocate(whole)
        if slots is None:
            return None
        result = self.cache.insert(InsertParams(key=key[:whole], value=slots, **how))
        self.allocator.free_segment(slots[: result.prefix_len], start_pos=0)
        return int(result.prefix_len)

    def evict(self, tokens: int) -> int:
        """Evicts so many tokens, at least."""
        return int(self.cache.evict(EvictParams(num_tokens=tokens)).num_tokens_evicted)

    def start(
        self, number: int, prompt: array[int], extra: str | None, priority: int | None
    ) -> object:
        """A request comes in, or comes back after a retraction; nothing is computed yet."""
        request = self.requests.get(number)
        if request is None:
            request = Req(str(number), "", prompt, SamplingParams(), extra_key=extra)
            request.priority = priority
        request.init_next_round_input(self.cache)
        delta = self.cache.inc_lock_ref(request.last_node).delta
        self.rows.alloc([request])
        self.requests[number] = request
        self.kv_lens[number] = 0
        return delta, request.prefix_indices.tolist(), request.cache_protected_len

    def chunk(self, number: int, tokens: int) -> object:
        """Computes the next tokens of a request's text and caches them."""
        request = self.requests[number]
        start, all_ = len(request.prefix_indices), len(request.full_untruncated_fill_ids)
        end = min(start + tokens, all_)
        row = self.rows.req_to_token[request.req_pool_idx]
        row[:start] = request.prefix_indices
        if not self._extend(row, start, end):
            return None
        request.set_extend_range(start, end)
        request.inflight_middle_chunks = int(end < all_)
        self.kv_lens[number] = end
        self.cache.cache_unfinished_req(request, chunked=end < all_)
        assert request.prefix_indices.dtype == torch.int64
        return request.prefix_indices.tolist(), request.cache_protected_len, row[:end].tolist()

    def decode(self, number: int, token: int) -> bool:
        """A token is sampled, and the KV of the one before it is stored."""
        request = self.requests[number]
        row = self.rows.req_to_token[request.req_pool_idx]
        at = self.kv_lens[number]
        if request.output_ids:
            if not self._extend(row, at, at + 1):
                return False
            self.kv_lens[number] += 1
        request.output_ids.append(token)
        return True

    def finish(self, number: int, is_insert: bool) -> None:
        """A request is over; what it computed stays in the cache if it is asked for."""
        self._release(self.requests.pop(number), number, is_insert)

    def retract(self, number: int) -> None:
        """A request's KV is given back; it starts again later."""
        request = self.requests[number]
        self._release(request, number, is_insert=False)
        request.reset_for_retract()

    def reset(self) -> None:
        """Forgets all."""
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    # What every move shows besides its own result.

    def state(self) -> dict[str, Any]:
        """Sizes, events, and the slots that are free."""
        self._sort_free()
        return {
            "evictable": self.cache.evictable_size(),
            "protected": self.cache.protected_size(),
            "total": self.cache.total_size(),
            "free": self.allocator.free_pages.tolist(),
            "events": self.cache.take_events(),
        }

    def _match(
        self, tokens: array[int], extra: str | None, limit: int | None
    ) -> tuple[list[int], Any]:
        key = RadixKey(tokens, extra, limit=limit)
        result = self.cache.match_prefix(MatchPrefixParams(key=key))
        assert result.device_indices.dtype == torch.int64
        assert result.last_host_node == result.best_match_node == result.last_device_node
        assert result.host_hit_length == 0
        return result.device_indices.tolist(), result.last_device_node

    def _release(self, request: Req, number: int, is_insert: bool) -> None:
        length = self.kv_lens.pop(number)
        self.cache.cache_finished_req(request, is_insert=is_insert, kv_len_to_handle=length)
        self.rows.free(request)

    def _sort_free(self) -> None:
        """The order of free slots differs where one call frees the slots of many leaves."""
        free = torch.cat([self.allocator.free_pages, self.allocator.release_pages])
        self.allocator.free_pages, _ = torch.sort(free)
        self.allocator.release_pages = free[:0]

    def _allocate(self, tokens: int) -> torch.Tensor | None:
        evict_from_tree_cache(self.cache, tokens)
        self._sort_free()
        slots: torch.Tensor | None = self.allocator.alloc(tokens)
        return slots

    def _extend(self, row: torch.Tensor, start: int, end: int) -> bool:
        """Gives positions slots: first the rest of a page that is begun, then new pages."""
        size = self.setting.page_size
        first = min(-(-start // size) * size, end)
        pages = -(-(end - first) // size)
        slots = self._allocate(pages * size)
        if slots is None:
            return False
        if start < first:
            row[start:first] = row[start - 1] + 1 + torch.arange(first - start)
        row[first:end] = slots[: end - first]
        return True


class Moves:
    """Random moves that a scheduler could make, on texts that share prefixes."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting, self.random = setting, random.Random(seed)
        self.texts = [self._tokens(self.random.randint(0, setting.longest)) for _ in range(4)]
        self.waiting: list[int] = []
        """Retracted requests."""
        self.running: dict[int, int] = {}
        """Tokens that each still has to compute before it decodes."""
        self.held = 0
        self.started = 0

    def _tokens(self, count: int) -> list[int]:
        # Ids of images are far above the vocabulary, and ids may repeat.
        return [self.random.choice([1, 2, 3, 70_000, 1_000_000_007]) for _ in range(count)]

    def text(self, least: int = 0) -> array[int]:
        """One that begins like others, as often as not."""
        if self.random.random() < 0.1:
            self.texts[self.random.randrange(len(self.texts))] = self._tokens(self.setting.longest)
        begin = self.random.choice(self.texts)
        begin = begin[: self.random.randint(0, len(begin))]
        more = self._tokens(self.random.randint(least, 3 * self.setting.page_size))
        return array("q", (begin + more)[: self.setting.longest])

    def extra(self) -> str | None:
        return self.random.choice([None, None, "", "lora-1", "lora-2"])

    def how(self) -> dict[str, Any]:
        return {"priority": self.random.randint(-1, 3), "chunked": self.random.random() < 0.3}

    def __call__(self, worlds: list[World]) -> list[tuple[str, list[object]]]:
        """One move in each world; its name, and what it showed in each."""
        at_random = [
            *[self._match] * 3,
            *[self._insert] * 3,
            *[self._start] * 3,
            *[self._chunk] * 4,
            *[self._decode] * 4,
            *[self._finish] * 2,
            self._retract,
            self._hold,
            self._drop,
            self._evict,
            self._reset,
        ]
        name, move = self.random.choice(at_random)()
        return [(name, [move(world) for world in worlds])]

    def _match(self) -> tuple[str, Callable[[World], object]]:
        tokens, extra = self.text(), self.extra()
        limit = self.random.choice([None, self.random.randint(0, len(tokens) + 1)])
        return f"match {tokens} {extra} {limit}", lambda world: world.match(tokens, extra, limit)

    def _insert(self) -> tuple[str, Callable[[World], object]]:
        tokens, extra, how = self.text(), self.extra(), self.how()
        return f"insert {tokens} {extra} {how}", lambda world: world.insert(tokens, extra, how)

    def _hold(self) -> tuple[str, Callable[[World], object]]:
        if self.held == 3:
            return self._drop()
        self.held += 1
        tokens, extra = self.text(), self.extra()
        return f"hold {tokens} {extra}", lambda world: world.hold(tokens, extra)

    def _drop(self) -> tuple[str, Callable[[World], object]]:
        if not self.held:
            return self._evict()
        self.held -= 1
        index = self.random.randint(0, self.held)
        return f"drop {index}", lambda world: world.drop(index)

    def _evict(self) -> tuple[str, Callable[[World], object]]:
        tokens = self.random.randint(0, 4 * self.setting.page_size)
        return f"evict {tokens}", lambda world: world.evict(tokens)

    def _start(self) -> tuple[str, Callable[[World], object]]:
        if len(self.running) == ROWS:
            return self._finish()
        if self.waiting and self.random.random() < 0.7:
            number = self.waiting.pop()
        else:
            number = self.started
            self.started += 1
        prompt, extra = self.text(least=1), self.extra()
        priority = self.random.choice([None, 0, 2])
        self.running[number] = -1
        return (
            f"start {number} {prompt} {extra} {priority}",
            lambda world: world.start(number, prompt, extra, priority),
        )

    def _one(self, world: World, *, decoding: bool) -> list[int]:
        """Requests that decode, or those that do not yet."""

        def left(number: int) -> int:
            request = world.requests[number]
            return len(request.full_untruncated_fill_ids) - world.kv_lens[number]

        return [number for number in self.running if (left(number) <= 0) == decoding]

    def _chunk(self) -> tuple[str, Callable[[World], object]]:
        tokens, pick = self.random.randint(1, 3 * self.setting.page_size), self.random.random()

        def move(world: World) -> object:
            numbers = self._one(world, decoding=False)
            return numbers and world.chunk(numbers[int(pick * len(numbers))], tokens)

        return f"chunk {tokens} {pick}", move

    def _decode(self) -> tuple[str, Callable[[World], object]]:
        token, pick = self.random.randint(1, 3), self.random.random()

        def move(world: World) -> object:
            numbers = [
                number
                for number in self._one(world, decoding=True)
                if world.kv_lens[number] < 2 * self.setting.longest - 1
            ]
            return numbers and world.decode(numbers[int(pick * len(numbers))], token)

        return f"decode {token} {pick}", move

    def _finish(self) -> tuple[str, Callable[[World], object]]:
        if not self.running:
            return self._match()
        number, is_insert = self._leave(), self.random.random() < 0.8
        return f"finish {number} {is_insert}", lambda world: world.finish(number, is_insert)

    def _retract(self) -> tuple[str, Callable[[World], object]]:
        if not self.running:
            return self._match()
        number = self._leave()
        self.waiting.append(number)
        return f"retract {number}", lambda world: world.retract(number)

    def _leave(self) -> int:
        number = self.random.choice(list(self.running))
        del self.running[number]
        return number

    def _reset(self) -> tuple[str, Callable[[World], object]]:
        if self.running or self.held or self.random.random() < 0.5:
            return self._evict()
        return "reset", lambda world: world.reset()


class DifferentError(AssertionError):
    """Two worlds showed something else."""


def play(makes: list[Make], setting: Setting, seed: int, moves: int) -> Iterator[str]:
    """Plays moves in these kinds of worlds, and yields each one's name.

    Raises:
        DifferentError: Names the moves up to the first that showed a difference, and what it was.
    """
    worlds = [World(make, setting) for make in makes]
    mover = Moves(setting, seed)
    log = []
    compare([world.state() for world in worlds], setting, seed, log)
    for _ in range(moves):
        for name, shown in mover(worlds):
            log.append(name if len(name) < 100 else f"{name[:60]} ... {name[-40:]}")
            states = [world.state() for world in worlds]
            for state, each in zip(states, shown, strict=True):
                state["shown"] = each
            compare(states, setting, seed, log)
            yield name.split()[0]


def compare(states: list[dict[str, Any]], setting: Setting, seed: int, log: list[str]) -> None:
    """Raises unless the worlds show the same."""
    first = states[0]
    for state in states[1:]:
        for what, value in first.items():
            if state[what] != value:
                last = "\n  ".join(log[-12:])
                raise DifferentError(
                    f"{setting}, seed {seed}, move {len(log)}: {what} differs\n"
                    f"theirs {value}\nours   {state[what]}\nlast moves:\n  {last}"
                )
