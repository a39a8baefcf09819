"""Sizes of passes and CUDA graphs that the driver chooses."""

from __future__ import annotations

from typing import Final

from pie_driver_sglang.config.options import PAGED_DECODE

CHUNK_TOKENS: Final = {"cpu": 2048, "cuda": 8192}
"""Most tokens of one pass, unless `chunked_prefill_size` is set."""
LARGE_BYTES: Final = 90 << 30
LARGE_CHUNK_TOKENS: Final = 16384
"""The same on a GPU with at least `LARGE_BYTES`: even in a small model, such a pass takes the GPU
longer than the host needs to launch its kernels."""
MAX_SLOTS: Final = 512
"""Logit rows computed at once: 512 rows of a 152k vocabulary take 311 MB in float32."""
LONGEST_GRAPH: Final = 2304
"""Rows of the largest graph, unless one decode of each request needs more."""
LONGEST_SPARSE_GRAPH: Final = 4096
"""The same for a mixture of experts: its longer passes still end before the host has launched their
kernels (benches/notebook/gpu.md)."""
SPARSE_STEP: Final = 256
"""Rows between the longest graphs."""
DRAFT_ROOM: Final = 64
"""Tokens after the last position that a request's drafts may occupy."""

GRAPH_BACKENDS: Final = frozenset({"triton", PAGED_DECODE})
"""Attention backends whose decodes can be captured: their metadata is made on the device alone."""


def chunk_tokens(device_type: str, device_bytes: int, chunked_prefill_size: int | None) -> int:
    """Most tokens of one pass on `cpu` or `cuda`."""
    if chunked_prefill_size is not None and chunked_prefill_size > 0:
        return chunked_prefill_size
    if device_type == "cuda" and device_bytes >= LARGE_BYTES:
        return LARGE_CHUNK_TOKENS
    return CHUNK_TOKENS[device_type]


def decode_batch_sizes(most: int) -> list[int]:
    """Rows of the decode graphs, up to `most`: dense where a step is short."""
    rows = [*range(1, 9), 12, *range(16, 65, 8), *range(80, 257, 16), *range(288, 4097, 32)]
    return [*(count for count in rows if count < most), most]


def shared_prefix_batch_sizes(most: int) -> list[int]:
    """Rows of the graphs for decodes that read shared prefixes once, up to `most` and 256."""
    rows = (16, 32, 64, 128, 192)
    return [*(count for count in rows if count < most), min(most, 256)]


def extended_batch_sizes(most: int) -> list[int]:
    """Rows of the graphs for extended steps and for LoRA, up to `most`."""
    rows = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
    return [*(count for count in rows if count < most), most]


def prefill_batch_sizes(most: int, chunk_tokens: int, *, sparse: bool) -> list[int]:
    """Rows of the graphs that hold prompts, more than `most` and within one pass.

    `sparse` is whether the model is a mixture of experts.
    """
    rows = [8 * count * 2**octave for octave in range(6) for count in range(4, 8)]
    rows += range(2048, LONGEST_SPARSE_GRAPH, SPARSE_STEP)
    longest = min(LONGEST_SPARSE_GRAPH if sparse else LONGEST_GRAPH, chunk_tokens)
    return [*(count for count in rows if most < count < longest), *([longest] * (longest > most))]


def row_pages(context_length: int, page_size: int) -> int:
    """Pages of one row of the block table."""
    return -(-(context_length + DRAFT_ROOM) // page_size)
