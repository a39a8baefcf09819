"""Dense layers of decode steps on a GPU: parity, times compared with cuBLAS and SGLang, and tuning.

    python benches/gpu/dense_check.py [--parity] [--times] [--tune] [--seconds N] [--json FILE]

Without one of the three it does the first two.

--parity: each kernel in bfloat16 against float64.
--times: microseconds of a layer without its attention, in graphs of layers whose weights exceed the
    L2 cache: the kernels of `few_rows`, those of `dense_layers`, and what SGLang runs for Qwen 3.
--tune: microseconds of each product, alone and cut in every way, and cuBLAS; prints the best.

With `TRITON_INTERPRET=1 ... --device cpu` the first runs on tiny sizes.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import frame
import torch
from frame import Report
from tiled_products import TiledProduct, randn

from pie_driver_sglang.kernels.gemm import dense_layers, small_m, tiled
from pie_driver_sglang.kernels.gemm.dense_layers import Heads, LinearWeights, Norm, Scale, Tiling

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
        most, seen = dense_layers.MOST_PARTS, self.heads * self.dim
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
                randn(outputs * (2 if gated else 1), inputs, device=device, scale=inputs**-0.5)
            )
            for name, (outputs, inputs, _, gated) in shape.products().items()
        }
        angles = torch.rand(SLOTS, shape.dim // 2, device=device) * 6.28
        storage = [randn(SLOTS, shape.kv_heads, shape.dim, device=device) for _ in range(2)]
        self._scratch: small_m.Scratch | None = None
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

        if len(slots) > dense._FEW_ROWS:
            return parts, self._many(residual, slots)
        rows, residual = dense_layers.add_norm(parts, residual, self.norms[0])
        qkv = self._product("qkv", rows)[0]
        seen = dense_layers.norm_rope_store(qkv, self.heads, slots, slots).flatten(1)
        rows, residual = dense_layers.add_norm(self._product("out", seen), residual, self.norms[1])
        return self._product("down", self._gated(rows)), residual

    def few(self, parts: torch.Tensor, residual: torch.Tensor, slots: torch.Tensor) -> Any:
        """By the kernels of few rows; the sums of squares are kept as the parts."""
        cuts, count = self.few_cuts(len(slots)), len(slots)
        if cuts is None:
            raise ValueError(f"no cuts for {count} rows")
        if self._scratch is None:
            self._scratch = small_m.Scratch(
                torch.zeros(64 * 4 * self.shape.hidden, device=slots.device),
                torch.zeros(self.shape.hidden, dtype=torch.int32, device=slots.device),
            )
        scratch, hidden = self._scratch, self.shape.hidden
        tiles = {name: hidden // cuts[name].outputs for name in ("out", "down")}
        if parts.dtype != torch.float32 or parts.shape != (count, tiles["down"]):
            parts = small_m.begin(residual, tiles["down"]).squares
        given, into = small_m.Stream(residual, parts), self.matrices
        qkv = small_m.product(
            residual, into["qkv"], cuts["qkv"], scratch, stream=given, epsilon=EPSILON
        )
        seen = dense_layers.norm_rope_store(qkv, self.heads, slots, slots).flatten(1)
        middle = small_m.Stream(residual, parts.new_empty(count, tiles["out"]))
        small_m.product(seen, into["out"], cuts["out"], scratch, into=middle)
        gated = small_m.product(
            residual, into["gate_up"], cuts["gate_up"], scratch, given=middle, epsilon=EPSILON,
            gated=True,
        )  # fmt: skip
        after = small_m.Stream(residual, parts.new_empty(count, tiles["down"]))
        small_m.product(gated, into["down"], cuts["down"], scratch, into=after)
        return after.squares, residual

    def few_cuts(self, rows: int) -> dict[str, small_m.Cut] | None:
        """Of each product; None if one has none."""
        cuts = {
            name: small_m.find_cut(
                rows, outputs, inputs, adds=name in ("out", "down"), gated=is_gated
            )
            for name, (outputs, inputs, _, is_gated) in self.shape.products().items()
        }
        found = {name: cut for name, cut in cuts.items() if cut is not None}
        return found if len(found) == len(cuts) else None

    def _many(self, residual: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """As a layer of many rows runs: without norms."""
        linear, scale = torch.nn.functional.linear, Scale(residual, EPSILON)
        weights = {name: matrix.weight for name, matrix in self.matrices.items()}
        qkv = linear(residual, weights["qkv"])
        seen = dense_layers.norm_rope_store(qkv, self.heads, slots, slots, scale=scale).flatten(1)
        residual.addmm_(seen, weights["out"].t())
        middle = dense_layers.gate(linear(residual, weights["gate_up"]), scale)
        return residual.addmm_(middle, weights["down"].t())

    def _cut(self, name: str, rows: int) -> Tiling | None:
        outputs, inputs, most, gated = self.shape.products()[name]
        return dense_layers.tiling(rows, outputs, inputs, most, gated=gated)

    def _product(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        cut, matrix = self._cut(name, len(rows)), self.matrices[name]
        if cut is None:
            return torch.nn.functional.linear(rows, matrix.weight)[None]
        return dense_layers.linear(rows, matrix, cut)

    def _gated(self, rows: torch.Tensor) -> torch.Tensor:
        cut, matrix = self._cut("gate_up", len(rows)), self.matrices["gate_up"]
        if cut is None:
            return dense_layers.gate(torch.nn.functional.linear(rows, matrix.weight))
        return dense_layers.gated(rows, matrix, cut)

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
        norms = (self.heads.query_norm, self.heads.key_norm)
        heads = [part.view(count, -1, shape.dim) for part in (q, k)]
        fused_inplace_qknorm(
            *heads, *(norm.weight for norm in norms), head_dim=shape.dim, eps=EPSILON
        )
        apply_rope_with_cos_sin_cache_inplace(*heads, self.heads.rotations, slots, is_neox=True)
        keys, values = (stored.view(SLOTS, -1) for stored in (self.heads.keys, self.heads.values))
        store_cache(k, v, keys, values, slots, row_bytes=2 * kv_width)
        rows = linear(q.contiguous(), self.matrices["out"].weight)
        fused_add_rmsnorm(rows, residual, self.norms[1].weight, EPSILON)
        middle = silu_and_mul(linear(rows, self.matrices["gate_up"].weight))
        return linear(middle, self.matrices["down"].weight)[None], residual


def microseconds(calls: Callable[[], None], number: int) -> float:
    """Of one of the calls: the median of five rounds of a replayed graph."""
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def round_of(replays: int) -> float:
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / replays * 1000 / number

    once = round_of(2)
    return statistics.median(round_of(max(2, int(3000 / (once * number)))) for _ in range(5))


def check_parity(device: torch.device, tiny: bool, report: Report) -> None:
    """Prints the largest error of each kernel, in parts of its largest result."""
    shape = TINY if tiny else SHAPES[0]
    layer = Layer(shape, device)
    worst: dict[str, float] = {}

    def compare(name: str, found: torch.Tensor, exact: torch.Tensor) -> None:
        error = float((found.double() - exact).abs().max() / exact.abs().max())
        worst[name] = max(worst.get(name, 0.0), error)

    for count in (1, 3, 17) if tiny else (1, 3, 17, 100, 256):
        for name, (outputs, inputs, most, gated) in shape.products().items():
            rows, weight = randn(count, inputs, device=device), layer.matrices[name].weight
            exact = rows.double() @ weight.double().T
            if gated:
                gate, up = exact.chunk(2, dim=-1)
                exact = torch.nn.functional.silu(gate) * up
            for cut in [Tiling(16, 16, 16)] if tiny else cuts(count, inputs, most, gated):
                if not cut.fits(outputs, inputs):
                    continue
                if gated:
                    compare(name, dense_layers.gated(rows, LinearWeights(weight), cut), exact)
                else:
                    compare(
                        name, dense_layers.linear(rows, LinearWeights(weight), cut).sum(0), exact
                    )
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
    cuts = layer.few_cuts(count)
    if cuts is None:
        return
    scratch = small_m.Scratch(
        torch.zeros(64 * 4 * layer.shape.hidden, device=device),
        torch.zeros(layer.shape.hidden, dtype=torch.int32, device=device),
    )
    for name, (outputs, inputs, _, is_gated) in layer.shape.products().items():
        rows, matrix, cut = randn(count, inputs, device=device), layer.matrices[name], cuts[name]
        if name in ("out", "down"):
            before = randn(count, outputs, device=device)
            squares = torch.empty(count, outputs // cut.outputs, device=device)
            exact = before.double() + rows.double() @ matrix.weight.double().T
            into = small_m.Stream(before, squares)
            found = small_m.product(rows, matrix, cut, scratch, into=into)
        else:
            given = small_m.begin(rows, 4)
            found = small_m.product(
                rows, matrix, cut, scratch, stream=given, epsilon=EPSILON, gated=is_gated
            )
            exact = rows.double()
            exact *= torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON)
            exact = exact @ matrix.weight.double().T
            if is_gated:
                gate, up = exact.chunk(2, dim=-1)
                exact = torch.nn.functional.silu(gate) * up
        compare(f"{name} of few rows", found, exact)


def check_tiles(
    shape: Shape, device: torch.device, compare: Callable[[str, torch.Tensor, torch.Tensor], None]
) -> None:
    """Compares products by tiles, of the type that weights have and of FP8."""
    for (kind, itemsize, most), tiles in tiled._TILES.items():
        for count in (1, most - 3, most):
            for name, (outputs, inputs, _, gated) in shape.products().items():
                if kind != {"out": "adds", "down": "adds", "gate_up": "gated"}.get(name, "plain"):
                    continue
                fitting = [tile for tile in tiles if tile.fits(outputs, inputs)]
                for tile in [tiled.Tile(16, 16, 16)] if device.type == "cpu" else fitting:
                    product = TiledProduct(count, outputs, inputs, device, itemsize, gated=gated)
                    found = product.run(tile, adds=kind == "adds")
                    compare(f"{name} by tiles of {itemsize} bytes", found, product.exact)


def cuts(rows: int, inputs: int, most_parts: int, gated: bool) -> Iterator[Tiling]:
    """What may be tried for a step and a matrix of so many inputs."""
    tile, matrices = min(128, max(16, 1 << (rows - 1).bit_length())), 2 if gated else 1
    for outputs, parts, warps in itertools.product(
        (16, 32, 64, 128), range(1, most_parts + 1), (4, 8)
    ):
        if tile * outputs * matrices > 64 * 32 * warps or inputs % parts:
            continue
        for turn, stages in ((64, 5), (128, 3), (128, 5), (256, 3)):
            held = (tile + outputs * matrices) * turn * 2 * stages
            if held <= 220 << 10:
                yield Tiling(tile, outputs, turn, parts, warps, stages)


class Product:
    """One product of a shape for a number of rows, over many matrices."""

    def __init__(self, shape: Shape, name: str, weights: list[torch.Tensor], rows: int) -> None:
        self.outputs, self.inputs, self.most_parts, self.is_gated = shape.products()[name]
        self.weights = weights
        self.rows = randn(rows, self.inputs, device=weights[0].device)

    def library(self) -> float:
        """Microseconds of cuBLAS, without the gate."""
        return self._time(torch.nn.functional.linear)

    def cut(self, tiling: Tiling) -> float:
        """Microseconds of our kernel."""
        run = dense_layers.gated if self.is_gated else dense_layers.linear
        return self._time(lambda rows, weight: run(rows, LinearWeights(weight), tiling))

    def _time(self, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        def products() -> None:
            for weight in self.weights:
                run(self.rows, weight)

        return microseconds(products, len(self.weights))

    def tilings(self) -> Iterator[Tiling]:
        """What may be the best."""
        for cut in cuts(len(self.rows), self.inputs, self.most_parts, self.is_gated):
            programs = self.outputs // cut.outputs * cut.parts
            if cut.fits(self.outputs, self.inputs) and programs >= 48:
                yield cut


def compile_cuts(shape: Shape, device: torch.device, until: float) -> None:
    """Fills Triton's cache for a shape, with all processors."""
    kernels: dict[tuple[Any, ...], tuple[str, Tiling]] = {}
    for name, (_, inputs, _, is_gated) in shape.products().items():
        weights = [torch.empty(0, inputs, device=device)]
        for rows in TUNED_ROWS:
            for cut in Product(shape, name, weights, rows).tilings():
                # What of a cut its kernel knows.
                known = (replace(cut, parts=1), cut.parts > 1, is_gated)
                kernels.setdefault(known, (name, cut))
    print(f"{len(kernels)} kernels", flush=True)
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(compile_cut, shape, *kernel, device) for kernel in kernels.values()]
        wait(jobs, timeout=until - time.monotonic())
        pool.shutdown(wait=True, cancel_futures=True)
    failed = [error for job in jobs if not job.cancelled() and (error := job.exception())]
    print(f"{len(failed)} failed, first {failed[:1]}", flush=True)


