"""GPU kernels that choose the experts of rows.

An RMS norm is applied first, since experts take the same rows. Of few rows every program finds the
logit of an expert and a row, and the last one of a row chooses. Of more a program has some inputs
of several rows and all experts, and the last one of these rows chooses. Who chooses adds to the
lists of the experts' pairs: a pair is a row and one of its experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.dense_layers import Norm
from pie_driver_sglang.kernels.gemm.small_m import Scratch, Stream
from pie_driver_sglang.kernels.pdl import chained, lead

FEWEST = 2
"""Rows up to which pairs are not listed: each is computed alone."""
_FEW = 16
"""Rows up to which a program has one expert and one row."""
_LOADED = 2048
"""Elements of a row that a warp of the router loads, if rows are few."""
_TILE_ROWS, _PARTS, _INPUTS = 16, 8, 128
"""Of more: rows of a program, programs that divide their inputs, and inputs of an iteration."""


class Router(NamedTuple):
    """How a mixture chooses experts."""

    weight: torch.Tensor
    """``[experts, width]``."""
    chosen: int
    """Experts of a row."""
    normalized: bool
    """Whether the weights of a row's experts sum to 1."""


class PairLists(NamedTuple):
    """The pairs of each expert."""

    pairs: torch.Tensor
    """``[experts, rows]`` int32, in any order."""
    counts: torch.Tensor
    """``[experts]`` int32: how many of these there are; zeros outside of a layer."""


class Routing(NamedTuple):
    """Which experts the rows of a step take."""

    rows: torch.Tensor
    """``[rows, width]``: normalized."""
    experts: torch.Tensor
    """``[rows, chosen]`` int32."""
    weights: torch.Tensor
    """``[rows, chosen]`` float32."""
    lists: PairLists | None = None
    """The pairs of each expert, if rows are more than :data:`FEWEST`."""


def route(stream: Stream, norm: Norm, router: Router, scratch: Scratch) -> Routing:
    """Normalizes the rows of a stream and chooses their experts. Can be captured.

    Args:
        stream: The stream; of more than :data:`FEWEST` rows its sums of squares may be unknown,
            ``[rows, 0]``.
        norm: The norm of what experts take.
        router: What chooses.
        scratch: Of :func:`routing_scratch`; the counts of lists must be cleared later.
    """
    count, total = len(stream.rows), len(router.weight)
    ids, weights = (
        stream.rows.new_empty(count, router.chosen, dtype=dtype)
        for dtype in (torch.int32, torch.float32)
    )
    routing = Routing(torch.empty_like(stream.rows), ids, weights)
    if count > FEWEST:
        lists = PairLists(ids.new_empty(total, count), scratch.arrived[:total])
        routing = routing._replace(lists=lists)
    if count > _FEW or not stream.squares.shape[1]:
        _route_tiles(stream, norm, router, scratch, routing)
    else:
        _route_rows(stream, norm, router, scratch, routing)
    return routing


def routing_scratch(rows: int, experts: int) -> tuple[int, int]:
    """Floats and counters of a `Scratch` for so many rows and experts."""
    tiles = triton.cdiv(rows, _TILE_ROWS)
    floats = max(rows, _PARTS * tiles * _TILE_ROWS) * _lanes(experts)
    return floats, experts + max(rows, tiles)


def _lanes(experts: int) -> int:
    """Columns of a tile of logits, of which matrix instructions want some."""
    return max(16, int(triton.next_power_of_2(experts)))


