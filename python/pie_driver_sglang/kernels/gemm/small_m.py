"""GEMV and small-M GEMM in Triton for decode steps: ``rows @ weight.T``, up to 64 rows.

Such a step is bound by reading weights, so nothing else gets a kernel of its own:

- **RMSNorm** is deferred. The epilogue that adds to the residual also stores the sum of squares
  of each tile; the next GEMM takes the residual as it is and multiplies its outputs by ``1 / rms``.
  The norm's weight is folded into the matrix.
- **Bias, SwiGLU and residual add** are epilogues.
- **LoRA**: the loop over K continues over the ranks of the adapters of the rows (`lora`).
- **Split-K** sums are reduced by the program that finishes last, in a fixed order.
- **PDL**: a kernel releases the next one at once. One row is multiplied by FMA instead of tensor
  cores, and its first weights are loaded before the wait for the previous kernel.

cuBLAS has neither these epilogues nor PDL loads. On Hopper `wgmma` is faster from 2 rows on.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.lora import Shrunk, expand_lora, lora_args, lora_constants
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
from pie_driver_sglang.kernels.pdl import (
    pdl_options,
    pdl_trigger,
    pdl_trigger_wait,
    pdl_wait,
)

_VECTOR = tl.constexpr(8)
"""Weights that a thread loads at once."""
_MIN_BLOCK_N, _MIN_BLOCK_K = 16, 16
"""Smallest tile of a tensor core MMA."""
MAX_ROWS = 64
"""Most rows of a step."""
_CONFIGS: dict[tuple[Epilogue, int], TileConfig] = {
    (STORE, 1): TileConfig(1, 8, 512, num_stages=1),
    (ADD_RESIDUAL, 1): TileConfig(1, 16, 512, num_warps=8, num_stages=1),
    (SWIGLU, 1): TileConfig(1, 4, 512, num_stages=1),
    (STORE, 16): TileConfig(16, 64, 256, num_stages=3),
    (ADD_RESIDUAL, 16): TileConfig(16, 64, 256, split_k=4, num_stages=3),
    (SWIGLU, 16): TileConfig(16, 64, 128, num_stages=5),
    (STORE, 32): TileConfig(32, 64, 128, num_stages=5),
    (ADD_RESIDUAL, 32): TileConfig(32, 64, 128, split_k=4, num_stages=3),
    (SWIGLU, 32): TileConfig(32, 64, 128, num_stages=5),
    (STORE, 64): TileConfig(64, 64, 256, num_stages=3),
    (ADD_RESIDUAL, 64): TileConfig(64, 64, 256, split_k=4, num_stages=3),
}
"""By epilogue and largest number of rows: for one row those that lose least on an H200, over the
shapes of `benches/gpu/tune_check.py`, against the best one of each shape."""


def find_small_m_config(
    rows: int, outputs: int, inputs: int, epilogue: Epilogue = STORE
) -> TileConfig | None:
    """The tile config of a GEMM that was never measured.

    Args:
        rows: Rows of the step.
        outputs: Outputs of the weight, or of its gate half.
        inputs: Inputs of the weight.
        epilogue: The epilogue.

    Returns:
        None where these kernels do not support the GEMM.
    """
    bucket = next((bucket for bucket in (1, 16, 32, 64) if rows <= bucket), None)
    if bucket is None:
        return None
    best = _CONFIGS.get((epilogue, bucket))
    if best is None or best.fits(outputs, inputs):
        return best
    return shrink_config(outputs, inputs, best)


def shrink_config(outputs: int, inputs: int, config: TileConfig) -> TileConfig | None:
    """Shrinks a config's tiles, without split-K, so that they divide a weight of this shape."""
    # The largest powers of two that divide them.
    block_n = min(config.block_n, outputs & -outputs)
    block_k = min(config.block_k, inputs & -inputs)
    if block_n < min(config.block_n, _MIN_BLOCK_N) or block_k < _MIN_BLOCK_K:
        return None
    return replace(config, block_n=block_n, block_k=block_k, split_k=1)


