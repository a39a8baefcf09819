"""Grouped GEMMs of a mixture of experts in decode steps, in Triton.

``out = residual + sum_k topk_weight_k * down_k @ swiglu(gate_up_k @ rms_norm(residual))``

Such a step is bound by reading the weights of the chosen experts, each once. A *pair* is a row and
one of its experts. Kernels: the router (`routing`), gate/up GEMM with SwiGLU, down GEMM, weighted
sum with residual add. Up to 2 rows each program of the gate/up GEMM computes one pair, and the down
GEMM sums a row's pairs itself. Above, a program belongs to an expert and loops over its list of
pairs. SGLang's fused MoE sorts and pads pairs per expert first, which takes longer than such a
step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.norm_rope import silu_mul
from pie_driver_sglang.kernels.gemm.small_m import accumulate, shrink_config
from pie_driver_sglang.kernels.gemm.types import Norm, Residual, TileConfig, Workspace
from pie_driver_sglang.kernels.moe.routing import MAX_UNLISTED_ROWS, Router, Routing, route
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_trigger_wait, pdl_wait_trigger

_MAX_ROWS, _ALWAYS_ROWS, _MAX_MEAN_PAIRS = 256, 64, 16
"""Most rows of a step; rows that are always supported; most pairs an expert, on average, above."""
_CONFIGS = {
    ("gate_up", 1): TileConfig(1, 2, 512, num_warps=1, num_stages=1),
    ("down", 1): TileConfig(1, 2, 256, num_stages=1),
    ("gate_up", 16): TileConfig(16, 64, 128, num_stages=3),
    ("down", 16): TileConfig(16, 128, 64),
    ("gate_up", 32): TileConfig(32, 64, 64, num_stages=5),
    ("down", 32): TileConfig(32, 128, 64),
}
"""The best configs on an H200 for experts of 768 by 2,048: by GEMM, and pairs of a program."""


class Experts(NamedTuple):
    """Weights of a mixture of experts."""

    router: Router
    gate_up: torch.Tensor
    """``[experts, 2 * intermediate, width]``: gate, then up projection."""
    down: torch.Tensor
    """``[experts, width, intermediate]``."""


def find_expert_configs(rows: int, experts: Experts) -> tuple[TileConfig, TileConfig] | None:
    """The configs of gate/up and down GEMM for a step of so many rows; None if none fit."""
    found = []
    for name, weights in (("gate_up", experts.gate_up), ("down", experts.down)):
        _, height, inputs = weights.shape
        outputs = height // 2 if name == "gate_up" else height
        block_m = _pairs_per_program(rows, len(weights), experts.router.top_k)
        config: TileConfig | None = _CONFIGS[name, block_m]
        if config is not None and not config.fits(outputs, inputs):
            config = shrink_config(outputs, inputs, config)
        if config is None:
            return None
        found.append(config)
    return found[0], found[1]


def max_rows(experts: Experts) -> int:
    """Most rows of a step: with more pairs an expert, its weights would be read several times."""
    router = experts.router
    most = _MAX_MEAN_PAIRS * len(router.weight) // router.top_k
    return max(_ALWAYS_ROWS, min(_MAX_ROWS, most))


def _pairs_per_program(rows: int, total: int, top_k: int) -> int:
    if rows <= MAX_UNLISTED_ROWS:
        return 1
    return 16 if 2 * rows * top_k <= 16 * total else 32


def add_moe(residual: Residual, norm: Norm, experts: Experts, workspace: Workspace) -> Residual:
    """Adds a mixture of experts to the residual in place. Can be captured.

    Args:
        residual: The residual.
        norm: The RMSNorm before the experts.
        experts: Experts with shapes that :func:`find_expert_configs` supports.
        workspace: For router logits.

    Raises:
        ValueError: No config fits the experts.
    """
    configs = find_expert_configs(len(residual.rows), experts)
    if configs is None:
        raise ValueError(f"no config fits experts of {tuple(experts.down.shape)}")
    routing = route(residual, norm, experts.router, workspace)
    activated = expert_gemm(routing.rows, experts.gate_up, routing, configs[0], swiglu=True)
    if len(residual.rows) <= MAX_UNLISTED_ROWS:
        return down_gemm_add(activated, experts.down, routing, configs[1], residual)
    pairs = expert_gemm(activated, experts.down, routing, configs[1], swiglu=False)
    return combine_add(pairs, residual, routing)


def expert_gemm(
    rows: torch.Tensor, weights: torch.Tensor, routing: Routing, config: TileConfig, *, swiglu: bool
) -> torch.Tensor:
    """Multiplies the row of each pair by the weight of its expert. Can be captured.

    Grid: (outputs / block_n, pairs), or (outputs / block_n, experts) with lists of pairs.

    Args:
        rows: ``[rows, width]`` if `swiglu`, else ``[pairs, intermediate]``, contiguous.
        weights: `Experts.gate_up` if `swiglu`, else `Experts.down`.
        routing: The experts of the rows.
        config: One that fits the weight of an expert, or half of it if `swiglu`; without split-K.
        swiglu: Whether the epilogue is SwiGLU, else a multiplication by the pairs' weights.

    Returns:
        ``[pairs, intermediate]`` if `swiglu`, else ``[pairs, width]``.
    """
    pairs, top_k = routing.experts.numel(), routing.experts.shape[1]
    total, height, inputs = weights.shape
    outputs = height // (2 if swiglu else 1)
    out = rows.new_empty(pairs, outputs)
    block_m = config.block_m
    # A program of one pair reads its expert from where lists would be.
    pair_list, counts = routing.lists or (routing.experts, routing.experts)
    _expert_gemm[(outputs // config.block_n, pairs if block_m == 1 else total)](
        rows, weights, pair_list, counts, routing.weights, out, len(routing.rows), outputs, inputs,
        BLOCK_M=block_m, PAIRS_PER_X_ROW=top_k if swiglu else 1, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, NUM_STAGES=config.num_stages, SWIGLU=swiglu,
        num_warps=config.num_warps, **pdl_options(rows.device),
    )  # fmt: skip
    return out


def combine_add(pairs: torch.Tensor, residual: Residual, routing: Routing) -> Residual:
    """Adds the pairs of each row, ``[pairs, width]``, to the residual in place. Can be captured.

    Also clears the counts of the routing's lists. Grid: one program a row.
    """
    count, width = residual.rows.shape
    sum_squares = residual.rows.new_empty(count, 1, dtype=torch.float32)
    top_k = routing.experts.shape[1]
    counts = None if routing.lists is None else routing.lists.counts
    total = 0 if counts is None else len(counts)
    _combine_add[(count,)](
        pairs, residual.rows, sum_squares, counts, width, top_k, total,
        WIDTH=triton.next_power_of_2(width), TOP_K=triton.next_power_of_2(top_k),
        CLEAR_BLOCK=triton.next_power_of_2(triton.cdiv(total, count)) if total else 0,
        num_warps=8, **pdl_options(pairs.device),
    )  # fmt: skip
    return Residual(residual.rows, sum_squares)


def down_gemm_add(
    activated: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    config: TileConfig,
    residual: Residual,
) -> Residual:
    """Down GEMM, weighted sum of a row's pairs and residual add, in place. Can be captured.

    It reads `routing` before the previous kernel has ended, which must be an :func:`expert_gemm` of
    at most 2 rows. Grid: (width / block_n, rows).

    Args:
        activated: ``[pairs, intermediate]``, contiguous.
        weights: `Experts.down`.
        routing: The experts of the rows.
        config: One that fits the weight of an expert; without split-K.
        residual: The residual.
    """
    count, top_k = routing.experts.shape
    _, outputs, inputs = weights.shape
    tiles = outputs // config.block_n
    sum_squares = residual.rows.new_empty(count, tiles, dtype=torch.float32)
    _down_gemm_add[(tiles, count)](
        activated, weights, routing.experts, routing.weights, residual.rows, sum_squares, outputs,
        inputs, TOP_K=top_k, TOP_K_BLOCK=triton.next_power_of_2(top_k), BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, num_warps=config.num_warps, **pdl_options(activated.device),
    )  # fmt: skip
    return Residual(residual.rows, sum_squares)


@triton.jit(do_not_specialize=["list_stride"])
def _expert_gemm(
    rows, weight, pair_list, counts, topk_weights, out, list_stride, outputs, inputs,
    BLOCK_M: tl.constexpr, PAIRS_PER_X_ROW: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Computes a tile of outputs, for one pair or all pairs of an expert."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    program = tl.program_id(1)
    if PDL:
        if BLOCK_M == 1:
            # The next kernel reads the router's output before it waits.
            pdl_wait_trigger()
        else:
            pdl_trigger_wait()
    if BLOCK_M == 1:
        expert = tl.load(pair_list + program)
        pair = program + tl.arange(0, 1)
        _pair_gemm(
            rows, weight, topk_weights, out, expert, pair, pair >= 0, columns, outputs, inputs,
            BLOCK_M, PAIRS_PER_X_ROW, BLOCK_K, NUM_STAGES, SWIGLU,
        )  # fmt: skip
    else:
        count = tl.load(counts + program)
        for first in tl.range(0, count, BLOCK_M, num_stages=1):
            positions = first + tl.arange(0, BLOCK_M)
            pair = tl.load(
                pair_list + program * list_stride + positions, mask=positions < count, other=0
            )
            _pair_gemm(
                rows, weight, topk_weights, out, program, pair, positions < count, columns, outputs,
                inputs, BLOCK_M, PAIRS_PER_X_ROW, BLOCK_K, NUM_STAGES, SWIGLU,
            )  # fmt: skip


@triton.jit
def _pair_gemm(
    rows, weight, topk_weights, out, expert, pair, known, columns, outputs, inputs,
    BLOCK_M: tl.constexpr, PAIRS_PER_X_ROW: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr, SWIGLU: tl.constexpr,
):  # fmt: skip
    """Computes a tile of outputs for some pairs of one expert."""
    k_offsets = tl.arange(0, BLOCK_K)
    height = outputs * 2 if SWIGLU else outputs
    w_rows = weight + (expert.to(tl.int64) * height + columns) * inputs
    up_rows = w_rows + outputs.to(tl.int64) * inputs
    pair = pair.to(tl.int64)
    if BLOCK_M == 1:
        x_ptrs = rows + (pair // PAIRS_PER_X_ROW)[:, None] * inputs + k_offsets[None, :]
        x_mask = k_offsets[None, :] >= 0
        acc = tl.zeros([columns.shape[0], BLOCK_K // 8], tl.float32)
    else:
        x_ptrs = rows + (pair // PAIRS_PER_X_ROW)[None, :] * inputs + k_offsets[:, None]
        x_mask = known[None, :]
        acc = tl.zeros([columns.shape[0], BLOCK_M], tl.float32)
    up_acc = acc
    if NUM_STAGES == 1:
        w = tl.load(w_rows[:, None] + k_offsets[None, :])
        u = w
        if SWIGLU:
            u = tl.load(up_rows[:, None] + k_offsets[None, :])
        x = tl.load(x_ptrs, mask=x_mask, other=0.0)
        for k in tl.range(BLOCK_K, inputs, BLOCK_K, num_stages=1):
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
        for k in tl.range(0, inputs, BLOCK_K, num_stages=NUM_STAGES):
            x = tl.load(x_ptrs + k, mask=x_mask, other=0.0)
            w = tl.load(w_rows[:, None] + k + k_offsets[None, :])
            acc = accumulate(w, x, acc, BLOCK_M)
            if SWIGLU:
                w = tl.load(up_rows[:, None] + k + k_offsets[None, :])
                up_acc = accumulate(w, x, up_acc, BLOCK_M)
    if BLOCK_M == 1:
        acc = tl.sum(acc, 1)[:, None]
        up_acc = tl.sum(up_acc, 1)[:, None]
    if SWIGLU:
        # Rounded as the output of an unfused GEMM would be.
        dtype = out.dtype.element_ty
        acc = silu_mul(acc.to(dtype).to(tl.float32), up_acc.to(dtype).to(tl.float32))
    else:
        acc *= tl.load(topk_weights + pair, mask=known, other=0.0)[None, :]
    tl.store(out + pair[None, :] * outputs + columns[:, None], acc, mask=known[None, :])


@triton.jit
def _combine_add(
    pairs, rows, sum_squares, counts, width, top_k, total, WIDTH: tl.constexpr, TOP_K: tl.constexpr,
    CLEAR_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_trigger_wait()
    row = tl.program_id(0).to(tl.int64)
    if CLEAR_BLOCK > 0:
        experts = row + tl.arange(0, CLEAR_BLOCK) * tl.num_programs(0)
        tl.store(counts + experts, 0, mask=experts < total)
    columns = tl.arange(0, WIDTH)
    mask = columns < width
    residual_ptrs = rows + row * width + columns
    residual = tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    ranks = tl.arange(0, TOP_K)
    found = tl.load(
        pairs + (row * top_k + ranks)[:, None] * width + columns[None, :],
        mask=mask[None, :] & (ranks < top_k)[:, None],
        other=0.0,
    )
    total = (residual + tl.sum(found.to(tl.float32), 0)).to(rows.dtype.element_ty)
    tl.store(residual_ptrs, total, mask=mask)
    total = tl.where(mask, total.to(tl.float32), 0.0)
    tl.store(sum_squares + row, tl.sum(total * total, 0))


@triton.jit
def _down_gemm_add(
    activated, weight, ids, topk_weights, rows, sum_squares, outputs, inputs,
    TOP_K: tl.constexpr, TOP_K_BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Computes a tile of a row's outputs, over all its experts."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    # Weight rows of the first expert, then those of the second one.
    expert_rows = tl.arange(0, TOP_K_BLOCK * BLOCK_N)
    ranks = expert_rows // BLOCK_N
    known = (ranks < TOP_K)[:, None]
    pairs = row * TOP_K + ranks
    k_offsets = tl.arange(0, BLOCK_K)
    # The previous kernel waited for the router's before it triggered this one.
    experts = tl.load(ids + pairs, mask=ranks < TOP_K, other=0).to(tl.int64)
    topk_weight = tl.load(topk_weights + pairs, mask=ranks < TOP_K, other=0.0)
    w_row_ids = experts * outputs + tile * BLOCK_N + expert_rows % BLOCK_N
    w_rows = weight + w_row_ids[:, None] * inputs + k_offsets[None, :]
    x_ptrs = activated + pairs[:, None] * inputs + k_offsets[None, :]
    w = tl.load(w_rows, mask=known, other=0.0)
    if PDL:
        pdl_trigger_wait()
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    residual_ptrs = rows + row * outputs + columns
    residual = tl.load(residual_ptrs).to(tl.float32)
    x = tl.load(x_ptrs, mask=known, other=0.0)
    acc = tl.zeros([TOP_K_BLOCK * BLOCK_N, BLOCK_K // 8], tl.float32)
    for k in tl.range(BLOCK_K, inputs, BLOCK_K, num_stages=1):
        next_x = tl.load(x_ptrs + k, mask=known, other=0.0)
        next_w = tl.load(w_rows + k, mask=known, other=0.0)
        acc = accumulate(w, x, acc, 1)
        w = next_w
        x = next_x
    acc = accumulate(w, x, acc, 1)
    added = tl.reshape(tl.sum(acc, 1) * topk_weight, [TOP_K_BLOCK, BLOCK_N])
    total = (residual + tl.sum(added, 0)).to(rows.dtype.element_ty)
    tl.store(residual_ptrs, total)
    total = total.to(tl.float32)
    tl.store(sum_squares + row * tl.num_programs(0) + tile, tl.sum(total * total, 0))
