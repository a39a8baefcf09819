"""GEMM kernels compiled for compute capability 9.0: launch order, shared memory and copies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from pie_driver_sglang.kernels.gemm import dense_layers, fp8_rows, small_m, tiled
from pie_driver_sglang.kernels.gemm.dense_layers import Heads, LinearWeights, Norm, Scale
from pie_driver_sglang.kernels.gemm.fp8_rows import FP8, QuantizedRows, QuantizedWeights
from pie_driver_sglang.kernels.gemm.small_m import Scratch, Stream
from support.kernels.compile_harness import check_order, recorded


def products(dtype: torch.dtype) -> Iterator[Any]:
    """Those of a layer of Qwen3-0.6B, as they are cut at some numbers of rows."""
    for outputs, inputs, most, gated in (
        (4096, 1024, 1, False),
        (1024, 3072, dense_layers.MOST_PARTS, False),
        (3072, 1024, 1, True),
    ):
        matrix = LinearWeights(torch.zeros((1 + gated) * outputs, inputs, dtype=dtype))
        if most == 1 and not gated:
            matrix = matrix._replace(bias=torch.zeros(outputs, dtype=dtype))
        for count in (1, 17, 33, 65, 129):
            tiling = dense_layers.tiling(count, outputs, inputs, most, gated=gated)
            assert (tiling is None) == (count > 128 or (most == 1 and count > 64))
            if tiling is None:
                continue
            assert tiling.rows >= count
            assert tiling.fits(outputs, inputs)
            run = dense_layers.gated if gated else dense_layers.linear
            rows = torch.zeros(count, inputs, dtype=dtype)
            yield from recorded(functools.partial(run, rows, matrix, tiling))


def check_dense(dtype: torch.dtype) -> None:
    """The products' factors are loaded ahead; weights are asked for before the wait."""

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    norm, width = Norm(zeros(128), 1e-6), 4096
    for kernel in products(dtype):
        check_order(kernel)
        assert "async_copy_global_to_local" in kernel.asm["ttgir"]
        assert "prefetch.L2" in kernel.asm["ptx"].partition("griddepcontrol.wait")[0]
        assert kernel.metadata.shared <= dense_layers.SHARED_BYTES, kernel.metadata.shared
    [kernel] = recorded(
        lambda: dense_layers.add_norm(torch.zeros(4, 40, 128), zeros(40, 128), norm)
    )
    check_order(kernel, early=2)
    storage = zeros(64, 8, 128)
    heads = Heads(16, norm, norm, torch.zeros(512, 128), True, storage, storage)
    places = torch.zeros(40, dtype=torch.int64)
    for scale in (None, Scale(zeros(40, 1024), 1e-6)):
        prepare = functools.partial(
            dense_layers.norm_rope_store,
            zeros(40, width),
            heads,
            places,
            places,
            scale=scale,
        )
        [kernel] = recorded(prepare)
        # A slot, a position, and its cosines and sines.
        check_order(kernel, early=4, leads=True)
        [kernel] = recorded(functools.partial(dense_layers.gate, zeros(40, width), scale))
        check_order(kernel)
    [kernel] = recorded(lambda: dense_layers.find_scale(zeros(40, width), 1e-6))
    check_order(kernel)
    # Products of FP8 weights, whose scales are applied here.
    once, outputs = Scale(torch.ones(40, 1), 0.0), torch.ones(width)
    prepare = functools.partial(
        dense_layers.norm_rope_store, zeros(40, width), heads, places, places, scale=once,
        of_outputs=outputs,
    )  # fmt: skip
    [kernel] = recorded(prepare)
    check_order(kernel, early=4, leads=True)
    scales = (torch.ones(40, 1), torch.ones(128))
    [kernel] = recorded(
        lambda: dense_layers.add_norm(zeros(1, 40, 128), zeros(40, 128), norm, scales)
    )
    check_order(kernel, early=2)


