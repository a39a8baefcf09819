"""GPU kernel of the attention of a step of one row, from the product of its layer on.

Such a step waits for kernels more than for memory. So one kernel norms and turns the heads, stores
the new key and value, and attends. What was stored before is loaded before the product has ended;
the new key and value never come from storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.attention.partial_results import (
    LOG2E,
    alloc_partials,
    merge_or_store,
    store_partial,
)
from pie_driver_sglang.kernels.gemm.types import Heads
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_trigger_wait

_MOST_HEADS = 16
"""Query heads of a KV head, at most: the smallest tile of a product."""
_MOST_KV_HEADS = 4
"""With which the kernel is faster than those of several rows."""
_DIMS = (32, 64, 128, 256)
"""Head sizes: halves of them are tiles."""


@dataclass(frozen=True)
class LoneTuning:
    """How the KV of a row is divided among programs."""

    block: int
    """Tokens per iteration of a program's loop; the first ones are loaded ahead."""
    warps: int
    """Warps of a program."""
    programs: int
    """Programs of a KV head, at most."""
    registers: int
    """Registers of a thread, at most: what the products around it leave."""
    merged: int
    """Elements of partial results that are merged at once, about."""


def tuning_of(heads: Heads) -> LoneTuning | None:
    """The best on an H200; None for heads with which the kernels of several rows are faster there.

    With 8 KV heads these are as fast at 512 tokens, and faster at 4,096.
    """
    _, kv_heads, dim = heads.k_cache.shape
    if kv_heads > _MOST_KV_HEADS:
        return None
    return LoneTuning(max(16, min(32, 4096 // dim)), 8, max(1, 128 // kv_heads), 96, 8192)


class LoneRow(NamedTuple):
    """The row of a step; every tensor has one entry."""

    table: torch.Tensor
    """``[table rows, tokens]`` int32: the storage slot of each KV index."""
    table_row: torch.Tensor
    """``[1]`` int64."""
    kv_len: torch.Tensor
    """``[1]`` int64: the row's own token included, at least 1."""
    position: torch.Tensor
    """``[1]`` int64."""
    slot: torch.Tensor
    """``[1]`` int64: where its key and value are to be stored."""


def takes(heads: Heads) -> bool:
    """Whether the kernel knows such heads."""
    _, kv_heads, dim = heads.k_cache.shape
    return heads.is_neox and heads.num_q_heads <= kv_heads * _MOST_HEADS and dim in _DIMS


def attend_lone(
    qkv: torch.Tensor,
    heads: Heads,
    row: LoneRow,
    arrived: torch.Tensor,
    scale: float,
    tuning: LoneTuning,
) -> torch.Tensor:
    """Norms and turns heads, stores the new key and value, and attends. Can be captured.

    A kernel that is not launched early must come between those that write `row` or `arrived` and
    the first one of these.

    Args:
        qkv: ``[1, heads]``, contiguous: queries, keys and values of the row.
        heads: Heads for which :func:`takes` says so, with KV of the row's dtype.
        row: The row.
        arrived: ``[kv_heads, programs]`` int32, zeros between layers; as many programs as there
            are, or fewer than `tuning` says.
        scale: Of scores.
        tuning: How its KV is divided.

    Returns:
        ``[1, queries * dim]``.
    """
    _, kv_heads, dim = heads.k_cache.shape
    programs = min(arrived.shape[1], tuning.programs)
    out = qkv.new_empty(1, heads.num_q_heads * dim)
    group = heads.num_q_heads // kv_heads
    parts, sums = alloc_partials(2 * programs, out.view(1, heads.num_q_heads, dim), dim)
    norms = (heads.q_norm, heads.k_norm)
    weights = [qkv if norm is None else norm.weight for norm in norms]
    epsilons = [0.0 if norm is None else norm.epsilon for norm in norms]
    _attend_lone[(kv_heads, programs)](
        qkv, out, *weights, *epsilons, heads.cos_sin_cache, *row, heads.k_cache, heads.v_cache,
        arrived, parts, sums, scale * LOG2E.value,
        heads.cos_sin_cache.stride(0), row.table.stride(0),
        heads.k_cache.stride(0), heads.k_cache.stride(1),
        heads.v_cache.stride(0), heads.v_cache.stride(1),
        GROUP=group, DIM=dim, BLOCK=tuning.block, HEAD_BLOCK=triton.next_power_of_2(group),
        GROUP_BLOCK=_MOST_HEADS, NORMED=heads.q_norm is not None, MERGED=tuning.merged,
        num_warps=tuning.warps, num_stages=3, maxnreg=tuning.registers, **pdl_options(qkv.device),
    )  # fmt: skip
    return out


@triton.jit
def _attend_lone(
    qkv, out, query_weight, key_weight, query_epsilon, key_epsilon, rotations,
    table, table_row, kv_len, position, slot, keys, values, arrived, parts, sums, scale,
    rotation_stride, table_stride,
    key_stride, key_head_stride, value_stride, value_head_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, NORMED: tl.constexpr, MERGED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's range of tokens, for the query heads of one KV head."""
    HALF: tl.constexpr = DIM // 2
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    stored = tl.maximum(tl.load(kv_len).to(tl.int32), 1) - 1
    slots = table + tl.load(table_row).to(tl.int64) * table_stride
    blocks = tl.cdiv(stored, BLOCK)
    share = tl.maximum(tl.cdiv(blocks, tl.num_programs(1)), 1) * BLOCK
    final = tl.maximum(stored - 1, 0) // share
    begin = program * share
    end = tl.minimum(begin + share, stored)
    pair = tl.arange(0, HALF)
    dims = tl.arange(0, DIM)
    head_keys = keys + kv_head * key_head_stride
    head_values = values + kv_head * value_head_stride
    # What other kernels of this step do not write is loaded before the one in front has ended.
    kx, ky, v = _load_block(
        head_keys, head_values, _places(slots, begin, end, BLOCK), begin, end,
        key_stride, value_stride, pair, dims, BLOCK, HALF,
    )  # fmt: skip
    places = _places(slots, begin + BLOCK, end, BLOCK)
    turn = rotations + tl.load(position).to(tl.int64) * rotation_stride + pair
    cosine = tl.load(turn).to(tl.float32)[None, :]
    sine = tl.load(turn + HALF).to(tl.float32)[None, :]
    own_slot = tl.load(slot).to(tl.int64)
    if PDL:
        pdl_trigger_wait()
    group = tl.arange(0, GROUP_BLOCK)
    number = group // GROUP
    heads = kv_head * GROUP + group % GROUP
    asks = number == 0
    qx, qy = _turned(
        qkv + heads * DIM, asks, query_weight, query_epsilon, cosine, sine, pair, DIM, HALF, NORMED
    )
    own_key = qkv + (tl.num_programs(0) * GROUP + kv_head + group * 0) * DIM
    new_kx, new_ky = _turned(
        own_key, asks, key_weight, key_epsilon, cosine, sine, pair, DIM, HALF, NORMED
    )
    new_v = tl.load(qkv + (tl.num_programs(0) * (GROUP + 1) + kv_head) * DIM + dims)
    # The new key is in the first row of several.
    stores = (program == final) & (group == 0)[:, None]
    own_places = head_keys + own_slot * key_stride + pair[None, :] + group[:, None] * 0
    tl.store(own_places, new_kx, mask=stores)
    tl.store(own_places + HALF, new_ky, mask=stores)
    last = (program == final) & (dims >= 0)
    tl.store(head_values + own_slot * value_stride + dims, new_v, mask=last)
    # The new token is seen by the last program, and not from storage.
    new_scores = tl.sum(qx.to(tl.float32) * new_kx.to(tl.float32), 1)
    new_scores = (new_scores + tl.sum(qy.to(tl.float32) * new_ky.to(tl.float32), 1)) * scale
    new_scores = tl.where(program == final, new_scores, float("-inf"))
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    totals = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, DIM], tl.float32)
    mixed, best, totals = _seen(
        qx, qy, kx, ky, v, begin, end, scale, mixed, new_scores, best, totals, BLOCK
    )
    for token in tl.range(begin + BLOCK, end, BLOCK):
        kx, ky, v = _load_block(
            head_keys, head_values, places, token, end, key_stride, value_stride, pair, dims,
            BLOCK, HALF,
        )  # fmt: skip
        places = _places(slots, token + BLOCK, end, BLOCK)
        mixed, best, totals = _seen(
            qx, qy, kx, ky, v, token, end, scale, mixed, best, best, totals, BLOCK
        )
    weight = tl.exp2(new_scores - tl.where(best == float("-inf"), 0.0, best))
    mixed += weight[:, None] * new_v.to(tl.float32)[None, :]
    total = tl.sum(totals, 1) + weight
    if final == 0:
        if program == 0:
            merge_or_store(
                mixed, best, total, number.to(tl.int64), heads, asks, out, 0,
                out, out, out, 1, 0, out, GROUP, DIM, DIM, False, False,
            )  # fmt: skip
    elif program <= final:
        store_partial(
            mixed, best, total, out, parts, sums, out, arrived, program, program * 0, final,
            out, 0, 0, number, kv_head, 0, out, out, out, 1, 0,
            GROUP, DIM, GROUP_BLOCK, HEAD_BLOCK, DIM, False, False, 1, MERGED,
        )  # fmt: skip


@triton.jit
def _places(slots, token, end, BLOCK: tl.constexpr):
    """The storage slots of a block of tokens, ``[BLOCK]`` int64."""
    tokens = token + tl.arange(0, BLOCK)
    return tl.load(slots + tokens, mask=tokens < end, other=0).to(tl.int64)


@triton.jit
def _load_block(
    head_keys, head_values, places, token, end, key_stride, value_stride, pair, dims,
    BLOCK: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Halves of stored keys, and values, from `token` to `end`; zeros after it."""
    own = (token + tl.arange(0, BLOCK) < end)[:, None]
    keys = head_keys + places[:, None] * key_stride + pair[None, :]
    kx = tl.load(keys, mask=own, other=0.0)
    ky = tl.load(keys + HALF, mask=own, other=0.0)
    v = tl.load(head_values + places[:, None] * value_stride + dims[None, :], mask=own, other=0.0)
    return kx, ky, v


@triton.jit
def _seen(qx, qy, kx, ky, v, token, end, scale, mixed, least, best, totals, BLOCK: tl.constexpr):
    """Attends to a block; weights are relative to the largest score, which is `least` or more."""
    tokens = token + tl.arange(0, BLOCK)
    scores = tl.dot(qx, tl.trans(kx), input_precision="ieee")
    scores = tl.dot(qy, tl.trans(ky), scores, input_precision="ieee") * scale
    scores = tl.where((tokens < end)[None, :], scores, float("-inf"))
    largest = tl.maximum(least, tl.max(scores, 1))
    # A program that sees nothing has weights of 0.
    level = tl.where(largest == float("-inf"), 0.0, largest)
    shrink = tl.exp2(best - level)
    weights = tl.exp2(scores - level[:, None])
    totals = totals * shrink[:, None] + weights
    mixed = tl.dot(weights.to(v.dtype), v, mixed * shrink[:, None], input_precision="ieee")
    return mixed, largest, totals


@triton.jit
def _turned(
    heads, known, weight, epsilon, cosine, sine, pair, DIM: tl.constexpr, HALF: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """Halves of heads, ``[heads, HALF]``, normed and turned; zeros for those that are not known."""
    kind = heads.dtype.element_ty
    x = tl.load(heads[:, None] + pair[None, :], mask=known[:, None], other=0.0).to(tl.float32)
    y = tl.load(heads[:, None] + HALF + pair[None, :], mask=known[:, None], other=0.0)
    y = y.to(tl.float32)
    if NORMED:
        spread = tl.rsqrt(tl.sum(x * x + y * y, 1)[:, None] / DIM + epsilon)
        x = x * spread * tl.load(weight + pair).to(tl.float32)[None, :]
        y = y * spread * tl.load(weight + HALF + pair).to(tl.float32)[None, :]
        # Rounded as a separate norm kernel would do.
        x = x.to(kind).to(tl.float32)
        y = y.to(kind).to(tl.float32)
    return (x * cosine - y * sine).to(kind), (y * cosine + x * sine).to(kind)
