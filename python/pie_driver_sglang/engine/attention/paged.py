"""Paged decode attention: every row attends to the KV of its own block-table row.

Replaces the decodes of FlashInfer, FlashAttention-3 and SGLang's triton backend, whose metadata is
a list of the slots of all tokens, or a plan made on the host. Here the block table is read as it
is, and splits are planned on the device; see `kernels/attention/paged_decode.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from pie_driver_sglang.kernels.attention import (
    cluster_decode,
    paged_decode,
    single_decode,
    split_plan,
)
from pie_driver_sglang.kernels.attention.cluster_decode import ClusterDecode
from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams
from pie_driver_sglang.kernels.attention.prompt_rows import Prompts, find_prompts
from pie_driver_sglang.kernels.attention.single_decode import DecodeToken
from pie_driver_sglang.kernels.attention.split_plan import DecodeRows, Prefixes, SplitPlan, WorkPlan

if TYPE_CHECKING:
    from pie_driver_sglang.engine.block_table import BlockTable
    from pie_driver_sglang.kernels.gemm.types import Heads

_LEAST_HEADS = 1 << 14
"""Query heads of all rows of a step from which on prompts attend by a kernel of prefills."""


class AttentionLayer(NamedTuple):
    """The attention of one layer, and its KV; sizes are those of this rank."""

    layer_id: int
    """The library's number."""
    heads: int
    """Query heads."""
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    """Of the softmax."""
    logit_cap: float
    """Soft cap of scores; 0 for none."""
    window: int
    """Tokens that a row sees before its own; -1 for all."""
    keys: torch.Tensor
    """``[slots, kv_heads, head_dim]``, with heads in one piece."""
    values: torch.Tensor
    """``[slots, kv_heads, value_dim]``."""
    key_scale: float = 1.0
    """Of stored keys in FP8."""
    value_scale: float = 1.0


class PromptAttention(Protocol):
    """A library's prefill kernel over paged KV, as FlashAttention-3's ``flash_attn_with_kvcache``.

    Attends with the rows of prompts; other rows become zeros. Can be captured.
    """

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        prompts: Prompts,
        rule: AttentionParams,
        page_size: int,
    ) -> None:
        """Writes `out`, ``[rows, heads, dim]`` as `queries`.

        Args:
            queries: ``[rows, heads, dim]``.
            keys: ``[slots, kv_heads, dim]`` of the queries' dtype.
            values: The same.
            out: Written.
            prompts: The step's.
            rule: The layer's, without window and cap.
            page_size: Tokens of a page, of which `keys` have a whole number.
        """


class _Step(NamedTuple):
    """What the layers of a decode have in common."""

    rows: DecodeRows
    shares: dict[SplitPlan, WorkPlan]
    prompts: Prompts | None
    """Of a step of many rows, if another kernel attends with those of prompts."""


