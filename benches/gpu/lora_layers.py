"""LoRA in fused layers on a GPU, without a model: errors and times, a part of `lora_check.py`.

Errors are those of each GEMM of a layer against torch in float32, for every kernel that expands
(`wgmma`, `small_m`, cuBLAS with `lora_expand`), mixed ranks, rows without an adapter. Times are of
the layers without attention, as CUDA graphs, with adapters of rank 16 in every matrix: whole
layers, each kernel by the profiler, and each matrix with and without its shrink and expand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from frame import Report
from graph_times import time_graph

from pie_driver_sglang.engine.layers import small_batch as small_batch_module
from pie_driver_sglang.engine.layers.lora import FusedLora, LayerLora
from pie_driver_sglang.engine.layers.random_layers import LayerShape, random_layers
from pie_driver_sglang.engine.layers.selection import load_gemm_table
from pie_driver_sglang.engine.layers.small_batch import LayerConfigs, SmallBatchLayers
from pie_driver_sglang.engine.layers.weights import Layer, LayerAdapters
from pie_driver_sglang.kernels.gemm import small_m
from pie_driver_sglang.kernels.gemm.lora import LoraRows, LoraWeights, Shrunk, lora_expand
from pie_driver_sglang.kernels.gemm.types import (
    STORE,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Residual,
)

TOLERANCE = 0.02
"""Of bfloat16, relative to the largest output."""
SHAPES = {
    "0.6b": LayerShape(1024, 16, 8, 128, 3072),
    "8b": LayerShape(4096, 32, 8, 128, 14336),
}
LAYERS = {"0.6b": 28, "8b": 8}
"""Layers that are timed; all have weights of their own."""
TIMED_ROWS, TIMED_RANK = (1, 16, 64), 16
TIMED_ADAPTERS = (0, 1, 8)
ERROR_CASES = (
    *itertools.product((1, 16, 64, 200, 500), (16,), (1, 8)),
    *itertools.product((64,), (8, 64, 128), (3, 32)),
)
"""Rows, largest rank, adapters."""


MATRICES: dict[str, Epilogue | None] = {
    "qkv": STORE, "out": None, "gate_up": SWIGLU, "down": None,
}  # fmt: skip
"""With the epilogues of projections; others add to the residual."""


class Bound(NamedTuple):
    """A layer and the adapters of a step."""

    layer: Layer
    lora: LayerLora


def make_adapters(layer: Layer, shape: LayerShape, slots: int, rank: int) -> LayerAdapters:
    """Random adapters of every matrix, whose products are as large as those of the matrix."""

    def weights(matrix: LinearWeights, *parts: int) -> LoraWeights:
        outputs, inputs = matrix.weight.shape
        like: dict[str, Any] = {"dtype": matrix.weight.dtype, "device": matrix.weight.device}
        down = torch.randn(slots, len(parts) * rank, inputs, **like) * inputs**-0.5
        return LoraWeights(down, torch.randn(slots, outputs, rank, **like) * rank**-0.5, parts)

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return LayerAdapters(
        weights(layer.qkv, queries, keys, keys),
        weights(layer.out, shape.width),
        weights(layer.gate_up, shape.middle, shape.middle),
        weights(layer.down, shape.width),
    )


def make_rows(count: int, adapters: int, rank: int, device: torch.device) -> LoraRows:
    """Rows of all adapters in turn, and of none; ranks differ where there are some adapters."""
    slots = torch.arange(count, dtype=torch.int32, device=device) % (adapters + 1) - 1
    if count == 1 and adapters:
        slots = slots + 1
    ranks = [rank - number % 3 for number in range(adapters + 1)]
    return LoraRows(slots, torch.tensor(ranks, dtype=torch.int32, device=device))


def added(x: torch.Tensor, rows: LoraRows, weights: LoraWeights) -> torch.Tensor:
    """What adapters add, in float32."""
    out = torch.zeros(len(x), sum(weights.parts), device=x.device)
    for slot, rank in enumerate(rows.ranks.tolist()):
        mine, start = rows.slots == slot, 0
        if not bool(mine.any()):
            continue
        for part, size in enumerate(weights.parts):
            down = weights.down[slot, part * rank : (part + 1) * rank].float()
            up = weights.up[slot, start : start + size, :rank].float()
            shrunk = (x[mine].float() @ down.T).to(x.dtype).float()
            out[mine, start : start + size] = shrunk @ up.T
            start += size
    return out


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative to the largest output; NaN is infinite."""
    error = float((found.float() - exact).abs().max() / exact.abs().max())
    return error if error == error else float("inf")


