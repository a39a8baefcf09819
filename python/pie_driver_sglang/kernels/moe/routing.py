"""MoE router in Triton: RMSNorm, router GEMM, softmax top-k and lists of pairs in one kernel.

``experts, weights = top_k(softmax(rms_norm(residual) @ router.T))``; a *pair* is a row and one of
its experts. Up to 16 rows a program computes the logit of one expert and row, above a split of the
inputs of 16 rows for all experts. The last program of a row selects, and adds to the lists of pairs
of each expert by atomics. It replaces a norm kernel, a cuBLAS GEMM, `topk_softmax` and
`moe_align_block_size`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.types import Norm, Residual, Workspace
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_trigger_wait

MAX_UNLISTED_ROWS = 2
"""Rows up to which there are no lists: a program computes one pair."""
_MAX_GEMV_ROWS = 16
"""Rows up to which a program has one expert and one row."""
_ELEMENTS_PER_WARP = 2048
"""Elements of a row that a warp loads there."""
_BLOCK_M, _SPLIT_K, _BLOCK_K = 16, 8, 128
"""Tile sizes above."""


class Router(NamedTuple):
    """Router weights and options."""

    weight: torch.Tensor
    """``[experts, width]``."""
    top_k: int
    """Experts of each row."""
    renormalize: bool
    """Whether the weights of a row's experts are renormalized to a sum of 1."""


class PairLists(NamedTuple):
    """The pairs of each expert; a pair is ``row * top_k + rank``."""

    pairs: torch.Tensor
    """``[experts, rows]`` int32, in any order."""
    counts: torch.Tensor
    """``[experts]`` int32: number of pairs; zeros between layers."""


class Routing(NamedTuple):
    """The experts of a step's rows."""

    rows: torch.Tensor
    """``[rows, width]``: input of the experts, after RMSNorm."""
    experts: torch.Tensor
    """``[rows, top_k]`` int32."""
    weights: torch.Tensor
    """``[rows, top_k]`` float32."""
    lists: PairLists | None = None
    """None up to :data:`MAX_UNLISTED_ROWS` rows."""


def route(residual: Residual, norm: Norm, router: Router, workspace: Workspace) -> Routing:
    """Normalizes the residual and selects the experts of its rows. Can be captured.

    Args:
        residual: The residual; above :data:`MAX_UNLISTED_ROWS` rows its sums of squares may be
            unknown, ``[rows, 0]``.
        norm: The RMSNorm before the experts.
        router: The router.
        workspace: Of :func:`routing_workspace_sizes`; the counts of lists must be cleared later.
    """
    count, total = len(residual.rows), len(router.weight)
    ids, weights = (
        residual.rows.new_empty(count, router.top_k, dtype=dtype)
        for dtype in (torch.int32, torch.float32)
    )
    routing = Routing(torch.empty_like(residual.rows), ids, weights)
    if count > MAX_UNLISTED_ROWS:
        lists = PairLists(ids.new_empty(total, count), workspace.semaphores[:total])
        routing = routing._replace(lists=lists)
    if count > _MAX_GEMV_ROWS or not residual.sum_squares.shape[1]:
        _launch_tiled(residual, norm, router, workspace, routing)
    else:
        _launch_per_row(residual, norm, router, workspace, routing)
    return routing


def routing_workspace_sizes(rows: int, experts: int) -> tuple[int, int]:
    """Floats and semaphores of a `Workspace` for so many rows and experts."""
    tiles = triton.cdiv(rows, _BLOCK_M)
    floats = max(rows, _SPLIT_K * tiles * _BLOCK_M) * _expert_block(experts)
    return floats, experts + max(rows, tiles)


def _expert_block(experts: int) -> int:
    """Columns of a tile of logits; MMA instructions need 16."""
    return max(16, int(triton.next_power_of_2(experts)))