def _route_rows(
    stream: Stream, norm: Norm, router: Router, scratch: Scratch, routing: Routing
) -> None:
    (count, width), tiles, total = stream.rows.shape, stream.squares.shape[1], len(router.weight)
    block, ids = triton.next_power_of_2(width), routing.experts
    _route[(total, count)](
        stream.rows, stream.squares, norm.weight, router.weight, routing.rows, scratch.parts,
        scratch.arrived[total:], ids, routing.weights, *(routing.lists or (ids, ids)), width, tiles,
        norm.epsilon,
        WIDTH=block, SQUARES=triton.next_power_of_2(tiles),
        TOTAL=total, LANES=triton.next_power_of_2(total), CHOSEN=router.chosen,
        LISTED=triton.next_power_of_2(router.chosen), NORMALIZED=router.normalized,
        LISTS=routing.lists is not None, num_warps=max(1, block // _LOADED),
        **chained(stream.rows.device),
    )  # fmt: skip


def _route_tiles(
    stream: Stream, norm: Norm, router: Router, scratch: Scratch, routing: Routing
) -> None:
    (count, width), tiles, total = stream.rows.shape, stream.squares.shape[1], len(router.weight)
    assert routing.lists is not None
    _route_tile[(triton.cdiv(count, _TILE_ROWS), _PARTS)](
        stream.rows, stream.squares, norm.weight, router.weight, routing.rows, scratch.parts,
        scratch.arrived[total:], routing.experts, routing.weights, *routing.lists, count, width,
        triton.cdiv(width, _PARTS * _INPUTS) * _INPUTS, tiles, norm.epsilon,
        ROWS=_TILE_ROWS, INPUTS=_INPUTS, SQUARES=triton.next_power_of_2(tiles) if tiles else 0,
        TOTAL=total, LANES=_lanes(total), CHOSEN=router.chosen,
        LISTED=triton.next_power_of_2(router.chosen), NORMALIZED=router.normalized,
        num_warps=4, num_stages=3, **chained(stream.rows.device),
    )  # fmt: skip


@triton.jit
def _route(
    rows, squares, norm, router, out, logits, arrived, ids, weights, pairs, counts, width, tiles,
    epsilon,
    WIDTH: tl.constexpr, SQUARES: tl.constexpr, TOTAL: tl.constexpr, LANES: tl.constexpr,
    CHOSEN: tl.constexpr, LISTED: tl.constexpr, NORMALIZED: tl.constexpr, LISTS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """An expert's logit of a row; the row's last program chooses."""
    expert = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, WIDTH)
    inside = lanes < width
    w = tl.load(router + expert.to(tl.int64) * width + lanes, mask=inside, other=0.0)
    scale = tl.load(norm + lanes, mask=inside, other=0.0)
    if CHAINED:
        lead()
    x = tl.load(rows + row * width + lanes, mask=inside, other=0.0).to(tl.float32)
    tile = tl.arange(0, SQUARES)
    square = tl.sum(tl.load(squares + row * tiles + tile, mask=tile < tiles, other=0.0), 0)
    kind = out.dtype.element_ty
    x = (x * tl.rsqrt(square / width + epsilon) * scale.to(tl.float32)).to(kind)
    tl.store(out + row * width + lanes, x, mask=inside & (expert == 0))
    # Rounded as the output of a separate product would be.
    logit = tl.sum(w.to(tl.float32) * x.to(tl.float32), 0).to(kind).to(tl.float32)
    tl.store(logits + row * TOTAL + expert, logit)
    # All warps must have stored their part before one of them counts it.
    tl.debug_barrier()
    if tl.atomic_add(arrived + row, 1, sem="acq_rel") == TOTAL - 1:
        tl.store(arrived + row, 0)
        numbers = tl.arange(0, LANES)
        # Bypasses L1, which is not coherent with other SMs.
        found = tl.load(
            logits + row * TOTAL + numbers, mask=numbers < TOTAL, other=float("-inf"),
            cache_modifier=".cg",
        )  # fmt: skip
        left = _keys(found, numbers, LANES)
        turns = tl.arange(0, LISTED)
        chosen = tl.zeros([LISTED], tl.int32)
        best = tl.full([LISTED], float("-inf"), tl.float32)
        for turn in tl.static_range(CHOSEN):
            largest = tl.max(left, 0)
            left = tl.where(left == largest, -(1 << 63), left)
            number, logit = _apart(largest, LANES)
            chosen = tl.where(turns == turn, number, chosen)
            best = tl.where(turns == turn, logit, best)
        highest = tl.max(best, 0)
        shares = tl.exp(best - highest)
        shares = shares / tl.sum(shares if NORMALIZED else tl.exp(found - highest), 0)
        listed = turns < CHOSEN
        pair = row * CHOSEN + turns
        tl.store(ids + pair, chosen, mask=listed)
        tl.store(weights + pair, shares, mask=listed)
        if LISTS:
            place = tl.atomic_add(counts + chosen, 1, mask=listed, sem="relaxed")
            tl.store(pairs + chosen * tl.num_programs(1) + place, pair.to(tl.int32), mask=listed)


@triton.jit(do_not_specialize=["count"])
def _route_tile(
    rows, squares, norm, router, out, parts, arrived, ids, weights, pairs, counts, count, width,
    part_width, tiles, epsilon,
    ROWS: tl.constexpr, INPUTS: tl.constexpr, SQUARES: tl.constexpr, TOTAL: tl.constexpr,
    LANES: tl.constexpr, CHOSEN: tl.constexpr, LISTED: tl.constexpr, NORMALIZED: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Some inputs of some rows; the last program of these rows chooses."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    number = tile * ROWS + tl.arange(0, ROWS)
    inside = number < count
    numbers = tl.arange(0, LANES)
    lanes = tl.arange(0, INPUTS)
    places = number[:, None].to(tl.int64) * width + lanes[None, :]
    if CHAINED:
        lead()
    square = tl.zeros([ROWS], tl.float32)
    if SQUARES > 0:
        lane = tl.arange(0, SQUARES)
        known = inside[:, None] & (lane < tiles)[None, :]
        found = tl.load(squares + number[:, None] * tiles + lane[None, :], mask=known, other=0.0)
        square = tl.sum(found, 1)
    else:
        for at in range(0, width, INPUTS):
            known = inside[:, None] & (at + lanes < width)[None, :]
            x = tl.load(rows + places + at, mask=known, other=0.0).to(tl.float32)
            square += tl.sum(x * x, 1)
    spread = tl.rsqrt(square / width + epsilon)[:, None]
    logits = tl.zeros([ROWS, LANES], tl.float32)
    for at in tl.range(part * part_width, tl.minimum((part + 1) * part_width, width), INPUTS):
        there = at + lanes < width
        x = tl.load(rows + places + at, mask=inside[:, None] & there[None, :], other=0.0)
        scale = tl.load(norm + at + lanes, mask=there, other=0.0)
        w = tl.load(
            router + numbers[None, :] * width + (at + lanes)[:, None],
            mask=(numbers < TOTAL)[None, :] & there[:, None],
            other=0.0,
        )
        x = (x.to(tl.float32) * spread * scale.to(tl.float32)[None, :]).to(x.dtype)
        tl.store(out + places + at, x, mask=inside[:, None] & there[None, :])
        logits = tl.dot(x, w, logits, input_precision="ieee")
    own = tl.arange(0, ROWS)[:, None] * LANES + numbers[None, :]
    tiles_of_part = tl.num_programs(0)
    tl.store(parts + (part * tiles_of_part + tile) * (ROWS * LANES) + own, logits)
    # All warps must have stored their part before one of them counts it.
    tl.debug_barrier()
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(arrived + tile, 0)
        logits = tl.zeros([ROWS, LANES], tl.float32)
        for other in range(tl.num_programs(1)):
            # Bypasses L1, which is not coherent with other SMs.
            logits += tl.load(
                parts + (other * tiles_of_part + tile) * (ROWS * LANES) + own, cache_modifier=".cg"
            )
        # Rounded as the output of a separate product would be.
        logits = logits.to(out.dtype.element_ty).to(tl.float32)
        logits = tl.where((numbers < TOTAL)[None, :], logits, float("-inf"))
        chosen, shares = _choose(logits, numbers, LANES, CHOSEN, LISTED, NORMALIZED)
        turn = tl.arange(0, LISTED)[None, :]
        listed = (turn < CHOSEN) & inside[:, None]
        pair = number[:, None] * CHOSEN + turn
        tl.store(ids + pair, chosen, mask=listed)
        tl.store(weights + pair, shares, mask=listed)
        place = tl.atomic_add(counts + chosen, 1, mask=listed, sem="relaxed")
        tl.store(pairs + chosen * count + place, pair, mask=listed)


@triton.jit
def _choose(
    logits, numbers, LANES: tl.constexpr, CHOSEN: tl.constexpr, LISTED: tl.constexpr,
    NORMALIZED: tl.constexpr,
):  # fmt: skip
    """The best experts of rows by their logits, ``[rows, LANES]``, and their weights."""
    left = _keys(logits, numbers[None, :], LANES)
    turns = tl.arange(0, LISTED)[None, :]
    chosen = tl.zeros([logits.shape[0], LISTED], tl.int32)
    best = tl.full([logits.shape[0], LISTED], float("-inf"), tl.float32)
    for turn in tl.static_range(CHOSEN):
        largest = tl.max(left, 1)[:, None]
        left = tl.where(left == largest, -(1 << 63), left)
        number, logit = _apart(largest, LANES)
        chosen = tl.where(turns == turn, number, chosen)
        best = tl.where(turns == turn, logit, best)
    highest = tl.max(best, 1)[:, None]
    shares = tl.exp(best - highest)
    return chosen, shares / tl.sum(shares if NORMALIZED else tl.exp(logits - highest), 1)[:, None]


@triton.jit
def _keys(logits, numbers, LANES: tl.constexpr):
    """Integers in the order of the logits, and of equal ones the first expert first."""
    bits = logits.to(tl.int32, bitcast=True)
    return (_ordered(bits).to(tl.int64) << 32) + LANES - numbers


@triton.jit
def _apart(keys, LANES: tl.constexpr):
    """The experts and logits of keys."""
    logits = _ordered((keys >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    return LANES - (keys & 0xFFFFFFFF).to(tl.int32), logits


@triton.jit
def _ordered(bits):
    """Maps the bits of float32 numbers to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