def lora_configs(layers: SmallBatchLayers, layer: Layer, count: int) -> LayerConfigs | None:
    """The configs of a layer's GEMMs in a step with adapters; None for cuBLAS only."""
    found = layers.find_configs(count, layer) if count <= layers.max_rows else None
    return None if found is None else found.with_lora()


def layer_errors(layers: SmallBatchLayers, bound: Bound, count: int) -> dict[str, float]:
    """The error of each GEMM of a layer with adapters."""
    layer, lora = bound
    assert lora.rows is not None
    found: dict[str, float] = {}
    configs = lora_configs(layers, layer, count)
    for name, epilogue in MATRICES.items():
        matrix: LinearWeights = getattr(layer, name)
        weights: LoraWeights = getattr(lora.adapters, name)
        config = None if configs is None else getattr(configs, name)
        x = torch.randn(count, matrix.weight.shape[1], device=matrix.weight.device)
        x = x.to(matrix.weight.dtype)
        sums = x.float() @ matrix.weight.float().T + added(x, lora.rows, weights)
        shrunk = lora.shrink(x, weights)
        if config is None:
            product = lora_expand(torch.nn.functional.linear(x, matrix.weight), shrunk)
            found[f"{name} cuBLAS"] = error_of(product, sums)
            continue
        kernel = f"{name} {type(config).__name__}"
        if epilogue is None:
            before = torch.randn(count, len(matrix.weight), device=x.device).to(x.dtype)
            start = Residual(before.clone(), torch.empty(0, device=x.device))
            result = layers.runner.project_add(x, matrix, config, start, shrunk)
            found[kernel] = error_of(result.rows, sums + before.float())
            squares = result.rows.float().square().sum(1)
            found[f"{kernel} squares"] = error_of(result.sum_squares.sum(1), squares)
            continue
        residual = small_m.start_residual(x, 4)
        norm = layer.before if name == "qkv" else layer.between
        product = layers.runner.project(residual, norm, matrix, config, epilogue, shrunk)
        sums *= torch.rsqrt(x.float().square().mean(1, keepdim=True) + norm.epsilon)
        if epilogue == SWIGLU:
            gate, up = sums.chunk(2, dim=1)
            sums = torch.nn.functional.silu(gate) * up
        found[kernel] = error_of(product, sums)
    return found


def check_errors(report: Report, name: str, device: torch.device) -> None:
    """Every case of a shape; one that fails does not keep the others from running."""
    shape = SHAPES[name]
    made, norm = random_layers(shape, device, 0)
    no_attention: Any = None
    layers = SmallBatchLayers.of(made, norm, no_attention, load_gemm_table(device))
    assert layers is not None
    worst, failed = 0.0, []
    for count, rank, adapters in ERROR_CASES:
        case = {"part": "errors", "shape": name, "rows": count, "rank": rank, "adapters": adapters}
        try:
            torch.manual_seed(0)
            own = FusedLora([make_adapters(made[0], shape, adapters + 1, rank)])
            [lora] = own.of_rows(make_rows(count, adapters, rank, device))
            found = layer_errors(layers, Bound(made[0], lora), count)
            if device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            failed.append(f"{case}: {type(error).__name__}: {error}")
            print(f"    {failed[-1]}", flush=True)
            continue
        worst = max(worst, *found.values())
        report.add(**case, errors=found)
        bad = {kernel: error for kernel, error in found.items() if not error <= TOLERANCE}
        kernels = sorted({kernel.split()[1] for kernel in found})
        print(
            f"    {name}, {count} rows, rank {rank}, {adapters} adapters: "
            f"{max(found.values()):.1e} ({', '.join(kernels)}) {bad or ''}",
            flush=True,
        )
    report.hold(f"{name}: error of layers with adapters", worst, at_most=TOLERANCE)
    report.hold(f"{name}: cases that failed", len(failed), at_most=0)


