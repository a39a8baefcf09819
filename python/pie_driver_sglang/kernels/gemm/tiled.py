"""TMA GEMM in Triton for FP8 weights, and for 16-bit weights where `wgmma` does not run.

Computes ``rows @ weight.T`` for up to 128 rows with the epilogues of `small_m`: deferred RMSNorm,
SwiGLU, residual add in place, split-K. Both operands are loaded by TMA, since rows are read from L2
once for each tile of outputs. On Hopper it serves FP8 weights with block scales (128x128, DeepSeek
style), where DeepGEMM would need separate kernels for quantization, activation and residual add;
`wgmma` is faster for all others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pie_driver_sglang.kernels.gemm.fp8_rows import GROUP, QuantizedRows, QuantizedWeights
from pie_driver_sglang.kernels.gemm.norm_rope import silu_mul
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Residual,
    TileConfig,
    Workspace,
)
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_trigger_wait

_MAX_SPLIT_K = 4
_SMS = 132
"""Of an H100 or H200."""
SHARED_BYTES = 227 << 10
"""Shared memory of an SM that programs can have."""
_MIN_FILL = 0.65
"""Least share of program slots that a GEMM must use."""
_NEARLY_FULL = 112
"""Rows above which a tile of 128 rows beats cuBLAS, in 16 bits."""
_LONG = 8192
"""Inputs from which on cuBLAS is faster for 65 rows and more, in 16 bits."""
_CONFIGS: dict[tuple[Epilogue, int, int], tuple[TileConfig, ...]] = {
    (STORE, 1, 16): (
        TileConfig(16, 64, 256, num_stages=5, swap_ab=True),
        TileConfig(16, 64, 128, num_stages=8, swap_ab=True),
    ),
    (ADD_RESIDUAL, 1, 16): (
        TileConfig(16, 64, 256, 2, num_stages=5, swap_ab=True),
        TileConfig(16, 64, 128, 2, num_stages=8, swap_ab=True),
    ),
    (SWIGLU, 1, 16): (
        TileConfig(16, 64, 256, num_stages=3, swap_ab=True),
        TileConfig(16, 64, 128, num_stages=6, swap_ab=True),
    ),
    (STORE, 1, 64): (
        TileConfig(64, 64, 256, num_stages=6, swap_ab=True),
        TileConfig(64, 64, 128, num_stages=8, swap_ab=True),
    ),
    (ADD_RESIDUAL, 1, 64): (
        TileConfig(64, 32, 256, num_stages=8),
        TileConfig(64, 32, 256, num_stages=4),
    ),
    (SWIGLU, 1, 64): (TileConfig(64, 64, 128, num_stages=4, swap_ab=True),),
    (STORE, 1, 128): (
        TileConfig(128, 64, 128, num_stages=8, swap_ab=True),
        TileConfig(128, 64, 128, num_stages=4, swap_ab=True),
    ),
    (ADD_RESIDUAL, 1, 128): (
        TileConfig(128, 64, 256, 2, num_stages=4, swap_ab=True),
        TileConfig(128, 32, 256, num_stages=5),
        TileConfig(128, 64, 128, 2, num_stages=4),
    ),
    (SWIGLU, 1, 128): (TileConfig(128, 128, 128, num_warps=8, num_stages=4, swap_ab=True),),
    (STORE, 2, 64): (TileConfig(64, 64, 128, num_stages=6), TileConfig(64, 64, 64, num_stages=6)),
    (ADD_RESIDUAL, 2, 64): (
        TileConfig(64, 32, 128, num_stages=8),
        TileConfig(64, 32, 64, num_stages=8),
    ),
    (SWIGLU, 2, 64): (TileConfig(64, 64, 128, num_stages=4),),
    (ADD_RESIDUAL, 2, 128): (TileConfig(128, 32, 128, num_stages=5),),
    (SWIGLU, 2, 128): (TileConfig(128, 64, 64, num_stages=3, swap_ab=True),),
}
"""Configs by epilogue, bytes of a weight and largest number of rows: the best on an H200 first,
then some for other shapes."""


def find_tiled_config(
    rows: int, outputs: int, inputs: int, itemsize: int, epilogue: Epilogue = STORE
) -> TileConfig | None:
    """Chooses the tile config of a GEMM.

    Args:
        rows: Rows of the step.
        outputs: Outputs of the weight, or of its gate half.
        inputs: Inputs of the weight.
        itemsize: Bytes of a weight.
        epilogue: The epilogue.

    Returns:
        None where cuBLAS is as fast, or no config fits.
    """
    if itemsize > 1 and rows > 64 and (rows <= _NEARLY_FULL or inputs >= _LONG):
        return None
    for bucket in (16, 64, 128):
        configs = _CONFIGS.get((epilogue, itemsize, bucket), ()) if rows <= bucket else ()
        for config in configs:
            fill = _fill(config, outputs, itemsize, epilogue)
            if config.fits(outputs, inputs) and fill >= _MIN_FILL:
                return config
        if configs:
            break
    return None


def _fill(config: TileConfig, outputs: int, itemsize: int, epilogue: Epilogue) -> float:
    """Share of the GPU's program slots that a GEMM uses, over its waves."""
    programs = outputs // config.block_n * config.split_k
    shared = config.shared_bytes(itemsize, epilogue)
    slots = _SMS * max(1, min(SHARED_BYTES // (shared + 2048), 16 // config.num_warps))
    if programs <= slots:
        # Programs of one wave share the bandwidth: one on most SMs is enough.
        return min(1.0, programs / _SMS)
    return programs / (-(-programs // slots) * slots)


def workspace_sizes(rows: int, outputs: int) -> tuple[int, int]:
    """Floats and semaphores of a `Workspace` for GEMMs of so many rows and outputs.

    GEMMs with SwiGLU do not split K.
    """
    return _MAX_SPLIT_K * rows * outputs, outputs


def tiled_gemm(
    given: torch.Tensor | QuantizedRows,
    matrix: LinearWeights | QuantizedWeights,
    config: TileConfig,
    workspace: Workspace,
    *,
    sum_squares: torch.Tensor | None = None,
    epsilon: float = 0.0,
    residual: Residual | torch.Tensor | None = None,
    swiglu: bool = False,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Computes ``rows @ weight.T`` with an epilogue. Can be captured.

    Grid: (outputs / block_n, rows / block_m, split_k).

    Args:
        given: ``[rows, inputs]``, inputs contiguous.
        matrix: Of the rows' dtype; with a bias only without SwiGLU and residual. FP8 if the rows
            are, without a bias.
        config: One that fits the weight, or half of it if `swiglu`.
        workspace: For split-K.
        sum_squares: ``[rows, tiles]`` float32: partial sums of squares of the rows, whose RMSNorm
            is applied; None for no norm.
        epsilon: Of that norm.
        residual: ``[rows, outputs]``, added to in place; a `Residual` also gets new sums of
            squares.
        swiglu: Whether the epilogue is SwiGLU.
        dtype: Of the output; by default that of the rows.

    Returns:
        ``[rows, outputs]``, half of them with SwiGLU; the residual's rows if given.

    Raises:
        ValueError: The residual has another number of partial sums of squares.
    """
    rows = given.rows if isinstance(given, QuantizedRows) else given
    count, inputs = rows.shape
    outputs = len(matrix.weight) // (2 if swiglu else 1)
    tiles = outputs // config.block_n
    unused = workspace.partial_sums
    out_sum_squares, out = unused, residual
    if isinstance(residual, Residual):
        out, out_sum_squares = residual
        if out_sum_squares.shape[1] != tiles:
            raise ValueError(f"{out_sum_squares.shape[1]} sums of squares for {tiles} tiles")
    if out is None:
        out = rows.new_empty(count, outputs, dtype=dtype)
    assert isinstance(out, torch.Tensor)
    square_tiles = 0 if sum_squares is None else sum_squares.shape[1]
    bias = matrix.bias if isinstance(matrix, LinearWeights) else None
    height, block_k = len(matrix.weight), config.block_k
    x = TensorDescriptor(rows, [count, inputs], [rows.stride(0), 1], [config.block_m, block_k])
    w = TensorDescriptor(matrix.weight, [height, inputs], [inputs, 1], [config.block_n, block_k])
    _tiled_gemm[(tiles, triton.cdiv(count, config.block_m), config.split_k)](
        x, w, out, unused if sum_squares is None else sum_squares, out_sum_squares,
        workspace.partial_sums, workspace.semaphores, unused if bias is None else bias, count,
        outputs, inputs, inputs // config.split_k, epsilon, square_tiles,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=block_k, SPLIT_K=config.split_k,
        NUM_STAGES=config.num_stages, SWAP_AB=config.swap_ab,
        SQUARE_TILES=triton.next_power_of_2(square_tiles) if square_tiles else 0, SWIGLU=swiglu,
        ADD_RESIDUAL=residual is not None, WRITE_SUM_SQUARES=isinstance(residual, Residual),
        BIASED=bias is not None, **_scale_args(given, matrix, unused),
        num_warps=config.num_warps, **pdl_options(rows.device),
    )  # fmt: skip
    return out


def _scale_args(
    given: torch.Tensor | QuantizedRows,
    matrix: LinearWeights | QuantizedWeights,
    unused: torch.Tensor,
) -> dict[str, Any]:
    """Kernel arguments of FP8 scales."""
    if not isinstance(matrix, QuantizedWeights) or not isinstance(given, QuantizedRows):
        return {"x_scales": unused, "w_scales": unused, "SCALED": False, "GROUP": 0}
    group = GROUP if matrix.grouped else 0
    return {"x_scales": given.scales, "w_scales": matrix.scales, "SCALED": True, "GROUP": group}


@triton.jit(do_not_specialize=["row_count"])
def _tiled_gemm(
    x, w, out, sum_squares, out_sum_squares, partial_sums, semaphores, bias,
    row_count, outputs, inputs, inputs_per_split, epsilon, square_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, SWAP_AB: tl.constexpr, SQUARE_TILES: tl.constexpr,
    SWIGLU: tl.constexpr, ADD_RESIDUAL: tl.constexpr, WRITE_SUM_SQUARES: tl.constexpr,
    BIASED: tl.constexpr, x_scales, w_scales, SCALED: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes one split of an output tile."""
    tile = tl.program_id(0)
    split = tl.program_id(2)
    first_row = tl.program_id(1) * BLOCK_M
    first_column = tile * BLOCK_N
    first = split * inputs_per_split
    if PDL:
        pdl_trigger_wait()
    row_ids = first_row + tl.arange(0, BLOCK_M)
    row_mask = row_ids < row_count
    columns = first_column + tl.arange(0, BLOCK_N)
    rstd = _row_rstd(sum_squares, row_ids, row_mask, square_tiles, inputs, epsilon, SQUARE_TILES)
    acc = _zero_acc(BLOCK_M, BLOCK_N, SWAP_AB)
    up_acc = acc
    for k in tl.range(first, first + inputs_per_split, BLOCK_K, num_stages=NUM_STAGES):
        x_tile = x.load([first_row, k])
        w_tile = w.load([first_column, k])
        if GROUP == 0:
            acc = _mma(acc, x_tile, w_tile, SWAP_AB)
            if SWIGLU:
                up_acc = _mma(up_acc, x_tile, w.load([outputs + first_column, k]), SWAP_AB)
        else:
            groups = inputs // GROUP
            group = k // GROUP
            x_scale = tl.load(x_scales + row_ids * groups + group, mask=row_mask, other=0.0)
            w_scale = tl.load(w_scales + columns // GROUP * groups + group)
            acc = _mma_scaled(acc, x_tile, w_tile, x_scale, w_scale, SWAP_AB)
            if SWIGLU:
                w_tile = w.load([outputs + first_column, k])
                w_scale = tl.load(w_scales + (outputs + columns) // GROUP * groups + group)
                up_acc = _mma_scaled(up_acc, x_tile, w_tile, x_scale, w_scale, SWAP_AB)
    if SWAP_AB:
        acc = tl.trans(acc)
        up_acc = tl.trans(up_acc)
    out_offsets = row_ids[:, None].to(tl.int64) * outputs + columns[None, :]
    out_mask = row_mask[:, None] & (columns >= 0)[None, :]
    last = True
    if SPLIT_K > 1:
        size = row_count.to(tl.int64) * outputs
        tl.store(partial_sums + split * size + out_offsets, acc, mask=out_mask)
        if SWIGLU:
            tl.store(partial_sums + (SPLIT_K + split) * size + out_offsets, up_acc, mask=out_mask)
        # All warps must have stored their sums before the semaphore is raised.
        tl.debug_barrier()
        semaphore = semaphores + tl.program_id(1) * tl.num_programs(0) + tile
        last = tl.atomic_add(semaphore, 1, sem="acq_rel") == SPLIT_K - 1
        if last:
            tl.store(semaphore, 0)
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for other in tl.static_range(SPLIT_K):
                # Bypasses L1, which is not coherent with other SMs.
                partial_ptrs = partial_sums + other * size + out_offsets
                acc += tl.load(partial_ptrs, mask=out_mask, other=0.0, cache_modifier=".cg")
                if SWIGLU:
                    partial_ptrs = partial_sums + (SPLIT_K + other) * size + out_offsets
                    up_acc += tl.load(partial_ptrs, mask=out_mask, other=0.0, cache_modifier=".cg")
    if last:
        dtype = out.dtype.element_ty
        if SCALED and GROUP == 0:
            x_scale = tl.load(x_scales + row_ids, mask=row_mask, other=0.0)[:, None]
            acc *= x_scale * tl.load(w_scales + columns)[None, :]
            if SWIGLU:
                up_acc *= x_scale * tl.load(w_scales + outputs + columns)[None, :]
        if SQUARE_TILES > 0:
            acc *= rstd[:, None]
            up_acc *= rstd[:, None]
        if BIASED:
            acc += tl.load(bias + columns).to(tl.float32)[None, :]
        if SWIGLU:
            # Rounded as the output of an unfused GEMM would be.
            acc = silu_mul(acc.to(dtype).to(tl.float32), up_acc.to(dtype).to(tl.float32))
        if ADD_RESIDUAL:
            acc += tl.load(out + out_offsets, mask=out_mask, other=0.0).to(tl.float32)
            if WRITE_SUM_SQUARES:
                rounded = tl.where(out_mask, acc.to(dtype).to(tl.float32), 0.0)
                total = tl.sum(rounded * rounded, 1)
                tl.store(
                    out_sum_squares + row_ids * tl.num_programs(0) + tile, total, mask=row_mask
                )
        tl.store(out + out_offsets, acc.to(dtype), mask=out_mask)


@triton.jit
def _zero_acc(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr):
    """Zero accumulators, ``[N, M]`` if operands are swapped."""
    if SWAP_AB:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    return acc


@triton.jit
def _mma(acc, x_tile, weights, SWAP_AB: tl.constexpr):
    """Adds ``x_tile @ weights.T``, transposed if operands are swapped."""
    if SWAP_AB:
        acc = tl.dot(weights, tl.trans(x_tile), acc, input_precision="ieee")
    else:
        acc = tl.dot(x_tile, tl.trans(weights), acc, input_precision="ieee")
    return acc


@triton.jit
def _mma_scaled(acc, x_tile, weights, x_scales, w_scales, SWAP_AB: tl.constexpr):
    """Adds ``x_tile @ weights.T`` of one quantization group, times the scales of both."""
    sums = _mma(tl.zeros_like(acc), x_tile, weights, SWAP_AB)
    if SWAP_AB:
        acc += sums * w_scales[:, None] * x_scales[None, :]
    else:
        acc += sums * x_scales[:, None] * w_scales[None, :]
    return acc


@triton.jit
def _row_rstd(sum_squares, row_ids, row_mask, count, width, epsilon, SQUARE_TILES: tl.constexpr):
    """The reciprocal RMS of each row."""
    total = tl.zeros([row_ids.shape[0]], tl.float32)
    if SQUARE_TILES > 0:
        lanes = tl.arange(0, SQUARE_TILES)
        found = tl.load(
            sum_squares + row_ids[:, None] * count + lanes[None, :],
            mask=row_mask[:, None] & (lanes < count)[None, :],
            other=0.0,
        )
        total = tl.rsqrt(tl.sum(found, 1) / width + epsilon)
    return total
