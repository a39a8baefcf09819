"""Sizes of passes and steps that the driver chooses by itself."""

from __future__ import annotations

from typing import Final

CHUNK_TOKENS: Final = {"cpu": 2048, "cuda": 8192}
"""Tokens of one pass unless `chunked_prefill_size` says otherwise."""
LARGE_BYTES: Final = 90 << 30
LARGE_CHUNK_TOKENS: Final = 16384
"""The same on a GPU with that much memory: such a pass takes it longer than the host needs to
launch what a small model's pass consists of."""
MAX_SLOTS: Final = 512
"""Logit rows computed at once: 512 rows of a 152k vocabulary take 311 MB in float32."""
LONGEST_GRAPH: Final = 2304
"""Rows of the longest graph, if one decode of each request does not need more."""
DRAFT_ROOM: Final = 64
"""Tokens behind the last position that a request's drafts may occupy."""


def chunk_tokens(device_type: str, device_bytes: int, chunked_prefill_size: int | None) -> int:
    """Most tokens of one pass on `cpu` or `cuda`."""
    if chunked_prefill_size is not None and chunked_prefill_size > 0:
        return chunked_prefill_size
    if device_type == "cuda" and device_bytes >= LARGE_BYTES:
        return LARGE_CHUNK_TOKENS
    return CHUNK_TOKENS[device_type]


def ladder(most: int) -> list[int]:
    """Rows of the graphs of decodes: dense where a step is short, and `most` at the end."""
    rows = [*range(1, 9), 12, *range(16, 65, 8), *range(80, 257, 16), *range(288, 4097, 32)]
    return [*(count for count in rows if count < most), most]


def grouped_ladder(most: int) -> list[int]:
    """Rows of the graphs for steps in which rows begin with the same KV."""
    rows = (16, 32, 64, 128, 192)
    return [*(count for count in rows if count < most), min(most, 256)]


def bound_ladder(most: int) -> list[int]:
    """Rows of the graphs of decodes that bind adapters, all of them in :func:`ladder`."""
    rows = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
    return [*(count for count in rows if count < most), most]


def long_ladder(most: int, chunk_tokens: int) -> list[int]:
    """Rows of the graphs of prompts, alone or beside up to `most` decodes, within one pass."""
    rows = (8 * count * 2**octave for octave in range(7) for count in range(4, 8))
    longest = min(LONGEST_GRAPH, chunk_tokens)
    return [*(count for count in rows if most < count < longest), *([longest] * (longest > most))]


def row_pages(context_length: int, page_size: int) -> int:
    """Pages of one row of the block table."""
    return -(-(context_length + DRAFT_ROOM) // page_size)
