"""Batch-1 decode attention fused with q/k norm, rotary embedding and KV cache store, in Triton.

Such a step is bound by kernel latency. One kernel computes what `norm_rope_store` and
`paged_decode` do: the stored KV is loaded before the QKV projection has ended (PDL), and the new
key and value are taken from its output. Split-KV partial results are merged by the last program.
Used where `cluster_decode` does not apply and there are at most 4 KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.attention.partial_results import (
    alloc_partials,
    merge_or_store,
    store_partial,
)
from pie_driver_sglang.kernels.constants import LOG2E
from pie_driver_sglang.kernels.gemm.types import Heads
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_trigger_wait

_MAX_GQA_GROUP = 16
"""Query heads of a KV head, at most: the M tile of an MMA."""
_MAX_KV_HEADS = 4
"""Most KV heads with which it is faster than two kernels."""
_DIMS = (32, 64, 128, 256)
"""Head sizes whose halves are MMA tiles."""


@dataclass(frozen=True)
class SingleDecodeConfig:
    """Block size and split of the KV."""

    block: int
    """Tokens of an iteration."""
    warps: int
    """Warps of a program."""
    programs: int
    """Programs of a KV head, at most."""
    registers: int
    """Most registers of a thread, so that it fits beside the GEMMs around it."""
    merged: int
    """Elements of partial results that are merged at once, about."""


def find_single_decode_config(heads: Heads) -> SingleDecodeConfig | None:
    """The best config on an H200; None where `paged_decode` is faster.

    With 8 KV heads that is as fast at 512 tokens, and faster at 4,096.
    """
    _, kv_heads, dim = heads.k_cache.shape
    if kv_heads > _MAX_KV_HEADS:
        return None
    return SingleDecodeConfig(max(16, min(32, 4096 // dim)), 8, max(1, 128 // kv_heads), 96, 8192)


class DecodeToken(NamedTuple):
    """The token of a batch-1 decode step; every tensor has one entry."""

    table: torch.Tensor
    """``[table rows, tokens]`` int32: block table, the KV slot of each KV index."""
    table_row: torch.Tensor
    """``[1]`` int64."""
    kv_len: torch.Tensor
    """``[1]`` int64: KV length, the token itself included."""
    position: torch.Tensor
    """``[1]`` int64."""
    slot: torch.Tensor
    """``[1]`` int64: the KV slot of its key and value."""


def supports_single_decode(heads: Heads) -> bool:
    """Whether the kernel supports the heads."""
    _, kv_heads, dim = heads.k_cache.shape
    return heads.is_neox and heads.num_q_heads <= kv_heads * _MAX_GQA_GROUP and dim in _DIMS


def attend_single(
    qkv: torch.Tensor,
    heads: Heads,
    row: DecodeToken,
    semaphores: torch.Tensor,
    scale: float,
    tuning: SingleDecodeConfig,
) -> torch.Tensor:
    """Applies q/k norm and rotary embedding, stores K and V, and attends. Can be captured.

    A kernel without PDL must run between those that write `row` or `semaphores` and the first one
    of these. Grid: (kv_heads, programs).

    Args:
        qkv: ``[1, (q_heads + 2 * kv_heads) * dim]``, contiguous: output of the QKV projection.
        heads: Heads that :func:`supports_single_decode`, with KV of the dtype of `qkv`.
        row: The token.
        semaphores: ``[kv_heads, programs]`` int32, zeros between layers; limits the programs.
        scale: Softmax scale.
        tuning: The config.

    Returns:
        ``[1, q_heads * dim]``.
    """
    _, kv_heads, dim = heads.k_cache.shape
    programs = min(semaphores.shape[1], tuning.programs)
    out = qkv.new_empty(1, heads.num_q_heads * dim)
    group = heads.num_q_heads // kv_heads
    partial_out, partial_lse = alloc_partials(
        2 * programs, out.view(1, heads.num_q_heads, dim), dim
    )
    norms = (heads.q_norm, heads.k_norm)
    weights = [qkv if norm is None else norm.weight for norm in norms]
    epsilons = [0.0 if norm is None else norm.epsilon for norm in norms]
    _single_decode[(kv_heads, programs)](
        qkv, out, *weights, *epsilons, heads.cos_sin_cache, *row, heads.k_cache, heads.v_cache,
        semaphores, partial_out, partial_lse, scale * LOG2E.value,
        heads.cos_sin_cache.stride(0), row.table.stride(0),
        heads.k_cache.stride(0), heads.k_cache.stride(1),
        heads.v_cache.stride(0), heads.v_cache.stride(1),
        GQA_GROUP=group, DIM=dim, BLOCK_KV=tuning.block, GQA_BLOCK=triton.next_power_of_2(group),
        BLOCK_M=_MAX_GQA_GROUP, QK_NORM=heads.q_norm is not None, MERGE_ELEMENTS=tuning.merged,
        num_warps=tuning.warps, num_stages=3, maxnreg=tuning.registers, **pdl_options(qkv.device),
    )  # fmt: skip
    return out


@triton.jit
def _single_decode(
    qkv, out, q_weight, k_weight, q_epsilon, k_epsilon, cos_sin_cache,
    table, table_row, kv_len, position, slot, k_cache, v_cache, semaphores, partial_out,
    partial_lse, scale,
    cos_sin_stride, table_stride,
    k_stride, k_head_stride, v_stride, v_head_stride,
    GQA_GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_KV: tl.constexpr, GQA_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, QK_NORM: tl.constexpr, MERGE_ELEMENTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes a program's range of tokens, for the query heads of one KV head."""
    HALF: tl.constexpr = DIM // 2
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    stored = tl.maximum(tl.load(kv_len).to(tl.int32), 1) - 1
    slots = table + tl.load(table_row).to(tl.int64) * table_stride
    blocks = tl.cdiv(stored, BLOCK_KV)
    tokens_per_program = tl.maximum(tl.cdiv(blocks, tl.num_programs(1)), 1) * BLOCK_KV
    final = tl.maximum(stored - 1, 0) // tokens_per_program
    begin = program * tokens_per_program
    end = tl.minimum(begin + tokens_per_program, stored)
    pair = tl.arange(0, HALF)
    dims = tl.arange(0, DIM)
    head_keys = k_cache + kv_head * k_head_stride
    head_values = v_cache + kv_head * v_head_stride
    # No kernel of this step writes what is loaded before the wait.
    kx, ky, v = _load_block(
        head_keys, head_values, _token_slots(slots, begin, end, BLOCK_KV), begin, end,
        k_stride, v_stride, pair, dims, BLOCK_KV, HALF,
    )  # fmt: skip
    block_slots = _token_slots(slots, begin + BLOCK_KV, end, BLOCK_KV)
    angles = cos_sin_cache + tl.load(position).to(tl.int64) * cos_sin_stride + pair
    cosine = tl.load(angles).to(tl.float32)[None, :]
    sine = tl.load(angles + HALF).to(tl.float32)[None, :]
    own_slot = tl.load(slot).to(tl.int64)
    if PDL:
        pdl_trigger_wait()
    group = tl.arange(0, BLOCK_M)
    tile_row = group // GQA_GROUP
    heads = kv_head * GQA_GROUP + group % GQA_GROUP
    row_mask = tile_row == 0
    qx, qy = _norm_rope(
        qkv + heads * DIM, row_mask, q_weight, q_epsilon, cosine, sine, pair, DIM, HALF, QK_NORM
    )
    own_key = qkv + (tl.num_programs(0) * GQA_GROUP + kv_head + group * 0) * DIM
    new_kx, new_ky = _norm_rope(
        own_key, row_mask, k_weight, k_epsilon, cosine, sine, pair, DIM, HALF, QK_NORM
    )
    new_v = tl.load(qkv + (tl.num_programs(0) * (GQA_GROUP + 1) + kv_head) * DIM + dims)
    # All rows have the new key: the first one stores it.
    stores = (program == final) & (group == 0)[:, None]
    new_k_ptrs = head_keys + own_slot * k_stride + pair[None, :] + group[:, None] * 0
    tl.store(new_k_ptrs, new_kx, mask=stores)
    tl.store(new_k_ptrs + HALF, new_ky, mask=stores)
    last = (program == final) & (dims >= 0)
    tl.store(head_values + own_slot * v_stride + dims, new_v, mask=last)
    # The last program attends to the new token, from registers.
    new_scores = tl.sum(qx.to(tl.float32) * new_kx.to(tl.float32), 1)
    new_scores = (new_scores + tl.sum(qy.to(tl.float32) * new_ky.to(tl.float32), 1)) * scale
    new_scores = tl.where(program == final, new_scores, float("-inf"))
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    totals = tl.zeros([BLOCK_M, BLOCK_KV], tl.float32)
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    acc, row_max, totals = _attend_block(
        qx, qy, kx, ky, v, begin, end, scale, acc, new_scores, row_max, totals, BLOCK_KV
    )
    for token in tl.range(begin + BLOCK_KV, end, BLOCK_KV):
        kx, ky, v = _load_block(
            head_keys, head_values, block_slots, token, end, k_stride, v_stride, pair, dims,
            BLOCK_KV, HALF,
        )  # fmt: skip
        block_slots = _token_slots(slots, token + BLOCK_KV, end, BLOCK_KV)
        acc, row_max, totals = _attend_block(
            qx, qy, kx, ky, v, token, end, scale, acc, row_max, row_max, totals, BLOCK_KV
        )
    weight = tl.exp2(new_scores - tl.where(row_max == float("-inf"), 0.0, row_max))
    acc += weight[:, None] * new_v.to(tl.float32)[None, :]
    row_sum = tl.sum(totals, 1) + weight
    if final == 0:
        if program == 0:
            merge_or_store(
                acc, row_max, row_sum, tile_row.to(tl.int64), heads, row_mask, out, 0,
                out, out, out, 1, 0, out, GQA_GROUP, DIM, DIM, False, False,
            )  # fmt: skip
    elif program <= final:
        store_partial(
            acc, row_max, row_sum, out, partial_out, partial_lse, out, semaphores, program,
            program * 0, final,
            out, 0, 0, tile_row, kv_head, 0, out, out, out, 1, 0,
            GQA_GROUP, DIM, BLOCK_M, GQA_BLOCK, DIM, False, False, 1, MERGE_ELEMENTS,
        )  # fmt: skip


