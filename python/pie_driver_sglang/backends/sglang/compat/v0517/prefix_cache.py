"""The interface of SGLang's prefix caches, whose scheduler calls one of the driver's by it.

All of these are passed through as they are. A version with a new abstract method cannot make the
cache; one with a new field of a result gets its default.
"""

from __future__ import annotations

from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
)
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams

__all__ = [
    "AllBlocksCleared",
    "BasePrefixCache",
    "BlockRemoved",
    "BlockStored",
    "CacheInitParams",
    "DecLockRefParams",
    "DecLockRefResult",
    "EvictParams",
    "EvictResult",
    "IncLockRefResult",
    "InsertParams",
    "InsertResult",
    "MatchPrefixParams",
    "MatchResult",
    "StorageMedium",
]
