"""SGLang's memory: KV pools, block tables and recurrent state.

The pools' classes are passed on for annotations. `dtype`, `store_dtype`, `size` and `req_to_token`
are read elsewhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

__all__ = ["HybridReqToTokenPool", "KVCache", "MHATokenToKVPool", "ReqToTokenPool"]


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
    """Whether a pool keeps keys and values by heads, in the way that the driver's kernels read."""
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


def storage(pool: KVCache) -> tuple[list[torch.Tensor], int]:
    """The tensors of a pool's layers, and its pages with the one for padding; none may be missed.

    Args:
        pool: One that :func:`has_known_pages`. A version that keeps KV in more tensors than these
            is copied in part, without an error.
    """
    pages = pool.size // pool.page_size + 1
    if isinstance(pool, MLATokenToKVPool):
        latent: MLATokenToKVPool = pool
        return list(latent.kv_buffer), pages
    heads: MHATokenToKVPool = pool
    return [*heads.k_buffer, *heads.v_buffer], pages


def stored_kv(pool: KVCache, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer: ``[slots, heads, dim]`` each."""
    keys, values = pool.get_kv_buffer(layer.layer_id)
    return keys, values


def store_kv(
    pool: KVCache, layer: RadixAttention, slots: torch.Tensor, *kv: torch.Tensor | None
) -> None:
    """Writes keys, values and, of KV that is scaled, their scales; wraps slots in `KVWriteLoc`."""
    pool.set_kv_buffer(layer, KVWriteLoc(slots, None), *kv)


def replace_block_table(runner: ModelRunner, requests: int, row_tokens: int) -> None:
    """Gives a runner a block table of the driver's size, before backends take a reference to it.

    Args:
        runner: With its pools.
        requests: Rows of the table.
        row_tokens: Slots of a row.
    """
    table = ReqToTokenPool(
        size=requests,
        max_context_len=row_tokens,
        device=runner.device,
        enable_memory_saver=False,
    )
    if isinstance(runner.req_to_token_pool, HybridReqToTokenPool):
        widen(runner.req_to_token_pool, table)
    else:
        runner.req_to_token_pool = table


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


def state_rows(table: HybridReqToTokenPool) -> torch.Tensor:
    """``[rows]`` int32: the state slot of each row of a block table; written before each pass."""
    rows: torch.Tensor = table.req_index_to_mamba_index_mapping
    return rows


def state_parts(table: HybridReqToTokenPool) -> list[torch.Tensor]:
    """The tensors of recurrent state, ``[layers, slots, ...]`` each; none may be missed."""
    pool: MambaPool = table.mamba_pool
    cache: MambaPool.State = pool.mamba_cache
    return [*cache.conv, cache.temporal]


def state_slots(table: HybridReqToTokenPool) -> int:
    """Slots of recurrent state besides the one for padding, which is slot 0."""
    pool: MambaPool = table.mamba_pool
    return int(pool.size)


def clear_states(table: HybridReqToTokenPool, slots: torch.Tensor) -> None:
    """Fills slots of recurrent state with zeros."""
    pool: MambaPool = table.mamba_pool
    pool.clear_slots(slots)


def copy_states(table: HybridReqToTokenPool, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies slots of recurrent state, within the device."""
    pool: MambaPool = table.mamba_pool
    pool.copy_from(sources, targets)
