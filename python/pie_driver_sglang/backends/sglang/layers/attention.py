"""Attention of fused layers: QKV norms and rotary embedding, KV cache store, attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.kernels.gemm.norm_rope import (
    compute_rms_scale,
    norm_rope_store,
    silu_and_mul,
)
from pie_driver_sglang.kernels.gemm.types import RmsScale

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.attention.paged import PagedDecode
    from pie_driver_sglang.backends.sglang.compat.layers import ExpertLayer, Layer, QuantizedLayer
    from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch

_PRECOMPUTED_SCALE_ROWS = 512
"""Above this many rows a kernel of its own computes the RMS scale faster than each consumer."""


def attend_decode(
    qkv: torch.Tensor,
    layer: Layer | ExpertLayer | QuantizedLayer,
    attention: PagedDecode,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
) -> torch.Tensor:
    """Attention of a decode, ``[rows, q_heads * dim]``; one kernel for a batch of one, if it can.

    Args:
        qkv: ``[rows, (q_heads + 2 * kv_heads) * dim]``; overwritten.
        layer: The layer.
        attention: The decode backend.
        positions: ``[rows]`` int64.
        forward_batch: SGLang's.
    """
    if len(qkv) == 1:
        fused = attention.attend_single(qkv, layer.heads, positions, layer.attention, forward_batch)
        if fused is not None:
            return fused
    return attend(qkv, layer, positions, forward_batch, out_of_place=False)


def attend(
    qkv: torch.Tensor,
    layer: Layer | ExpertLayer | QuantizedLayer,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    *,
    scale: RmsScale | None = None,
    output_scales: torch.Tensor | None = None,
    out_of_place: bool,
) -> torch.Tensor:
    """Attention of any pass by SGLang's backend, ``[rows, q_heads * dim]``.

    Args:
        qkv: ``[rows, (q_heads + 2 * kv_heads) * dim]``; overwritten unless `out_of_place`.
        layer: The layer.
        positions: ``[rows]`` int64.
        forward_batch: SGLang's.
        scale: A deferred RMS scale of `qkv`.
        output_scales: FP8 scales of the columns of `qkv`.
        out_of_place: Whether queries get contiguous storage of their own, as prefills need.
    """
    queries = norm_rope_store(
        qkv, layer.heads, positions, forward_batch.out_cache_loc,
        scale=scale, output_scales=output_scales, out_of_place=out_of_place,
    )  # fmt: skip
    if out_of_place:
        queries = queries.flatten(1)
    out: torch.Tensor = layer.attention(queries, None, None, forward_batch, save_kv_cache=False)
    return out


def attend_folded_norm(
    layer: Layer | ExpertLayer,
    residual: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    *,
    out_of_place: bool,
) -> torch.Tensor:
    """QKV projection by cuBLAS and attention, with the RMSNorm folded into the projection.

    Args:
        layer: One whose norms are folded.
        residual: ``[rows, width]``.
        positions: ``[rows]`` int64.
        forward_batch: SGLang's.
        out_of_place: Whether queries get contiguous storage of their own.
    """
    qkv = torch.nn.functional.linear(residual, layer.qkv.weight)
    scale = _rms_scale(residual, layer.before.epsilon)
    return attend(qkv, layer, positions, forward_batch, scale=scale, out_of_place=out_of_place)


def swiglu_folded_norm(layer: Layer, residual: torch.Tensor) -> torch.Tensor:
    """Gate and up projection of ``[rows, width]`` by cuBLAS and SwiGLU, with a folded RMSNorm."""
    return silu_and_mul(
        torch.nn.functional.linear(residual, layer.gate_up.weight),
        _rms_scale(residual, layer.between.epsilon),
    )


def _rms_scale(residual: torch.Tensor, epsilon: float) -> RmsScale:
    if len(residual) > _PRECOMPUTED_SCALE_ROWS:
        return compute_rms_scale(residual, epsilon)
    return RmsScale(residual, epsilon)
