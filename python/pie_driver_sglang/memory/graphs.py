"""The CUDA graphs that a driver captures, for the capture and for the memory plan."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final, NamedTuple

from pie_driver_sglang.memory.batch_sizes import (
    DRAFTED_ROWS,
    adapter_prefill_batch_sizes,
    decode_batch_sizes,
    extended_batch_sizes,
    prefill_batch_sizes,
    shared_prefix_batch_sizes,
)


class GraphKind(Enum):
    """The kinds of captured graphs."""

    PLAIN = 0
    """It samples."""
    GROUPED = 1
    """It samples, and reads the KV of shared prefixes once (cascade attention)."""
    EXTENDED = 2
    """It applies penalties and biases, samples, records tokens, and writes log-probabilities."""
    LORA = 3
    """The library's layers apply LoRA adapters, and its hidden states are left to Python."""
    ADAPTERS = 4
    """Fused layers apply LoRA adapters, and it samples."""
    EXTENDED_ADAPTERS = 5
    """The same with penalties and all else of `EXTENDED`."""
    DRAFTING = 6
    """It samples, and runs a draft model."""
    EXTENDED_DRAFTING = 7
    """The same with penalties and all else of `EXTENDED`."""


LORA_KINDS: Final = (GraphKind.LORA, GraphKind.ADAPTERS, GraphKind.EXTENDED_ADAPTERS)
"""Kinds with adapters."""
DRAFTING_KINDS: Final = (GraphKind.DRAFTING, GraphKind.EXTENDED_DRAFTING)
"""Kinds with a draft model."""
STEP_KINDS: Final = (
    GraphKind.PLAIN,
    GraphKind.GROUPED,
    GraphKind.EXTENDED,
    GraphKind.ADAPTERS,
    GraphKind.EXTENDED_ADAPTERS,
    *DRAFTING_KINDS,
)
"""Kinds of the graph path, in the order of :func:`graph_specs`."""


class GraphSpec(NamedTuple):
    """A graph to capture."""

    kind: GraphKind
    rows: int
    """Its batch size in tokens."""

    def keeps_hidden(self, requests: int) -> bool:
        """Whether its hidden states are kept for the Python path.

        `requests`: those of the largest decode.
        """
        is_decode = self.kind is GraphKind.PLAIN and self.rows <= requests
        return is_decode or self.kind is GraphKind.LORA


def graph_specs(
    requests: int,
    chunk_tokens: int,
    *,
    groups: bool,
    prompts: bool,
    sparse: bool,
    adapters: bool,
    fused_adapters: bool = False,
    draft_model: bool = False,
    chosen: Sequence[int] = (),
) -> list[GraphSpec]:
    """All graphs of a driver, those of one kind together and in ascending order of rows.

    Args:
        requests: Of the largest decode: `cuda_graph_max_bs`.
        chunk_tokens: Of the largest pass.
        groups: Whether the attention backend reads shared prefixes once.
        prompts: Whether a step may have more rows than there are requests.
        sparse: Whether it is an MoE model.
        adapters: Whether the driver applies adapters in graphs.
        fused_adapters: Whether fused layers apply them.
        draft_model: Whether there is a draft model, which only some steps run.
        chosen: Sizes of the decode graphs, `cuda_graph_bs`; empty for the default ones.
    """
    decodes = decode_batch_sizes(requests, chosen)
    plain = list(decodes)
    if prompts:
        plain += prefill_batch_sizes(requests, chunk_tokens, sparse=sparse)
    bound = extended_batch_sizes(requests)
    if prompts:
        bound += adapter_prefill_batch_sizes(requests, chunk_tokens)
    return [
        *_specs(GraphKind.PLAIN, plain),
        *_specs(GraphKind.GROUPED, shared_prefix_batch_sizes(requests) if groups else ()),
        *_specs(GraphKind.EXTENDED, extended_batch_sizes(requests)),
        *_specs(GraphKind.ADAPTERS, bound if fused_adapters else ()),
        *_specs(
            GraphKind.EXTENDED_ADAPTERS, extended_batch_sizes(requests) if fused_adapters else ()
        ),
        *_specs(GraphKind.DRAFTING, _drafted(plain) if draft_model else ()),
        *_specs(
            GraphKind.EXTENDED_DRAFTING,
            _drafted(extended_batch_sizes(requests)) if draft_model else (),
        ),
        *_specs(GraphKind.LORA, _lora_batch_sizes(requests, decodes) if adapters else ()),
    ]


def prompt_specs(chunk_tokens: int, *, sparse: bool) -> list[GraphSpec]:
    """The graphs of an embedding model, whose passes are prompts only."""
    return plain_specs(prefill_batch_sizes(0, chunk_tokens, sparse=sparse))


def _drafted(rows: Iterable[int]) -> list[int]:
    return [count for count in rows if count <= DRAFTED_ROWS]


def _lora_batch_sizes(requests: int, decodes: Sequence[int]) -> list[int]:
    """Batch sizes of the graphs for LoRA: of `decodes`, because they are staged in plain graphs."""
    return sorted({decodes[bisect_left(decodes, rows)] for rows in extended_batch_sizes(requests)})


def plain_specs(rows: Iterable[int]) -> list[GraphSpec]:
    """Graphs without anything besides sampling."""
    return _specs(GraphKind.PLAIN, rows)


def _specs(kind: GraphKind, rows: Iterable[int]) -> list[GraphSpec]:
    return [GraphSpec(kind, count) for count in rows]