class PagedDecode:
    """The decode attention of all layers; prefills are another's."""

    def __init__(
        self,
        table: BlockTable,
        layers: Sequence[AttentionLayer],
        multiprocessors: int,
        attend_prompts: PromptAttention | None,
    ) -> None:
        """Plans nothing yet.

        Args:
            table: The block table.
            layers: All layers with KV.
            multiprocessors: Of the GPU.
            attend_prompts: Attends with prompts of large steps; None for no other kernel.
        """
        self._table = table
        self._layers = layers
        self._multiprocessors = multiprocessors
        self._attend_prompts = attend_prompts
        self._heads = min((layer.heads for layer in layers), default=0)
        self.shares_prefixes = any(layer.window == -1 for layer in layers)
        """Whether rows may have a shared prefix: those with a window need not see it."""
        self._step: _Step | None = None
        self._prefixes: Prefixes | None = None
        self._clustered_heads: dict[tuple[int, ...], ClusterDecode | None] = {}

    @contextlib.contextmanager
    def sharing(self, prefixes: Prefixes | None) -> Iterator[None]:
        """Within, decodes that are planned read the KV of shared prefixes once for their rows."""
        self._prefixes = prefixes
        try:
            yield
        finally:
            self._prefixes = None

    def plan(self, table_rows: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """Plans the splits of a decode on the device. Can be captured.

        Args:
            table_rows: ``[rows]`` int64: the block-table row of each.
            kv_lens: ``[rows]`` int64: KV tokens of each, its own included.
        """
        rows = DecodeRows(self._table.slots, table_rows, kv_lens, self._prefixes)
        prompts = None
        if self._by_prefill(len(kv_lens)):
            prompts, rows = find_prompts(rows, self._table.requests, self._table.page_size)
        cuts = {self._cut(layer, len(rows.kv_lens)) for layer in self._layers}
        shares = {cut: split_plan.plan_splits(rows, cut, self._multiprocessors) for cut in cuts}
        self._step = _Step(rows, shares, prompts)

    def attend(
        self, layer: AttentionLayer, queries: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attends with the rows of the planned decode to KV that is stored. Can be captured.

        Args:
            layer: The layer.
            queries: ``[rows, heads * dim]`` or ``[rows, heads, dim]``, after RoPE.
            sinks: ``[heads]``: a logit more for each head; None for none.

        Returns:
            ``[rows, heads * value_dim]``
        """
        queries = queries.reshape(-1, layer.heads, layer.head_dim)
        rule = AttentionParams(layer.scale * layer.key_scale, layer.logit_cap, sinks=sinks)
        out = queries.new_empty(len(queries), layer.heads, layer.value_dim)
        rows, shares, prompts = self._planned
        page_size = self._table.page_size
        if prompts is not None and self._attend_prompts is not None:
            # It comes first, because it makes zeros of rows between prompts.
            self._attend_prompts(queries, layer.keys, layer.values, out, prompts, rule, page_size)
        paged_decode.attend_paged(
            queries, layer.keys, layer.values, out, rows, shares[self._cut(layer, len(out))], rule,
            page_size, layer.value_scale,
        )  # fmt: skip
        return out.flatten(1)

    def attend_single(
        self,
        layer: AttentionLayer,
        qkv: torch.Tensor,
        heads: Heads,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor | None:
        """The whole attention of a decode of one row; None if the kernel cannot, or is slower.

        Args:
            layer: Of KV that is stored as it is.
            qkv: ``[1, heads]``: the product of queries, keys and values.
            heads: Of the layer.
            positions: ``[1]`` int64.
            slots: ``[1]`` int64: where its KV goes.
        """
        rows, shares, _ = self._planned
        plain = layer.window == -1 and not layer.logit_cap
        if (
            len(qkv) != 1
            or rows.prefixes is not None
            or not plain
            or not single_decode.supports_single_decode(heads)
        ):
            return None
        row = DecodeToken(rows.table, rows.table_rows, rows.kv_lens, positions, slots)
        clusters = self._clustered(heads, qkv.dtype)
        if clusters is not None:
            return clusters.attend(qkv, heads, row, layer.scale)
        tuning = single_decode.find_single_decode_config(heads)
        if tuning is None:
            return None
        return single_decode.attend_single(
            qkv, heads, row, shares[self._cut(layer, 1)].semaphores, layer.scale,
            tuning,
        )  # fmt: skip

    @property
    def _planned(self) -> _Step:
        if self._step is None:
            raise RuntimeError("a decode whose metadata was not made")
        return self._step

    def _clustered(self, heads: Heads, dtype: torch.dtype) -> ClusterDecode | None:
        """The kernel of such heads in clusters of CTAs, where it is the fastest."""
        shape = (heads.num_q_heads, *heads.k_cache.shape[1:], heads.q_norm is not None)
        if shape not in self._clustered_heads:
            self._clustered_heads[shape] = cluster_decode.make_cluster_decode(heads, dtype)
        return self._clustered_heads[shape]

    def _cut(self, layer: AttentionLayer, rows: int) -> SplitPlan:
        dim = max(layer.head_dim, layer.value_dim)
        group, itemsize = layer.heads // layer.kv_heads, layer.keys.itemsize
        # Rows of prompts read the same KV, unless another kernel has them.
        prompts = self._has_prompts(rows) and not self._by_prefill(rows)
        tuning = split_plan.split_tuning(dim, group, itemsize, rows, prompts=prompts)
        return SplitPlan(tuning, layer.kv_heads, group, layer.window)

    def _has_prompts(self, rows: int) -> bool:
        """Whether there are more rows than requests."""
        return rows > self._table.requests

    def _by_prefill(self, rows: int) -> bool:
        """Whether a prefill kernel attends with rows of prompts: it reads KV once for more rows."""
        pays = rows * self._heads >= _LEAST_HEADS
        return self._attend_prompts is not None and self._has_prompts(rows) and pays