def small_m_gemm(
    rows: torch.Tensor,
    matrix: LinearWeights,
    config: TileConfig,
    workspace: Workspace,
    *,
    sum_squares: torch.Tensor | None = None,
    epsilon: float = 0.0,
    residual: Residual | None = None,
    swiglu: bool = False,
    lora: Shrunk | None = None,
) -> torch.Tensor:
    """Computes ``rows @ weight.T`` with an epilogue. Can be captured.

    Grid: (outputs / block_n, split_k).

    Args:
        rows: ``[rows, inputs]``, inputs contiguous; at most `config.block_m` rows.
        matrix: Of the rows' dtype; with a bias only without SwiGLU and residual.
        config: One that fits the weight, or half of it if `swiglu`.
        workspace: For split-K.
        sum_squares: ``[rows, tiles]`` float32: partial sums of squares of `rows`, whose RMSNorm is
            applied; None for no norm.
        epsilon: Of that norm.
        residual: Added to in place, and given new sums of squares, ``[rows, outputs / block_n]``.
        swiglu: Whether the epilogue is SwiGLU.
        lora: What LoRA adapters add to the sums before the epilogue.

    Returns:
        ``[rows, outputs]`` of the rows' dtype, half of them with SwiGLU; `residual.rows` if given.

    Raises:
        ValueError: The residual has another number of partial sums of squares.
    """
    count, inputs = rows.shape
    outputs = len(matrix.weight) // (2 if swiglu else 1)
    out = rows.new_empty(count, outputs) if residual is None else residual.rows
    tiles = outputs // config.block_n
    unused = workspace.partial_sums
    if residual is not None and residual.sum_squares.shape[1] != tiles:
        raise ValueError(f"{residual.sum_squares.shape[1]} sums of squares for {tiles} tiles")
    square_tiles = 0 if sum_squares is None else sum_squares.shape[1]
    _gemm[(tiles, config.split_k)](
        rows, matrix.weight, out, unused if sum_squares is None else sum_squares,
        unused if residual is None else residual.sum_squares, workspace.partial_sums,
        workspace.semaphores, unused if matrix.bias is None else matrix.bias,
        *lora_args(lora, rows), count, rows.stride(0), outputs, inputs, inputs // config.split_k,
        epsilon, square_tiles,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        SPLIT_K=config.split_k, NUM_STAGES=config.num_stages,
        SQUARE_TILES=0 if sum_squares is None else triton.next_power_of_2(square_tiles),
        SWIGLU=swiglu, ADD_RESIDUAL=residual is not None, BIASED=matrix.bias is not None,
        **lora_constants(lora), num_warps=config.num_warps, **pdl_options(rows.device),
    )  # fmt: skip
    return out


def start_residual(rows: torch.Tensor, tiles: int) -> Residual:
    """Computes the sums of squares of embeddings, ``[rows, width]``, as a residual's epilogue does.

    They are ``[rows, tiles]``: the first has the row's sum, the others are zero.
    """
    residual = Residual(rows, rows.new_empty(len(rows), tiles, dtype=torch.float32))
    _store_sum_squares(residual, None)
    return residual


def add_to_residual(part: torch.Tensor, residual: Residual) -> None:
    """Adds ``[rows, width]`` to a residual of its dtype in place. Can be captured.

    Sums are rounded once and squared as they are stored. What a row gets does not depend on the
    number of rows.
    """
    _store_sum_squares(residual, part)


def _store_sum_squares(residual: Residual, part: torch.Tensor | None) -> None:
    """Grid: one program a row."""
    (count, width), tiles = residual.rows.shape, residual.sum_squares.shape[1]
    _residual_squares[(count,)](
        residual.rows, residual.rows if part is None else part, residual.sum_squares, width, tiles,
        WIDTH=triton.next_power_of_2(width), TILES=triton.next_power_of_2(tiles),
        ADD=part is not None, num_warps=8, **pdl_options(residual.rows.device),
    )  # fmt: skip


