"""The kernels of one row in CUDA C++ on a GPU: parity, and times of products in FP8.

    python benches/gpu/lone_check.py [--parity] [--times] [--json FILE]

Without one of the two it does both.

--parity: attention by clusters, and products that quantize their row, against float64.
--times: microseconds of each product of a layer of the 8B in FP8, in graphs whose matrices exceed
    the L2 cache: by one kernel, and by one that quantizes and one by tiles.

Times of whole steps, with and without these kernels: `step_check.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import NamedTuple

import frame
import torch
from frame import Report
from graph_times import time_graph

sys.path.insert(0, str(frame.REPOSITORY / "tests"))

import single_decode_kernels
from pie_driver_sglang.kernels.attention import cluster_decode
from pie_driver_sglang.kernels.attention.cluster_decode import ClusterConfig, ClusterDecode
from pie_driver_sglang.kernels.gemm import fp8_gemv, tiled
from pie_driver_sglang.kernels.gemm.fp8_gemv import Fp8Gemv, GemvConfig
from pie_driver_sglang.kernels.gemm.fp8_rows import FP8, GROUP, QuantizedWeights, quantize
from pie_driver_sglang.kernels.gemm.types import Epilogue, Norm, Workspace

SEEN_TOLERANCE = 0.02
"""Of the largest number that attention gives, whose weights are rounded to 16 bits."""
PRODUCT_TOLERANCE = 0.05
"""Of the largest output. Two ways may round the largest number of a normed row to either side. Then
the scales differ, and so do some numbers of the row, by an FP8 step."""
EPSILON = 1e-6
ROTATED_BYTES = 400 << 20
"""Weights of a graph, at least: several times the L2 cache."""
ROWS = (
    # Length, queries, KV heads, head size, normed.
    (1, 16, 8, 128, True), (2, 16, 8, 128, False), (17, 32, 8, 128, False),
    (300, 40, 8, 128, True), (700, 32, 4, 128, True), (5000, 16, 8, 128, True),
    (70, 8, 4, 64, True), (900, 48, 8, 64, True), (129, 6, 6, 128, True),
)  # fmt: skip
TUNINGS = (None, ClusterConfig(8), ClusterConfig(16, 128), ClusterConfig(4, 512))
"""The kernel's own choice first."""


class Matrix(NamedTuple):
    """A product of the 8B, and some of other sizes."""

    epilogue: Epilogue
    outputs: int
    inputs: int
    normed: bool


LAYER = (
    Matrix(Epilogue.STORE, 6144, 4096, True),
    Matrix(Epilogue.ADD_RESIDUAL, 4096, 4096, False),
    Matrix(Epilogue.SWIGLU, 28672, 4096, True),
    Matrix(Epilogue.ADD_RESIDUAL, 4096, 14336, False),
)
OTHERS = (
    Matrix(Epilogue.STORE, 256, 1024, False),
    Matrix(Epilogue.SWIGLU, 512, 2560, False),
    Matrix(Epilogue.ADD_RESIDUAL, 5120, 17408, False),
    Matrix(Epilogue.STORE, 4096, 1024, True),
)


def attention_errors(report: Report) -> Iterator[float]:
    """How far off every row is."""
    for row in ROWS:
        for dtype in (torch.bfloat16, torch.float16):
            case = single_decode_kernels.Case(*row, dtype, "cuda")
            heads = single_decode_kernels.make_heads(case)
            assert cluster_decode.supports_cluster_decode(heads, dtype)
            for tuning in TUNINGS if dtype is torch.bfloat16 else TUNINGS[:1]:
                kernel = ClusterDecode(
                    heads, dtype, tuning or cluster_decode.find_cluster_config(heads)
                )
                off = single_decode_kernels.error(case, heads, kernel.attend, SEEN_TOLERANCE)
                report.add(part="attention", case=str(case), tuning=str(tuning), off=off)
                yield off


