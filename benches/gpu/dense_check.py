"""Dense layers of decode steps on a GPU: parity, times compared with cuBLAS and SGLang, and tuning.

    python benches/gpu/dense_check.py [--parity] [--times] [--tune] [--seconds N] [--json FILE]

Without one of the three it does the first two.

--parity: each kernel in bfloat16 against float64.
--times: microseconds of a layer without its attention, in graphs of layers whose weights exceed the
    L2 cache: `small_m`, `linear` with `norm_rope`, and what SGLang runs for Qwen 3.
--tune: microseconds of each product, alone and cut in every way, and cuBLAS; prints the best.

With `TRITON_INTERPRET=1 ... --device cpu` the first runs on tiny sizes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import frame
import torch
from frame import Report
from graph_times import time_graph
from tiled_products import TiledProduct, randn

from pie_driver_sglang.kernels.gemm import linear, norm_rope, small_m, tiled
from pie_driver_sglang.kernels.gemm.types import (
    Epilogue,
    Heads,
    LinearWeights,
    Norm,
    Residual,
    RmsScale,
    TileConfig,
    Workspace,
)

ROWS = (1, 8, 16, 32, 64, 128, 256)
TUNED_ROWS = (1, 16, 32, 64, 128, 256)
EPSILON = 1e-6
TOLERANCE = 2e-2
"""Of the largest value of a result in bfloat16."""
ROTATED_BYTES = 200 << 20
"""Weights of a graph, at least: several times the L2 cache."""
SLOTS = 4096


class Shape(NamedTuple):
    """The layers of a model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    middle: int

    def products(self) -> dict[str, tuple[int, int, int, bool]]:
        """Outputs and inputs of each product, the most parts, and whether it is gated."""
        most, seen = linear.MAX_SPLIT_K, self.heads * self.dim
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.dim, self.hidden, 1, False),
            "out": (self.hidden, seen, most, False),
            "gate_up": (self.middle, self.hidden, 1, True),
            "down": (self.hidden, self.middle, most, False),
        }


SHAPES = (
    Shape("0.6B", 1024, 16, 8, 128, 3072),
    Shape("8B", 4096, 32, 8, 128, 14336),
    Shape("14B", 5120, 40, 8, 128, 17408),
)
TINY = Shape("tiny", 64, 4, 2, 16, 96)


