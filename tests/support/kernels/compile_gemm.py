"""GEMM kernels compiled for compute capability 9.0: launch order, shared memory and copies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from pie_driver_sglang.kernels.gemm import fp8_rows, linear, norm_rope, small_m, tiled
from pie_driver_sglang.kernels.gemm.fp8_rows import FP8, QuantizedRows, QuantizedWeights
from pie_driver_sglang.kernels.gemm.types import (
    Epilogue,
    Heads,
    LinearWeights,
    Norm,
    Residual,
    RmsScale,
    Workspace,
)
from support.kernels.compile_harness import check_order, recorded


def products(dtype: torch.dtype) -> Iterator[Any]:
    """Those of a layer of Qwen3-0.6B, as they are cut at some numbers of rows."""
    for outputs, inputs, most, swiglu in (
        (4096, 1024, 1, False),
        (1024, 3072, linear.MAX_SPLIT_K, False),
        (3072, 1024, 1, True),
    ):
        matrix = LinearWeights(torch.zeros((1 + swiglu) * outputs, inputs, dtype=dtype))
        if most == 1 and not swiglu:
            matrix = matrix._replace(bias=torch.zeros(outputs, dtype=dtype))
        for count in (1, 17, 33, 65, 129):
            config = linear.find_linear_config(count, outputs, inputs, most, swiglu=swiglu)
            assert (config is None) == (count > 128 or (most == 1 and count > 64))
            if config is None:
                continue
            assert config.block_m >= count
            assert config.fits(outputs, inputs)
            run = linear.linear_swiglu if swiglu else linear.linear
            rows = torch.zeros(count, inputs, dtype=dtype)
            yield from recorded(functools.partial(run, rows, matrix, config))


def check_dense(dtype: torch.dtype) -> None:
    """The products' factors are loaded ahead; weights are asked for before the wait."""

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    norm, width = Norm(zeros(128), 1e-6), 4096
    for kernel in products(dtype):
        check_order(kernel)
        assert "async_copy_global_to_local" in kernel.asm["ttgir"]
        assert "prefetch.L2" in kernel.asm["ptx"].partition("griddepcontrol.wait")[0]
        assert kernel.metadata.shared <= linear.MAX_SHARED_BYTES, kernel.metadata.shared
    [kernel] = recorded(
        lambda: norm_rope.add_rms_norm(torch.zeros(4, 40, 128), zeros(40, 128), norm)
    )
    check_order(kernel, early=2)
    storage = zeros(64, 8, 128)
    heads = Heads(16, norm, norm, torch.zeros(512, 128), True, storage, storage)
    slots = torch.zeros(40, dtype=torch.int64)
    for scale in (None, RmsScale(zeros(40, 1024), 1e-6)):
        prepare = functools.partial(
            norm_rope.norm_rope_store,
            zeros(40, width),
            heads,
            slots,
            slots,
            scale=scale,
        )
        [kernel] = recorded(prepare)
        # A slot, a position, and its cosines and sines.
        check_order(kernel, early=4, leads=True)
        [kernel] = recorded(functools.partial(norm_rope.silu_and_mul, zeros(40, width), scale))
        check_order(kernel)
    [kernel] = recorded(lambda: norm_rope.compute_rms_scale(zeros(40, width), 1e-6))
    check_order(kernel)
    # Products of FP8 weights, whose scales are applied here.
    once, outputs = RmsScale(torch.ones(40, 1), 0.0), torch.ones(width)
    prepare = functools.partial(
        norm_rope.norm_rope_store, zeros(40, width), heads, slots, slots, scale=once,
        output_scales=outputs,
    )  # fmt: skip
    [kernel] = recorded(prepare)
    check_order(kernel, early=4, leads=True)
    scales = (torch.ones(40, 1), torch.ones(128))
    [kernel] = recorded(
        lambda: norm_rope.add_rms_norm(zeros(1, 40, 128), zeros(40, 128), norm, scales)
    )
    check_order(kernel, early=2)


