"""Products of batches on a GPU (`kernels/gemm/wgmma.py`): parity, times, and those of cuBLAS.

    python benches/gpu/batch_check.py [--parity] [--times] [--rows 2,16,64,128,192] [--json FILE]

Without one of the two it does both.

--parity: products of every kind, in 16 bits and in FP8, of 2 to 224 rows against float64.
--times: microseconds of each product of a layer of the 8B, the 14B and the 0.6B, in graphs whose
    matrices exceed the L2 cache, and of cuBLAS with the kernels that it leaves to others.

Times of whole steps, with and without these kernels: `step_check.py --way batch_products=0`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import frame
import torch
from frame import Report
from graph_times import time_graph

from pie_driver_sglang.kernels.gemm import norm_rope, wgmma
from pie_driver_sglang.kernels.gemm.fp8_rows import (
    FP8,
    QuantizedRows,
    QuantizedWeights,
    unscaled_fp8_gemm,
)
from pie_driver_sglang.kernels.gemm.types import Epilogue, LinearWeights, Residual, RmsScale
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaGemm

TOLERANCE = 0.02
"""Of the largest output, which is rounded to 16 bits, as a gate and its product are."""
EPSILON = 1e-6
ROTATED_BYTES = 250 << 20
"""Weights of a graph, at least: several times the L2 cache."""
STORE, SWIGLU, ADD_RESIDUAL = Epilogue
_TYPES = (torch.bfloat16, torch.float16)


class Product(NamedTuple):
    """A matrix and what its product does at its end."""

    epilogue: Epilogue
    height: int
    inputs: int


LAYERS = {
    "8b": (
        Product(STORE, 6144, 4096), Product(ADD_RESIDUAL, 4096, 4096),
        Product(SWIGLU, 28672, 4096), Product(ADD_RESIDUAL, 4096, 14336),
    ),
    "14b": (
        Product(STORE, 7168, 5120), Product(ADD_RESIDUAL, 5120, 5120),
        Product(SWIGLU, 34816, 5120), Product(ADD_RESIDUAL, 5120, 17408),
    ),
    "0.6b": (
        Product(STORE, 4096, 1024), Product(ADD_RESIDUAL, 1024, 2048),
        Product(SWIGLU, 6144, 1024), Product(ADD_RESIDUAL, 1024, 3072),
    ),
}  # fmt: skip
"""Of a layer: queries, keys and values; out; gate and up; down."""
OTHERS = (
    Product(STORE, 512, 256), Product(ADD_RESIDUAL, 576, 384), Product(SWIGLU, 768, 640),
    Product(STORE, 5120, 2048), Product(ADD_RESIDUAL, 2048, 4096), Product(SWIGLU, 3072, 2048),
)  # fmt: skip
PARITY_ROWS = (2, 7, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 161, 200, 224)


class Case:
    """Rows, matrices, and the kernel's cut for them; None where it does not take them."""

    def __init__(
        self, product: Product, rows: int, dtype: torch.dtype, *, fp8: bool, matrices: int = 1
    ) -> None:
        self.product = product
        epilogue, height, inputs = product
        self.config = wgmma.find_wgmma_config(rows, height, inputs, 1 if fp8 else 2, epilogue)
        self.outputs = height // 2 if epilogue == SWIGLU else height
        self.rows = torch.randn(rows, inputs, device="cuda").to(dtype)
        self.given: torch.Tensor | QuantizedRows = self.rows
        self.sum_squares: torch.Tensor | None = None
        if fp8:
            scales = torch.rand(rows, 1, device="cuda") + 0.5
            self.given = QuantizedRows(self.rows.to(FP8), scales)
        elif epilogue != ADD_RESIDUAL:
            # Not the rows' own, which would hide a mistake in how they are summed.
            sum_squares = torch.rand(rows, inputs // 64, device="cuda") * 128
            self.sum_squares = sum_squares
        made = [torch.randn(height, inputs, device="cuda").to(dtype) for _ in range(matrices)]
        self.weights: list[LinearWeights | QuantizedWeights] = [
            QuantizedWeights((each * 0.25).to(FP8), torch.rand(height, device="cuda") + 0.5)
            if fp8 else LinearWeights(each * inputs**-0.5)
            for each in made
        ]  # fmt: skip
        self.before = torch.randn(rows, self.outputs, device="cuda").to(dtype)
        self.residual: Residual | None = None
        if epilogue == ADD_RESIDUAL and self.config is not None:
            tiles = self.outputs // self.config.block_n
            self.residual = Residual(self.before.clone(), torch.empty(rows, tiles, device="cuda"))

    def exact(self) -> torch.Tensor:
        """What float64 says of the first matrix."""
        [weights, *_] = self.weights
        given = self.given
        if isinstance(given, QuantizedRows) and isinstance(weights, QuantizedWeights):
            found = given.rows.double() @ weights.weight.double().T
            found *= given.scales.double() * weights.scales.double()
        else:
            found = self.rows.double() @ weights.weight.double().T
        if self.sum_squares is not None:
            mean = self.sum_squares.double().sum(1, keepdim=True) / self.product.inputs
            found *= torch.rsqrt(mean + EPSILON)
        if self.product.epilogue == SWIGLU:
            gate, up = found.chunk(2, -1)
            found = torch.nn.functional.silu(gate) * up
        return found + self.before.double() if self.product.epilogue == ADD_RESIDUAL else found

    def run(self, kernels: WgmmaGemm, number: int = 0) -> Residual:
        """A product, and sums of squares of an output that was added to."""
        assert self.config is not None
        found = kernels.multiply(
            self.given, self.weights[number], self.config, self.product.epilogue,
            sum_squares=self.sum_squares,
            epsilon=EPSILON, residual=self.residual,
        )  # fmt: skip
        return self.residual or Residual(found, self.rows)

    def checked(self, kernels: WgmmaGemm) -> Residual:
        """The first product, added to what there was before."""
        if self.residual is not None:
            self.residual.rows.copy_(self.before)
            self.residual.sum_squares.fill_(torch.nan)
        rows, sum_squares = self.run(kernels)
        return Residual(rows.clone(), sum_squares.clone())


def errors(report: Report) -> Iterator[float]:
    """How far off every product is."""
    kernels = {each: WgmmaGemm(each, torch.device("cuda", 0)) for each in _TYPES}
    for product in (*OTHERS, *LAYERS["8b"], *LAYERS["0.6b"]):
        for dtype, fp8 in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, True)):
            for rows in PARITY_ROWS:
                case = Case(product, rows, dtype, fp8=fp8)
                if case.config is None:
                    continue
                exact = case.exact()
                found, parts = case.checked(kernels[dtype])
                again, _ = case.checked(kernels[dtype])
                assert torch.equal(found, again), f"{product}, {rows} rows: sums in another order"
                off = float((found.double() - exact).abs().max() / exact.abs().max())
                own = found.double().pow(2).sum(1)
                sum_squares = 0.0
                if product.epilogue == ADD_RESIDUAL:
                    sum_squares = float(((parts.double().sum(1) - own) / own).abs().max())
                report.add(
                    part="parity", product=str(product), rows=rows, dtype=str(dtype), fp8=fp8,
                    config=str(case.config), off=off, sum_squares=sum_squares,
                )  # fmt: skip
                yield max(off, sum_squares)


