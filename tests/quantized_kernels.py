"""The kernels of many rows and of FP8 under Triton's interpreter, against float64.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools

import torch

import fp8_rounding
from pie_driver_sglang.kernels.gemm.fp8_rows import (
    FP8,
    FP8_MAX,
    GROUP,
    QuantizedRows,
    QuantizedWeights,
    quantize,
    unscaled_fp8_gemm,
)
from pie_driver_sglang.kernels.gemm.norm_rope import add_rms_norm
from pie_driver_sglang.kernels.gemm.small_m import start_residual
from pie_driver_sglang.kernels.gemm.tiled import tiled_gemm
from pie_driver_sglang.kernels.gemm.types import (
    LinearWeights,
    Norm,
    Residual,
    TileConfig,
    Workspace,
)

EPSILON = 1e-6
TOLERANCE = 1e-5
ROWS = (5, 16, 20)


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Up to rounding in float32."""
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert error < TOLERANCE, error


def make_workspace() -> Workspace:
    """With parts that no sum may contain."""
    return Workspace(torch.full((400_000,), torch.nan), torch.zeros(256, dtype=torch.int32))


def normalized(rows: torch.Tensor) -> torch.Tensor:
    """In float64, without weights."""
    rows = rows.double()
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPSILON)


def swiglu(rows: torch.Tensor) -> torch.Tensor:
    """A gate and an up projection, joined."""
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def check_products() -> None:
    """Products that scale, gate and add, whole and in parts, in either order of the operands."""
    for count, parts, swapped in itertools.product(ROWS, (1, 2), (False, True)):
        workspace, tile = make_workspace(), TileConfig(16, 16, 32, parts, swap_ab=swapped)
        rows, matrix = torch.randn(count, 128), LinearWeights(torch.randn(96, 128))
        exact = rows.double() @ matrix.weight.double().T
        # Rows may lie in something wider.
        wider = torch.cat([rows, rows], 1)[:, :128]
        close(tiled_gemm(wider, matrix, tile, workspace), exact)
        stream = start_residual(rows, 3)
        scaled = normalized(rows) @ matrix.weight.double().T
        given = {"sum_squares": stream.sum_squares, "epsilon": EPSILON}
        close(tiled_gemm(rows, matrix, tile, workspace, **given), scaled)
        close(tiled_gemm(rows, matrix, tile, workspace, swiglu=True, **given), swiglu(scaled))
        before = torch.randn(count, 96)
        into = Residual(before.clone(), torch.full((count, 6), torch.nan))
        assert tiled_gemm(rows, matrix, tile, workspace, residual=into) is into.rows
        close(into.rows, before.double() + exact)
        close(into.sum_squares.sum(1), into.rows.double().square().sum(1))
        again = before.clone()
        assert tiled_gemm(rows, matrix, tile, workspace, residual=again) is again
        assert torch.equal(again, into.rows)
        assert not workspace.semaphores.any()


