"""The driver's copies in SGLang's own KV pools."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from support.process import drivers

PAGE_SIZES = (1, 16)
PAGES = 12


def copy_in_pools(connection: Connection, stderr: str) -> None:
    """Copies pages through the host in pools of every kind.

    Sends for each pool its name and what every page holds afterwards, as the number of the page
    that it was copied from; -1 where its layers, keys or values disagree.
    """
    from pie_driver_sglang.backends.sglang.compat.pools import kv_pages
    from pie_driver_sglang.engine.page_pools import PagePools, page_buffers

    drivers.redirect_output(stderr)
    results: list[tuple[str, list[int]]] = []
    for name, pool in _pools():
        _number(pool)
        pools = PagePools(page_buffers(kv_pages(pool)), 4, staging_bytes=1)
        pools.copy("D2H", [2, 5, 0], [3, 0, 1])
        pools.copy("H2D", [1, 3], [11, 7])
        pools.copy("D2D", [9], [10])
        results.append((name, _numbers(pool)))
    with connection:
        connection.send(results)


def states_in_pool(connection: Connection, stderr: str) -> None:
    """Assigns, clears and copies recurrent state in SGLang's pool of three slots.

    Sends the bytes of a slot, the slot of each block-table row, and what every slot of the pool
    holds, as the number of the slot that it was copied from; -1 where its layers disagree.
    """
    import numpy as np
    import torch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from pie_driver_sglang.backends.sglang.compat.pools import RecurrentState, widen
    from pie_driver_sglang.engine.state_pool import StatePool

    drivers.redirect_output(stderr)
    plain = ReqToTokenPool(size=5, max_context_len=8, device="cpu", enable_memory_saver=False)
    table = _hybrid_table()
    widen(table, plain)
    assert table.req_to_token is plain.req_to_token
    state = RecurrentState.of(table)
    assert state is not None
    assert RecurrentState.of(plain) is None
    states = StatePool(state)
    cache = table.mamba_pool.mamba_cache
    parts = [*cache.conv, cache.temporal]
    for part in parts:
        numbers = torch.arange(1.0, part.shape[1] + 1).view(1, -1, *[1] * (part.dim() - 2))
        part.copy_(numbers.expand(part.shape))
    passed = np.array([[3, 0], [1, 1], [0, 0]], dtype=np.int64)
    states.assign(torch.tensor([5, 1, 2]), bytearray(passed.tobytes()))
    states.copy([2], [1])
    whole = torch.cat([part.movedim(1, 0).reshape(part.shape[1], -1) for part in parts], dim=1)
    same = (whole == whole[:, :1]).all(dim=1)
    slots = torch.where(same, whole[:, 0] - 1, -2.0).int().tolist()
    rows = table.req_index_to_mamba_index_mapping.tolist()
    with connection:
        connection.send((states.slots, states.slot_bytes, rows, slots))


def _hybrid_table() -> Any:
    import torch
    from sglang.srt.configs.mamba_utils import (
        Mamba2CacheParams,
        Mamba2StateDType,
        Mamba2StateShape,
    )
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=16,
        n_groups=1,
        num_heads=2,
        head_dim=8,
        state_size=4,
        conv_kernel=4,
    )
    dtype = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    return HybridReqToTokenPool(
        size=2,
        mamba_size=3,
        mamba_spec_state_size=0,
        max_context_len=4,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, dtype=dtype, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
    )


def _pools() -> list[tuple[str, Any]]:
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    pools: list[tuple[str, Any]] = []
    for page_size in PAGE_SIZES:
        common = {
            "size": PAGES * page_size,
            "page_size": page_size,
            "layer_num": 3,
            "device": "cpu",
            "enable_memory_saver": False,
        }
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            heads = {"head_num": 2, "head_dim": 8, "v_head_dim": 4}
            pools.append(
                (f"MHA {page_size} {dtype}", MHATokenToKVPool(dtype=dtype, **heads, **common))
            )
        ranks = {"kv_lora_rank": 5, "qk_rope_head_dim": 2}
        mla = MLATokenToKVPool(dtype=torch.bfloat16, **ranks, **common)
        pools.append((f"MLA {page_size}", mla))
    return pools


def _buffers(pool: Any) -> list[Any]:
    if hasattr(pool, "kv_buffer"):
        return [pool.get_key_buffer(layer) for layer in range(pool.layer_num)]
    both = (pool.get_key_buffer, pool.get_value_buffer)
    return [get(layer) for layer in range(pool.layer_num) for get in both]


def _number(pool: Any) -> None:
    """Every token of the runtime's page p holds p, as a small number of the pool's type."""
    import torch

    for buffer in _buffers(pool):
        pages = torch.arange(-1, PAGES).repeat_interleave(pool.page_size)
        buffer.copy_(pages.view(-1, 1, 1).expand(buffer.shape).float())


def _numbers(pool: Any) -> list[int]:
    import torch

    flat = [buffer.float().reshape(PAGES + 1, -1) for buffer in _buffers(pool)]
    whole = torch.cat(flat, dim=1)
    same = (whole == whole[:, :1]).all(dim=1)
    return torch.where(same, whole[:, 0], -1.0).int().tolist()[1:]
