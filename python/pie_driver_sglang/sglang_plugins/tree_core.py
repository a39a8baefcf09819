"""SGLang's `UnifiedTreeCoreInterface` on the native prefix index, for SGLang 0.5.23.

SGLang's `UnifiedRadixCache` keeps requests, locks and pools; the tree core is its radix tree. This
one has KV on the device alone, and no sliding windows or recurrent states.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch

from pie_driver_sglang.backends.sglang.compat.v0523.prefix_cache import (
    BasePrefixCache,
    CacheInitParams,
    ComponentType,
    DecLockRefParams,
    DecLockRefResult,
    DriveHostEvictionResult,
    EvictDeviceNextNodeResult,
    FreeDeviceKV,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    InsertStepResult,
    KVCacheEventRecorder,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
    TreeCacheBuildContext,
    UnifiedTreeCoreInterface,
    create_unified_radix_cache,
    dfs_weight_order,
    get_tree_core_factory,
    register_tree_core_backend,
)
from pie_driver_sglang.sglang_plugins.paged_slots import ROOT, PagedSlots

_FULL: Final = ComponentType.FULL

_OF_HOST_TIER: Final = (
    *("build_backup_spec", "build_hicache_transfers", "build_load_back_spec"),
    *("build_storage_backup_spec", "commit_backup", "commit_hicache_transfers", "commit_load_back"),
    *("component_has_host_value_only", "dec_host_lock_ref", "demote", "drop_subtree_no_host"),
    *("evict_device_leaf", "finish_load_back", "finish_write_through", "inc_host_lock_ref"),
    *("insert_host", "mark_write_through_pending", "prefetch_anchor_info"),
    *("set_hicache_enabled", "set_host_memory_buffer_only", "snapshot_buffer_backup"),
    *("validate_buffer_backup",),
)
_OF_STORAGE: Final = (
    *("backfill_missing_hash_values", "build_external_linker_offload_transfers"),
    *("collect_path_info", "finish_external_linker_offload", "is_write_through_compatible"),
    *("mark_external_cache_stored_path", "mark_external_linker_offload_pending"),
)
_OF_OTHER_COMPONENTS: Final = (
    *("adjust_component_size", "all_mamba_values_flatten", "attach_swa_window"),
    *("dec_swa_lock_only", "evict_excess_path_states", "finish_mamba_state_eviction"),
    *("finish_swa_state_eviction", "get_component_device_value", "set_component_device_value"),
    *("swa_tombstone_ranges",),
)
_OF_CANARY: Final = ("walk_for_kv_canary", "node_by_id")


def _unsupported(name: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *arguments: object, **keywords: object) -> NoReturn:
        raise NotImplementedError(
            f"the tree core of pie_radix has no `{name}`: it keeps KV on the device, without "
            "host memory, storage, sliding windows or recurrent states; drop the flag that needs "
            "it, or --radix-cache-backend pie"
        )

    return refuse


class _Unsupported(UnifiedTreeCoreInterface):
    """Methods that only features call which the plug-in refuses at start."""

    for _name in (*_OF_HOST_TIER, *_OF_STORAGE, *_OF_OTHER_COMPONENTS, *_OF_CANARY):
        locals()[_name] = _unsupported(_name)
    del _name


class TreeCore(_Unsupported):
    """A tree core over `RadixIndex`.

    Node handles are integers.

    Args:
        params: Pools, page size and policy.
        min_hit: Shorter prefixes are computed again, which may be faster for launch-bound passes.

    Raises:
        ValueError: The model or a setting needs more than KV of whole sequences on the device.
    """

    enable_hicache = False
    enable_external_cache_linker = False
    has_swa_host_pool = False
    is_host_memory_buffer_only = False

    def __init__(self, params: CacheInitParams, min_hit: int = 1) -> None:
        _check(params)
        allocator = params.token_to_kv_pool_allocator
        self.page_size: int = params.page_size
        self.is_eagle: bool = params.is_eagle
        self.device = torch.device("cpu" if allocator is None else allocator.device)
        # SGLang sets these, whatever they are for.
        self.enable_storage = False
        self.is_write_back = False
        self.write_through_threshold = 256
        self.kv_events = KVCacheEventRecorder(enabled=False, page_size=params.page_size)
        self._min_hit = min_hit
        self._evicted_at = 0
        self._slots = PagedSlots(
            0 if allocator is None else int(allocator.size),
            params.page_size,
            params.eviction_policy.lower(),
            bigram=params.is_eagle,
            events=False,
            split_keeps_age=True,
            device=self.device,
        )
        self._index = self._slots.index
        self._no_match = MatchResult(
            device_prefix_len=0,
            last_device_node=ROOT,
            last_host_node=ROOT,
            best_match_node=ROOT,
            cache_actions=[],
        )

    def reset(self) -> None:
        """Clear the index; SGLang frees the slots."""
        self._slots.reset()

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest cached prefix, and the node in which it ends."""
        self._slots.clear_view()
        tokens, node = self._match(params.key)
        if node == ROOT or tokens < self._min_hit:
            return self._no_match
        return MatchResult(
            device_prefix_len=tokens,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            full_kv_hit_length=tokens,
            last_visited_node_id=node,
            cache_actions=[],
        )

    def match_full_device_prefix(self, key: RadixKey) -> tuple[int, int, int]:
        """The matched tokens, the node, and the tokens that a lock of it protects."""
        tokens, node = self._match(key)
        return tokens, node, tokens

    def supports_fast_match_prefix(self) -> bool:
        """A match takes microseconds."""
        return True

    @property
    def empty_match_result(self) -> MatchResult:
        """A match of nothing."""
        return self._no_match

    def collect_full_device_indices(self, from_node_id: int, until_node_id: int) -> torch.Tensor:
        """The slots of a path, int64 ``(tokens,)``, without those of the node where it begins."""
        if from_node_id == until_node_id:
            return self._slots.gather(self._index.path_pages(ROOT)[:0])
        pages = self._index.path_pages(from_node_id)
        above = 0 if until_node_id == ROOT else len(self._index.path_pages(until_node_id))
        return self._slots.gather(pages[above:])

    def begin_insert(self, params: InsertParams) -> InsertStepResult:
        """Insert a key with its slots, in one step.

        Returns:
            How many of its tokens were cached before, its last node, and the slots of the former
            that the request brought twice, to be freed.
        """
        key, value = params.key.maybe_to_bigram_view(self.is_eagle, value=params.value)
        if value is None:
            value = torch.tensor(key.raw_token_ids(), dtype=torch.int64, device=self.device)
        existing, whole, node = self._slots.insert(
            key.token_ids,
            _namespace(key),
            value,
            params.priority,
            inserted=params.inserted_len,
            limit=key.limit,
        )
        twice = value[params.prev_prefix_len : existing]
        actions = [FreeDeviceKV([twice])] if twice.numel() else []
        result = InsertResult(prefix_len=existing, last_device_node=node if whole else ROOT)
        # SGLang takes a key without a page for one whose recurrent state is there.
        result.mamba_exist = not whole
        if params.track_adopted_ranges:
            result.adopted_ranges = {}
            result.record_adopted_range(_FULL, start=existing, end=whole)
        return InsertStepResult(actions=actions, result=result)

    def resume_insert(self) -> InsertStepResult:
        """Never: an insertion has one step."""
        raise RuntimeError("no in-flight insert")

    def has_ongoing_insert(self) -> bool:
        """Never."""
        return False

    def end_insert(self) -> list[Any]:
        """Nothing is left to do."""
        return []

    def evict_device_start(self, component_type: ComponentType, request_cnt: int) -> None:
        """Begin an eviction of at least so many tokens."""
        self._evicted_at = request_cnt

    def evict_device_next_node(
        self, component_type: ComponentType, tracker: dict[ComponentType, int]
    ) -> EvictDeviceNextNodeResult:
        """Evict the next leaf by the policy, unless enough tokens are.

        Its slots are in the result, so SGLang has no leaf to evict itself.
        """
        result = EvictDeviceNextNodeResult()
        if tracker[_FULL] < self._evicted_at:
            slots = self._slots.evict(1)
            if slots.numel():
                result.made_progress = True
                result.device_frees[_FULL].append(slots)
                result.tracker[_FULL] = slots.numel()
        return result

    def evict_device_end(self, component_type: ComponentType) -> None:
        """End an eviction."""
        self._evicted_at = 0

    def drive_host_eviction(
        self, component_type: ComponentType, num_tokens: int
    ) -> DriveHostEvictionResult:
        """Nothing is in host memory."""
        return DriveHostEvictionResult()

    def inc_lock_ref(
        self, node_id: int, skip_lock_components: Sequence[ComponentType] = ()
    ) -> IncLockRefResult:
        """Lock a node and its ancestors against eviction."""
        skipped = tuple(skip_lock_components)
        pages = 0 if _FULL in skipped else self._index.lock(node_id)
        return IncLockRefResult(
            delta=pages * self.page_size, node_id=node_id, skipped_lock_components=skipped
        )

    def dec_lock_ref(
        self, node_id: int, params: DecLockRefParams, skip_swa: bool = False
    ) -> DecLockRefResult:
        """Unlock a node, by the receipt of its lock."""
        assert params.node_id == node_id, f"a lock of node {params.node_id} is not one of {node_id}"
        if _FULL not in params.skipped_lock_components:
            self._index.unlock(node_id)
        return DecLockRefResult()

    def inc_full_pin(self, node_id: int) -> None:
        """Lock a node and its ancestors."""
        self._index.lock(node_id)

    def dec_full_pin(self, node_id: int) -> None:
        """Unlock them."""
        self._index.unlock(node_id)

    def evictable_size(self) -> int:
        """Tokens of unlocked nodes."""
        return self._index.evictable_pages * self.page_size

    def protected_size(self) -> int:
        """Tokens of locked nodes."""
        return self._index.protected_pages * self.page_size

    full_evictable_size = evictable_size
    full_protected_size = protected_size

    def component_evictable_size(self, component_type: ComponentType) -> int:
        """Tokens of unlocked nodes; 0 for other components than `FULL`."""
        return self.evictable_size() if component_type == _FULL else 0

    def component_protected_size(self, component_type: ComponentType) -> int:
        """Tokens of locked nodes; 0 for other components than `FULL`."""
        return self.protected_size() if component_type == _FULL else 0

    def swa_evictable_size(self) -> int:
        """Nothing."""
        return 0

    mamba_evictable_size = swa_evictable_size
    swa_protected_size = swa_evictable_size
    mamba_protected_size = swa_evictable_size

    def total_size(self) -> tuple[int, int]:
        """All tokens, and those of other components."""
        return self._index.device_pages * self.page_size, 0

    def all_values_flatten(self) -> torch.Tensor:
        """All slots, int64."""
        return self._slots.all_slots()

    def is_backuped(self, node_id: int) -> bool:
        """Whether a node has a copy in host memory: none has."""
        return False

    def is_root(self, node_id: int) -> bool:
        """Whether a match was empty."""
        return node_id == ROOT

    def is_full_device_evicted(self, node_id: int) -> bool:
        """No: a node that is evicted is gone."""
        return False

    def root_node_handle(self, extra_key: str | None = None) -> int:
        """The handle of an empty match."""
        return ROOT

    def dfs_weight_order(self, node_ids: Sequence[int]) -> list[int]:
        """The indices of nodes in the order of SGLang's policy ``dfs-weight``."""
        self._slots.clear_view()
        for node in node_ids:
            self._slots.resolve(node)
        order: list[int] = dfs_weight_order(self._slots.root, node_ids, self._slots.resolve)
        return order

    def get_last_hash_value(self, node_id: int) -> str | None:
        """None: hashes are for storage, which is refused."""
        return None

    def get_prefix_hash_values(self, node_id: int) -> list[str]:
        """None: hashes are for storage, which is refused."""
        return []

    get_hash_values = get_prefix_hash_values

    def sanity_check(
        self,
        ongoing_write_through: list[tuple[int, int]],
        ongoing_load_back: list[tuple[int, int]],
    ) -> None:
        """Check that all pages are accounted for; requests and sessions may hold locks."""
        index = self._index
        counted = index.evictable_pages + index.protected_pages
        assert counted == index.device_pages, f"{index!r} has {index.device_pages} pages"
        cached = self.all_values_flatten().numel()
        assert cached == self.total_size()[0], f"{index!r}, and {cached} slots"

    def pretty_print(self) -> None:
        """Print the tree as JSON, and the number of tokens."""
        print(self._index.to_json())
        print(f"#tokens: {self.total_size()[0]}")

    def _match(self, key: RadixKey) -> tuple[int, int]:
        """Tokens of the longest cached prefix, and its node."""
        found = self._index.match_prefix(key.token_ids, namespace=_namespace(key), limit=key.limit)
        return len(found.pages) * self.page_size, found.node


def _namespace(key: RadixKey) -> str | None:
    """Keys of different salts or extra keys share nothing."""
    if key.cache_salt is None:
        extra: str | None = key.extra_key
        return extra
    return json.dumps([key.extra_key, key.cache_salt])


def _check(params: CacheInitParams) -> None:
    drop = "drop --radix-cache-backend pie"
    components = [component.name for component in params.tree_components or ()]
    if components != [_FULL.name] or params.component_registry_override:
        raise ValueError(f"pie_radix keeps KV of whole sequences, not of {components}; {drop}")
    if params.enable_kv_cache_events:
        raise ValueError(f"pie_radix sends no KV events; drop --kv-events-config, or {drop}")


def make_cache(context: TreeCacheBuildContext, backend: str, min_hit: int) -> BasePrefixCache:
    """SGLang's unified cache with this tree core.

    Args:
        context: SGLang's, of the cache.
        backend: The name of the tree core.
        min_hit: Of `TreeCore`.
    """
    if get_tree_core_factory(backend) is None:
        register_tree_core_backend(backend, factory=lambda params, _: TreeCore(params, min_hit))
    context.params.tree_core_backend = backend
    return create_unified_radix_cache(context)
