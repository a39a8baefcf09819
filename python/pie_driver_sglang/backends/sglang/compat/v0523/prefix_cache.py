"""The interface of SGLang's tree cores: the radix tree of its unified cache, behind a registry.

All of these are passed through as they are. A version with a new abstract method cannot make the
core; one with a new field of a result gets its default.
"""

from __future__ import annotations

from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    _dfs_weight_order,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.events import KVCacheEventRecorder
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import TreeCacheBuildContext, create_unified_radix_cache
from sglang.srt.mem_cache.unified_cache.cache_action import FreeDeviceKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.tree_core_registry import (
    get_tree_core_factory,
    register_tree_core_backend,
)
from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import (
    DriveHostEvictionResult,
    EvictDeviceNextNodeResult,
    InsertStepResult,
    UnifiedTreeCoreInterface,
)

dfs_weight_order = _dfs_weight_order
"""The order of SGLang's policy ``dfs-weight``: root, node handles, and what resolves one."""

__all__ = [
    "BasePrefixCache",
    "CacheInitParams",
    "ComponentType",
    "DecLockRefParams",
    "DecLockRefResult",
    "DriveHostEvictionResult",
    "EvictDeviceNextNodeResult",
    "FreeDeviceKV",
    "IncLockRefResult",
    "InsertParams",
    "InsertResult",
    "InsertStepResult",
    "KVCacheEventRecorder",
    "MatchPrefixParams",
    "MatchResult",
    "RadixKey",
    "TreeCacheBuildContext",
    "UnifiedTreeCoreInterface",
    "create_unified_radix_cache",
    "dfs_weight_order",
    "get_tree_core_factory",
    "register_tree_core_backend",
]
