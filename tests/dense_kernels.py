"""The kernels of dense layers under Triton's interpreter, against float64.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools
import math

import torch

from pie_driver_sglang.kernels.gemm.linear import linear, linear_swiglu
from pie_driver_sglang.kernels.gemm.norm_rope import (
    add_rms_norm,
    compute_rms_scale,
    norm_rope_store,
    silu_and_mul,
)
from pie_driver_sglang.kernels.gemm.types import Heads, LinearWeights, Norm, RmsScale, TileConfig

ROWS = (1, 16, 17, 40)
TOLERANCE = 1e-5
EPSILON = 1e-6


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Up to rounding in float32."""
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert error < TOLERANCE, error


def normalized(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    rows = rows.double()
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPSILON) * weight.double()


def check_linear() -> None:
    """Products of any number of rows, whole and in parts, with a bias and without."""
    for count, parts, biased in itertools.product(ROWS, (1, 3), (False, True)):
        if parts > 1 and biased:
            continue
        # Rows lie in something wider.
        rows = torch.randn(count, 200)[:, :192]
        matrix = LinearWeights(torch.randn(64, 192), torch.randn(64) if biased else None)
        config = TileConfig(16, 32, 32, parts)
        assert config.fits(64, 192)
        exact = rows.double() @ matrix.weight.double().T
        if matrix.bias is not None:
            exact += matrix.bias.double()
        found = linear(rows, matrix, config)
        assert found.shape == (parts, count, 64)
        close(found.sum(0), exact)


def check_gated() -> None:
    """Gates and ups of an MLP."""
    for count in ROWS:
        rows, matrix = torch.randn(count, 64), LinearWeights(torch.randn(96, 64))
        gate, up = (rows.double() @ matrix.weight.double().T).chunk(2, dim=-1)
        exact = torch.nn.functional.silu(gate) * up
        close(linear_swiglu(rows, matrix, TileConfig(16, 16, 32)), exact)


def check_gate() -> None:
    """Gates and ups, and such as have still to be divided by the rows that they come from."""
    for count, scaled in itertools.product(ROWS, (False, True)):
        rows, given = torch.randn(count, 2 * 1500), torch.randn(count, 90)[:, :80]
        exact = rows.double()
        if scaled:
            exact *= torch.rsqrt(given.double().square().mean(-1, keepdim=True) + EPSILON)
        first, second = exact.chunk(2, dim=-1)
        exact = torch.nn.functional.silu(first) * second
        close(silu_and_mul(rows, RmsScale(given, EPSILON) if scaled else None), exact)
        if scaled:
            close(silu_and_mul(rows, compute_rms_scale(given, EPSILON)), exact)


def check_add_norm() -> None:
    """One part and several, with and without a residual, of a width that is no power of two."""
    for count, parts, add_residual in itertools.product(ROWS, (1, 4), (False, True)):
        given = torch.randn(parts, count, 80)
        residual = torch.randn(count, 80) if add_residual else None
        norm = Norm(torch.randn(80), EPSILON)
        total = given.double().sum(0) + (0.0 if residual is None else residual.double())
        out, after = add_rms_norm(given, residual, norm)
        close(after, total)
        close(out, normalized(total, norm.weight))
        assert residual is None or after is residual


def turned(rows: torch.Tensor, angles: torch.Tensor, halves: bool) -> torch.Tensor:
    """Rotary embedding as a product of complex numbers: ``[rows, heads, dim]``."""
    dim = rows.shape[-1]
    pairs = rows.double().unflatten(-1, (2, dim // 2) if halves else (dim // 2, 2))
    if halves:
        pairs = pairs.transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous())
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    pairs = torch.view_as_real(numbers)
    return (pairs.transpose(-1, -2) if halves else pairs).flatten(-2)


def check_prepare() -> None:
    """Heads that are normalized and that are not, and turn either way; nothing else is written."""
    shapes = ((4, 2, 32), (7, 1, 48), (16, 8, 16))
    for (queries, kv_heads, dim), halves, normed, scaled in itertools.product(
        shapes, (False, True), (False, True), (False, True)
    ):
        count = 5
        scale = RmsScale(torch.randn(count, 96), EPSILON) if scaled else None
        positions = torch.tensor([0, 3, 3, 63, 17])
        angles = torch.rand(64, dim // 2, dtype=torch.float64) * 2 * math.pi
        rows = torch.randn(count, (queries + 2 * kv_heads) * dim)
        q, k, v = rows.clone().view(count, -1, dim).split([queries, kv_heads, kv_heads], dim=1)
        keys, values = (torch.full((9, kv_heads, dim), math.nan) for _ in range(2))
        slots = torch.tensor([8, 1, 4, 2, 6])
        norms = [Norm(torch.randn(dim), EPSILON) if normed else None for _ in range(2)]
        heads = Heads(
            queries, *norms, torch.cat([angles.cos(), angles.sin()], -1).float(), halves,
            keys, values,
        )  # fmt: skip
        given = rows.clone()
        apart = norm_rope_store(rows, heads, positions, slots, scale=scale, out_of_place=True)
        assert torch.equal(rows, given)
        if scale is not None:
            found_once = compute_rms_scale(*scale)
            again = norm_rope_store(
                rows, heads, positions, slots, scale=found_once, out_of_place=True
            )
            close(again, apart.double())
            # Products of FP8 weights have a scale for each output, too.
            outputs = torch.rand(rows.shape[1]) + 0.5
            apart_keys = keys.clone()
            again = norm_rope_store(
                rows / outputs, heads, positions, slots, scale=found_once, output_scales=outputs,
                out_of_place=True,
            )  # fmt: skip
            close(again, apart.double())
            close(keys[slots], apart_keys[slots].double())
        found = norm_rope_store(rows, heads, positions, slots, scale=scale)
        assert torch.equal(found, apart)
        assert apart.is_contiguous()
        if scale is not None:
            rstd = torch.rsqrt(scale.rows.double().square().mean(-1) + EPSILON)[:, None, None]
            q, k, v = (part.double() * rstd for part in (q, k, v))
        q, k = (
            part if norm is None else normalized(part, norm.weight)
            for part, norm in zip((q, k), norms, strict=True)
        )
        close(found, turned(q, angles[positions], halves))
        close(keys[slots], turned(k, angles[positions], halves))
        close(values[slots], v)
        assert scaled or torch.equal(values[slots], v)
        others = [slot for slot in range(9) if slot not in slots.tolist()]
        assert keys[others].isnan().all()
        assert values[others].isnan().all()


if __name__ == "__main__":
    torch.manual_seed(2)
    check_linear()
    check_gated()
    check_gate()
    check_add_norm()
    check_prepare()
    print("dense layers: all close")
