"""Attention of fused layers: QKV norms and rotary embedding, KV cache store, attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.kernels.gemm.lora import Shrunk, lora_expand
from pie_driver_sglang.kernels.gemm.norm_rope import (
    compute_rms_scale,
    norm_rope_store,
    silu_and_mul,
)
from pie_driver_sglang.kernels.gemm.types import RmsScale

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import AttentionLayer, PagedDecode
    from pie_driver_sglang.engine.backend import Decoder, PassContext
    from pie_driver_sglang.engine.layers.weights import ExpertLayer, Layer, QuantizedLayer

    AttendKvCache = Callable[[AttentionLayer, torch.Tensor], torch.Tensor]
    """Attention of a layer's queries to the KV cache, where their own KV is stored already."""

_PRECOMPUTED_SCALE_ROWS = 512
"""Above this many rows a kernel of its own computes the RMS scale faster than each consumer."""


def kv_cache_attention(
    decoder: Decoder, attention: PagedDecode, context: PassContext
) -> AttendKvCache:
    """The attention of a pass: `attention` in decodes, the library's in prefills."""
    if context.is_decode:
        return attention.attend

    def attend_prefill(layer: AttentionLayer, queries: torch.Tensor) -> torch.Tensor:
        return decoder.attend(layer.layer_id, queries, context)

    return attend_prefill


def attend_decode(
    qkv: torch.Tensor,
    layer: Layer | ExpertLayer | QuantizedLayer,
    attention: PagedDecode,
    positions: torch.Tensor,
    context: PassContext,
) -> torch.Tensor:
    """Attention of a decode, ``[rows, q_heads * dim]``; one kernel for a batch of one, if it can.

    Args:
        qkv: ``[rows, (q_heads + 2 * kv_heads) * dim]``; overwritten.
        layer: The layer.
        attention: The decode attention.
        positions: ``[rows]`` int64.
        context: Of the pass.
    """
    if len(qkv) == 1:
        fused = attention.attend_single(
            layer.attention, qkv, layer.heads, positions, context.out_cache_loc
        )
        if fused is not None:
            return fused
    return attend(qkv, layer, positions, context, attention.attend, out_of_place=False)


def attend(
    qkv: torch.Tensor,
    layer: Layer | ExpertLayer | QuantizedLayer,
    positions: torch.Tensor,
    context: PassContext,
    attend_kv_cache: AttendKvCache,
    *,
    scale: RmsScale | None = None,
    output_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_of_place: bool,
) -> torch.Tensor:
    """Attention of any pass, ``[rows, q_heads * dim]``.

    Args:
        qkv: ``[rows, (q_heads + 2 * kv_heads) * dim]``; overwritten unless `out_of_place`.
        layer: The layer.
        positions: ``[rows]`` int64.
        context: Of the pass.
        attend_kv_cache: The attention of the pass.
        scale: A deferred RMS scale of `qkv`.
        output_scales: FP8 scales of the columns of `qkv`.
        bias: Of the columns of `qkv`, after the scales.
        out_of_place: Whether queries get contiguous storage of their own, as prefills need.
    """
    queries = norm_rope_store(
        qkv, layer.heads, positions, context.out_cache_loc,
        scale=scale, output_scales=output_scales, bias=bias, out_of_place=out_of_place,
    )  # fmt: skip
    if out_of_place:
        queries = queries.flatten(1)
    return attend_kv_cache(layer.attention, queries)


def attend_folded_norm(
    layer: Layer | ExpertLayer,
    residual: torch.Tensor,
    positions: torch.Tensor,
    context: PassContext,
    attend_kv_cache: AttendKvCache,
    *,
    lora: Shrunk | None = None,
    out_of_place: bool,
) -> torch.Tensor:
    """QKV projection by cuBLAS and attention, with the RMSNorm folded into the projection.

    Args:
        layer: One whose norms are folded.
        residual: ``[rows, width]``.
        positions: ``[rows]`` int64.
        context: Of the pass.
        attend_kv_cache: The attention of the pass.
        lora: What LoRA adapters add to the projection.
        out_of_place: Whether queries get contiguous storage of their own.
    """
    qkv = lora_expand(torch.nn.functional.linear(residual, layer.qkv.weight), lora)
    scale = _rms_scale(residual, layer.before.epsilon)
    return attend(
        qkv, layer, positions, context, attend_kv_cache,
        scale=scale, bias=layer.qkv.bias, out_of_place=out_of_place,
    )  # fmt: skip


def swiglu_folded_norm(
    layer: Layer, residual: torch.Tensor, lora: Shrunk | None = None
) -> torch.Tensor:
    """Gate and up projection of ``[rows, width]`` by cuBLAS and SwiGLU, with a folded RMSNorm."""
    return silu_and_mul(
        lora_expand(torch.nn.functional.linear(residual, layer.gate_up.weight), lora),
        _rms_scale(residual, layer.between.epsilon),
    )


def _rms_scale(residual: torch.Tensor, epsilon: float) -> RmsScale:
    if len(residual) > _PRECOMPUTED_SCALE_ROWS:
        return compute_rms_scale(residual, epsilon)
    return RmsScale(residual, epsilon)
