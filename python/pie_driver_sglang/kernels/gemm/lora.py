"""LoRA beside the GEMMs of fused layers: shrink, and expand.

:func:`lora_shrink` computes ``A @ x`` of each row's adapter. The expand, ``B @ (A @ x)``, is a part
of the GEMM of the layer (`small_m`, `wgmma`): after its loop over K the tile continues over the
ranks of the adapters that its rows have, before the epilogue. So weights are read once, and the RMS
scale, SwiGLU and the residual add stay in the GEMM. SGLang's (and Punica's) SGMV kernels take two
launches besides each GEMM. :func:`lora_expand` does the same after a GEMM of cuBLAS.

Shrink and GEMM run at the same time (PDL): the shrink triggers the GEMM after its own wait for the
previous kernel, so the GEMM may read that kernel's output at once. It waits for the shrink behind
its loop over K. The next kernel after a shrink must be that GEMM, or one without PDL, such as
cuBLAS's before :func:`lora_expand`.

Rows of any adapters, or of none, are mixed in a step. A tile finds the adapters of its rows by
itself, each once, so graphs do not depend on the adapters of a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.wgmma import supports_wgmma
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_trigger_wait, pdl_wait_trigger

if TYPE_CHECKING:
    from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

_NO_SLOT = tl.constexpr(1 << 30)
_MIN_RANK = 16
"""Smallest dimension of a tensor core MMA."""
_BLOCK_R = tl.constexpr(32)
"""Most ranks of an iteration."""
_SUB_TILES = 4
"""Parts of K that warps of a program sum up side by side."""
_SMALL_TILE_ROWS = 256
"""Most rows of a shrink in Triton with tiles of 16 rows."""
_MAX_CUDA_ROWS, _CUDA_TILE, _CUDA_THREADS = 256, 16, 256
"""Of ``cuda/lora_shrink.cu``: most rows, rows and ranks of a CTA, and its threads."""
_CUDA_SOURCE = "lora_shrink.cu"
MAX_PARTS = 3
"""Most parts of a fused linear layer: queries, keys and values."""
_PART_OUTPUTS = 16
"""What divides the outputs of a part: a warp of `wgmma` has so many."""


class LoraWeights(NamedTuple):
    """Adapters of a linear layer that may have several parts, in device slots."""

    down: torch.Tensor
    """``A``: ``[slots, parts * max_rank, inputs]``; of an adapter of rank `r` the first
    ``parts * r`` rows are used, part by part."""
    up: torch.Tensor
    """``B``: ``[slots, outputs, max_rank]``, of which the first `r` columns are used."""
    parts: tuple[int, ...]
    """Outputs of each part, at most :data:`MAX_PARTS`."""

    @property
    def rank(self) -> int:
        """Largest rank of an adapter, padded: a power of two, at least 16."""
        return max(_MIN_RANK, int(triton.next_power_of_2(self.up.shape[2])))

    @property
    def ends(self) -> tuple[int, int]:
        """Where the first and the second part end, among the outputs."""
        first, *others = self.parts
        return first, first + (others[0] if others else 0)


class LoraRows(NamedTuple):
    """Which adapter each row has."""

    slots: torch.Tensor
    """``[rows]`` int32: device slot, -1 for none."""
    ranks: torch.Tensor
    """``[slots]`` int32: rank of the adapter in each slot, 0 for an empty one."""


class Shrunk(NamedTuple):
    """What a GEMM adds to its sums: ``B @ values`` of each row's adapter."""

    values: torch.Tensor
    """``[rows, parts * padded rank]``: ``A @ x``, zero from the adapter's rank on. Rows without an
    adapter are not written."""
    rows: LoraRows
    weights: LoraWeights


def supports_lora(*weights: LoraWeights | None) -> bool:
    """Whether the kernels support adapters of these layers."""
    return all(
        len(one.parts) <= MAX_PARTS
        and all(part % _PART_OUTPUTS == 0 for part in one.parts)
        # `wgmma` loads two weights at once.
        and one.up.shape[2] % 2 == 0
        and one.down.shape[2] % 8 == 0
        for one in weights
        if one is not None
    )


def load_shrink_kernel(dtype: torch.dtype, device: torch.device) -> CudaKernel | None:
    """Compiles ``cuda/lora_shrink.cu`` for 16-bit weights; None where the GPU is not Hopper."""
    if not supports_wgmma(device) or dtype.itemsize != 2:
        return None
    from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

    return CudaKernel(_CUDA_SOURCE, shrink_macros(dtype), device)


def shrink_macros(dtype: torch.dtype) -> dict[str, int]:
    """Macros of the source."""
    return {"BF16": int(dtype is torch.bfloat16)}