@triton.jit
def _residual_squares(
    rows, part, sum_squares, width, tiles, WIDTH: tl.constexpr, TILES: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_trigger_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    mask = columns < width
    offsets = row * width + columns
    x = tl.load(rows + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(part + offsets, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(rows.dtype.element_ty)
        tl.store(rows + offsets, rounded, mask=mask)
        x = rounded.to(tl.float32)
    tile = tl.arange(0, TILES)
    total = tl.where(tile == 0, tl.sum(x * x, 0), 0.0)
    tl.store(sum_squares + row * tiles + tile, total, mask=tile < tiles)


@triton.jit(do_not_specialize=["row_count"])
def _gemm(
    rows, weight, out, sum_squares, out_sum_squares, partial_sums, semaphores, bias, lora_values,
    lora_up, lora_slots, lora_ranks, up_slot_stride, up_row_stride, first_end, second_end,
    row_count, row_stride, outputs, inputs, inputs_per_split, epsilon, square_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, SQUARE_TILES: tl.constexpr, SWIGLU: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr, BIASED: tl.constexpr, LORA_RANK: tl.constexpr,
    LORA_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes one split of an output tile, for all rows, as ``out.T = weight @ x.T``."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    first = split * inputs_per_split
    w_rows = weight + columns.to(tl.int64) * inputs + first
    up_rows = w_rows + outputs.to(tl.int64) * inputs
    row_ids = tl.arange(0, BLOCK_M)
    row_mask = row_ids < row_count
    k_offsets = tl.arange(0, BLOCK_K)
    if BLOCK_M == 1:
        x_ptrs = rows + first + k_offsets[None, :]
        x_mask = k_offsets[None, :] >= 0
    else:
        x_ptrs = rows + row_ids[None, :].to(tl.int64) * row_stride + first + k_offsets[:, None]
        x_mask = row_mask[None, :]
    if NUM_STAGES == 1:
        # Loads of the first weights overlap with the wait for the previous kernel.
        w = tl.load(w_rows[:, None] + k_offsets[None, :])
        u = w
        if SWIGLU:
            u = tl.load(up_rows[:, None] + k_offsets[None, :])
    bias_tile = tl.zeros([BLOCK_N], tl.float32)
    if BIASED:
        bias_tile = tl.load(bias + columns).to(tl.float32)
    if PDL:
        # With adapters the previous kernel is the shrink, which starts this one when the inputs
        # are written.
        if LORA_PARTS > 0:
            pdl_trigger()
        else:
            pdl_trigger_wait()
    out_offsets = columns[:, None] + row_ids[None, :].to(tl.int64) * outputs
    out_mask = row_mask[None, :] & (columns[:, None] >= 0)
    square_lanes = tl.arange(0, 1 if SQUARE_TILES == 0 else SQUARE_TILES)
    acc = tl.zeros([BLOCK_N, BLOCK_K // _VECTOR if BLOCK_M == 1 else BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_K // _VECTOR if BLOCK_M == 1 else BLOCK_M], tl.float32)
    if NUM_STAGES == 1:
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
    sum_squares_tile = _load_sum_squares(
        sum_squares, row_ids, row_mask, square_lanes, square_tiles, SQUARE_TILES
    )
    residual_tile = tl.zeros([BLOCK_N, BLOCK_M], out.dtype.element_ty)
    if ADD_RESIDUAL:
        residual_tile = tl.load(out + out_offsets, mask=out_mask, other=0.0)
    if NUM_STAGES == 1:
        for k in tl.range(BLOCK_K, inputs_per_split, BLOCK_K, num_stages=1):
            next_x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            next_w = tl.load(w_rows[:, None] + k + k_offsets[None, :])
            if SWIGLU:
                next_u = tl.load(up_rows[:, None] + k + k_offsets[None, :])
                up_acc = accumulate(u, x, up_acc, BLOCK_M)
                u = next_u
            acc = accumulate(w, x, acc, BLOCK_M)
            w = next_w
            x = next_x
        acc = accumulate(w, x, acc, BLOCK_M)
        if SWIGLU:
            up_acc = accumulate(u, x, up_acc, BLOCK_M)
    else:
        for k in tl.range(0, inputs_per_split, BLOCK_K, num_stages=NUM_STAGES):
            x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            w = tl.load(w_rows[:, None] + k + k_offsets[None, :])
            acc = accumulate(w, x, acc, BLOCK_M)
            if SWIGLU:
                w = tl.load(up_rows[:, None] + k + k_offsets[None, :])
                up_acc = accumulate(w, x, up_acc, BLOCK_M)
    if BLOCK_M == 1:
        acc = tl.sum(acc, 1)[:, None]
        up_acc = tl.sum(up_acc, 1)[:, None]
    if PDL and LORA_PARTS > 0:
        pdl_wait()
    if LORA_PARTS > 0 and split == 0:
        acc = expand_lora(
            acc, lora_values, lora_up, lora_slots, lora_ranks, up_slot_stride, up_row_stride,
            first_end, second_end, row_ids, row_mask, columns, LORA_RANK, LORA_PARTS,
        )  # fmt: skip
        if SWIGLU:
            up_acc = expand_lora(
                up_acc, lora_values, lora_up, lora_slots, lora_ranks, up_slot_stride,
                up_row_stride, first_end, second_end, row_ids, row_mask, columns + outputs,
                LORA_RANK, LORA_PARTS,
            )  # fmt: skip
    if SPLIT_K == 1:
        _epilogue(
            acc, up_acc, sum_squares_tile, residual_tile, bias_tile, out, out_sum_squares,
            out_offsets, tile, row_ids, row_mask, inputs, epsilon, SQUARE_TILES, SWIGLU,
            ADD_RESIDUAL, BIASED,
        )  # fmt: skip
    else:
        size = row_count.to(tl.int64) * outputs
        partial_ptrs = partial_sums + out_offsets
        tl.store(partial_ptrs + split * size, acc, mask=out_mask)
        if SWIGLU:
            tl.store(partial_ptrs + (SPLIT_K + split) * size, up_acc, mask=out_mask)
        # All warps must have stored their sums before the semaphore is raised.
        tl.debug_barrier()
        if tl.atomic_add(semaphores + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            tl.store(semaphores + tile, 0)
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for other in tl.static_range(SPLIT_K):
                # Bypasses L1, which is not coherent with other SMs.
                acc += tl.load(
                    partial_ptrs + other * size, mask=out_mask, other=0.0, cache_modifier=".cg"
                )
                if SWIGLU:
                    up_acc += tl.load(
                        partial_ptrs + (SPLIT_K + other) * size, mask=out_mask, other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
            _epilogue(
                acc, up_acc, sum_squares_tile, residual_tile, bias_tile, out, out_sum_squares,
                out_offsets, tile, row_ids, row_mask, inputs, epsilon, SQUARE_TILES, SWIGLU,
                ADD_RESIDUAL, BIASED,
            )  # fmt: skip


@triton.jit
def accumulate(w, x, acc, BLOCK_M: tl.constexpr):
    """Adds ``w @ x`` of a tile: by FMA for one row (GEMV), else on tensor cores.

    `w` is ``[outputs, inputs]``, `x` ``[1, inputs]`` or ``[inputs, rows]``. For one row each thread
    reduces the vector that it loaded, so that sums take few registers.
    """
    if BLOCK_M == 1:
        BLOCK_N: tl.constexpr = w.shape[0]
        BLOCK_K: tl.constexpr = w.shape[1]
        products = w.to(tl.float32) * x.to(tl.float32)
        acc += tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // _VECTOR, _VECTOR]), 2)
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _load_sum_squares(sum_squares, row_ids, row_mask, lanes, count, SQUARE_TILES: tl.constexpr):
    """Loads partial sums of squares, ``[rows, tiles]``; zeros without any."""
    found = tl.zeros([row_ids.shape[0], lanes.shape[0]], tl.float32)
    if SQUARE_TILES > 0:
        found = tl.load(
            sum_squares + row_ids[:, None] * count + lanes[None, :],
            mask=row_mask[:, None] & (lanes < count)[None, :],
            other=0.0,
        )
    return found


@triton.jit
def _epilogue(
    acc, up_acc, sum_squares_tile, residual_tile, bias_tile, out, out_sum_squares, out_offsets,
    tile, row_ids, row_mask, width, epsilon, SQUARE_TILES: tl.constexpr, SWIGLU: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Applies the RMS scale, then the bias, SwiGLU or the residual add, and stores."""
    dtype = out.dtype.element_ty
    out_mask = row_mask[None, :] & (out_offsets >= 0)
    if SQUARE_TILES > 0:
        rstd = tl.rsqrt(tl.sum(sum_squares_tile, 1) / width + epsilon)[None, :]
        acc *= rstd
        up_acc *= rstd
    if BIASED:
        acc += bias_tile[:, None]
    if SWIGLU:
        # Rounded as the output of an unfused GEMM would be.
        acc = silu_mul(acc.to(dtype).to(tl.float32), up_acc.to(dtype).to(tl.float32))
    if ADD_RESIDUAL:
        acc += residual_tile.to(tl.float32)
        rounded = tl.where(out_mask, acc.to(dtype).to(tl.float32), 0.0)
        total = tl.sum(rounded * rounded, 0)
        tl.store(out_sum_squares + row_ids * tl.num_programs(0) + tile, total, mask=row_mask)
    tl.store(out + out_offsets, acc, mask=out_mask)