def check_quantized_products() -> None:
    """FP8 rows and weights with a scale for each row and output, and for groups and blocks."""
    for count, parts, swapped, grouped in itertools.product(
        ROWS[::2], (1, 2), (False, True), (False, True)
    ):
        workspace, tile = make_workspace(), TileConfig(16, 64, 128, parts, swap_ab=swapped)
        outputs, inputs = 256, 512
        rows = quantize(torch.randn(count, inputs), grouped=grouped)
        size = (outputs // GROUP, inputs // GROUP) if grouped else (outputs,)
        weights = QuantizedWeights(torch.randn(outputs, inputs).to(FP8), torch.rand(size) + 0.5)
        exact = numbers(rows) @ matrix_of(weights).T
        kind = torch.float32
        close(tiled_gemm(rows, weights, tile, workspace, dtype=kind), exact)
        found = tiled_gemm(rows, weights, tile, workspace, swiglu=True, dtype=kind)
        close(found, swiglu(exact))
        before = torch.randn(count, outputs)
        found = tiled_gemm(rows, weights, tile, workspace, residual=before.clone())
        close(found, before.double() + exact)
        assert not workspace.semaphores.any()


def check_unscaled() -> None:
    """Products whose scales the next kernel applies: a sum with a norm, a gate, or a sum alone."""
    count, width = 5, 256
    rows = quantize(torch.randn(count, width))
    size = (2 * width,)
    weights = QuantizedWeights(torch.randn(*size, width).to(FP8), torch.rand(size) + 0.5)
    exact = numbers(rows) @ matrix_of(weights).T
    products = unscaled_fp8_gemm(rows, weights, torch.ones(()), torch.float32)
    close(products.rows * products.row_scales * products.output_scales, exact)
    joined = quantize(products, swiglu=True)
    close(joined.scales[:, 0] * FP8_MAX, swiglu(exact).abs().amax(1))
    norm, residual = Norm(torch.rand(width) + 0.5, EPSILON), torch.randn(count, width)
    half = QuantizedWeights(weights.weight[:width], weights.scales[:width])
    products = unscaled_fp8_gemm(rows, half, torch.ones(()), torch.float32)
    exact = residual.double() + numbers(rows) @ matrix_of(half).T
    largest = (normalized(exact) * norm.weight.double()).abs().amax(1)
    given = residual.clone()
    found = quantize(products, residual=given, norm=norm)
    close(given, exact)
    close(found.scales[:, 0] * FP8_MAX, largest)
    scales = (products.row_scales, products.output_scales)
    out, total = add_rms_norm(products.rows[None], residual.clone(), norm, scales)
    close(total, exact)
    close(out, normalized(exact) * norm.weight.double())


def numbers(rows: QuantizedRows) -> torch.Tensor:
    """What FP8 rows stand for."""
    width, groups = rows.rows.shape[1], rows.scales.shape[1]
    return rows.rows.double() * rows.scales.double().repeat_interleave(width // groups, 1)


def matrix_of(weights: QuantizedWeights) -> torch.Tensor:
    """What FP8 weights stand for."""
    scales = weights.scales.double()
    if not weights.grouped:
        return weights.weight.double() * scales[:, None]
    whole = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    return weights.weight.double() * whole


def check_quantize() -> None:
    """Each number is the nearest of FP8, after a sum, a norm or a gate; scales fit the largest."""
    for count, how, grouped, static_scale in itertools.product(
        (1, 5), ("plain", "norm", "add and norm", "gate"), (False, True), (False, True)
    ):
        if grouped and static_scale:
            continue
        width = 384
        rows = torch.randn(count, width * (2 if how == "gate" else 1))
        # Rows may lie in something wider.
        rows = torch.cat([rows, rows], 1)[:, : rows.shape[1]]
        norm = Norm(torch.rand(width) + 0.5, EPSILON) if "norm" in how else None
        residual = torch.randn(count, width) if "add" in how else None
        scale = torch.tensor([0.01]) if static_scale else None
        exact = rows.double()
        if residual is not None:
            exact = exact + residual.double()
        if norm is not None:
            exact = normalized(exact) * norm.weight.double()
        exact = swiglu(exact) if how == "gate" else exact
        before = None if residual is None else residual.clone()
        found = quantize(
            rows, residual=residual, norm=norm, swiglu=how == "gate", grouped=grouped, scale=scale
        )
        if residual is not None:
            assert before is not None
            close(residual, rows.double() + before.double())
        groups = width // GROUP if grouped else 1
        largest = exact.view(count, groups, -1).abs().amax(-1) / FP8_MAX
        close(found.scales, torch.full_like(largest, 0.01) if static_scale else largest)
        each = found.scales.double().repeat_interleave(width // groups, 1)
        nearest = (exact / each).clamp(-FP8_MAX, FP8_MAX).float().to(FP8)
        # Float32 may round to the other side.
        assert (nearest.double() == found.rows.double()).double().mean() > 0.995
    zeros = quantize(torch.zeros(2, 128))
    assert not zeros.rows.double().any()
    assert (zeros.scales > 0).all()
    try:
        quantize(torch.zeros(2, 100), grouped=True)
    except ValueError as error:
        assert "rows of 100 numbers have no whole groups of 128" in str(error)
    else:
        raise AssertionError("a group that is not whole")


if __name__ == "__main__":
    fp8_rounding.correct()
    torch.manual_seed(0)
    check_products()
    check_quantize()
    check_quantized_products()
    check_unscaled()
    print("quantized and tiled: all close")
