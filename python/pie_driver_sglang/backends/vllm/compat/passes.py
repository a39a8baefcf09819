"""A pass of vLLM: attention metadata of our block table, and the context that its layers read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from pie_driver_sglang.backends.vllm.compat.model import KvLayer
from pie_driver_sglang.engine.backend import Extends, PassInputs
from pie_driver_sglang.engine.block_table import BlockTable


class AttentionRows(NamedTuple):
    """The rows of a pass, as attention sees them; on the device."""

    starts: torch.Tensor
    """``[requests + 1]`` int32: where the tokens of each begin."""
    kv_lens: torch.Tensor
    """``[requests]`` int32: KV of each, with this pass."""
    pages: torch.Tensor
    """``[requests, pages]`` int32: vLLM's block table."""
    most_tokens: int
    """Tokens of the request that has most."""
    most_kv: int
    """KV of the request that has most, or a bound of it."""

    @classmethod
    def of(
        cls, inputs: PassInputs, extends: Extends | None, table: BlockTable, most_kv: int
    ) -> AttentionRows:
        """Reads them off the block table. Can be captured where there are no `extends`.

        Args:
            inputs: Of the pass.
            extends: Of a prefill; None for a decode.
            table: The block table.
            most_kv: As in the result.
        """
        size, requests = table.page_size, len(inputs.seq_lens)
        columns = table.slots[:, : -(-most_kv // size) * size : size]
        starts = torch.arange(requests + 1, dtype=torch.int32, device=inputs.seq_lens.device)
        if extends is not None:
            starts[1:] = extends.seq_lens.cumsum(0)
        return cls(
            starts,
            inputs.seq_lens.int(),
            columns[inputs.req_pool_indices] // size,
            1 if extends is None else max(extends.seq_lens_cpu),
            most_kv,
        )


class MetadataPlanner:
    """The attention metadata of passes: one builder for layers of the same kind and window."""

    def __init__(
        self,
        config: VllmConfig,
        layers: Sequence[KvLayer],
        shared: dict[str, str],
        table: BlockTable,
    ) -> None:
        """Makes the builders.

        Args:
            config: The settings.
            layers: Those that keep KV.
            shared: Names of layers that read another's KV, with its name.
            table: The block table.
        """
        self.metadata: dict[str, Any] = {}
        self._table = table
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

    def plan(self, inputs: PassInputs, extends: Extends | None, most_kv: int) -> None:
        """See `PassAttention.plan`."""
        rows = AttentionRows.of(inputs, extends, self._table, most_kv)
        common = _common(rows, inputs)
        for builder, names in self._builders:
            built = builder.build(common_prefix_len=0, common_attn_metadata=common)
            self.metadata |= dict.fromkeys(names, built)


def _common(rows: AttentionRows, inputs: PassInputs) -> CommonAttentionMetadata:
    return CommonAttentionMetadata(
        query_start_loc=rows.starts,
        query_start_loc_cpu=rows.starts,
        seq_lens=rows.kv_lens,
        seq_lens_cpu_upper_bound=rows.kv_lens,
        num_reqs=len(rows.kv_lens),
        num_actual_tokens=len(inputs.out_cache_loc),
        max_query_len=rows.most_tokens,
        max_seq_len=rows.most_kv,
        block_table_tensor=rows.pages,
        slot_mapping=inputs.out_cache_loc,
        causal=True,
        positions=inputs.positions,
        is_prefilling=torch.full((len(rows.kv_lens),), rows.most_tokens > 1),
    )


def run_layers(
    model: Any, config: VllmConfig, metadata: dict[str, Any], inputs: PassInputs
) -> torch.Tensor:
    """Runs a planned pass.

    Args:
        model: The model.
        config: Its settings.
        metadata: Attention metadata by the names of layers.
        inputs: Of the pass.

    Returns:
        ``[tokens, hidden]`` after the final norm.
    """
    # Backends of vLLM store KV by this, not by the metadata.
    slots = dict.fromkeys(metadata, inputs.out_cache_loc)
    tokens = len(inputs.input_ids)
    with set_forward_context(metadata, config, num_tokens=tokens, slot_mapping=slots):
        hidden: torch.Tensor = model(input_ids=inputs.input_ids, positions=inputs.positions)
    return hidden