def by_library(case: Case) -> Callable[[], Any]:
    """cuBLAS, and the kernels of gates after it."""
    one = torch.ones((), device="cuda")
    scale = RmsScale(case.rows, EPSILON)
    given = case.given

    def run() -> None:
        for weights in case.weights:
            if isinstance(given, QuantizedRows) and isinstance(weights, QuantizedWeights):
                # Gates and sums are the next quantization's.
                unscaled_fp8_gemm(given, weights, one, case.rows.dtype)
            elif case.product.epilogue == ADD_RESIDUAL:
                case.before.addmm_(case.rows, weights.weight.T)
            else:
                found = torch.nn.functional.linear(case.rows, weights.weight)
                if case.product.epilogue == SWIGLU:
                    norm_rope.silu_and_mul(found, scale)

    return run


def time_products(report: Report, counts: list[int]) -> None:
    """A line for every product."""
    kernels = WgmmaGemm(torch.bfloat16, torch.device("cuda", 0))
    for name, layer in LAYERS.items():
        for fp8 in (False, True):
            for rows in counts:
                totals = [0.0, 0.0]
                for product in layer:
                    size = product.height * product.inputs * (1 if fp8 else 2)
                    matrices = ROTATED_BYTES // size + 2
                    case = Case(product, rows, torch.bfloat16, fp8=fp8, matrices=matrices)
                    figures = {"library": time_graph(by_library(case), matrices)}
                    if case.config is not None:
                        numbers = range(matrices)
                        figures["own"] = time_graph(
                            lambda case=case, numbers=numbers: [
                                case.run(kernels, number) for number in numbers
                            ],
                            matrices,
                        )
                    report.add(
                        part="times", shape=name, fp8=fp8, rows=rows, product=str(product),
                        config=str(case.config), us=figures, megabytes=size / 1e6,
                    )  # fmt: skip
                    totals[0] += figures["library"]
                    totals[1] += figures.get("own", float("nan"))
                library, own = totals
                kind = "FP8" if fp8 else "bfloat16"
                print(f"{name}, {kind}, {rows} rows: {own:.1f}, cuBLAS {library:.1f}", flush=True)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__)
    for part in ("parity", "times"):
        made.add_argument(f"--{part}", action="store_true")
    made.add_argument("--rows", default="2,16,64,128,192", help="of the products that are timed")
    return made


def main() -> None:
    """Runs the parts."""
    arguments = parser().parse_args()
    both = not (arguments.parity or arguments.times)
    torch.manual_seed(7)
    with Report(__file__, arguments) as report:
        if arguments.parity or both:
            report.hold("products", max(errors(report)), at_most=TOLERANCE)
        if arguments.times or both:
            time_products(report, [int(count) for count in arguments.rows.split(",")])


if __name__ == "__main__":
    main()
