"""SGLang's own KV pools under the driver's copies, in a process that has SGLang."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

import drivers

PAGE_SIZES = (1, 16)
PAGES = 12


def copy_in_pools(connection: Connection, stderr: str) -> None:
    """Copies pages through the host in pools of every kind.

    Sends for each pool its name and what every page holds afterwards, as the number of the page
    that it was copied from; -1 where its layers, keys or values disagree.
    """
    from pie_driver_sglang.sglang.pool import PagePools, page_buffers

    drivers.redirect_output(stderr)
    results: list[tuple[str, list[int]]] = []
    for name, pool in _pools():
        _number(pool)
        pools = PagePools(page_buffers(pool), 4, staging_bytes=1)
        pools.copy("D2H", [2, 5, 0], [3, 0, 1])
        pools.copy("H2D", [1, 3], [11, 7])
        pools.copy("D2D", [9], [10])
        results.append((name, _numbers(pool)))
    with connection:
        connection.send(results)


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
