"""SGLang's memory: KV pools, block tables and recurrent state.

The pools' classes are passed on for annotations. `dtype` and `store_dtype` are read
elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from sglang.srt.mem_cache.memory_pool import (
    HybridLinearKVPool,
    HybridReqToTokenPool,
    KVCache,
    KVWriteLoc,
    MambaPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)

from pie_driver_sglang.backends.sglang.compat import selection

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

    from pie_driver_sglang.engine.block_table import BlockTable

__all__ = ["KVCache", "MHATokenToKVPool"]

POSITIONAL: Final = {
    "sglang.srt.mem_cache.memory_pool.KVCache.set_kv_buffer": (
        "self",
        "layer",
        "loc",
        "cache_k",
        "cache_v",
    ),
}
"""Parameters that are passed by position, as pools name them differently."""


def paged(pool: KVCache) -> KVCache:
    """The part of a pool that consists of pages: all of it, unless some layers are recurrent."""
    if not keeps_state(pool):
        return pool
    hybrid: HybridLinearKVPool = pool
    return hybrid.full_kv_pool


def keeps_state(pool: KVCache) -> bool:
    """Whether some layers of a pool's model are recurrent."""
    return isinstance(pool, HybridLinearKVPool)


def keeps_heads(pool: KVCache) -> bool:
    """Whether a pool keeps keys and values by heads, in the layout that our kernels read."""
    return type(pool) is MHATokenToKVPool


def has_known_pages(pool: KVCache) -> bool:
    """Whether the planner's one space of slots describes a pool's pages; a new kind must be read.

    Args:
        pool: As :func:`paged` gives it.
    """
    return type(pool) in (MHATokenToKVPool, MLATokenToKVPool)


def lies_by_token(pool: MHATokenToKVPool) -> bool:
    """Whether the keys of a token lie in one piece, as kernels read them: not by heads."""
    return bool(pool.get_key_buffer(pool.start_layer).dim() == 3)


def kv_pages(pool: KVCache) -> list[torch.Tensor]:
    """The tensors of a pool's layers as ``[pages + 1, numbers]``; none may be missed.

    Args:
        pool: One that :func:`has_known_pages`. A version that keeps KV in more tensors than these
            is copied in part, without an error.
    """
    pages = pool.size // pool.page_size + 1
    if isinstance(pool, MLATokenToKVPool):
        latent: MLATokenToKVPool = pool
        return [buffer.view(pages, -1) for buffer in latent.kv_buffer]
    heads: MHATokenToKVPool = pool
    slots = pages * pool.page_size
    # The layer of an EAGLE head has more.
    return [buffer[:slots].view(pages, -1) for buffer in (*heads.k_buffer, *heads.v_buffer)]


def stored_kv(pool: KVCache, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer: ``[slots, heads, dim]`` each."""
    keys, values = pool.get_kv_buffer(layer.layer_id)
    return keys, values


def store_kv(
    pool: KVCache, layer: RadixAttention, slots: torch.Tensor, *kv: torch.Tensor | None
) -> None:
    """Writes keys, values and, of KV that is scaled, their scales; wraps slots in `KVWriteLoc`."""
    pool.set_kv_buffer(layer, KVWriteLoc(slots), *kv)


def replace_block_table(runner: ModelRunner, table: BlockTable) -> None:
    """Gives a runner the core's block table, before backends take a reference to it."""
    # Its own tensor is replaced: one of a token a row is small.
    pool = ReqToTokenPool(
        size=table.requests, max_context_len=1, device=runner.device, enable_memory_saver=False
    )
    pool.max_context_len = table.slots.shape[1]
    pool.req_to_token = table.slots
    if isinstance(runner.req_to_token_pool, HybridReqToTokenPool):
        widen(runner.req_to_token_pool, pool)
    else:
        runner.req_to_token_pool = pool
    selection.passes().read_block_table(runner)


def widen(table: HybridReqToTokenPool, plain: ReqToTokenPool) -> None:
    """Gives a hybrid model's block table the rows of another one, and keeps its states.

    Every field of a table that has a row for each request must be among these.
    """
    table.size = plain.size
    table._alloc_size = plain._alloc_size
    table.max_context_len = plain.max_context_len
    table.req_to_token = plain.req_to_token
    table.free_slots = plain.free_slots
    table.req_generation = plain.req_generation
    rows = plain.req_to_token.shape[0]
    table.req_index_to_mamba_index_mapping = torch.zeros(
        rows, dtype=torch.int32, device=plain.req_to_token.device
    )


class RecurrentState:
    """Implements `StateBackend` by the state pool of a hybrid model's block table."""

    def __init__(self, table: HybridReqToTokenPool) -> None:
        self._pool: MambaPool = table.mamba_pool
        self.slots = int(self._pool.size)
        self.rows: torch.Tensor = table.req_index_to_mamba_index_mapping

    @staticmethod
    def of(table: ReqToTokenPool) -> RecurrentState | None:
        """That of a block table; None for a model without recurrent layers."""
        return RecurrentState(table) if isinstance(table, HybridReqToTokenPool) else None

    @property
    def parts(self) -> list[torch.Tensor]:
        """The tensors of recurrent state, ``[layers, slots, ...]`` each; none may be missed."""
        cache: MambaPool.State = self._pool.mamba_cache
        return [*cache.conv, cache.temporal]

    def clear(self, slots: torch.Tensor) -> None:
        """Fills slots with zeros."""
        self._pool.clear_slots(slots)

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies slots, within the device."""
        self._pool.copy_from(sources, dst_indices=targets)
