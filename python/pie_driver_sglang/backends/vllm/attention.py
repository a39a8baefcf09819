"""Attention over our pages on a GPU: decodes by `PagedDecode`, prefills by a kernel of vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from pie_driver_sglang.backends.vllm.compat import attention as compat
from pie_driver_sglang.backends.vllm.compat.passes import AttentionRows
from pie_driver_sglang.engine.attention.paged import AttentionLayer, PagedDecode
from pie_driver_sglang.engine.backend import Extends, PassInputs
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams
from pie_driver_sglang.kernels.attention.prompt_rows import Prompts


class PagedPrefill(Protocol):
    """A kernel of causal attention to paged KV in which a pass's own tokens are stored already."""

    def __call__(
        self,
        queries: torch.Tensor,
        key_pages: torch.Tensor,
        value_pages: torch.Tensor,
        out: torch.Tensor,
        *,
        starts: torch.Tensor,
        kv_lens: torch.Tensor,
        pages: torch.Tensor,
        most_tokens: int,
        most_kv: int,
        scale: float,
        window: int,
        cap: float,
        sinks: torch.Tensor | None,
        splits: int,
    ) -> None:
        """Attends.

        Args:
            queries: ``[tokens, heads, dim]``.
            key_pages: ``[pages, page_size, kv_heads, dim]``.
            value_pages: ``[pages, page_size, kv_heads, value_dim]``.
            out: ``[tokens, heads, value_dim]``; written.
            starts: ``[requests + 1]`` int32: where the tokens of each begin.
            kv_lens: ``[requests]`` int32: KV of each, with this pass.
            pages: ``[requests, pages]`` int32.
            most_tokens: Tokens of the request that has most, or a bound of them.
            most_kv: The same of KV.
            scale: Of the softmax.
            window: Tokens that a row sees before its own; -1 for all.
            cap: Soft cap of scores; 0 for none.
            sinks: ``[heads]``: a logit more for each head; None for none.
            splits: Parts of the KV of a row; 0 for as many as the kernel chooses by `most_kv`.
        """


class PassAttention(Protocol):
    """The attention of a model's layers. One pass at a time."""

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the planned pass, what vLLM hands to layers, by their names."""

    def plan(self, inputs: PassInputs, extends: Extends | None, most_kv: int) -> None:
        """Plans a pass. Can be captured on a GPU where there are no `extends`.

        Args:
            inputs: Of the pass.
            extends: Of a prefill; None for a decode.
            most_kv: KV of the request that has most, or a bound of it.
        """


class PagedLayer(NamedTuple):
    """A layer with its KV as kernels of vLLM take it."""

    attention: AttentionLayer
    key_pages: torch.Tensor
    """``[pages, page_size, kv_heads, dim]``."""
    value_pages: torch.Tensor
    """``[pages, page_size, kv_heads, value_dim]``."""
    sinks: torch.Tensor | None
    """``[heads]``."""
    shares: bool
    """Whether its KV is another layer's, which stores it."""


class PagedAttention:
    """Implements `PassAttention`; is itself the metadata, a `LayerAttention`."""

    def __init__(
        self,
        layers: Mapping[str, PagedLayer],
        table: BlockTable,
        prefill: PagedPrefill,
        decode: PagedDecode | None,
    ) -> None:
        """Plans nothing yet.

        Args:
            layers: By the names that vLLM calls them by.
            table: The block table.
            prefill: Attends with prefills.
            decode: Attends with decodes; None to have `prefill` do that, too.
        """
        self.decode = decode
        self.metadata: dict[str, Any] = dict.fromkeys(layers, self)
        self._layers = layers
        self._by_number = {layer.attention.layer_id: layer for layer in layers.values()}
        self._table = table
        self._prefill = prefill
        self._one = torch.ones((), device=table.slots.device)
        self._slots: torch.Tensor | None = None
        self._rows: AttentionRows | None = None

    @property
    def layers(self) -> dict[str, AttentionLayer]:
        """Rule and KV of each layer, by name."""
        return {name: layer.attention for name, layer in self._layers.items()}

    def plan(self, inputs: PassInputs, extends: Extends | None, most_kv: int) -> None:
        """See `PassAttention.plan`."""
        self._slots = inputs.out_cache_loc
        if extends is None and self.decode is not None:
            self._rows = None
            self.decode.plan(inputs.req_pool_indices, inputs.seq_lens)
        else:
            self._rows = AttentionRows.of(inputs, extends, self._table, most_kv)

    def attend(
        self,
        name: str,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `LayerAttention.attend`."""
        layer = self._layers[name]
        if not layer.shares:
            slots = self._slots
            assert slots is not None
            compat.store_pages(keys, values, layer.key_pages, layer.value_pages, slots, self._one)
        self.attend_stored(layer, queries, out)

    def attend_stored(self, layer: PagedLayer, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Attends with the rows of the planned pass to KV that is stored already.

        Args:
            layer: The layer.
            queries: ``[tokens, heads, dim]``, after RoPE.
            out: ``[tokens, heads, value_dim]``; written.
        """
        own, rows = layer.attention, self._rows
        if rows is None:
            assert self.decode is not None
            out.copy_(self.decode.attend(own, queries, layer.sinks).view_as(out))
            return
        self._prefill(
            queries, layer.key_pages, layer.value_pages, out, starts=rows.starts,
            kv_lens=rows.kv_lens, pages=rows.pages, most_tokens=rows.most_tokens,
            most_kv=rows.most_kv, scale=own.scale, window=own.window, cap=own.logit_cap,
            sinks=layer.sinks, splits=0,
        )  # fmt: skip

    def attend_prefill(self, number: int, queries: torch.Tensor) -> torch.Tensor:
        """`Decoder.attend`: ``[tokens, heads * dim]`` -> ``[tokens, heads * value_dim]``."""
        layer = self._by_number[number]
        own = layer.attention
        out = queries.new_empty(len(queries), own.heads, own.value_dim)
        self.attend_stored(layer, queries.view(-1, own.heads, own.head_dim), out)
        return out.flatten(1)


def prompts_by_fa3(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    prompts: Prompts,
    rule: AttentionParams,
    page_size: int,
) -> None:
    """`PromptAttention` by vLLM's FlashAttention 3."""
    key_pages, value_pages = (x.view(-1, page_size, *x.shape[1:]) for x in (keys, values))
    compat.attend_by_fa3(
        queries, key_pages, value_pages, out, starts=prompts.starts, kv_lens=prompts.kv_lens,
        pages=prompts.pages, most_tokens=len(queries),
        most_kv=prompts.pages.shape[1] * page_size, scale=rule.scale, window=-1, cap=0.0,
        sinks=rule.sinks,
        # How many are best is computed on the host, from lengths that it does not know here.
        splits=1,
    )  # fmt: skip