def lora_shrink(
    x: torch.Tensor, rows: LoraRows, weights: LoraWeights, kernel: CudaKernel | None = None
) -> Shrunk:
    """Computes ``A @ x`` of each row's adapter. Can be captured.

    The next kernel must be the GEMM that takes the result, or one without PDL. Weights are loaded
    before the previous kernel has ended.

    Args:
        x: ``[rows, inputs]``, inputs contiguous.
        rows: The adapter of each row.
        weights: Of the layer whose inputs are `x`, of its dtype.
        kernel: That of :func:`load_shrink_kernel`, for up to 256 rows; others are in Triton.
    """
    count = len(x)
    values = x.new_empty(count, len(weights.parts) * weights.rank)
    if kernel is None or count > _MAX_CUDA_ROWS or x.stride(0) % 8:
        _launch_triton_shrink(x, rows, weights, values)
    else:
        _launch_cuda_shrink(kernel, x, rows, weights, values)
    return Shrunk(values, rows, weights)


def _launch_cuda_shrink(
    kernel: CudaKernel,
    x: torch.Tensor,
    rows: LoraRows,
    weights: LoraWeights,
    values: torch.Tensor,
) -> None:
    """Grid: (blocks of 16 ranks, tiles of 16 rows of a slot, as many as any slots need)."""
    (count, inputs), (slots, _, _) = x.shape, weights.down.shape
    used = min(slots, count)
    grid = (values.shape[1] // _CUDA_TILE, used + (count - used) // _CUDA_TILE)
    kernel.launch(
        grid, _CUDA_THREADS, x, weights.down, values, *rows, weights.down.stride(0), x.stride(0),
        numpy.int32(count), numpy.int32(inputs), numpy.int32(weights.rank),
    )  # fmt: skip


def _launch_triton_shrink(
    x: torch.Tensor, rows: LoraRows, weights: LoraWeights, values: torch.Tensor
) -> None:
    """Grid: (slots * blocks of ranks, tiles of 16 rows, or 64 of many).

    A program whose rows do not have its slot ends at once.
    """
    (count, inputs), columns = x.shape, values.shape[1]
    block_m = _MIN_RANK if count <= _SMALL_TILE_ROWS else 64
    block_r = min(weights.rank, _BLOCK_R.value)
    grid = (len(weights.down) * columns // block_r, triton.cdiv(count, block_m))
    _shrink[grid](
        x, weights.down, values, *rows, count, x.stride(0), inputs, weights.down.stride(0),
        PARTS=len(weights.parts), RANK=weights.rank, BLOCK_M=block_m, BLOCK_R=block_r,
        BLOCK_K=128 if block_m * block_r <= _MIN_RANK**2 else 64, SUB_TILES=_SUB_TILES,
        num_warps=4, **pdl_options(x.device),
    )  # fmt: skip


def lora_expand(out: torch.Tensor, shrunk: Shrunk | None) -> torch.Tensor:
    """Adds ``B @ shrunk`` of each row's adapter to the output of a GEMM. Can be captured.

    Grid: (tiles of 64 outputs, tiles of 16 or 64 rows).

    Args:
        out: ``[rows, outputs]``, contiguous; overwritten.
        shrunk: The shrunk inputs of the GEMM; None to add nothing.

    Returns:
        `out`.
    """
    if shrunk is None:
        return out
    count, outputs = out.shape
    block_m, block_n = 16 if count <= _MIN_RANK else 64, min(64, outputs & -outputs)
    _expand[(outputs // block_n, triton.cdiv(count, block_m))](
        out, *lora_args(shrunk, out), count, outputs, BLOCK_M=block_m, BLOCK_N=block_n,
        **lora_constants(shrunk), num_warps=4, **pdl_options(out.device),
    )  # fmt: skip
    return out


def lora_args(shrunk: Shrunk | None, unused: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of a GEMM kernel that expands, in the order in which they are taken."""
    if shrunk is None:
        return unused, unused, unused, unused, 0, 0, 0, 0
    up = shrunk.weights.up
    slots, ranks = shrunk.rows
    return shrunk.values, up, slots, ranks, up.stride(0), up.stride(1), *shrunk.weights.ends


def lora_constants(shrunk: Shrunk | None) -> dict[str, int]:
    """Its constexpr arguments: padded rank and parts, zeros for no adapters."""
    if shrunk is None:
        return {"LORA_RANK": 0, "LORA_PARTS": 0}
    return {"LORA_RANK": shrunk.weights.rank, "LORA_PARTS": len(shrunk.weights.parts)}


@triton.jit(do_not_specialize=["row_count"])
def _shrink(
    x, down, values, slots, ranks, row_count, row_stride, inputs, slot_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr, SUB_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A tile of rows and ranks of a slot, by a batched MMA over parts of K."""
    COLUMNS: tl.constexpr = PARTS * RANK
    RANK_BLOCKS: tl.constexpr = COLUMNS // BLOCK_R
    slot = tl.program_id(0) // RANK_BLOCKS
    column = tl.program_id(0) % RANK_BLOCKS * BLOCK_R
    part = column // RANK
    dims = column % RANK + tl.arange(0, BLOCK_R)
    row_ids = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    # Slots of rows, ranks and weights were written before the first kernel of the step.
    mine = tl.load(slots + row_ids, mask=row_ids < row_count, other=-1) == slot
    used = tl.max(mine.to(tl.int32), 0) > 0
    rank = tl.load(ranks + slot)
    k = tl.arange(0, SUB_TILES)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    w_ptrs = down + slot.to(tl.int64) * slot_stride + k[:, :, None]
    w_ptrs += ((part * rank + dims) * inputs)[None, None, :]
    w_mask = (used & (dims < rank))[None, None, :]
    w = tl.load(w_ptrs, mask=w_mask & (k < inputs)[:, :, None], other=0.0)
    if PDL:
        # Programs without rows wait, too: the GEMM may start when all have.
        pdl_wait_trigger()
    if used:
        x_ptrs = x + row_ids[None, :, None].to(tl.int64) * row_stride + k[:, None, :]
        acc = tl.zeros([SUB_TILES, BLOCK_M, BLOCK_R], tl.float32)
        for done in tl.range(0, inputs, SUB_TILES * BLOCK_K):
            tile = tl.load(
                x_ptrs + done, mask=mine[None, :, None] & (k < inputs - done)[:, None, :], other=0.0
            )
            acc = tl.dot(tile, w, acc, input_precision="ieee")
            after = done + SUB_TILES * BLOCK_K
            w = tl.load(w_ptrs + after, mask=w_mask & (k < inputs - after)[:, :, None], other=0.0)
        offsets = row_ids[:, None].to(tl.int64) * COLUMNS + column + tl.arange(0, BLOCK_R)[None, :]
        tl.store(values + offsets, tl.sum(acc, 0), mask=mine[:, None] & (dims >= 0)[None, :])


@triton.jit(do_not_specialize=["row_count"])
def _expand(
    out, values, up, slots, ranks, up_slot_stride, up_row_stride, first_end, second_end,
    row_count, outputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LORA_RANK: tl.constexpr,
    LORA_PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_trigger_wait()
    row_ids = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row_ids < row_count
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_ptrs = out + row_ids[None, :].to(tl.int64) * outputs + columns[:, None]
    mask = row_mask[None, :] & (columns >= 0)[:, None]
    acc = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    acc = expand_lora(
        acc, values, up, slots, ranks, up_slot_stride, up_row_stride, first_end, second_end,
        row_ids, row_mask, columns, LORA_RANK, LORA_PARTS,
    )  # fmt: skip
    tl.store(out_ptrs, acc, mask=mask)


@triton.jit
def expand_lora(
    acc, values, up, slots, ranks, up_slot_stride, up_row_stride, first_end, second_end, row_ids,
    row_mask, columns, LORA_RANK: tl.constexpr, LORA_PARTS: tl.constexpr,
):  # fmt: skip
    """Adds ``B @ values`` of each row's adapter to sums, ``[outputs, rows]``.

    `columns` are ascending outputs of the layer; they may be of several parts.
    """
    lowest = tl.min(columns, 0)
    highest = tl.max(columns, 0)
    for part in tl.static_range(LORA_PARTS):
        start = 0
        end = first_end
        if part > 0:
            start = first_end if part == 1 else second_end
            end = second_end if part == 1 else 1 << 30
        if (highest >= start) & (lowest < end):
            acc = _expand_part(
                acc, values + part * LORA_RANK, up, slots, ranks, up_slot_stride, up_row_stride,
                row_ids, row_mask, columns, (columns >= start) & (columns < end),
                LORA_RANK * LORA_PARTS, LORA_RANK,
            )  # fmt: skip
    return acc


@triton.jit
def _expand_part(
    acc, values, up, slots, ranks, up_slot_stride, up_row_stride, row_ids, row_mask, columns,
    in_part, value_stride: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """The same for one part of the layer: the slots of the rows one after the other."""
    BLOCK_R: tl.constexpr = RANK if RANK < _BLOCK_R else _BLOCK_R
    own = tl.load(slots + row_ids, mask=row_mask, other=-1)
    value_ptrs = values + row_ids[None, :].to(tl.int64) * value_stride
    up_ptrs = up + columns[:, None].to(tl.int64) * up_row_stride
    slot = tl.min(tl.where(own >= 0, own, _NO_SLOT), 0)
    while slot < _NO_SLOT:
        rank = tl.load(ranks + slot)
        for first in tl.range(0, rank, BLOCK_R):
            dims = first + tl.arange(0, BLOCK_R)
            b = tl.load(
                up_ptrs + slot.to(tl.int64) * up_slot_stride + dims[None, :],
                mask=in_part[:, None] & (dims < rank)[None, :], other=0.0,
            )  # fmt: skip
            # Rows of other adapters are zeros, not what they have there. `.cg`: the shrink writes
            # on other SMs while this kernel runs, and L1 is not coherent.
            h = tl.load(
                value_ptrs + dims[:, None],
                mask=(own == slot)[None, :] & (dims < rank)[:, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            if acc.shape[1] == 1:
                products = b.to(tl.float32) * tl.trans(h).to(tl.float32)
                acc += tl.sum(products, 1)[:, None]
            else:
                acc = tl.dot(b, h, acc, input_precision="ieee")
        slot = tl.min(tl.where(own > slot, own, _NO_SLOT), 0)
    return acc
