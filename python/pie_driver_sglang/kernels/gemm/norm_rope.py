"""Norm, activation and rotary kernels between the GEMMs of a layer, in Triton.

- :func:`add_rms_norm`: split-K reduction + residual add + RMSNorm (FlashInfer's
  `fused_add_rmsnorm` takes one tensor, and no partial sums or FP8 scales).
- :func:`norm_rope_store`: per-head q/k RMSNorm + rotary embedding + KV cache store, three kernels
  in SGLang.
- :func:`silu_and_mul`: SwiGLU activation, with a deferred RMS scale.

All wait for the previous kernel by PDL, and load before that what it does not write.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.types import Heads, Norm, RmsScale
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_trigger, pdl_wait, pdl_wait_trigger

_SWIGLU_BLOCK = tl.constexpr(1024)
_BLOCK_HEADS = 8
"""Heads of a program of :func:`norm_rope_store`."""


def silu_and_mul(rows: torch.Tensor, scale: RmsScale | None = None) -> torch.Tensor:
    """Computes ``silu(gate) * up``. Can be captured.

    Args:
        rows: ``[rows, 2 * outputs]``: gate, then up.
        scale: A deferred RMS scale of the rows.

    Returns:
        ``[rows, outputs]``.
    """
    out = rows.new_empty(len(rows), rows.shape[1] // 2)
    grid = (len(rows), triton.cdiv(out.shape[1], _SWIGLU_BLOCK.value))
    _silu_and_mul[grid](
        rows, out, out.shape[1], **_scale_args(rows, scale), **pdl_options(rows.device)
    )
    return out


def compute_rms_scale(rows: torch.Tensor, epsilon: float) -> RmsScale:
    """Computes ``1 / rms(row)`` of rows ``[rows, width]`` once, for all kernels that apply it."""
    out = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(rows.shape[1])
    _compute_rms_scale[(len(rows),)](
        rows, out, rows.stride(0), rows.shape[1], epsilon, BLOCK=block,
        num_warps=max(1, min(8, block // 512)), **pdl_options(rows.device),
    )  # fmt: skip
    return RmsScale(out, epsilon)


def _scale_args(rows: torch.Tensor, scale: RmsScale | None) -> dict[str, Any]:
    """Kernel arguments of a deferred RMS scale; a width of 1 means that it is computed already."""
    x_or_rstd, epsilon = (rows, 0.0) if scale is None else scale
    width = x_or_rstd.shape[1]
    return {
        "x_or_rstd": x_or_rstd,
        "x_stride": x_or_rstd.stride(0),
        "width": width,
        "epsilon": epsilon,
        "WIDTH_BLOCK": 0 if scale is None else triton.next_power_of_2(width),
    }


def add_rms_norm(
    partial_sums: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes ``rms_norm(residual + sum(partial_sums) * scales)``. Can be captured.

    Grid: one program a row.

    Args:
        partial_sums: ``[split_k, rows, width]``: split-K sums of a GEMM.
        residual: ``[rows, width]``, overwritten by the sum; None before the first layer.
        norm: Of the residual's dtype.
        scales: ``[rows, 1]`` and ``[width]`` float32: FP8 scales of rows and of outputs.

    Returns:
        ``[rows, width]`` normalized sums, and the sums.
    """
    count, rows, width = partial_sums.shape
    total = residual
    if total is None:
        total = norm.weight.new_empty(rows, width)
    out = torch.empty_like(total)
    block = triton.next_power_of_2(width)
    row_scales, output_scales = (partial_sums, partial_sums) if scales is None else scales
    _add_rms_norm[(rows,)](
        partial_sums, total, norm.weight, out, row_scales, output_scales, rows, width, norm.epsilon,
        SPLIT_K=count, ADD_RESIDUAL=residual is not None, SCALED=scales is not None, BLOCK=block,
        num_warps=max(4, min(16, block // 512)), **pdl_options(partial_sums.device),
    )  # fmt: skip
    return out, total


def norm_rope_store(
    rows: torch.Tensor,
    heads: Heads,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: RmsScale | None = None,
    output_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_of_place: bool = False,
) -> torch.Tensor:
    """Applies q/k RMSNorm and rotary embedding, and stores K and V. Can be captured.

    Grid: (rows, blocks of 8 query and key heads). A key head's program also stores its value head.

    Args:
        rows: ``[rows, (q_heads + 2 * kv_heads) * dim]``: output of the QKV projection.
        heads: Layout, norms and KV cache.
        positions: ``[rows]`` int64.
        slots: ``[rows]`` int64: the KV slot of each row.
        scale: A deferred RMS scale of the rows.
        output_scales: ``[(q_heads + 2 * kv_heads) * dim]`` float32: FP8 scales of outputs; only
            with `scale`.
        bias: ``[(q_heads + 2 * kv_heads) * dim]``: added after the scales.
        out_of_place: Whether the queries get contiguous storage of their own.

    Returns:
        ``[rows, q_heads, dim]`` queries; a view of `rows`, which is overwritten, unless
        `out_of_place`.
    """
    kv_heads, dim = heads.k_cache.shape[1:]
    width = heads.num_q_heads * dim
    out = rows.new_empty(len(rows), width) if out_of_place else rows[:, :width]
    norms = (heads.q_norm, heads.k_norm)
    weights = [rows if norm is None else norm.weight for norm in norms]
    epsilons = [0.0 if norm is None else norm.epsilon for norm in norms]
    grid = (len(rows), triton.cdiv(heads.num_q_heads + kv_heads, _BLOCK_HEADS))
    _norm_rope_store[grid](
        rows, out, *weights, *epsilons, heads.cos_sin_cache, positions, slots, heads.k_cache,
        heads.v_cache, rows.stride(0), out.stride(0), heads.cos_sin_cache.stride(0),
        heads.k_cache.stride(0), heads.v_cache.stride(0),
        rows if output_scales is None else output_scales, rows if bias is None else bias,
        Q_HEADS=heads.num_q_heads, KV_HEADS=kv_heads, DIM=dim, BLOCK_HEADS=_BLOCK_HEADS,
        HALF_BLOCK=triton.next_power_of_2(dim // 2), IS_NEOX=heads.is_neox,
        NORMED=heads.q_norm is not None, SCALED=output_scales is not None, BIASED=bias is not None,
        num_warps=4, **_scale_args(rows, scale), **pdl_options(rows.device),
    )  # fmt: skip
    return out.view(len(rows), heads.num_q_heads, dim)


@triton.jit
def silu_mul(gate, up):
    """SwiGLU: ``silu(gate) * up``."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _compute_rms_scale(rows, out, stride, width, epsilon, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    tl.store(out + row, _rstd(rows, stride, row, width, epsilon, BLOCK))


@triton.jit
def _rstd(x_or_rstd, x_stride, row, width, epsilon, WIDTH_BLOCK: tl.constexpr):
    """The reciprocal RMS of a row, loaded or computed."""
    if WIDTH_BLOCK == 1:
        rstd = tl.load(x_or_rstd + row)
    else:
        columns = tl.arange(0, WIDTH_BLOCK)
        x = tl.load(x_or_rstd + row * x_stride + columns, mask=columns < width, other=0.0)
        x = x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(x * x, 0) / width + epsilon)
    return rstd


@triton.jit
def _silu_and_mul(
    rows, out, outputs, x_or_rstd, x_stride, width, epsilon,
    WIDTH_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_wait_trigger()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * _SWIGLU_BLOCK + tl.arange(0, _SWIGLU_BLOCK)
    mask = columns < outputs
    gate_ptrs = rows + 2 * row * outputs + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + outputs, mask=mask, other=0.0).to(tl.float32)
    if WIDTH_BLOCK > 0:
        rstd = _rstd(x_or_rstd, x_stride, row, width, epsilon, WIDTH_BLOCK)
        gate *= rstd
        up *= rstd
    tl.store(out + row * outputs + columns, silu_mul(gate, up), mask=mask)


@triton.jit(do_not_specialize=["row_count"])
def _add_rms_norm(
    partial_sums, residual, weight, out, row_scales, output_scales, row_count, width, epsilon,
    SPLIT_K: tl.constexpr, ADD_RESIDUAL: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    offsets = tl.program_id(0).to(tl.int64) * width + columns
    total = tl.zeros([BLOCK], tl.float32)
    if ADD_RESIDUAL:
        # The previous kernel writes the partial sums and does not touch the residual.
        total = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        pdl_wait_trigger()
    added = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT_K):
        before = tl.cast(part, tl.int64) * row_count * width
        added += tl.load(partial_sums + before + offsets, mask=mask, other=0.0).to(tl.float32)
    if SCALED:
        row_scale = tl.load(row_scales + tl.program_id(0))
        added *= row_scale * tl.load(output_scales + columns, mask=mask, other=0.0)
    total = added + total
    tl.store(residual + offsets, total, mask=mask)
    rstd = tl.rsqrt(tl.sum(total * total, 0) / width + epsilon)
    tl.store(out + offsets, total * rstd * scale, mask=mask)


@triton.jit
def _norm_rope_store(
    rows, out, q_weight, k_weight, q_epsilon, k_epsilon, cos_sin_cache, positions, slots,
    k_cache, v_cache, row_stride, out_stride, cos_sin_stride, k_stride, v_stride, output_scales,
    bias, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, IS_NEOX: tl.constexpr,
    NORMED: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, x_or_rstd, x_stride, width,
    epsilon, WIDTH_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A block of query and key heads of a row, and the values of these keys."""
    HALF: tl.constexpr = DIM // 2
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    is_key = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    pair = tl.arange(0, HALF_BLOCK)
    in_half = pair < HALF
    first = pair
    second = pair + HALF
    if not IS_NEOX:
        first = 2 * pair
        second = 2 * pair + 1
    if PDL:
        # The attention kernel reads its block table while this one waits and runs.
        pdl_trigger()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    angles = cos_sin_cache + tl.load(positions + row).to(tl.int64) * cos_sin_stride + pair
    cosine = tl.load(angles, mask=in_half, other=0.0)[None, :].to(tl.float32)
    sine = tl.load(angles + HALF, mask=in_half, other=0.0)[None, :].to(tl.float32)
    if PDL:
        # The previous kernel writes nothing that is loaded above.
        pdl_wait()
    head_ptrs = rows + row * row_stride + head * DIM
    known = (head < Q_HEADS + KV_HEADS) & in_half[None, :]
    x = tl.load(head_ptrs + first[None, :], mask=known, other=0.0).to(tl.float32)
    y = tl.load(head_ptrs + second[None, :], mask=known, other=0.0).to(tl.float32)
    scale = 1.0
    if WIDTH_BLOCK > 0:
        scale = _rstd(x_or_rstd, x_stride, row, width, epsilon, WIDTH_BLOCK)
        x *= scale
        y *= scale
    if SCALED:
        x *= tl.load(output_scales + head * DIM + first[None, :], mask=known, other=0.0)
        y *= tl.load(output_scales + head * DIM + second[None, :], mask=known, other=0.0)
    if BIASED:
        x += tl.load(bias + head * DIM + first[None, :], mask=known, other=0.0).to(tl.float32)
        y += tl.load(bias + head * DIM + second[None, :], mask=known, other=0.0).to(tl.float32)
    if NORMED:
        sum_squares = tl.sum(x * x + y * y, 1)[:, None]
        rstd = tl.rsqrt(sum_squares / DIM + tl.where(is_key, k_epsilon, q_epsilon))
        x = x * rstd * _head_weights(q_weight, k_weight, first, in_half, is_key)
        y = y * rstd * _head_weights(q_weight, k_weight, second, in_half, is_key)
        # Rounded as a separate norm kernel would do.
        x = x.to(rows.dtype.element_ty).to(tl.float32)
        y = y.to(rows.dtype.element_ty).to(tl.float32)
    rotated_x = x * cosine - y * sine
    rotated_y = y * cosine + x * sine
    is_query = (head < Q_HEADS) & in_half[None, :]
    query = out + row * out_stride + head * DIM
    tl.store(query + first[None, :], rotated_x, mask=is_query)
    tl.store(query + second[None, :], rotated_y, mask=is_query)
    stored = is_key & in_half[None, :]
    key = k_cache + slot * k_stride + (head - Q_HEADS) * DIM
    tl.store(key + first[None, :], rotated_x, mask=stored)
    tl.store(key + second[None, :], rotated_y, mask=stored)
    v_ptrs = head_ptrs + KV_HEADS * DIM + pair[None, :]
    value = v_cache + slot * v_stride + (head - Q_HEADS) * DIM + pair[None, :]
    first_values = tl.load(v_ptrs, mask=stored) * scale
    second_values = tl.load(v_ptrs + HALF, mask=stored) * scale
    if SCALED:
        v_scales = output_scales + (head + KV_HEADS) * DIM + pair[None, :]
        first_values *= tl.load(v_scales, mask=stored, other=0.0)
        second_values *= tl.load(v_scales + HALF, mask=stored, other=0.0)
    if BIASED:
        v_bias = bias + (head + KV_HEADS) * DIM + pair[None, :]
        first_values += tl.load(v_bias, mask=stored, other=0.0).to(tl.float32)
        second_values += tl.load(v_bias + HALF, mask=stored, other=0.0).to(tl.float32)
    tl.store(value, first_values, mask=stored)
    tl.store(value + HALF, second_values, mask=stored)


@triton.jit
def _head_weights(q_weight, k_weight, dims, mask, is_key):
    of_q = tl.load(q_weight + dims, mask=mask, other=0.0).to(tl.float32)
    of_k = tl.load(k_weight + dims, mask=mask, other=0.0).to(tl.float32)
    return tl.where(is_key, of_k[None, :], of_q[None, :])