class Layer:
    """Weights of a layer, and two ways to run it without its attention."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.norms = [self._norm(shape.hidden, device) for _ in range(2)]
        self.matrices = {
            name: LinearWeights(
                randn(outputs * (2 if swiglu else 1), inputs, device=device, scale=inputs**-0.5)
            )
            for name, (outputs, inputs, _, swiglu) in shape.products().items()
        }
        angles = torch.rand(SLOTS, shape.dim // 2, device=device) * 6.28
        storage = [randn(SLOTS, shape.kv_heads, shape.dim, device=device) for _ in range(2)]
        self._workspace: Workspace | None = None
        self.heads = Heads(
            shape.heads, self._norm(shape.dim, device), self._norm(shape.dim, device),
            torch.cat([angles.cos(), angles.sin()], -1), True, *storage,
        )  # fmt: skip

    @staticmethod
    def _norm(width: int, device: torch.device) -> Norm:
        return Norm(1 + randn(width, device=device, scale=0.1), EPSILON)

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return sum(matrix.weight.nbytes for matrix in self.matrices.values())

    def ours(self, parts: torch.Tensor, residual: torch.Tensor, slots: torch.Tensor) -> Any:
        """By the kernels of the driver; the parts and the residual of the next layer."""
        from pie_driver_sglang.engine.layers import dense

        if len(slots) > dense._MAX_ROWS:
            return parts, self._many(residual, slots)
        rows, residual = norm_rope.add_rms_norm(parts, residual, self.norms[0])
        qkv = self._gemm("qkv", rows)[0]
        seen = norm_rope.norm_rope_store(qkv, self.heads, slots, slots).flatten(1)
        rows, residual = norm_rope.add_rms_norm(self._gemm("out", seen), residual, self.norms[1])
        return self._gemm("down", self._gated(rows)), residual

    def few(self, parts: torch.Tensor, residual: torch.Tensor, slots: torch.Tensor) -> Any:
        """By the kernels of few rows; the sums of squares are kept as the parts."""
        configs, count = self.few_cuts(len(slots)), len(slots)
        if configs is None:
            raise ValueError(f"no cuts for {count} rows")
        if self._workspace is None:
            self._workspace = Workspace(
                torch.zeros(64 * 4 * self.shape.hidden, device=slots.device),
                torch.zeros(self.shape.hidden, dtype=torch.int32, device=slots.device),
            )
        workspace, hidden = self._workspace, self.shape.hidden
        tiles = {name: hidden // configs[name].block_n for name in ("out", "down")}
        if parts.dtype != torch.float32 or parts.shape != (count, tiles["down"]):
            parts = small_m.start_residual(residual, tiles["down"]).sum_squares
        matrices = self.matrices
        qkv = small_m.small_m_gemm(
            residual, matrices["qkv"], configs["qkv"], workspace, sum_squares=parts, epsilon=EPSILON
        )
        seen = norm_rope.norm_rope_store(qkv, self.heads, slots, slots).flatten(1)
        middle = Residual(residual, parts.new_empty(count, tiles["out"]))
        small_m.small_m_gemm(seen, matrices["out"], configs["out"], workspace, residual=middle)
        swiglu = small_m.small_m_gemm(
            residual, matrices["gate_up"], configs["gate_up"], workspace,
            sum_squares=middle.sum_squares, epsilon=EPSILON,
            swiglu=True,
        )  # fmt: skip
        after = Residual(residual, parts.new_empty(count, tiles["down"]))
        small_m.small_m_gemm(swiglu, matrices["down"], configs["down"], workspace, residual=after)
        return after.sum_squares, residual

    def few_cuts(self, rows: int) -> dict[str, TileConfig] | None:
        """Of each product; None if one has none."""
        configs = {
            name: small_m.find_small_m_config(
                rows,
                outputs,
                inputs,
                Epilogue.of(swiglu=is_swiglu, add_residual=name in ("out", "down")),
            )
            for name, (outputs, inputs, _, is_swiglu) in self.shape.products().items()
        }
        found = {name: config for name, config in configs.items() if config is not None}
        return found if len(found) == len(configs) else None

    def _many(self, residual: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """As a layer of many rows runs: without norms."""
        linear, scale = torch.nn.functional.linear, RmsScale(residual, EPSILON)
        weights = {name: matrix.weight for name, matrix in self.matrices.items()}
        qkv = linear(residual, weights["qkv"])
        seen = norm_rope.norm_rope_store(qkv, self.heads, slots, slots, scale=scale).flatten(1)
        residual.addmm_(seen, weights["out"].t())
        middle = norm_rope.silu_and_mul(linear(residual, weights["gate_up"]), scale)
        return residual.addmm_(middle, weights["down"].t())

    def _cut(self, name: str, rows: int) -> TileConfig | None:
        outputs, inputs, most, swiglu = self.shape.products()[name]
        return linear.find_linear_config(rows, outputs, inputs, most, swiglu=swiglu)

    def _gemm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        config, matrix = self._cut(name, len(rows)), self.matrices[name]
        if config is None:
            return torch.nn.functional.linear(rows, matrix.weight)[None]
        return linear.linear(rows, matrix, config)

    def _gated(self, rows: torch.Tensor) -> torch.Tensor:
        config, matrix = self._cut("gate_up", len(rows)), self.matrices["gate_up"]
        if config is None:
            return norm_rope.silu_and_mul(torch.nn.functional.linear(rows, matrix.weight))
        return linear.linear_swiglu(rows, matrix, config)

    def sglang(self, parts: torch.Tensor, residual: torch.Tensor, slots: torch.Tensor) -> Any:
        """By what SGLang runs for Qwen 3."""
        from sglang.kernels.ops.attention.rope import apply_rope_with_cos_sin_cache_inplace
        from sglang.kernels.ops.kvcache.kvcache import store_cache
        from sglang.kernels.ops.layernorm.norm import fused_inplace_qknorm
        from sglang.srt.layers.activation import silu_and_mul
        from sglang.srt.layers.layernorm import fused_add_rmsnorm

        shape, linear = self.shape, torch.nn.functional.linear
        count, rows = len(slots), parts[0]
        fused_add_rmsnorm(rows, residual, self.norms[0].weight, EPSILON)
        qkv = linear(rows, self.matrices["qkv"].weight)
        width, kv_width = shape.heads * shape.dim, shape.kv_heads * shape.dim
        q, k, v = qkv.split([width, kv_width, kv_width], dim=-1)
        norms = (self.heads.q_norm, self.heads.k_norm)
        heads = [part.view(count, -1, shape.dim) for part in (q, k)]
        fused_inplace_qknorm(
            *heads, *(norm.weight for norm in norms), head_dim=shape.dim, eps=EPSILON
        )
        apply_rope_with_cos_sin_cache_inplace(*heads, self.heads.cos_sin_cache, slots, is_neox=True)
        keys, values = (
            stored.view(SLOTS, -1) for stored in (self.heads.k_cache, self.heads.v_cache)
        )
        store_cache(k, v, keys, values, slots, row_bytes=2 * kv_width)
        rows = linear(q.contiguous(), self.matrices["out"].weight)
        fused_add_rmsnorm(rows, residual, self.norms[1].weight, EPSILON)
        middle = silu_and_mul(linear(rows, self.matrices["gate_up"].weight))
        return linear(middle, self.matrices["down"].weight)[None], residual


def check_parity(device: torch.device, tiny: bool, report: Report) -> None:
    """Prints the largest error of each kernel, in parts of its largest result."""
    shape = TINY if tiny else SHAPES[0]
    layer = Layer(shape, device)
    worst: dict[str, float] = {}

    def compare(name: str, found: torch.Tensor, exact: torch.Tensor) -> None:
        error = float((found.double() - exact).abs().max() / exact.abs().max())
        worst[name] = max(worst.get(name, 0.0), error)

    for count in (1, 3, 17) if tiny else (1, 3, 17, 100, 256):
        for name, (outputs, inputs, most, swiglu) in shape.products().items():
            rows, weight = randn(count, inputs, device=device), layer.matrices[name].weight
            exact = rows.double() @ weight.double().T
            if swiglu:
                gate, up = exact.chunk(2, dim=-1)
                exact = torch.nn.functional.silu(gate) * up
            for config in (
                [TileConfig(16, 16, 16)] if tiny else configs(count, inputs, most, swiglu)
            ):
                if not config.fits(outputs, inputs):
                    continue
                if swiglu:
                    compare(name, linear.linear_swiglu(rows, LinearWeights(weight), config), exact)
                else:
                    compare(name, linear.linear(rows, LinearWeights(weight), config).sum(0), exact)
        check_few_parity(layer, count, device, compare)
    check_tiles(TINY if tiny else SHAPES[1], device, compare)
    for name, error in worst.items():
        print(f"parity {name}: {error:.1e}")
    held = [report.hold(f"error of {n}", error, at_most=TOLERANCE) for n, error in worst.items()]
    if not all(held):
        raise SystemExit("kernels differ from float64")


def check_few_parity(
    layer: Layer,
    count: int,
    device: torch.device,
    compare: Callable[[str, torch.Tensor, torch.Tensor], None],
) -> None:
    """Compares the products of few rows."""
    configs = layer.few_cuts(count)
    if configs is None:
        return
    workspace = Workspace(
        torch.zeros(64 * 4 * layer.shape.hidden, device=device),
        torch.zeros(layer.shape.hidden, dtype=torch.int32, device=device),
    )
    for name, (outputs, inputs, _, is_swiglu) in layer.shape.products().items():
        rows, matrix, config = (
            randn(count, inputs, device=device),
            layer.matrices[name],
            configs[name],
        )
        if name in ("out", "down"):
            before = randn(count, outputs, device=device)
            sum_squares = torch.empty(count, outputs // config.block_n, device=device)
            exact = before.double() + rows.double() @ matrix.weight.double().T
            into = Residual(before, sum_squares)
            found = small_m.small_m_gemm(rows, matrix, config, workspace, residual=into)
        else:
            given = small_m.start_residual(rows, 4)
            found = small_m.small_m_gemm(
                rows,
                matrix,
                config,
                workspace,
                sum_squares=given.sum_squares,
                epsilon=EPSILON,
                swiglu=is_swiglu,
            )
            exact = rows.double()
            exact *= torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON)
            exact = exact @ matrix.weight.double().T
            if is_swiglu:
                gate, up = exact.chunk(2, dim=-1)
                exact = torch.nn.functional.silu(gate) * up
        compare(f"{name} of few rows", found, exact)


def check_tiles(
    shape: Shape, device: torch.device, compare: Callable[[str, torch.Tensor, torch.Tensor], None]
) -> None:
    """Compares products by tiles, of the type that weights have and of FP8."""
    for (epilogue, itemsize, most), tiles in tiled._CONFIGS.items():
        for count in (1, most - 3, most):
            for name, (outputs, inputs, _, swiglu) in shape.products().items():
                if epilogue != Epilogue.of(swiglu=swiglu, add_residual=name in ("out", "down")):
                    continue
                fitting = [tile for tile in tiles if tile.fits(outputs, inputs)]
                for tile in [TileConfig(16, 16, 16)] if device.type == "cpu" else fitting:
                    product = TiledProduct(count, outputs, inputs, device, itemsize, swiglu=swiglu)
                    found = product.run(tile, add_residual=epilogue == Epilogue.ADD_RESIDUAL)
                    compare(f"{name} by tiles of {itemsize} bytes", found, product.exact)


def configs(rows: int, inputs: int, max_split_k: int, swiglu: bool) -> Iterator[TileConfig]:
    """What may be tried for a step and a matrix of so many inputs."""
    tile, matrices = min(128, max(16, 1 << (rows - 1).bit_length())), 2 if swiglu else 1
    for outputs, parts, warps in itertools.product(
        (16, 32, 64, 128), range(1, max_split_k + 1), (4, 8)
    ):
        if tile * outputs * matrices > 64 * 32 * warps or inputs % parts:
            continue
        for turn, stages in ((64, 5), (128, 3), (128, 5), (256, 3)):
            held = (tile + outputs * matrices) * turn * 2 * stages
            if held <= 220 << 10:
                yield TileConfig(tile, outputs, turn, parts, warps, stages)


class Product:
    """One product of a shape for a number of rows, over many matrices."""

    def __init__(self, shape: Shape, name: str, weights: list[torch.Tensor], rows: int) -> None:
        self.outputs, self.inputs, self.max_split_k, self.is_swiglu = shape.products()[name]
        self.weights = weights
        self.rows = randn(rows, self.inputs, device=weights[0].device)

    def library(self) -> float:
        """Microseconds of cuBLAS, without the gate."""
        return self._time(torch.nn.functional.linear)

    def config(self, config: TileConfig) -> float:
        """Microseconds of our kernel."""
        run = linear.linear_swiglu if self.is_swiglu else linear.linear
        return self._time(lambda rows, weight: run(rows, LinearWeights(weight), config))

    def _time(self, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        def products() -> None:
            for weight in self.weights:
                run(self.rows, weight)

        return time_graph(products, len(self.weights))

    def tilings(self) -> Iterator[TileConfig]:
        """What may be the best."""
        for config in configs(len(self.rows), self.inputs, self.max_split_k, self.is_swiglu):
            programs = self.outputs // config.block_n * config.split_k
            if config.fits(self.outputs, self.inputs) and programs >= 48:
                yield config


def compile_cuts(shape: Shape, device: torch.device, until: float) -> None:
    """Fills Triton's cache for a shape, with all processors."""
    kernels: dict[tuple[Any, ...], tuple[str, TileConfig]] = {}
    for name, (_, inputs, _, is_swiglu) in shape.products().items():
        weights = [torch.empty(0, inputs, device=device)]
        for rows in TUNED_ROWS:
            for config in Product(shape, name, weights, rows).tilings():
                # What of a cut its kernel knows.
                known = (replace(config, split_k=1), config.split_k > 1, is_swiglu)
                kernels.setdefault(known, (name, config))
    print(f"{len(kernels)} kernels", flush=True)
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_cut, shape, *kernel, device) for kernel in kernels.values()]
        wait(jobs, timeout=until - time.monotonic())
        pool.shutdown(wait=True, cancel_futures=True)
    failed = [error for job in jobs if not job.cancelled() and (error := job.exception())]
    print(f"{len(failed)} failed, first {failed[:1]}", flush=True)


