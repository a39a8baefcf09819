"""GPU kernels that make FP8 of the rows that a quantized product takes.

A product of FP8 weights takes FP8 rows: each number is divided by a scale that brings the largest
one of its row, or of its group of a row, to the largest number of the format. What comes before the
product (a norm, or the activation of an MLP) is part of the kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.dense_layers import Norm, silu
from pie_driver_sglang.kernels.pdl import chained, lead

FP8 = torch.float8_e4m3fn
"""The format of quantized weights and rows."""
LARGEST = 448.0
"""The largest number of the format."""
GROUP = 128
"""Inputs of a group, where each group of a row has a scale."""
_LEAST = tl.constexpr(1e-10)
"""What the largest number of a row counts at least."""
_ELEMENTS_PER_WARP = 1024


class QuantizedRows(NamedTuple):
    """Rows in FP8, and what they are to be multiplied by."""

    rows: torch.Tensor
    """``[rows, width]`` FP8, contiguous."""
    scales: torch.Tensor
    """``[rows, groups]`` float32; one group, or one for each :data:`GROUP` inputs."""


class QuantizedWeights(NamedTuple):
    """Weights of a linear layer in FP8."""

    weight: torch.Tensor
    """``[outputs, inputs]`` FP8, contiguous."""
    scales: torch.Tensor
    """``[outputs]`` float32, or ``[outputs / GROUP, inputs / GROUP]``: what the weights are to be
    multiplied by."""
    row_scale: torch.Tensor | None = None
    """``[1]`` float32: the scale of all rows that it takes; None where each row has its own."""

    @property
    def grouped(self) -> bool:
        """Whether blocks of the matrix and groups of each row have scales of their own."""
        return self.scales.dim() == 2


class UnscaledRows(NamedTuple):
    """What a product of FP8 rows and weights left, without their scales."""

    rows: torch.Tensor
    """``[rows, outputs]``, outputs contiguous."""
    of_rows: torch.Tensor
    """``[rows, 1]`` float32."""
    of_outputs: torch.Tensor
    """``[outputs]`` float32."""


def multiply_unscaled(
    given: QuantizedRows, weights: QuantizedWeights, one: torch.Tensor, dtype: torch.dtype
) -> UnscaledRows:
    """Multiplies FP8 rows by weights, by cuBLAS's fastest product, which applies no scales.

    Args:
        given: With one scale a row.
        weights: With one scale an output; of multiples of 16 outputs and inputs.
        one: The number 1 in float32, ``[]``, which it takes for scales.
        dtype: Of the products.
    """
    products = torch._scaled_mm(
        given.rows, weights.weight.t(), scale_a=one, scale_b=one, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip
    return UnscaledRows(products, given.scales, weights.scales)


def quantize(
    given: torch.Tensor | UnscaledRows,
    *,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    gated: bool = False,
    grouped: bool = False,
    scale: torch.Tensor | None = None,
) -> QuantizedRows:
    """Adds, normalizes or gates rows, and makes FP8 of them. Can be captured.

    Args:
        given: ``[rows, width]``; ``[rows, 2 * width]`` if `gated`. Width contiguous.
        residual: ``[rows, width]``, contiguous: what the rows are added to first, in place.
        norm: An RMS norm of the rows' dtype to apply next.
        gated: Whether they are the outputs of a gate, then of an up projection.
        grouped: Whether each :data:`GROUP` numbers get a scale of their own.
        scale: ``[1]`` float32: the scale of all rows; None for one that fits each of them.

    Raises:
        ValueError: The width is no multiple of the group.
    """
    unscaled = given if isinstance(given, UnscaledRows) else None
    rows = given.rows if isinstance(given, UnscaledRows) else given
    count, width = rows.shape
    if gated:
        width //= 2
    if grouped and width % GROUP:
        raise ValueError(f"rows of {width} numbers have no whole groups of {GROUP}")
    out = torch.empty(count, width, dtype=FP8, device=rows.device)
    groups = width // GROUP if grouped else 1
    scales = torch.empty(count, groups, dtype=torch.float32, device=rows.device)
    block = triton.next_power_of_2(width)
    _quantize[(count,)](
        rows, scales if unscaled is None else unscaled.of_rows,
        scales if unscaled is None else unscaled.of_outputs,
        rows if residual is None else residual, rows if norm is None else norm.weight,
        scales if scale is None else scale, out, scales, rows.stride(0), width, groups,
        0.0 if norm is None else norm.epsilon, LARGEST,
        BLOCK=block, GROUP=min(GROUP, block) if grouped else 0, UNSCALED=unscaled is not None,
        ADDS=residual is not None, NORMED=norm is not None, GATED=gated, FIXED=scale is not None,
        num_warps=max(1, min(16, block // _ELEMENTS_PER_WARP)), **chained(rows.device),
    )  # fmt: skip
    return QuantizedRows(out, scales)


@triton.jit
def _quantize(
    rows, of_rows, of_outputs, residual, weight, fixed, out, scales, row_stride, width, groups,
    epsilon, largest,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, UNSCALED: tl.constexpr, ADDS: tl.constexpr,
    NORMED: tl.constexpr, GATED: tl.constexpr, FIXED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    if NORMED:
        own = tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    if CHAINED:
        # A product comes next, which reads its weights while this kernel waits and runs.
        lead()
    row = tl.program_id(0).to(tl.int64)
    kind = rows.dtype.element_ty
    place = rows + row * row_stride + lanes
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    of_row = 1.0
    if UNSCALED:
        of_row = tl.load(of_rows + row)
        x = x * (of_row * tl.load(of_outputs + lanes, mask=inside, other=0.0))
    if GATED:
        up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
        if UNSCALED:
            up = up * (of_row * tl.load(of_outputs + width + lanes, mask=inside, other=0.0))
        # Rounded as a separate kernel would do.
        x = silu(x, up).to(kind).to(tl.float32)
    if ADDS:
        total = residual + row * width + lanes
        x = (x + tl.load(total, mask=inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(total, x, mask=inside)
        x = x.to(tl.float32)
    if NORMED:
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + epsilon) * own
        x = x.to(kind).to(tl.float32)
    if FIXED:
        scale = tl.load(fixed)
        tl.store(scales + row, scale)
        x = x / scale
    elif GROUP == 0:
        scale = tl.maximum(tl.max(tl.abs(x), 0), _LEAST) / largest
        tl.store(scales + row, scale)
        x = x / scale
    else:
        parts = tl.reshape(x, [BLOCK // GROUP, GROUP])
        scale = tl.maximum(tl.max(tl.abs(parts), 1), _LEAST) / largest
        numbers = tl.arange(0, BLOCK // GROUP)
        tl.store(scales + row * groups + numbers, scale, mask=numbers < groups)
        x = tl.reshape(parts / scale[:, None], [BLOCK])
    x = tl.minimum(tl.maximum(x, -largest), largest)
    tl.store(out + row * width + lanes, x.to(out.dtype.element_ty), mask=inside)
