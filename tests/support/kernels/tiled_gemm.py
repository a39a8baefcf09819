"""Tiled and FP8 GEMM kernels in Triton's interpreter, against float64.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools

import torch

from pie_driver_sglang.kernels.gemm.dense_layers import LinearWeights, Norm, add_norm
from pie_driver_sglang.kernels.gemm.fp8_rows import (
    FP8,
    GROUP,
    LARGEST,
    QuantizedRows,
    QuantizedWeights,
    multiply_unscaled,
    quantize,
)
from pie_driver_sglang.kernels.gemm.small_m import Scratch, Stream, begin
from pie_driver_sglang.kernels.gemm.tiled import Tile, tiled_product
from support.kernels import fp8_rounding
from support.kernels.float64 import EPSILON, close, normalized

ROWS = (5, 16, 20)


def make_scratch() -> Scratch:
    """With parts that no sum may contain."""
    return Scratch(torch.full((400_000,), torch.nan), torch.zeros(256, dtype=torch.int32))


def gated(rows: torch.Tensor) -> torch.Tensor:
    """A gate and an up projection, joined."""
    gate, up = rows.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def check_products() -> None:
    """Products that scale, gate and add, whole and in parts, in either order of the operands."""
    for count, parts, swapped in itertools.product(ROWS, (1, 2), (False, True)):
        scratch, tile = make_scratch(), Tile(16, 16, 32, parts=parts, swapped=swapped)
        rows, matrix = torch.randn(count, 128), LinearWeights(torch.randn(96, 128))
        exact = rows.double() @ matrix.weight.double().T
        # Rows may lie in something wider.
        wider = torch.cat([rows, rows], 1)[:, :128]
        close(tiled_product(wider, matrix, tile, scratch), exact)
        stream = begin(rows, 3)
        scaled = normalized(rows) @ matrix.weight.double().T
        given = {"stream": stream, "epsilon": EPSILON}
        close(tiled_product(rows, matrix, tile, scratch, **given), scaled)
        close(tiled_product(rows, matrix, tile, scratch, gated=True, **given), gated(scaled))
        before = torch.randn(count, 96)
        into = Stream(before.clone(), torch.full((count, 6), torch.nan))
        assert tiled_product(rows, matrix, tile, scratch, into=into) is into.rows
        close(into.rows, before.double() + exact)
        close(into.squares.sum(1), into.rows.double().square().sum(1))
        again = before.clone()
        assert tiled_product(rows, matrix, tile, scratch, into=again) is again
        assert torch.equal(again, into.rows)
        assert not scratch.arrived.any()


def check_quantized_products() -> None:
    """FP8 rows and weights with a scale for each row and output, and for groups and blocks."""
    for count, parts, swapped, grouped in itertools.product(
        ROWS[::2], (1, 2), (False, True), (False, True)
    ):
        scratch, tile = make_scratch(), Tile(16, 64, 128, parts=parts, swapped=swapped)
        outputs, inputs = 256, 512
        rows = quantize(torch.randn(count, inputs), grouped=grouped)
        size = (outputs // GROUP, inputs // GROUP) if grouped else (outputs,)
        weights = QuantizedWeights(torch.randn(outputs, inputs).to(FP8), torch.rand(size) + 0.5)
        exact = numbers(rows) @ matrix_of(weights).T
        kind = torch.float32
        close(tiled_product(rows, weights, tile, scratch, dtype=kind), exact)
        found = tiled_product(rows, weights, tile, scratch, gated=True, dtype=kind)
        close(found, gated(exact))
        before = torch.randn(count, outputs)
        found = tiled_product(rows, weights, tile, scratch, into=before.clone())
        close(found, before.double() + exact)
        assert not scratch.arrived.any()


def check_unscaled() -> None:
    """Products whose scales the next kernel applies: a sum with a norm, a gate, or a sum alone."""
    count, width = 5, 256
    rows = quantize(torch.randn(count, width))
    size = (2 * width,)
    weights = QuantizedWeights(torch.randn(*size, width).to(FP8), torch.rand(size) + 0.5)
    exact = numbers(rows) @ matrix_of(weights).T
    products = multiply_unscaled(rows, weights, torch.ones(()), torch.float32)
    close(products.rows * products.of_rows * products.of_outputs, exact)
    joined = quantize(products, gated=True)
    close(joined.scales[:, 0] * LARGEST, gated(exact).abs().amax(1))
    norm, residual = Norm(torch.rand(width) + 0.5, EPSILON), torch.randn(count, width)
    half = QuantizedWeights(weights.weight[:width], weights.scales[:width])
    products = multiply_unscaled(rows, half, torch.ones(()), torch.float32)
    exact = residual.double() + numbers(rows) @ matrix_of(half).T
    largest = (normalized(exact) * norm.weight.double()).abs().amax(1)
    given = residual.clone()
    found = quantize(products, residual=given, norm=norm)
    close(given, exact)
    close(found.scales[:, 0] * LARGEST, largest)
    scales = (products.of_rows, products.of_outputs)
    out, total = add_norm(products.rows[None], residual.clone(), norm, scales)
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
    for count, how, grouped, fixed in itertools.product(
        (1, 5), ("plain", "norm", "add and norm", "gate"), (False, True), (False, True)
    ):
        if grouped and fixed:
            continue
        width = 384
        rows = torch.randn(count, width * (2 if how == "gate" else 1))
        # Rows may lie in something wider.
        rows = torch.cat([rows, rows], 1)[:, : rows.shape[1]]
        norm = Norm(torch.rand(width) + 0.5, EPSILON) if "norm" in how else None
        residual = torch.randn(count, width) if "add" in how else None
        scale = torch.tensor([0.01]) if fixed else None
        exact = rows.double()
        if residual is not None:
            exact = exact + residual.double()
        if norm is not None:
            exact = normalized(exact) * norm.weight.double()
        exact = gated(exact) if how == "gate" else exact
        before = None if residual is None else residual.clone()
        found = quantize(
            rows, residual=residual, norm=norm, gated=how == "gate", grouped=grouped, scale=scale
        )
        if residual is not None:
            assert before is not None
            close(residual, rows.double() + before.double())
        groups = width // GROUP if grouped else 1
        largest = exact.view(count, groups, -1).abs().amax(-1) / LARGEST
        close(found.scales, torch.full_like(largest, 0.01) if fixed else largest)
        each = found.scales.double().repeat_interleave(width // groups, 1)
        nearest = (exact / each).clamp(-LARGEST, LARGEST).float().to(FP8)
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
