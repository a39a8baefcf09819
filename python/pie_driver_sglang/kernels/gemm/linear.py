"""Split-K GEMM in Triton with an optional SwiGLU epilogue: ``rows @ weight.T``.

Used up to 128 rows where norms are not folded into weights: with the library's LoRA, and of tensor
parallel ranks for shapes that no other kernel takes. It replaces cuBLAS there because it prefetches
weights into L2 before the previous kernel has ended (PDL), and leaves split-K sums to the next
kernel, `norm_rope.add_rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.norm_rope import silu_mul
from pie_driver_sglang.kernels.gemm.types import LinearWeights, TileConfig
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

MAX_SHARED_BYTES = 208 << 10
"""Most shared memory of a GEMM program, in bytes."""
MAX_SPLIT_K = 4
"""Largest split-K factor, where a later kernel reduces the partial sums."""
_PREFETCHED_BYTES = 16 << 20
"""Bytes of a weight that are prefetched into L2."""
_LARGE, _ROWS_OF_LARGE = 16 << 20, 32
"""From this many weight elements on, and above this many rows, cuBLAS is faster."""
_LONG = 4096
"""Inputs from which on cuBLAS is faster for those rows as well, if programs are few."""
_PROGRAMS, _MIN_PROGRAMS = 64, 48
"""Wanted programs of a GEMM, and the fewest that do if the split-K factor cannot grow."""


def find_linear_config(
    rows: int, outputs: int, inputs: int, max_split_k: int = 1, *, swiglu: bool = False
) -> TileConfig | None:
    """Chooses the tile config of a GEMM; ``benches/gpu/dense_check.py --tune`` measures them.

    Args:
        rows: Rows of the step.
        outputs: Outputs of the weight, or of its gate half.
        inputs: Inputs of the weight.
        max_split_k: Largest split-K factor.
        swiglu: Whether the epilogue is SwiGLU.

    Returns:
        None where cuBLAS is as fast.
    """
    if rows > 128:
        return None
    block_m = max(16, triton.next_power_of_2(rows))
    if block_m > 64 and max_split_k == 1:
        return None
    if block_m > _ROWS_OF_LARGE:
        few = max_split_k == 1 and inputs > _LONG and outputs < 32 * _PROGRAMS
        if few or outputs * inputs * (2 if swiglu else 1) > _LARGE:
            return None
    stages = 3 if block_m > (32 if swiglu else 64) else 5
    for block_n in (64, 32, 16):
        for split_k in (1, 2, 4):
            config = TileConfig(block_m, block_n, 128, min(split_k, max_split_k), num_stages=stages)
            programs = outputs // block_n * config.split_k
            # A larger split-K factor is used only for enough programs.
            enough = _PROGRAMS if config.split_k < max_split_k else _MIN_PROGRAMS
            if programs >= enough and config.fits(outputs, inputs):
                return config
    return None


def linear(rows: torch.Tensor, matrix: LinearWeights, config: TileConfig) -> torch.Tensor:
    """Computes ``rows @ weight.T + bias``, with or without split-K. Can be captured.

    Args:
        rows: ``[rows, inputs]``, inputs contiguous.
        matrix: Of the rows' dtype; without a bias if `config` splits K.
        config: One that fits the weight.

    Returns:
        ``[1, rows, outputs]`` of the rows' dtype, or ``[split_k, rows, outputs]`` float32 partial
        sums.
    """
    dtype = rows.dtype if config.split_k == 1 else torch.float32
    out = rows.new_empty(config.split_k, len(rows), len(matrix.weight), dtype=dtype)
    _launch(rows, matrix, out, config, swiglu=False)
    return out


def linear_swiglu(rows: torch.Tensor, matrix: LinearWeights, config: TileConfig) -> torch.Tensor:
    """Computes ``silu(rows @ gate.T) * (rows @ up.T)``. Can be captured.

    Args:
        rows: ``[rows, inputs]``, inputs contiguous.
        matrix: Weights of the gate, then of the up projection; of the rows' dtype.
        config: One that fits half of the weight, without split-K.

    Returns:
        ``[rows, outputs / 2]`` of the rows' dtype.
    """
    out = rows.new_empty(len(rows), len(matrix.weight) // 2)
    _launch(rows, matrix, out, config, swiglu=True)
    return out


def _launch(
    rows: torch.Tensor, matrix: LinearWeights, out: torch.Tensor, config: TileConfig, swiglu: bool
) -> None:
    outputs, inputs = out.shape[-1], rows.shape[-1]
    inputs_per_split = inputs // config.split_k
    # Bytes of each weight row that a program prefetches.
    prefetch_bytes = _PREFETCHED_BYTES // (len(matrix.weight) * config.split_k)
    prefetch_bytes = min(inputs_per_split * rows.itemsize, triton.cdiv(prefetch_bytes, 128) * 128)
    grid = (outputs // config.block_n, triton.cdiv(len(rows), config.block_m), config.split_k)
    _linear[grid](
        rows, matrix.weight, matrix.bias, out, len(rows), rows.stride(0), outputs, inputs,
        inputs_per_split, prefetch_bytes,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, SWIGLU=swiglu,
        num_warps=config.num_warps, num_stages=config.num_stages, **pdl_options(rows.device),
    )  # fmt: skip


@triton.jit
def _prefetch(rows, row_bytes):
    """Prefetches `row_bytes` of each row into L2; a hint, which the hardware may ignore."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [rows, row_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["row_count"])
def _linear(
    rows, weight, bias, out, row_count, row_stride, outputs, inputs, inputs_per_split,
    prefetch_bytes,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWIGLU: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes a tile of ``out.T = weight @ rows.T``: outputs are the M dimension of the MMA."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    first = split * inputs_per_split
    w_rows = weight + columns.to(tl.int64) * inputs + first
    up_rows = w_rows + outputs.to(tl.int64) * inputs
    if PDL:
        # Weights do not depend on the previous kernel.
        _prefetch(w_rows, prefetch_bytes)
        if SWIGLU:
            _prefetch(up_rows, prefetch_bytes)
        pdl_wait_trigger()
    row_ids = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row_ids < row_count
    k_offsets = tl.arange(0, BLOCK_K)
    x_ptrs = rows + row_ids[None, :].to(tl.int64) * row_stride + first + k_offsets[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, inputs_per_split, BLOCK_K):
        x = tl.load(x_ptrs + k, mask=row_mask[None, :], other=0.0)
        w = tl.load(w_rows[:, None] + k + k_offsets[None, :])
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if SWIGLU:
            w = tl.load(up_rows[:, None] + k + k_offsets[None, :])
            up_acc = tl.dot(w, x, up_acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + columns).to(tl.float32)[:, None]
    if SWIGLU:
        # Rounded as the output of an unfused GEMM would be.
        gate = acc.to(rows.dtype.element_ty).to(tl.float32)
        up = up_acc.to(rows.dtype.element_ty).to(tl.float32)
        acc = silu_mul(gate, up)
    row = split.to(tl.int64) * row_count + row_ids[None, :]
    tl.store(out + row * outputs + columns[:, None], acc, mask=row_mask[None, :])
