"""SGLang's `BasePrefixCache` on the native prefix index, for SGLang 0.5.17."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch

from pie_driver_sglang._core import CacheEvent
from pie_driver_sglang.backends.sglang.compat.v0517.prefix_cache import (
    AllBlocksCleared,
    BasePrefixCache,
    BlockRemoved,
    BlockStored,
    CacheInitParams,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    StorageMedium,
)
from pie_driver_sglang.sglang_plugins.paged_slots import ROOT, PagedSlots, TreeNode


class RadixCache(BasePrefixCache):
    """Replaces SGLang 0.5.17's class of that name, see ``srt/mem_cache/radix_cache.py``.

    Node handles are integers.

    Args:
        params: Pools, page size, policy and events.
        min_hit: Shorter prefixes are computed again, which may be faster for launch-bound passes.
    """

    def __init__(self, params: CacheInitParams, min_hit: int = 1) -> None:
        self.disable = False
        self._min_hit = min_hit
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.is_eagle: bool = params.is_eagle
        self.disable_finished_insert: bool = params.disable_finished_insert
        self.enable_kv_cache_events: bool = params.enable_kv_cache_events
        self.eviction_policy: str = params.eviction_policy.lower()
        self.device = torch.device(params.token_to_kv_pool_allocator.device)
        self._slots = PagedSlots(
            int(params.token_to_kv_pool_allocator.size),
            self.page_size,
            self.eviction_policy,
            bigram=self.is_eagle,
            events=self.enable_kv_cache_events,
            split_keeps_age=False,
            device=self.device,
        )
        self._index = self._slots.index
        nothing = torch.empty((0,), dtype=torch.int64, device=self.device)
        self._no_match = MatchResult(nothing, ROOT, ROOT, ROOT)
        if params.enable_metrics:
            self.init_metrics_collector()

    def reset(self) -> None:
        """Clear the index; the caller frees the slots."""
        self._slots.reset()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest cached prefix.

        Returns:
            Its slots, int64 ``(tokens,)`` on the device, and the node in which it ends.
        """
        key = params.key
        self._slots.clear_view()
        found = self._index.match_prefix(key.token_ids, namespace=key.extra_key, limit=key.limit)
        node = found.node
        if node == ROOT or len(found.pages) * self.page_size < self._min_hit:
            return self._no_match
        return MatchResult(self._slots.gather(found.pages), node, node, node)

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert a key with its slots, or with its tokens instead.

        Returns:
            How many of its tokens were cached before, whose slots the caller frees, and its last
            node.
        """
        key, value = params.key, params.value
        if value is None:
            value = torch.tensor(key.raw_token_ids(), dtype=torch.int64, device=self.device)
        existing, _, node = self._slots.insert(
            key.token_ids,
            key.extra_key,
            value,
            params.priority,
            chunked=params.chunked,
            limit=key.limit,
        )
        return InsertResult(prefix_len=existing, last_device_node=node)

    def cache_finished_req(
        self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
    ) -> None:
        """Cache the KV of a finished request, free the rest, and unlock its node.

        Args:
            req: SGLang's ``Req``.
            is_insert: Whether to cache its KV; else all that is not shared is freed.
            kv_len_to_handle: Tokens whose KV it has.
        """
        tokens = (req.origin_input_ids + req.output_ids)[:kv_len_to_handle]
        row = self.req_to_token_pool.req_to_token[req.req_pool_idx, : len(tokens)]
        protected = req.cache_protected_len
        if is_insert and not self.disable_finished_insert:
            freed, whole, _ = self._slots.insert(
                tokens, req.extra_key, row, getattr(req, "priority", 0)
            )
        else:
            units = max(len(tokens) - self.is_eagle, 0)
            freed = whole = units // self.page_size * self.page_size
        # Tokens that others have cached meanwhile, or all; then an incomplete page.
        self.token_to_kv_pool_allocator.free_segments(
            [(row[protected:freed], protected), (row[whole:], whole)]
        )
        if req.last_node is not None:
            self._index.unlock(req.last_node)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        """Cache the KV that a request has computed so far, and lock its last node.

        Args:
            req: SGLang's ``Req``. It gets the cached slots where others were faster.
            chunked: Whether more chunks of its prompt follow.
        """
        tokens = req.get_fill_ids()
        rows = self.req_to_token_pool
        row = rows.req_to_token[req.req_pool_idx, : len(tokens)]
        protected = req.cache_protected_len
        existing, whole, node = self._slots.insert(
            tokens, req.extra_key, row, getattr(req, "priority", 0), chunked=chunked
        )
        if existing > protected:
            self.token_to_kv_pool_allocator.free_segment(
                row[protected:existing], start_pos=protected
            )
            pages = self._index.path_pages(node)
            pages = pages[protected // self.page_size : existing // self.page_size]
            where = (req.req_pool_idx, slice(protected, existing))
            rows.write(where, self._slots.gather(pages).to(row.dtype))
        self._index.unlock(req.last_node)
        self._index.lock(node)
        req.cache_protected_len = whole
        # With the incomplete page.
        req.prefix_indices = row.to(torch.int64)
        req.last_node = node

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict at least `num_tokens` from leaves, by the policy, and free their slots."""
        start = time.perf_counter()
        wanted = -(-max(params.num_tokens, 0) // self.page_size)
        slots = self._slots.evict(wanted)
        evicted = slots.numel()
        if evicted:
            # Whole consecutive pages, as in the row of a request.
            self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
        self.update_eviction_metrics(evicted, start)
        return EvictResult(num_tokens_evicted=evicted)

    def inc_lock_ref(self, node: int) -> IncLockRefResult:
        """Lock a node and its ancestors against eviction."""
        return IncLockRefResult(delta=-self._index.lock(node) * self.page_size)

    def dec_lock_ref(self, node: int, params: DecLockRefParams | None = None) -> DecLockRefResult:
        """Unlock a node."""
        return DecLockRefResult(delta=self._index.unlock(node) * self.page_size)

    def evictable_size(self) -> int:
        """Tokens of unlocked nodes."""
        return self._index.evictable_pages * self.page_size

    def protected_size(self) -> int:
        """Tokens of locked nodes."""
        return self._index.protected_pages * self.page_size

    def total_size(self) -> int:
        """All tokens."""
        return self._index.device_pages * self.page_size

    def pretty_print(self) -> None:
        """Print the tree as JSON, and the number of tokens."""
        print(self._index.to_json())
        print(f"#tokens: {self.total_size()}")

    def take_events(self) -> list[Any]:
        """SGLang's KV events since the last call, one for each page that was stored."""
        events: list[Any] = []
        for event in self._index.take_events():
            if event.kind == "stored":
                events.extend(_stored(event))
            elif event.kind == "removed":
                events.append(BlockRemoved(block_hashes=event.hashes, medium=StorageMedium.GPU))
            else:
                events.append(AllBlocksCleared())
        return events

    def root_node_handle(self, extra_key: str | None = None) -> int:
        """The handle of an empty match."""
        return ROOT

    @property
    def root_node(self) -> TreeNode:
        """The root, with the paths to resolved nodes."""
        return self.resolve_node_handle(ROOT)

    def resolve_node_handle(self, node_handle: int) -> TreeNode:
        """Resolve a node, and add its path to the tree of `root_node`."""
        return self._slots.resolve(node_handle)

    def is_root(self, node: int) -> bool:
        """Whether a match was empty."""
        return node == ROOT

    def is_backuped(self, node: int) -> bool:
        """Whether a node has a copy in host memory: none has."""
        return False

    def get_last_hash_value(self, node: int) -> str | None:
        """None: hashes are for storage, which is refused."""
        return None

    def get_prefix_hash_values(self, node: int) -> list[str]:
        """None: hashes are for storage, which is refused."""
        return []


def _stored(event: CacheEvent) -> list[BlockStored]:
    """One event for each page, as SGLang's tree has them."""
    size, tokens = event.block_size, event.tokens
    units = list(pairwise(tokens)) if event.bigram else tokens
    parents = [event.parent, *event.hashes[:-1]]
    return [
        BlockStored(
            block_hashes=[block],
            parent_block_hash=parent,
            token_ids=units[page * size : (page + 1) * size],
            block_size=size,
            lora_id=None,
            medium=StorageMedium.GPU,
        )
        for page, (block, parent) in enumerate(zip(event.hashes, parents, strict=True))
    ]