def check_small_m(dtype: torch.dtype) -> None:
    """Of what a kernel touches before it waits, all is weights; cuts fit shared memory."""

    def zeros(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(*size, dtype=dtype)

    floats = zeros(64, dtype=torch.float32)
    workspace = Workspace(floats, zeros(64, dtype=torch.int32))
    for count, (outputs, inputs, add_residual, swiglu) in itertools.product(
        (1, 16, 32),
        ((6144, 4096, False, False), (4096, 4096, True, False), (14336, 4096, False, True)),
    ):
        config = small_m.find_small_m_config(
            count, outputs, inputs, Epilogue.of(swiglu=swiglu, add_residual=add_residual)
        )
        assert config is not None
        rows = zeros(count, inputs)
        sum_squares_in = zeros(count, 256, dtype=torch.float32)
        sum_squares = zeros(count, outputs // config.block_n, dtype=torch.float32)
        into = Residual(zeros(count, outputs), sum_squares) if add_residual else None
        # Nothing is computed here: an empty tensor of the height is enough.
        matrix = LinearWeights(zeros(1).expand((1 + swiglu) * outputs, inputs))
        [kernel] = recorded(
            functools.partial(
                small_m.small_m_gemm, rows, matrix, config, workspace,
                sum_squares=None if add_residual else sum_squares_in,
                residual=into, swiglu=swiglu,
            )
        )  # fmt: skip
        loads = config.block_n * config.block_k // (8 * 32 * config.num_warps) * (1 + swiglu)
        check_order(kernel, early=loads if config.num_stages == 1 else 0, leads=True)
        assert kernel.metadata.shared <= linear.MAX_SHARED_BYTES, kernel.metadata.shared
        if config.num_stages > 1:
            assert "async_copy_global_to_local" in kernel.asm["ttgir"]
        if config.split_k > 1:
            _, arrival, after = kernel.asm["ptx"].partition("atom.global.gpu.acq_rel.add")
            assert arrival
            assert "ld.global.cg" in after
    residual = Residual(zeros(3, 4096), torch.zeros(3, 1))
    for launch in (
        lambda: small_m.start_residual(zeros(3, 4096), 512),
        lambda: small_m.add_to_residual(zeros(3, 4096), residual),
    ):
        [kernel] = recorded(launch)
        check_order(kernel, leads=True)


def check_tiles() -> None:
    """Tiles come by the copy engine, and every one that may be chosen fits shared memory."""
    floats = torch.zeros(64)
    workspace = Workspace(floats, torch.zeros(64, dtype=torch.int32))
    for (epilogue, itemsize, count), configs in tiled._CONFIGS.items():
        dtype = FP8 if itemsize == 1 else torch.bfloat16
        for config, grouped in itertools.product(configs, (False, True)):
            if grouped and itemsize > 1:
                continue
            height, inputs, swiglu = 4096, 4096, epilogue == Epilogue.SWIGLU
            weight = torch.empty((1 + swiglu) * height, inputs, dtype=dtype)
            rows = torch.empty(count, inputs, dtype=dtype)
            size = (len(weight) // 128, inputs // 128) if grouped else (len(weight),)
            given: Any = rows
            matrix: Any = LinearWeights(weight)
            sum_squares = residual = None
            if itemsize == 1:
                given = QuantizedRows(rows, torch.empty(count, inputs // 128 if grouped else 1))
                matrix = QuantizedWeights(weight, torch.empty(size))
            elif epilogue != Epilogue.ADD_RESIDUAL:
                sum_squares = torch.zeros(count, 64)
            out = torch.empty(count, height, dtype=torch.bfloat16)
            if epilogue == Epilogue.ADD_RESIDUAL:
                tiles = torch.empty(count, height // config.block_n)
                residual = out if itemsize == 1 else Residual(out, tiles)
            [kernel] = recorded(
                functools.partial(
                    tiled.tiled_gemm, given, matrix, config, workspace, sum_squares=sum_squares,
                    residual=residual, swiglu=swiglu, dtype=torch.bfloat16,
                )
            )  # fmt: skip
            check_order(kernel, leads=True)
            code = kernel.asm["ptx"]
            assert "cp.async.bulk.tensor" in code, config
            assert "wgmma.mma_async" in code, config
            assert kernel.metadata.shared <= tiled.SHARED_BYTES, (config, kernel.metadata.shared)


def check_quantized() -> None:
    """Before the wait nothing is loaded but weights, of a norm or of a product of one row."""
    norm = Norm(torch.zeros(4096, dtype=torch.bfloat16), 1e-6)
    rows = torch.zeros(3, 4096, dtype=torch.bfloat16)
    named: dict[str, Any]
    for named, early in (
        ({"norm": norm, "residual": rows.clone()}, None),
        ({"grouped": True}, 0),
        ({"swiglu": True, "scale": torch.ones(1)}, 0),
    ):
        make = functools.partial(fp8_rows.quantize, rows, **named)
        [kernel] = recorded(make)
        check_order(kernel, early=early, leads=True)
        assert "cvt.rn.satfinite.e4m3x2" in kernel.asm["ptx"]
    products = torch.zeros(3, 4096, dtype=torch.bfloat16)
    unscaled = fp8_rows.UnscaledOutput(products, torch.ones(3, 1), torch.ones(4096))
    for named in ({"swiglu": True}, {"norm": norm}):
        residual = None if "swiglu" in named else rows.clone()
        make = functools.partial(fp8_rows.quantize, unscaled, residual=residual, **named)
        [kernel] = recorded(make)
        check_order(kernel, early=None, leads=True)