def time_layers(report: Report, name: str, device: torch.device) -> None:
    """Layers with no adapter, one and eight, over those that are not asked for any."""
    shape, count = SHAPES[name], LAYERS[name]
    a_layer = random_layers(shape, device, 0)[0][0]
    size = sum(part.weight.nbytes for part in a_layer if isinstance(part, LinearWeights))
    made, norm = random_layers(shape, device, count * size)
    no_attention: Any = None
    layers = SmallBatchLayers.of(made, norm, no_attention, load_gemm_table(device))
    assert layers is not None
    slots = max(TIMED_ADAPTERS) + 1
    own = FusedLora([make_adapters(layer, shape, slots, TIMED_RANK) for layer in made])
    for rows in TIMED_ROWS:
        embedded = torch.randn(rows, shape.width, device=device).to(torch.bfloat16)
        attended = torch.randn(rows, shape.heads * shape.head_dim, device=device)
        attended = attended.to(torch.bfloat16)

        def run(lora: list[LayerLora] | None) -> None:
            nothing: Any = None
            decoder: Any = SimpleNamespace(keep_input=lambda *_: None)
            with mock.patch.object(small_batch_module, "attend_decode", lambda *_: attended):  # noqa: B023
                layers.run(decoder, embedded.clone(), nothing, nothing, lora)  # noqa: B023

        plain = time_graph(lambda: run(None), len(made))
        print(f"    {name}, {rows} rows: {plain:.2f} us a layer without LoRA", flush=True)
        print_times(kernel_times(lambda: run(None)))
        for adapters in TIMED_ADAPTERS:
            bound = torch.arange(rows, dtype=torch.int32, device=device) % max(1, adapters)
            ranks = torch.full((slots,), TIMED_RANK, dtype=torch.int32, device=device)
            lora = own.of_rows(LoraRows(bound if adapters else bound - 1, ranks))
            us = time_graph(lambda: run(lora), len(made))  # noqa: B023
            print(
                f"    {name}, {rows} rows, {adapters} adapters: {us:.2f} us a layer, "
                f"{us - plain:+.2f}, {us / plain:.2f} times (without attention)",
                flush=True,
            )
            kernels = kernel_times(lambda: run(lora))  # noqa: B023
            print_times(kernels)
            parts = {}
            if adapters:
                bounds = [Bound(*each) for each in zip(made, lora, strict=True)]
                parts = matrix_times(layers, bounds, rows)
                print_times(parts)
            report.add(
                part="layers", shape=name, rows=rows, adapters=adapters, layer_us=us,
                plain_layer_us=plain, kernels_us=kernels, matrices_us=parts,
            )  # fmt: skip


def matrix_times(layers: SmallBatchLayers, bounds: list[Bound], count: int) -> dict[str, float]:
    """Microseconds of each matrix: its GEMM alone, with the expand, the shrink, and all of them."""
    found = {}
    configs = lora_configs(layers, bounds[0].layer, count)
    assert configs is not None
    for name in MATRICES:
        config = getattr(configs, name)
        if config is None:
            continue
        matrices = [getattr(layer, name) for layer, _ in bounds]
        weights = [getattr(lora.adapters, name) for _, lora in bounds]
        outputs, inputs = matrices[0].weight.shape
        x = torch.randn(count, inputs, device=matrices[0].weight.device)
        x = x.to(matrices[0].weight.dtype)
        add_to = Residual(x.new_zeros(count, outputs), torch.empty(0, device=x.device))
        start, norm = small_m.start_residual(x, 4), bounds[0].layer.before

        def gemm(number: int, shrunk: Shrunk | None) -> None:
            epilogue, matrix = MATRICES[name], matrices[number]  # noqa: B023
            if epilogue is None:
                layers.runner.project_add(x, matrix, config, add_to, shrunk)  # noqa: B023
            else:
                layers.runner.project(start, norm, matrix, config, epilogue, shrunk)  # noqa: B023

        def shrink(number: int) -> Shrunk | None:
            return bounds[number].lora.shrink(x, weights[number])  # noqa: B023

        cases: dict[str, Callable[[int], object]] = {
            "GEMM": lambda number: gemm(number, None),
            "shrink": shrink,
            "all": lambda number: gemm(number, shrink(number)),
        }
        for case, run in cases.items():
            us = time_graph(lambda: [run(number) for number in range(len(bounds))], len(bounds))  # noqa: B023
            found[f"{name}: {case}"] = us
    return found


def print_times(times: dict[str, float]) -> None:
    """Prints microseconds by name on one line."""
    print("        " + ", ".join(f"{name} {us:.2f}" for name, us in times.items()), flush=True)


def kernel_times(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds of a launch of each kernel, waits for previous ones included, by its name."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profiler:
        run()
        torch.cuda.synchronize()
    return {
        f"{each.key[:60]} x {each.count}": each.device_time_total / each.count
        for each in profiler.key_averages()
        if each.device_time_total
    }


def check(report: Report, device: str) -> None:
    """Errors and times of every shape, those of the smallest first."""
    where = torch.device(device)
    for name, part in itertools.product(SHAPES, (check_errors, time_layers)):
        try:
            part(report, name, where)
        except Exception as error:
            print(f"    {name}: {type(error).__name__}: {error}", flush=True)
            report.hold(f"{name}: {part.__name__} failed", 1, at_most=0)
        torch.cuda.empty_cache()