def _launch_per_row(
    residual: Residual, norm: Norm, router: Router, workspace: Workspace, routing: Routing
) -> None:
    (count, width), tiles = residual.rows.shape, residual.sum_squares.shape[1]
    total = len(router.weight)
    block, ids = triton.next_power_of_2(width), routing.experts
    _route_row[(total, count)](
        residual.rows, residual.sum_squares, norm.weight, router.weight, routing.rows,
        workspace.partial_sums, workspace.semaphores[total:], ids, routing.weights,
        *(routing.lists or (ids, ids)), width, tiles, norm.epsilon,
        WIDTH=block, SQUARE_TILES=triton.next_power_of_2(tiles),
        NUM_EXPERTS=total, EXPERT_BLOCK=triton.next_power_of_2(total), TOP_K=router.top_k,
        TOP_K_BLOCK=triton.next_power_of_2(router.top_k), RENORMALIZE=router.renormalize,
        WRITE_LISTS=routing.lists is not None, num_warps=max(1, block // _ELEMENTS_PER_WARP),
        **pdl_options(residual.rows.device),
    )  # fmt: skip


def _launch_tiled(
    residual: Residual, norm: Norm, router: Router, workspace: Workspace, routing: Routing
) -> None:
    (count, width), tiles = residual.rows.shape, residual.sum_squares.shape[1]
    total = len(router.weight)
    assert routing.lists is not None
    _route_tile[(triton.cdiv(count, _BLOCK_M), _SPLIT_K)](
        residual.rows, residual.sum_squares, norm.weight, router.weight, routing.rows,
        workspace.partial_sums, workspace.semaphores[total:], routing.experts, routing.weights,
        *routing.lists, count, width, triton.cdiv(width, _SPLIT_K * _BLOCK_K) * _BLOCK_K, tiles,
        norm.epsilon, BLOCK_M=_BLOCK_M, BLOCK_K=_BLOCK_K,
        SQUARE_TILES=triton.next_power_of_2(tiles) if tiles else 0,
        NUM_EXPERTS=total, EXPERT_BLOCK=_expert_block(total), TOP_K=router.top_k,
        TOP_K_BLOCK=triton.next_power_of_2(router.top_k), RENORMALIZE=router.renormalize,
        num_warps=4, num_stages=3, **pdl_options(residual.rows.device),
    )  # fmt: skip


@triton.jit
def _route_row(
    rows, sum_squares, norm, router, out, logits, semaphores, ids, weights, pairs, counts, width,
    tiles, epsilon,
    WIDTH: tl.constexpr, SQUARE_TILES: tl.constexpr, NUM_EXPERTS: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr,
    RENORMALIZE: tl.constexpr, WRITE_LISTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One expert's logit of a row; the row's last program selects. Grid: (experts, rows)."""
    expert = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    inside = lanes < width
    w = tl.load(router + expert.to(tl.int64) * width + lanes, mask=inside, other=0.0)
    scale = tl.load(norm + lanes, mask=inside, other=0.0)
    if PDL:
        pdl_trigger_wait()
    x = tl.load(rows + row * width + lanes, mask=inside, other=0.0).to(tl.float32)
    tile = tl.arange(0, SQUARE_TILES)
    sum_square = tl.sum(tl.load(sum_squares + row * tiles + tile, mask=tile < tiles, other=0.0), 0)
    dtype = out.dtype.element_ty
    x = (x * tl.rsqrt(sum_square / width + epsilon) * scale.to(tl.float32)).to(dtype)
    tl.store(out + row * width + lanes, x, mask=inside & (expert == 0))
    # Rounded as the output of an unfused GEMM would be.
    logit = tl.sum(w.to(tl.float32) * x.to(tl.float32), 0).to(dtype).to(tl.float32)
    tl.store(logits + row * NUM_EXPERTS + expert, logit)
    # All warps must have stored their logits before the semaphore is raised.
    tl.debug_barrier()
    if tl.atomic_add(semaphores + row, 1, sem="acq_rel") == NUM_EXPERTS - 1:
        tl.store(semaphores + row, 0)
        expert_ids = tl.arange(0, EXPERT_BLOCK)
        # Bypasses L1, which is not coherent with other SMs.
        found = tl.load(
            logits + row * NUM_EXPERTS + expert_ids, mask=expert_ids < NUM_EXPERTS,
            other=float("-inf"), cache_modifier=".cg",
        )  # fmt: skip
        remaining = _sort_keys(found, expert_ids, EXPERT_BLOCK)
        ranks = tl.arange(0, TOP_K_BLOCK)
        topk_ids = tl.zeros([TOP_K_BLOCK], tl.int32)
        best = tl.full([TOP_K_BLOCK], float("-inf"), tl.float32)
        for rank in tl.static_range(TOP_K):
            largest = tl.max(remaining, 0)
            remaining = tl.where(remaining == largest, -(1 << 63), remaining)
            chosen, logit = _split_keys(largest, EXPERT_BLOCK)
            topk_ids = tl.where(ranks == rank, chosen, topk_ids)
            best = tl.where(ranks == rank, logit, best)
        highest = tl.max(best, 0)
        topk_weights = tl.exp(best - highest)
        topk_weights = topk_weights / tl.sum(
            topk_weights if RENORMALIZE else tl.exp(found - highest), 0
        )
        listed = ranks < TOP_K
        pair = row * TOP_K + ranks
        tl.store(ids + pair, topk_ids, mask=listed)
        tl.store(weights + pair, topk_weights, mask=listed)
        if WRITE_LISTS:
            position = tl.atomic_add(counts + topk_ids, 1, mask=listed, sem="relaxed")
            pair_ptrs = pairs + topk_ids * tl.num_programs(1) + position
            tl.store(pair_ptrs, pair.to(tl.int32), mask=listed)


@triton.jit(do_not_specialize=["count"])
def _route_tile(
    rows, sum_squares, norm, router, out, partial_logits, semaphores, ids, weights, pairs, counts,
    count, width, split_width, tiles, epsilon,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, SQUARE_TILES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr, RENORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A split of a tile of logits; its last program selects. Grid: (row tiles, splits)."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row_ids = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row_ids < count
    expert_ids = tl.arange(0, EXPERT_BLOCK)
    k_offsets = tl.arange(0, BLOCK_K)
    x_offsets = row_ids[:, None].to(tl.int64) * width + k_offsets[None, :]
    if PDL:
        pdl_trigger_wait()
    sum_square = tl.zeros([BLOCK_M], tl.float32)
    if SQUARE_TILES > 0:
        lane = tl.arange(0, SQUARE_TILES)
        known = row_mask[:, None] & (lane < tiles)[None, :]
        found = tl.load(
            sum_squares + row_ids[:, None] * tiles + lane[None, :], mask=known, other=0.0
        )
        sum_square = tl.sum(found, 1)
    else:
        for k in range(0, width, BLOCK_K):
            known = row_mask[:, None] & (k + k_offsets < width)[None, :]
            x = tl.load(rows + x_offsets + k, mask=known, other=0.0).to(tl.float32)
            sum_square += tl.sum(x * x, 1)
    rstd = tl.rsqrt(sum_square / width + epsilon)[:, None]
    logits = tl.zeros([BLOCK_M, EXPERT_BLOCK], tl.float32)
    for k in tl.range(split * split_width, tl.minimum((split + 1) * split_width, width), BLOCK_K):
        k_mask = k + k_offsets < width
        x = tl.load(rows + x_offsets + k, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
        scale = tl.load(norm + k + k_offsets, mask=k_mask, other=0.0)
        w = tl.load(
            router + expert_ids[None, :] * width + (k + k_offsets)[:, None],
            mask=(expert_ids < NUM_EXPERTS)[None, :] & k_mask[:, None],
            other=0.0,
        )
        x = (x.to(tl.float32) * rstd * scale.to(tl.float32)[None, :]).to(x.dtype)
        tl.store(out + x_offsets + k, x, mask=row_mask[:, None] & k_mask[None, :])
        logits = tl.dot(x, w, logits, input_precision="ieee")
    logit_offsets = tl.arange(0, BLOCK_M)[:, None] * EXPERT_BLOCK + expert_ids[None, :]
    num_tiles = tl.num_programs(0)
    tl.store(
        partial_logits + (split * num_tiles + tile) * (BLOCK_M * EXPERT_BLOCK) + logit_offsets,
        logits,
    )
    # All warps must have stored their logits before the semaphore is raised.
    tl.debug_barrier()
    if tl.atomic_add(semaphores + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(semaphores + tile, 0)
        logits = tl.zeros([BLOCK_M, EXPERT_BLOCK], tl.float32)
        for other in range(tl.num_programs(1)):
            # Bypasses L1, which is not coherent with other SMs.
            logits += tl.load(
                partial_logits
                + (other * num_tiles + tile) * (BLOCK_M * EXPERT_BLOCK)
                + logit_offsets,
                cache_modifier=".cg",
            )
        # Rounded as the output of an unfused GEMM would be.
        logits = logits.to(out.dtype.element_ty).to(tl.float32)
        logits = tl.where((expert_ids < NUM_EXPERTS)[None, :], logits, float("-inf"))
        topk_ids, topk_weights = _top_k(
            logits, expert_ids, EXPERT_BLOCK, TOP_K, TOP_K_BLOCK, RENORMALIZE
        )
        rank = tl.arange(0, TOP_K_BLOCK)[None, :]
        listed = (rank < TOP_K) & row_mask[:, None]
        pair = row_ids[:, None] * TOP_K + rank
        tl.store(ids + pair, topk_ids, mask=listed)
        tl.store(weights + pair, topk_weights, mask=listed)
        position = tl.atomic_add(counts + topk_ids, 1, mask=listed, sem="relaxed")
        tl.store(pairs + topk_ids * count + position, pair, mask=listed)


@triton.jit
def _top_k(
    logits, expert_ids, EXPERT_BLOCK: tl.constexpr, TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Softmax top-k of logits, ``[rows, EXPERT_BLOCK]``: expert ids and weights."""
    remaining = _sort_keys(logits, expert_ids[None, :], EXPERT_BLOCK)
    ranks = tl.arange(0, TOP_K_BLOCK)[None, :]
    topk_ids = tl.zeros([logits.shape[0], TOP_K_BLOCK], tl.int32)
    best = tl.full([logits.shape[0], TOP_K_BLOCK], float("-inf"), tl.float32)
    for rank in tl.static_range(TOP_K):
        largest = tl.max(remaining, 1)[:, None]
        remaining = tl.where(remaining == largest, -(1 << 63), remaining)
        chosen, logit = _split_keys(largest, EXPERT_BLOCK)
        topk_ids = tl.where(ranks == rank, chosen, topk_ids)
        best = tl.where(ranks == rank, logit, best)
    highest = tl.max(best, 1)[:, None]
    topk_weights = tl.exp(best - highest)
    return topk_ids, topk_weights / tl.sum(
        topk_weights if RENORMALIZE else tl.exp(logits - highest), 1
    )[:, None]


@triton.jit
def _sort_keys(logits, expert_ids, EXPERT_BLOCK: tl.constexpr):
    """Unique int64 keys in the order of the logits; among equal ones the lower expert first."""
    bits = logits.to(tl.int32, bitcast=True)
    return (_sortable(bits).to(tl.int64) << 32) + EXPERT_BLOCK - expert_ids


@triton.jit
def _split_keys(keys, EXPERT_BLOCK: tl.constexpr):
    """Expert ids and logits of keys."""
    logits = _sortable((keys >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    return EXPERT_BLOCK - (keys & 0xFFFFFFFF).to(tl.int32), logits


@triton.jit
def _sortable(bits):
    """Maps float32 bits to int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
