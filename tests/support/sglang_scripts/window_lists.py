"""KV indices of SGLang's triton backend for decodes in sliding-window layers, as JSON.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import (
    TritonAttnBackend,
    update_sliding_window_buffer,
)

from pie_driver_sglang.backends.sglang.compat.corrections import correct_decode_windows
from pie_driver_sglang.config.sglang_versions import SUPPORTED, adapter_version

WINDOW = 4
"""Tokens that a row sees, its own being one of them."""
LENGTHS = (1, 3, 4, 5, 9)
ROW = 16


def backend() -> Any:
    """As SGLang makes it, for a model with windows."""
    made = object.__new__(TritonAttnBackend)
    made.sliding_window_size = WINDOW - 1
    return made


def listed(size: int) -> list[list[int]]:
    """The tokens of each context, which number `LENGTHS`, that its next row is shown."""
    rows = len(LENGTHS)
    table = torch.arange(rows * ROW, dtype=torch.int32).view(rows, ROW)
    lens, requests = torch.tensor(LENGTHS), torch.arange(rows)
    given: tuple[Any, ...] = (table, size, lens, requests)
    if adapter_version() != SUPPORTED[0]:
        # Newer versions read the table by a translator, which has no use for a plan here.
        given = (_translator(table), None, requests, size, lens)
    indptr, indices, _, _ = update_sliding_window_buffer(
        torch.zeros(rows + 1, dtype=torch.int32), *given, rows, "cpu"
    )
    parts = indices.tensor_split(indptr[1:-1].long())
    return [(part % ROW).tolist() for part in parts]


def _translator(table: torch.Tensor) -> Any:
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    return KVIndexTranslator(
        req_to_token=table,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=1,
        device="cpu",
    )


def main() -> None:
    """Lists as SGLang does, then with corrected backends of several makes."""
    alone = backend()
    one = backend()
    both = object.__new__(HybridAttnBackend)
    both.prefill_backend = both.decode_backend = one
    for each in (alone, both):
        correct_decode_windows(SimpleNamespace(attn_backend=each))  # type: ignore[arg-type]
    print(json.dumps([listed(each.sliding_window_size) for each in (backend(), alone, one)]))


if __name__ == "__main__":
    main()