def make_weights(
    matrix: Matrix, *, static_scale: bool = False, grouped: bool = False
) -> QuantizedWeights:
    """Random ones."""
    outputs, inputs = matrix.outputs, matrix.inputs
    weight = torch.randn(outputs, inputs, device="cuda").to(FP8)
    blocks = (outputs // GROUP, inputs // GROUP) if grouped else (outputs,)
    scales = (torch.rand(*blocks, device="cuda") + 0.5) * 0.01
    return QuantizedWeights(
        weight, scales, torch.tensor([0.02], device="cuda") if static_scale else None
    )


def compile_product(
    matrix: Matrix, weights: QuantizedWeights, dtype: torch.dtype, config: GemvConfig
) -> Fp8Gemv:
    """The kernel of a matrix."""
    return Fp8Gemv(
        matrix.inputs, matrix.epilogue, dtype, weights.weight.device, config, normed=matrix.normed,
        static_scale=weights.row_scale is not None, grouped=weights.grouped,
    )  # fmt: skip


def make_norm(matrix: Matrix, dtype: torch.dtype) -> Norm | None:
    """Of the row, if it is normed."""
    weight = torch.rand(matrix.inputs, device="cuda") + 0.5
    return Norm(weight.to(dtype), EPSILON) if matrix.normed else None


def product_error(
    matrix: Matrix, dtype: torch.dtype, config: GemvConfig, *, static_scale: bool, grouped: bool
) -> float:
    """How far off a product is."""
    weights = make_weights(matrix, static_scale=static_scale, grouped=grouped)
    row = torch.randn(1, matrix.inputs, device="cuda").to(dtype)
    norm = make_norm(matrix, dtype)
    given = quantize(row.clone(), norm=norm, grouped=grouped, scale=weights.row_scale)
    repeats = GROUP if grouped else matrix.inputs
    exact_row = given.rows.double() * given.scales.double().repeat_interleave(repeats, 1)
    scales = weights.scales.double()
    if grouped:
        scales = scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    else:
        scales = scales[:, None]
    exact = exact_row @ (weights.weight.double() * scales).T
    residual = None
    if matrix.epilogue == Epilogue.ADD_RESIDUAL:
        residual = torch.randn(1, matrix.outputs, device="cuda").to(dtype)
        exact += residual.double()
    if matrix.epilogue == Epilogue.SWIGLU:
        gate, up = exact.chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
    kernel = compile_product(matrix, weights, dtype, config)
    found = kernel.multiply(row, weights, norm=norm, residual=residual)
    return float((found.double() - exact).abs().max() / exact.abs().max())


def product_errors(report: Report) -> Iterator[float]:
    """How far off every product is."""
    for matrix in (*LAYER, *OTHERS):
        for dtype, static_scale, grouped in (
            (torch.bfloat16, False, False), (torch.float16, True, False),
            (torch.bfloat16, False, True),
        ):  # fmt: skip
            for config in configs(matrix):
                off = product_error(
                    matrix, dtype, config, static_scale=static_scale, grouped=grouped
                )
                how = {"dtype": str(dtype), "static_scale": static_scale, "grouped": grouped}
                report.add(part="products", matrix=str(matrix), config=str(config), off=off, **how)
                yield off


def configs(matrix: Matrix) -> list[GemvConfig]:
    """All that fit a matrix."""
    found = [config for config in fp8_gemv.GEMV_CONFIGS if config.fits(matrix.inputs)]
    assert found[0] == fp8_gemv.find_gemv_config(matrix.inputs)
    return found


class Chain:
    """A product of many matrices, one after the other."""

    def __init__(self, matrix: Matrix, *, grouped: bool) -> None:
        self.matrix, self.grouped = matrix, grouped
        self._dtype = torch.bfloat16
        count = ROTATED_BYTES // (matrix.outputs * matrix.inputs) + 1
        self._weights = [make_weights(matrix, grouped=grouped) for _ in range(count)]
        self._row = torch.randn(1, matrix.inputs, device="cuda").to(self._dtype)
        self._norm = make_norm(matrix, self._dtype)
        self._swiglu = matrix.epilogue == Epilogue.SWIGLU
        self._outputs = matrix.outputs // 2 if self._swiglu else matrix.outputs
        add_residual = matrix.epilogue == Epilogue.ADD_RESIDUAL
        self._residual = self._row.new_zeros(1, self._outputs) if add_residual else None

    def by_row(self, config: GemvConfig) -> float:
        """Microseconds of one kernel a product."""
        kernel = compile_product(self.matrix, self._weights[0], self._dtype, config)

        def run() -> None:
            for weights in self._weights:
                kernel.multiply(self._row, weights, norm=self._norm, residual=self._residual)

        return time_graph(run, len(self._weights))

    def by_tiles(self) -> float:
        """Microseconds of a kernel that quantizes and one of tiles."""
        inputs = self.matrix.inputs
        tile = tiled.find_tiled_config(1, self._outputs, inputs, 1, self.matrix.epilogue)
        assert tile is not None
        parts, tiles = tiled.workspace_sizes(tile.block_m, self.matrix.outputs)
        counters = torch.zeros(tiles, dtype=torch.int32, device="cuda")
        workspace = Workspace(torch.zeros(parts, device="cuda"), counters)

        def run() -> None:
            for weights in self._weights:
                given = quantize(self._row, norm=self._norm, grouped=self.grouped)
                tiled.tiled_gemm(
                    given, weights, tile, workspace, residual=self._residual, swiglu=self._swiglu,
                    dtype=self._dtype,
                )  # fmt: skip

        return time_graph(run, len(self._weights))


def time_products(report: Report) -> None:
    """A line for every product."""
    for grouped in (False, True):
        for matrix in LAYER:
            chain = Chain(matrix, grouped=grouped)
            figures = {"quantize, tiles": chain.by_tiles()}
            figures |= {str(config): chain.by_row(config) for config in configs(matrix)}
            line = "  ".join(f"{name}: {us:.1f}" for name, us in figures.items())
            print(f"{matrix}{', blocks' if grouped else ''}: {line}", flush=True)
            report.add(part="times", matrix=str(matrix), grouped=grouped, us=figures)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__)
    for part in ("parity", "times"):
        made.add_argument(f"--{part}", action="store_true")
    return made


def main() -> None:
    """Runs the parts."""
    arguments = parser().parse_args()
    both = not (arguments.parity or arguments.times)
    torch.manual_seed(7)
    with Report(__file__, arguments) as report:
        if arguments.parity or both:
            report.hold("attention", max(attention_errors(report)), at_most=SEEN_TOLERANCE)
            report.hold("products", max(product_errors(report)), at_most=PRODUCT_TOLERANCE)
        if arguments.times or both:
            time_products(report)


if __name__ == "__main__":
    main()
