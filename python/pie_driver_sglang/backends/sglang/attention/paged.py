"""The attention backend `pie`: decodes that read whole pages, for graphs and for eager batches.

Every row of a decode attends to the KV of its own block-table row. What SGLang's backends prepare
for each step, a list of the slots of all tokens, is not needed; see
`kernels/attention/paged_decode.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from pie_driver_sglang.backends.sglang import support
from pie_driver_sglang.backends.sglang.compat.attention import (
    AttentionBackend,
    attend_prompts,
    attention_layers,
    register_backend,
)
from pie_driver_sglang.backends.sglang.compat.model import resolved
from pie_driver_sglang.backends.sglang.compat.pools import paged, store_kv, stored_kv
from pie_driver_sglang.backends.sglang.compat.settings import change_settings, publish_settings
from pie_driver_sglang.config.options import PAGED_DECODE
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
    from pie_driver_sglang.backends.sglang.compat.attention import RadixAttention
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch
    from pie_driver_sglang.kernels.gemm.types import Heads

_LEAST_HEADS = 1 << 14
"""Query heads of all rows of a step from which on prompts attend by a kernel of prefills."""


def install(runner: ModelRunner, prefill: str | None = None) -> None:
    """Has a loaded model decode with this backend; to be called before it gets its backends.

    Prefills are computed by the backend `prefill`, or by the one that the settings name. SGLang
    checks its settings against lists of its own backends, so they learn of this one only now.
    Whether the kernel knows the model's attention is `support.paged_decode_refusal`.
    """
    register_backend(PAGED_DECODE, PagedDecode)
    args = runner.server_args
    named, _ = resolved(runner).attention_backends
    change_settings(
        args,
        prefill_attention_backend=prefill or named,
        decode_attention_backend=PAGED_DECODE,
    )
    publish_settings(args)


class _Step(NamedTuple):
    """What the layers of a decode have in common."""

    rows: DecodeRows
    shares: dict[SplitPlan, WorkPlan]
    prompts: Prompts | None
    """Of a step of many rows, if another kernel attends with those of prompts."""


class PagedDecode(AttentionBackend):
    """SGLang's attention backend of decodes; prefills are another's."""

    # Lengths are read on the device only.
    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        # SGLang looks for the pools here.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._page_size = resolved(runner).page_size
        self._itemsize = paged(runner.token_to_kv_pool).dtype.itemsize
        self._layers = attention_layers(runner)
        properties = torch.cuda.get_device_properties(runner.gpu_id)
        self._multiprocessors = properties.multi_processor_count
        named, _ = resolved(runner).attention_backends
        self._has_fa3 = named == "fa3" and support.prefills_by_fa3(runner)
        self._heads = min((layer.tp_q_head_num for layer in self._layers), default=0)
        # Rows with a window need not see what they have in common.
        self.knows_groups = any(layer.sliding_window_size in (None, -1) for layer in self._layers)
        self._step: _Step | None = None
        self._prefixes: Prefixes | None = None
        self._clustered_heads: dict[tuple[int, ...], ClusterDecode | None] = {}

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: a graph's memory comes from its pool."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """KV length of padding."""
        return 1

    @contextlib.contextmanager
    def sharing(self, prefixes: Prefixes | None) -> Iterator[None]:
        """Within, the rows of decodes whose metadata is made begin with the same KV in groups."""
        self._prefixes = prefixes
        try:
            yield
        finally:
            self._prefixes = None

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Plans the splits of a decode on the device; eager batches come here, too."""
        rows = DecodeRows(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            self._prefixes,
        )
        prompts = None
        if self._by_fa3(len(rows.kv_lens)):
            prompts, rows = find_prompts(rows, self.req_to_token_pool.size, self._page_size)
        cuts = {self._cut(layer, len(rows.kv_lens)) for layer in self._layers}
        shares = {cut: split_plan.plan_splits(rows, cut, self._multiprocessors) for cut in cuts}
        self._step = _Step(rows, shares, prompts)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the new KV, then attends: ``[rows, heads * dim]`` as SGLang hands them over."""
        if self._step is None:
            raise RuntimeError("a decode whose metadata was not made")
        scales: tuple[torch.Tensor, ...] = ()
        floats = (1.0, 1.0)
        keys, values = stored_kv(self.token_to_kv_pool, layer)
        # A checkpoint's scales are for KV in FP8: other KV is stored as it is.
        if keys.dtype.itemsize == 1 and layer.k_scale is not None and layer.v_scale is not None:
            scales = (layer.k_scale, layer.v_scale)
            floats = (layer.k_scale_float, layer.v_scale_float)
        if save_kv_cache and k is not None and v is not None:
            store_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v, *scales)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        rule = AttentionParams(layer.scaling * floats[0], layer.logit_cap or 0.0, sinks=sinks)
        out = queries.new_empty(len(queries), layer.tp_q_head_num, layer.v_head_dim)
        rows, shares, prompts = self._step
        if prompts is not None:
            # It comes first, because it makes zeros of rows between prompts.
            attend_prompts(queries, keys, values, out, prompts, rule, self._page_size)
        paged_decode.attend_paged(
            queries, keys, values, out, rows, shares[self._cut(layer, len(out))], rule,
            self._page_size, floats[1],
        )  # fmt: skip
        return out.flatten(1)

    def attend_single(
        self,
        qkv: torch.Tensor,
        heads: Heads,
        positions: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor | None:
        """The whole attention of a decode of one row; None if the kernel cannot, or is slower.

        Args:
            qkv: ``[1, heads]``: the product of queries, keys and values.
            heads: Of the layer.
            positions: ``[1]`` int64.
            layer: SGLang's, of KV that is stored as it is.
            forward_batch: SGLang's.
        """
        if self._step is None:
            raise RuntimeError("a decode whose metadata was not made")
        rows, shares, _ = self._step
        plain = layer.sliding_window_size in (None, -1) and not layer.logit_cap
        if (
            len(qkv) != 1
            or rows.prefixes is not None
            or not plain
            or not single_decode.supports_single_decode(heads)
        ):
            return None
        row = DecodeToken(rows.table, rows.table_rows, rows.kv_lens, positions,
                      forward_batch.out_cache_loc)  # fmt: skip
        clusters = self._clustered(heads, qkv.dtype)
        if clusters is not None:
            return clusters.attend(qkv, heads, row, layer.scaling)
        tuning = single_decode.find_single_decode_config(heads)
        if tuning is None:
            return None
        return single_decode.attend_single(
            qkv, heads, row, shares[self._cut(layer, 1)].semaphores, layer.scaling,
            tuning,
        )  # fmt: skip

    def _clustered(self, heads: Heads, dtype: torch.dtype) -> ClusterDecode | None:
        """The kernel of such heads in clusters of CTAs, where it is the fastest."""
        shape = (heads.num_q_heads, *heads.k_cache.shape[1:], heads.q_norm is not None)
        if shape not in self._clustered_heads:
            self._clustered_heads[shape] = cluster_decode.make_cluster_decode(heads, dtype)
        return self._clustered_heads[shape]

    def _cut(self, layer: RadixAttention, rows: int) -> SplitPlan:
        dim = max(layer.qk_head_dim, layer.v_head_dim)
        group = layer.tp_q_head_num // layer.tp_k_head_num
        window = layer.sliding_window_size
        # Rows of prompts read the same KV, unless another kernel has them.
        prompts = self._has_prompts(rows) and not self._by_fa3(rows)
        return SplitPlan(
            split_plan.split_tuning(dim, group, self._itemsize, rows, prompts=prompts),
            layer.tp_k_head_num,
            group,
            -1 if window is None else window,
        )

    def _has_prompts(self, rows: int) -> bool:
        """Whether there are more rows than requests."""
        requests: int = self.req_to_token_pool.size
        return rows > requests

    def _by_fa3(self, rows: int) -> bool:
        """Whether FlashAttention-3 attends with rows of prompts: it reads KV once for more rows."""
        pays: bool = rows * self._heads >= _LEAST_HEADS
        return self._has_fa3 and self._has_prompts(rows) and pays
