"""Batch sizes of forward passes and of captured CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pie_driver_sglang.config.options import PAGED_DECODE

CHUNK_TOKENS: Final = {"cpu": 2048, "cuda": 8192}
"""Default `chunked_prefill_size`."""
LARGE_BYTES: Final = 90 << 30
LARGE_CHUNK_TOKENS: Final = 16384
"""The default on a GPU with at least `LARGE_BYTES`: even with a small model, such a pass takes
longer than launching its kernels."""
MAX_SLOTS: Final = 512
"""Maximum rows of logits: 512 of a 152k vocabulary take 311 MB in float32."""
LONGEST_GRAPH: Final = 2304
"""Tokens of the largest graph, unless a full decode batch needs more."""
LONGEST_SPARSE_GRAPH: Final = 4096
"""The same for MoE models, whose longer passes are still launch-bound (benches/notebook/gpu.md)."""
SPARSE_STEP: Final = 256
"""Step between the longest graphs."""
DRAFT_ROOM: Final = 64
"""Tokens beyond the context length for drafts."""
DRAFTED_ROWS: Final = 128
"""Rows of the largest graph in which an EAGLE head drafts: larger batches are compute-bound."""

GRAPH_BACKENDS: Final = frozenset({"triton", PAGED_DECODE})
"""Attention backends whose decodes can be captured: they compute metadata on the device."""


def chunk_tokens(device_type: str, device_bytes: int, chunked_prefill_size: int | None) -> int:
    """Maximum tokens of a forward pass on `cpu` or `cuda`."""
    if chunked_prefill_size is not None and chunked_prefill_size > 0:
        return chunked_prefill_size
    if device_type == "cuda" and device_bytes >= LARGE_BYTES:
        return LARGE_CHUNK_TOKENS
    return CHUNK_TOKENS[device_type]


def decode_batch_sizes(most: int, chosen: Sequence[int] = ()) -> list[int]:
    """Batch sizes of the decode graphs, up to `most`; dense where a step is short.

    `chosen`: those of the user, `cuda_graph_bs` or `cuda_graph_bs_decode`, instead of the default
    ones.
    """
    rows = sorted(set(chosen)) or [
        *range(1, 9),
        12,
        *range(16, 65, 8),
        *range(80, 257, 16),
        *range(288, 4097, 32),
    ]
    return [*(count for count in rows if count < most), most]


def shared_prefix_batch_sizes(most: int) -> list[int]:
    """Batch sizes of the shared-prefix decode graphs, up to `most` and 256."""
    rows = (16, 32, 64, 128, 192)
    return [*(count for count in rows if count < most), min(most, 256)]


def extended_batch_sizes(most: int) -> list[int]:
    """Batch sizes of the graphs for extended steps, up to `most`."""
    rows = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
    return [*(count for count in rows if count < most), most]


def prefill_batch_sizes(most: int, chunk_tokens: int, *, sparse: bool) -> list[int]:
    """Tokens of the prefill graphs, more than `most` and within one pass.

    `sparse`: whether it is an MoE model.
    """
    rows = [8 * count * 2**octave for octave in range(6) for count in range(4, 8)]
    rows += range(2048, LONGEST_SPARSE_GRAPH, SPARSE_STEP)
    longest = min(LONGEST_SPARSE_GRAPH if sparse else LONGEST_GRAPH, chunk_tokens)
    return [*(count for count in rows if most < count < longest), *([longest] * (longest > most))]


def adapter_prefill_batch_sizes(most: int, chunk_tokens: int) -> list[int]:
    """Tokens of the prefill graphs with LoRA, more than `most` and within one pass."""
    rows = (256, 384, 512, 768, 1024, 1536, 2048)
    return [count for count in rows if most < count <= chunk_tokens]


def scratch_pages(num_drafts: int, page_size: int) -> int:
    """Pages for the KV of an EAGLE head's drafts that lies beyond the pages of their contexts."""
    return DRAFTED_ROWS * -(-num_drafts // page_size)


def row_pages(context_length: int, page_size: int) -> int:
    """Pages per row of the block table."""
    return -(-(context_length + DRAFT_ROOM) // page_size)
