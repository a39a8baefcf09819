"""FP8 (e4m3) quantization of GEMM inputs in Triton, and the types of FP8 GEMMs.

``scale = max(|x|) / 448`` of each row, of each group of 128 inputs, or static; ``q = x / scale``.
What comes before the GEMM is fused: dequantization of the previous GEMM's output, SwiGLU, residual
add and RMSNorm. SGLang runs a kernel for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.norm_rope import silu_mul
from pie_driver_sglang.kernels.gemm.types import Norm
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_trigger_wait

FP8 = torch.float8_e4m3fn
"""The dtype of quantized weights and rows."""
FP8_MAX = 448.0
"""The largest number of that dtype."""
GROUP = 128
"""Inputs of a quantization group, and rows and columns of a weight block."""
_MIN_ABS_MAX = tl.constexpr(1e-10)
"""Lower bound of ``max(|x|)``."""
_ELEMENTS_PER_WARP = 1024


class QuantizedRows(NamedTuple):
    """FP8 activations."""

    rows: torch.Tensor
    """``[rows, width]`` FP8, contiguous."""
    scales: torch.Tensor
    """``[rows, groups]`` float32; one group, or one for each :data:`GROUP` inputs."""


class QuantizedWeights(NamedTuple):
    """FP8 weights of a linear layer."""

    weight: torch.Tensor
    """``[outputs, inputs]`` FP8, contiguous."""
    scales: torch.Tensor
    """Float32: ``[outputs]``, or ``[outputs / GROUP, inputs / GROUP]`` for block scales."""
    row_scale: torch.Tensor | None = None
    """``[1]`` float32: static scale of activations; None for dynamic ones."""

    @property
    def grouped(self) -> bool:
        """Whether blocks of the weight, and groups of each row, have scales of their own."""
        return self.scales.dim() == 2


class UnscaledOutput(NamedTuple):
    """The output of an FP8 GEMM, to be multiplied by the scales of rows and outputs."""

    rows: torch.Tensor
    """``[rows, outputs]``, outputs contiguous."""
    row_scales: torch.Tensor
    """``[rows, 1]`` float32."""
    output_scales: torch.Tensor
    """``[outputs]`` float32."""


def unscaled_fp8_gemm(
    given: QuantizedRows, weights: QuantizedWeights, one: torch.Tensor, dtype: torch.dtype
) -> UnscaledOutput:
    """Multiplies FP8 rows by weights with cuBLAS's fastest GEMM, which applies no scales.

    Args:
        given: With one scale a row.
        weights: With one scale an output; multiples of 16 outputs and inputs.
        one: ``[]`` float32 1.0, passed as both scales.
        dtype: Of the output.
    """
    out = torch._scaled_mm(
        given.rows, weights.weight.t(), scale_a=one, scale_b=one, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return UnscaledOutput(out, given.scales, weights.scales)


def quantize(
    given: torch.Tensor | UnscaledOutput,
    *,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    swiglu: bool = False,
    grouped: bool = False,
    scale: torch.Tensor | None = None,
) -> QuantizedRows:
    """Quantizes rows to FP8, after SwiGLU, residual add and RMSNorm. Can be captured.

    Grid: one program a row.

    Args:
        given: ``[rows, width]``; ``[rows, 2 * width]`` if `swiglu`. Width contiguous.
        residual: ``[rows, width]``, contiguous: the rows are added to it in place first.
        norm: RMSNorm of the sum, of the rows' dtype.
        swiglu: Whether the rows are the output of a gate, then of an up projection.
        grouped: Whether each group of :data:`GROUP` inputs gets a scale.
        scale: ``[1]`` float32: static scale; None for a dynamic one of each row.

    Raises:
        ValueError: The width is no multiple of the group.
    """
    unscaled = given if isinstance(given, UnscaledOutput) else None
    rows = given.rows if isinstance(given, UnscaledOutput) else given
    count, width = rows.shape
    if swiglu:
        width //= 2
    if grouped and width % GROUP:
        raise ValueError(f"rows of {width} numbers have no whole groups of {GROUP}")
    out = torch.empty(count, width, dtype=FP8, device=rows.device)
    groups = width // GROUP if grouped else 1
    scales = torch.empty(count, groups, dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(width)
    _quantize[(count,)](
        rows, scales if unscaled is None else unscaled.row_scales,
        scales if unscaled is None else unscaled.output_scales,
        rows if residual is None else residual, rows if norm is None else norm.weight,
        scales if scale is None else scale, out, scales, rows.stride(0), width, groups,
        0.0 if norm is None else norm.epsilon, FP8_MAX,
        BLOCK=block, GROUP=min(GROUP, block) if grouped else 0, UNSCALED=unscaled is not None,
        ADD_RESIDUAL=residual is not None, NORMED=norm is not None, SWIGLU=swiglu,
        STATIC_SCALE=scale is not None,
        num_warps=max(1, min(16, block // _ELEMENTS_PER_WARP)), **pdl_options(rows.device),
    )  # fmt: skip
    return QuantizedRows(out, scales)


@triton.jit
def _quantize(
    rows, row_scales, output_scales, residual, weight, static_scale, out, scales, row_stride, width,
    groups, epsilon, fp8_max,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, UNSCALED: tl.constexpr, ADD_RESIDUAL: tl.constexpr,
    NORMED: tl.constexpr, SWIGLU: tl.constexpr, STATIC_SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    if NORMED:
        norm_weight = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        # The GEMM after it loads weights while this kernel waits and runs.
        pdl_trigger_wait()
    row = tl.program_id(0).to(tl.int64)
    dtype = rows.dtype.element_ty
    x_ptrs = rows + row * row_stride + columns
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    row_scale = 1.0
    if UNSCALED:
        row_scale = tl.load(row_scales + row)
        x = x * (row_scale * tl.load(output_scales + columns, mask=mask, other=0.0))
    if SWIGLU:
        up = tl.load(x_ptrs + width, mask=mask, other=0.0).to(tl.float32)
        if UNSCALED:
            up = up * (row_scale * tl.load(output_scales + width + columns, mask=mask, other=0.0))
        # Rounded as the output of an unfused kernel would be.
        x = silu_mul(x, up).to(dtype).to(tl.float32)
    if ADD_RESIDUAL:
        residual_ptrs = residual + row * width + columns
        x = (x + tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_ptrs, x, mask=mask)
        x = x.to(tl.float32)
    if NORMED:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon) * norm_weight
        x = x.to(dtype).to(tl.float32)
    if STATIC_SCALE:
        scale = tl.load(static_scale)
        tl.store(scales + row, scale)
        x = x / scale
    elif GROUP == 0:
        scale = tl.maximum(tl.max(tl.abs(x), 0), _MIN_ABS_MAX) / fp8_max
        tl.store(scales + row, scale)
        x = x / scale
    else:
        grouped_x = tl.reshape(x, [BLOCK // GROUP, GROUP])
        scale = tl.maximum(tl.max(tl.abs(grouped_x), 1), _MIN_ABS_MAX) / fp8_max
        group_ids = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * groups + group_ids, scale, mask=group_ids < groups)
        x = tl.reshape(grouped_x / scale[:, None], [BLOCK])
    x = tl.minimum(tl.maximum(x, -fp8_max), fp8_max)
    tl.store(out + row * width + columns, x.to(out.dtype.element_ty), mask=mask)
