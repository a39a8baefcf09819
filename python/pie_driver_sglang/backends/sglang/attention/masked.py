"""Attention under the users' masks: one bit for each row and KV index.

SGLang's own backends know causal rows only, or ignore what a mask says about stored KV. This one
serves the passes that bring a mask; the others never meet it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.backends.sglang.compat.attention import AttentionBackend, attending
from pie_driver_sglang.backends.sglang.compat.passes import skip_planning
from pie_driver_sglang.backends.sglang.compat.pools import store_kv, stored_kv
from pie_driver_sglang.kernels.attention import masked_reference, masked_triton
from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams, MaskedRequests

if TYPE_CHECKING:
    from pie_driver_sglang._core import AttentionMask
    from pie_driver_sglang.backends.sglang.compat.attention import RadixAttention
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch
    from pie_driver_sglang.ranks.types import Mask


class MaskedAttention(AttentionBackend):
    """SGLang's attention backend of a pass with a mask."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        # SGLang looks for the pools here.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._device = torch.device(runner.device)
        self._requests: MaskedRequests | None = None
        self._longest = 0

    @contextlib.contextmanager
    def applied(self, mask: AttentionMask | Mask, forward_batch: ForwardBatch) -> Iterator[None]:
        """Within it a forward pass over `forward_batch`, an extend, attends as the mask says."""
        self._requests = MaskedRequests(
            self.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.extend_seq_lens,
            forward_batch.extend_start_loc,
            torch.frombuffer(mask.offsets, dtype=torch.int64).to(self._device),
            torch.frombuffer(mask.words, dtype=torch.int32).to(self._device),
        )
        self._longest = max(forward_batch.extend_seq_lens_cpu)
        skip_planning(forward_batch)
        try:
            with attending(self):
                yield
        finally:
            self._requests = None

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores the new KV, then attends: ``[tokens, heads * dim]`` as SGLang hands them over."""
        if self._requests is None:
            raise RuntimeError("masked attention outside of a masked pass")
        if save_kv_cache and k is not None and v is not None:
            store_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys, values = stored_kv(self.token_to_kv_pool, layer)
        out = queries.new_empty(len(queries), layer.tp_q_head_num, layer.v_head_dim)
        rule = AttentionParams(
            layer.scaling, layer.logit_cap or 0.0, layer.sliding_window_size, sinks
        )
        operands = (queries, keys, values, out, self._requests, rule)
        if self._device.type == "cuda":
            masked_triton.masked_attention(*operands, self._longest)
        else:
            masked_reference.masked_attention_torch(*operands)
        return out.flatten(1)