def compile_cut(shape: Shape, name: str, config: TileConfig, device: torch.device) -> None:
    """Runs a product once."""
    outputs, inputs, _, is_swiglu = shape.products()[name]
    weight = torch.zeros(
        outputs * (2 if is_swiglu else 1), inputs, dtype=torch.bfloat16, device=device
    )
    run = linear.linear_swiglu if is_swiglu else linear.linear
    run(weight[:1], LinearWeights(weight), config)
    torch.cuda.synchronize()


def tune(shape: Shape, device: torch.device, until: float, report: Report) -> None:
    """Every product of a shape at every number of rows."""
    compile_cuts(shape, device, (time.monotonic() + until) / 2)
    for name, (outputs, inputs, _, is_swiglu) in shape.products().items():
        height = outputs * (2 if is_swiglu else 1)
        copies = max(2, -(-ROTATED_BYTES // (height * inputs * 2)))
        weights = [randn(height, inputs, device=device, scale=0.02) for _ in range(copies)]
        for rows in TUNED_ROWS:
            product = Product(shape, name, weights, rows)
            library, found = product.library(), []
            for config in product.tilings():
                if time.monotonic() > until:
                    break
                try:
                    found.append((product.config(config), config))
                except Exception as error:
                    print(f"{config}: {str(error).splitlines()[0][:100]}", flush=True)
            found.sort(key=lambda pair: pair[0])
            configs = [{"us": took, **asdict(config)} for took, config in found[:8]]
            report.add(
                shape=shape.name, product=name, rows=rows, library_us=library, configs=configs
            )
            said = "; ".join(
                f"{took:.2f} {tuple(asdict(config).values())}" for took, config in found[:4]
            )
            print(f"{shape.name} {name} x {rows}: cuBLAS {library:.2f} | {said}", flush=True)


def time_layers(shape: Shape, device: torch.device, report: Report) -> None:
    """A layer in both ways at every number of rows."""
    one = Layer(shape, device)
    layers = [one, *(Layer(shape, device) for _ in range(max(3, ROTATED_BYTES // one.bytes)))]
    for rows in ROWS:
        took = {}
        few = one.few_cuts(rows) is not None
        for way in ("few", "ours", "sglang") if few else ("ours", "sglang"):
            try:
                took[way] = time_way(layers, way, rows)
            except Exception as error:
                print(f"{way}: {type(error).__name__}: {str(error).splitlines()[0][:150]}")
        report.add(shape=shape.name, rows=rows, layer_us=took)
        figures = ", ".join(f"{way} {value:.1f}" for way, value in took.items())
        print(f"{shape.name} x {rows}: {figures} us a layer", flush=True)


def time_way(layers: list[Layer], way: str, rows: int) -> float:
    """Microseconds of a layer."""
    device = layers[0].norms[0].weight.device
    parts = randn(1, rows, layers[0].shape.hidden, device=device)
    residual = randn(rows, layers[0].shape.hidden, device=device)
    slots = torch.arange(rows, device=device)

    def run() -> None:
        state = (parts.clone(), residual.clone())
        for layer in layers:
            state = getattr(layer, way)(*state, slots)

    return time_graph(run, len(layers))


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    for name in ("parity", "times", "tune"):
        made.add_argument(f"--{name}", action="store_true")
    made.add_argument("--shapes", default="0.6B", help="of those with comma: 0.6B,8B,14B")
    made.add_argument("--seconds", type=float, default=400.0, help="for tuning")
    return made


def main() -> None:
    """Runs what is asked for."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        check(arguments, report)


def check(arguments: argparse.Namespace, report: Report) -> None:
    """Parity, then times or the search, shape by shape."""
    device = torch.device(arguments.device)
    everything = not (arguments.parity or arguments.times or arguments.tune)
    tiny = device.type == "cpu"
    torch.manual_seed(0)
    if arguments.parity or everything:
        check_parity(device, tiny, report)
    shapes = [shape for shape in SHAPES if shape.name in arguments.shapes.split(",")]
    for shape in [] if tiny else shapes:
        if arguments.times or everything:
            time_layers(shape, device, report)
        if arguments.tune:
            until = time.monotonic() + arguments.seconds / len(shapes)
            tune(shape, device, until, report)


if __name__ == "__main__":
    main()
