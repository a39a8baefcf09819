"""A pass of vLLM: attention metadata of our block table, and the context that its layers read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from pie_driver_sglang.backends.vllm.compat.model import KvLayer


class AttentionRows(NamedTuple):
    """The rows of a pass, as attention sees them; on the device."""

    starts: torch.Tensor
    """``[requests + 1]`` int32: where the tokens of each begin."""
    seq_lens: torch.Tensor
    """``[requests]`` int32: KV of each, with this pass."""
    pages: torch.Tensor
    """``[requests, pages]`` int32: vLLM's block table."""
    slots: torch.Tensor
    """``[tokens]`` int64: where their KV is stored."""
    positions: torch.Tensor
    """``[tokens]`` int64."""
    most_tokens: int
    """Tokens of the request that has most."""
    most_kv: int
    """KV of the request that has most."""


class MetadataPlanner:
    """The attention metadata of passes: one builder for layers of the same kind and window."""

    def __init__(self, config: VllmConfig, layers: Sequence[KvLayer], shared: dict[str, str]):
        """Makes the builders.

        Args:
            config: The settings.
            layers: Those that keep KV.
            shared: Names of layers that read another's KV, with its name.
        """
        self._config = config
        groups: dict[Any, list[str]] = {}
        for layer in layers:
            names = groups.setdefault((layer.backend, layer.spec), [])
            names += [layer.name, *(name for name, of in shared.items() if of == layer.name)]
        device = torch.device("cpu")
        with set_current_vllm_config(config):
            self._builders = [
                (backend.get_builder_cls()(spec, names, config, device), names)
                for (backend, spec), names in groups.items()
            ]

    def attending(self, rows: AttentionRows) -> AbstractContextManager[None]:
        """Within it the model may run these rows."""
        common = _common(rows)
        metadata: dict[str, Any] = {}
        for builder, names in self._builders:
            built = builder.build(common_prefix_len=0, common_attn_metadata=common)
            metadata |= dict.fromkeys(names, built)
        # KV is stored by this, not by the metadata.
        slots = dict.fromkeys(metadata, rows.slots)
        context: AbstractContextManager[None] = set_forward_context(
            metadata, self._config, num_tokens=len(rows.slots), slot_mapping=slots
        )
        return context


def _common(rows: AttentionRows) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=rows.starts,
        query_start_loc_cpu=rows.starts,
        seq_lens=rows.seq_lens,
        seq_lens_cpu_upper_bound=rows.seq_lens,
        num_reqs=len(rows.seq_lens),
        num_actual_tokens=len(rows.slots),
        max_query_len=rows.most_tokens,
        max_seq_len=rows.most_kv,
        block_table_tensor=rows.pages,
        slot_mapping=rows.slots,
        causal=True,
        positions=rows.positions,
        is_prefilling=torch.full((len(rows.seq_lens),), rows.most_tokens > 1),
    )


def run_layers(model: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``[tokens, hidden]`` after the final norm, within :meth:`MetadataPlanner.attending`."""
    hidden: torch.Tensor = model(input_ids=input_ids, positions=positions)
    return hidden