@triton.jit
def _token_slots(slots, token, end, BLOCK_KV: tl.constexpr):
    """Loads the KV slots of a block of tokens, ``[BLOCK_KV]`` int64."""
    tokens = token + tl.arange(0, BLOCK_KV)
    return tl.load(slots + tokens, mask=tokens < end, other=0).to(tl.int64)


@triton.jit
def _load_block(
    head_keys, head_values, block_slots, token, end, k_stride, v_stride, pair, dims,
    BLOCK_KV: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Loads halves of keys, and values, from `token` to `end`; zeros after it."""
    own = (token + tl.arange(0, BLOCK_KV) < end)[:, None]
    k_ptrs = head_keys + block_slots[:, None] * k_stride + pair[None, :]
    kx = tl.load(k_ptrs, mask=own, other=0.0)
    ky = tl.load(k_ptrs + HALF, mask=own, other=0.0)
    v = tl.load(head_values + block_slots[:, None] * v_stride + dims[None, :], mask=own, other=0.0)
    return kx, ky, v


@triton.jit
def _attend_block(
    qx, qy, kx, ky, v, token, end, scale, acc, min_max, row_max, totals, BLOCK_KV: tl.constexpr
):
    """Online softmax over a block; the new row maximum is at least `min_max`."""
    tokens = token + tl.arange(0, BLOCK_KV)
    scores = tl.dot(qx, tl.trans(kx), input_precision="ieee")
    scores = tl.dot(qy, tl.trans(ky), scores, input_precision="ieee") * scale
    scores = tl.where((tokens < end)[None, :], scores, float("-inf"))
    new_max = tl.maximum(min_max, tl.max(scores, 1))
    # Avoids inf - inf in a program without visible keys.
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - safe_max)
    weights = tl.exp2(scores - safe_max[:, None])
    totals = totals * rescale[:, None] + weights
    acc = tl.dot(weights.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_max, totals


@triton.jit
def _norm_rope(
    heads, head_mask, weight, epsilon, cosine, sine, pair, DIM: tl.constexpr, HALF: tl.constexpr,
    QK_NORM: tl.constexpr,
):  # fmt: skip
    """RMSNorm and NeoX rotary embedding: halves of heads, ``[heads, HALF]``; zeros if masked."""
    dtype = heads.dtype.element_ty
    x = tl.load(heads[:, None] + pair[None, :], mask=head_mask[:, None], other=0.0).to(tl.float32)
    y = tl.load(heads[:, None] + HALF + pair[None, :], mask=head_mask[:, None], other=0.0)
    y = y.to(tl.float32)
    if QK_NORM:
        rstd = tl.rsqrt(tl.sum(x * x + y * y, 1)[:, None] / DIM + epsilon)
        x = x * rstd * tl.load(weight + pair).to(tl.float32)[None, :]
        y = y * rstd * tl.load(weight + HALF + pair).to(tl.float32)[None, :]
        # Rounded as the output of an unfused norm kernel would be.
        x = x.to(dtype).to(tl.float32)
        y = y.to(dtype).to(tl.float32)
    return (x * cosine - y * sine).to(dtype), (y * cosine + x * sine).to(dtype)
