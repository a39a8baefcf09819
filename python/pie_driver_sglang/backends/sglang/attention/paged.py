"""SGLang's attention backend `pie`: `PagedDecode` behind SGLang's interface."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.backends.sglang import support
from pie_driver_sglang.backends.sglang.compat.attention import (
    AttentionBackend,
    attend_prompts,
    attention_layers,
    decode_backend,
    read_attention,
    register_backend,
    scales_kv,
    use_decode_backend,
)
from pie_driver_sglang.backends.sglang.compat.layers import activate_by_row
from pie_driver_sglang.backends.sglang.compat.model import resolved
from pie_driver_sglang.backends.sglang.compat.passes import context_of
from pie_driver_sglang.backends.sglang.compat.pools import store_kv
from pie_driver_sglang.backends.sglang.compat.settings import change_settings
from pie_driver_sglang.config.options import PAGED_DECODE
from pie_driver_sglang.engine.attention.batch_invariant import BatchInvariantAttention
from pie_driver_sglang.engine.attention.batch_invariant_cpu import CpuBatchInvariantAttention
from pie_driver_sglang.engine.attention.paged import PagedDecode

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.attention import RadixAttention
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch
    from pie_driver_sglang.engine.block_table import BlockTable


def install(
    runner: ModelRunner,
    table: BlockTable,
    prefill: str | None = None,
    *,
    deterministic_on_cpu: bool = False,
) -> None:
    """Has a loaded model decode with this backend; to be called before it gets its backends.

    Prefills are computed by the backend `prefill`, or by the one that the settings name. SGLang
    checks its settings against lists of its own backends, so they learn of this one only now.
    Whether the kernel supports the model's attention is `support.paged_decode_refusal`, and with
    `deterministic_on_cpu` `support.check_deterministic_on_cpu`.
    """
    backend = functools.partial(
        PagedDecodeBackend, table=table, deterministic_on_cpu=deterministic_on_cpu
    )
    register_backend(PAGED_DECODE, backend)
    args = runner.server_args
    named, _ = resolved(runner).attention_backends
    change_settings(
        args,
        prefill_attention_backend=prefill or named,
        decode_attention_backend=PAGED_DECODE,
    )


def installed_attention(runner: ModelRunner) -> PagedDecode | None:
    """The decode attention of a runner, where it is the backend `pie`."""
    backend = decode_backend(runner)
    return backend.attention if isinstance(backend, PagedDecodeBackend) else None


def replace_prefill_attention(runner: ModelRunner) -> None:
    """Has prefills attend by this backend, too, where it is batch-invariant."""
    attention = installed_attention(runner)
    if isinstance(attention, BatchInvariantAttention):
        use_decode_backend(runner)
    if isinstance(attention, CpuBatchInvariantAttention):
        activate_by_row(runner.model)


class PagedDecodeBackend(AttentionBackend):
    """SGLang's attention backend of decodes; prefills are another's, unless batch-invariant."""

    # Lengths are read on the device only.
    needs_cpu_seq_lens = False

    def __init__(
        self, runner: ModelRunner, *, table: BlockTable, deterministic_on_cpu: bool = False
    ) -> None:
        super().__init__()
        # SGLang looks for the pools here.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._layers = {
            layer: read_attention(layer, runner.token_to_kv_pool)
            for layer in attention_layers(runner)
        }
        layers = list(self._layers.values())
        self.attention: PagedDecode
        if deterministic_on_cpu:
            self.attention = CpuBatchInvariantAttention(table, layers)
            return
        properties = torch.cuda.get_device_properties(runner.gpu_id)
        multiprocessors, settings = properties.multi_processor_count, resolved(runner)
        if settings.enable_deterministic_inference:
            self.attention = BatchInvariantAttention(table, layers, multiprocessors)
            return
        has_fa3 = settings.attention_backends[0] == "fa3" and support.prefills_by_fa3(runner)
        prompts = attend_prompts if has_fa3 else None
        self.attention = PagedDecode(table, layers, multiprocessors, prompts)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: a graph's memory comes from its pool."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """KV length of padding."""
        return 1

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Plans a pass on the device; eager batches come here, too."""
        table_rows, extends = forward_batch.req_pool_indices, context_of(forward_batch).extends
        if extends is None:
            self.attention.plan(table_rows, forward_batch.seq_lens)
        else:
            assert isinstance(self.attention, BatchInvariantAttention)
            self.attention.plan_extend(table_rows, extends, len(forward_batch.positions))

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
        own = self._layers[layer]
        if save_kv_cache and k is not None and v is not None:
            # A checkpoint's scales are for KV in FP8: other KV is stored as it is.
            scales = (layer.k_scale, layer.v_scale) if scales_kv(layer, own.keys) else ()
            store_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v, *scales)
        return self.attention.attend(own, q, sinks)

    forward_extend = forward_decode