def check_few_rows(dtype: torch.dtype) -> None:
    """Of what a kernel touches before it waits, all is weights; cuts fit shared memory."""

    def zeros(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    floats = zeros(64, dtype=torch.float32)
    scratch = Scratch(floats, zeros(64, dtype=torch.int32))
    for count, (outputs, inputs, adds, gated) in itertools.product(
        (1, 16, 32),
        ((6144, 4096, False, False), (4096, 4096, True, False), (14336, 4096, False, True)),
    ):
        cut = small_m.find_cut(count, outputs, inputs, adds=adds, gated=gated)
        assert cut is not None
        rows = zeros(count, inputs)
        stream = Stream(rows, zeros(count, 256, dtype=torch.float32))
        squares = zeros(count, outputs // cut.outputs, dtype=torch.float32)
        into = Stream(zeros(count, outputs), squares) if adds else None
        # Nothing is computed here: an empty tensor of the height is enough.
        matrix = LinearWeights(zeros(1).expand((1 + gated) * outputs, inputs))
        [kernel] = recorded(
            functools.partial(
                small_m.product, rows, matrix, cut, scratch, stream=None if adds else stream,
                into=into, gated=gated,
            )
        )  # fmt: skip
        loads = cut.outputs * cut.inputs // (8 * 32 * cut.warps) * (1 + gated)
        check_order(kernel, early=loads if cut.stages == 1 else 0, leads=True)
        assert kernel.metadata.shared <= dense_layers.SHARED_BYTES, kernel.metadata.shared
        if cut.stages > 1:
            assert "async_copy_global_to_local" in kernel.asm["ttgir"]
        if cut.parts > 1:
            _, arrival, after = kernel.asm["ptx"].partition("atom.global.gpu.acq_rel.add")
            assert arrival
            assert "ld.global.cg" in after
    [kernel] = recorded(lambda: small_m.begin(zeros(3, 4096), 512))
    check_order(kernel, leads=True)


def check_tiles() -> None:
    """Tiles come by the copy engine, and every one that may be chosen fits shared memory."""
    floats = torch.zeros(64)
    scratch = Scratch(floats, torch.zeros(64, dtype=torch.int32))
    for (kind, itemsize, count), tiles in tiled._TILES.items():
        dtype = FP8 if itemsize == 1 else torch.bfloat16
        for tile, grouped in itertools.product(tiles, (False, True)):
            if grouped and itemsize > 1:
                continue
            height, inputs, gated = 4096, 4096, kind == "gated"
            weight = torch.empty((1 + gated) * height, inputs, dtype=dtype)
            rows = torch.empty(count, inputs, dtype=dtype)
            size = (len(weight) // 128, inputs // 128) if grouped else (len(weight),)
            given: Any = rows
            matrix: Any = LinearWeights(weight)
            stream = into = None
            if itemsize == 1:
                given = QuantizedRows(rows, torch.empty(count, inputs // 128 if grouped else 1))
                matrix = QuantizedWeights(weight, torch.empty(size))
            elif kind != "adds":
                stream = Stream(rows, torch.zeros(count, 64))
            out = torch.empty(count, height, dtype=torch.bfloat16)
            if kind == "adds":
                squares = torch.empty(count, height // tile.outputs)
                into = out if itemsize == 1 else Stream(out, squares)
            [kernel] = recorded(
                functools.partial(
                    tiled.tiled_product, given, matrix, tile, scratch, stream=stream,
                    into=into, gated=gated, dtype=torch.bfloat16,
                )
            )  # fmt: skip
            check_order(kernel, leads=True)
            code = kernel.asm["ptx"]
            assert "cp.async.bulk.tensor" in code, tile
            assert "wgmma.mma_async" in code, tile
            assert kernel.metadata.shared <= tiled._SHARED_BYTES, (tile, kernel.metadata.shared)


def check_quantized() -> None:
    """Before the wait nothing is loaded but weights, of a norm or of a product of one row."""
    norm = Norm(torch.zeros(4096, dtype=torch.bfloat16), 1e-6)
    rows = torch.zeros(3, 4096, dtype=torch.bfloat16)
    named: dict[str, Any]
    for named, early in (
        ({"norm": norm, "residual": rows.clone()}, None),
        ({"grouped": True}, 0),
        ({"gated": True, "scale": torch.ones(1)}, 0),
    ):
        make = functools.partial(fp8_rows.quantize, rows, **named)
        [kernel] = recorded(make)
        check_order(kernel, early=early, leads=True)
        assert "cvt.rn.satfinite.e4m3x2" in kernel.asm["ptx"]
    products = torch.zeros(3, 4096, dtype=torch.bfloat16)
    unscaled = fp8_rows.UnscaledRows(products, torch.ones(3, 1), torch.ones(4096))
    for named in ({"gated": True}, {"norm": norm}):
        residual = None if "gated" in named else rows.clone()
        make = functools.partial(fp8_rows.quantize, unscaled, residual=residual, **named)
        [kernel] = recorded(make)
        check_order(kernel, early=None, leads=True)