def compile_cut(shape: Shape, name: str, cut: Tiling, device: torch.device) -> None:
    """Runs a product once."""
    outputs, inputs, _, is_gated = shape.products()[name]
    weight = torch.zeros(
        outputs * (2 if is_gated else 1), inputs, dtype=torch.bfloat16, device=device
    )
    run = dense_layers.gated if is_gated else dense_layers.linear
    run(weight[:1], LinearWeights(weight), cut)
    torch.cuda.synchronize()


def tune(shape: Shape, device: torch.device, until: float, report: Report) -> None:
    """Every product of a shape at every number of rows."""
    compile_cuts(shape, device, (time.monotonic() + until) / 2)
    for name, (outputs, inputs, _, is_gated) in shape.products().items():
        height = outputs * (2 if is_gated else 1)
        copies = max(2, -(-ROTATED_BYTES // (height * inputs * 2)))
        weights = [randn(height, inputs, device=device, scale=0.02) for _ in range(copies)]
        for rows in TUNED_ROWS:
            product = Product(shape, name, weights, rows)
            library, found = product.library(), []
            for cut in product.tilings():
                if time.monotonic() > until:
                    break
                try:
                    found.append((product.cut(cut), cut))
                except Exception as error:
                    print(f"{cut}: {str(error).splitlines()[0][:100]}", flush=True)
            found.sort(key=lambda pair: pair[0])
            cuts = [{"us": took, **asdict(cut)} for took, cut in found[:8]]
            report.add(shape=shape.name, product=name, rows=rows, library_us=library, cuts=cuts)
            said = "; ".join(f"{took:.2f} {tuple(asdict(cut).values())}" for took, cut in found[:4])
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

    return microseconds(run, len(layers))


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
