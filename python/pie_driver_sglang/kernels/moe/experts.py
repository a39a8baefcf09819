"""GPU kernels of a mixture of experts in a decode step.

Such a step reads the weights of the chosen experts once, and little else. Its kernels are the
router's (`routing.py`), two products, and a weighted sum. A pair is a row and one of its experts.
With few pairs, each program of the first product computes one pair, and each of the second sums
some outputs of all pairs of a row. With more, a program belongs to an expert and its list of pairs,
and ends at once where there are none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.gemm.dense_layers import Norm, silu
from pie_driver_sglang.kernels.gemm.small_m import Cut, Scratch, Stream, add_products, smaller_cut
from pie_driver_sglang.kernels.moe.routing import FEWEST, Router, Routing, route
from pie_driver_sglang.kernels.pdl import chained, follow, lead

_MOST_ROWS, _LEAST_ROWS, _MOST_PAIRS = 256, 64, 16
"""Most rows of a step, rows that are taken anyway, and pairs of an expert on average otherwise."""
_CUTS = {
    ("up", 1): Cut(2, 512, warps=1),
    ("down", 1): Cut(2, 256, warps=4),
    ("up", 16): Cut(64, 128, stages=3),
    ("down", 16): Cut(128, 64, stages=4),
    ("up", 32): Cut(64, 64, stages=5),
    ("down", 32): Cut(128, 64, stages=4),
}
"""The best cuts on an H200 for experts of 768 by 2,048: by product, and pairs of a program."""


class Experts(NamedTuple):
    """The weights of a mixture of experts."""

    router: Router
    """Chooses among them."""
    gate_up: torch.Tensor
    """``[experts, 2 * middle, width]``: of the gate, then of the up projection."""
    down: torch.Tensor
    """``[experts, width, middle]``."""


def find_cuts(rows: int, experts: Experts) -> tuple[Cut, Cut] | None:
    """The cuts of both products of a step of so many rows; None if they fit none."""
    found = []
    for name, weights in (("up", experts.gate_up), ("down", experts.down)):
        _, height, inputs = weights.shape
        outputs = height // 2 if name == "up" else height
        cut: Cut | None = _CUTS[name, _pairs_at_once(rows, len(weights), experts.router.chosen)]
        if cut is not None and not cut.fits(outputs, inputs):
            cut = smaller_cut(outputs, inputs, cut)
        if cut is None:
            return None
        found.append(cut)
    return found[0], found[1]


def most_rows(experts: Experts) -> int:
    """Most rows of a step: of more pairs a program would read its weights several times."""
    router = experts.router
    most = _MOST_PAIRS * len(router.weight) // router.chosen
    return max(_LEAST_ROWS, min(_MOST_ROWS, most))


def _pairs_at_once(rows: int, total: int, chosen: int) -> int:
    """Pairs of an expert that a program computes at once."""
    if rows <= FEWEST:
        return 1
    return 16 if 2 * rows * chosen <= 16 * total else 32


def add_chosen(stream: Stream, norm: Norm, experts: Experts, scratch: Scratch) -> Stream:
    """Adds a mixture of experts to a stream in place. Can be captured.

    Args:
        stream: The stream, whose RMS norm the experts take.
        norm: That norm.
        experts: The experts, of shapes for which :func:`find_cuts` finds cuts.
        scratch: For logits.

    Raises:
        ValueError: No cut fits the experts.
    """
    cuts = find_cuts(len(stream.rows), experts)
    if cuts is None:
        raise ValueError(f"no cut fits experts of {tuple(experts.down.shape)}")
    routing = route(stream, norm, experts.router, scratch)
    middle = expert_product(routing.rows, experts.gate_up, routing, cuts[0], gated=True)
    if len(stream.rows) <= FEWEST:
        return add_experts(middle, experts.down, routing, cuts[1], stream)
    pairs = expert_product(middle, experts.down, routing, cuts[1], gated=False)
    return add_pairs(pairs, stream, routing)


def expert_product(
    rows: torch.Tensor, weights: torch.Tensor, routing: Routing, cut: Cut, *, gated: bool
) -> torch.Tensor:
    """Multiplies the row of each pair by the matrix of its expert. Can be captured.

    Args:
        rows: ``[rows, width]`` if `gated`, else ``[pairs, middle]``, contiguous.
        weights: ``[experts, 2 * middle, width]`` if `gated`, else ``[experts, width, middle]``.
        routing: The experts of the rows.
        cut: One that fits the matrix of an expert, or half of it if `gated`; of one part.
        gated: Whether the product is that of the gate and the up projection.

    Returns:
        ``[pairs, middle]``: ``silu(gate) * up``; or ``[pairs, width]``, times the pairs' weights.
    """
    pairs, chosen = routing.experts.numel(), routing.experts.shape[1]
    total, height, inputs = weights.shape
    outputs = height // (2 if gated else 1)
    out = rows.new_empty(pairs, outputs)
    at_once = _pairs_at_once(len(routing.rows), total, chosen)
    # Of one pair a program needs the expert only.
    listed, counts = routing.lists or (routing.experts, routing.experts)
    _expert_product[(outputs // cut.outputs, pairs if at_once == 1 else total)](
        rows, weights, listed, counts, routing.weights, out, len(routing.rows), outputs, inputs,
        ROWS=at_once, SHARED=chosen if gated else 1, OUTPUTS=cut.outputs, INPUTS=cut.inputs,
        STAGES=cut.stages, GATED=gated,
        num_warps=cut.warps, **chained(rows.device),
    )  # fmt: skip
    return out


def add_pairs(pairs: torch.Tensor, stream: Stream, routing: Routing) -> Stream:
    """Adds the pairs of each row, ``[pairs, width]``, to a stream in place. Can be captured.

    It clears the counts of the routing's lists.
    """
    count, width = stream.rows.shape
    squares = stream.rows.new_empty(count, 1, dtype=torch.float32)
    chosen = routing.experts.shape[1]
    counts = None if routing.lists is None else routing.lists.counts
    total = 0 if counts is None else len(counts)
    _add_pairs[(count,)](
        pairs, stream.rows, squares, counts, width, chosen, total,
        WIDTH=triton.next_power_of_2(width), CHOSEN=triton.next_power_of_2(chosen),
        CLEARED=triton.next_power_of_2(triton.cdiv(total, count)) if total else 0,
        num_warps=8, **chained(pairs.device),
    )  # fmt: skip
    return Stream(stream.rows, squares)


def add_experts(
    middle: torch.Tensor,
    weights: torch.Tensor,
    routing: Routing,
    cut: Cut,
    stream: Stream,
) -> Stream:
    """Adds the weighted products of a row's pairs to a stream in place. Can be captured.

    It reads `routing` before the kernel in front has ended, which must be an :func:`expert_product`
    of so few rows.

    Args:
        middle: ``[pairs, middle]``, contiguous.
        weights: ``[experts, width, middle]``.
        routing: The experts of the rows.
        cut: One that fits the matrix of an expert; of one part.
        stream: The stream to add to.
    """
    count, chosen = routing.experts.shape
    _, outputs, inputs = weights.shape
    tiles = outputs // cut.outputs
    squares = stream.rows.new_empty(count, tiles, dtype=torch.float32)
    _add_experts[(tiles, count)](
        middle, weights, routing.experts, routing.weights, stream.rows, squares, outputs, inputs,
        CHOSEN=chosen, LISTED=triton.next_power_of_2(chosen), OUTPUTS=cut.outputs,
        INPUTS=cut.inputs, num_warps=cut.warps, **chained(middle.device),
    )  # fmt: skip
    return Stream(stream.rows, squares)


@triton.jit(do_not_specialize=["most"])
def _expert_product(
    rows, weight, listed, counts, shares, out, most, outputs, inputs,
    ROWS: tl.constexpr, SHARED: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A tile of outputs, of one pair or of all pairs of an expert."""
    units = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    number = tl.program_id(1)
    if CHAINED:
        if ROWS == 1:
            # The next kernel reads what the router's has written before it waits.
            follow()
        else:
            lead()
    if ROWS == 1:
        expert = tl.load(listed + number)
        pair = number + tl.arange(0, 1)
        _pair_product(
            rows, weight, shares, out, expert, pair, pair >= 0, units, outputs, inputs,
            ROWS, SHARED, INPUTS, STAGES, GATED,
        )  # fmt: skip
    else:
        count = tl.load(counts + number)
        for first in tl.range(0, count, ROWS, num_stages=1):
            turn = first + tl.arange(0, ROWS)
            pair = tl.load(listed + number * most + turn, mask=turn < count, other=0)
            _pair_product(
                rows, weight, shares, out, number, pair, turn < count, units, outputs, inputs,
                ROWS, SHARED, INPUTS, STAGES, GATED,
            )  # fmt: skip


@triton.jit
def _pair_product(
    rows, weight, shares, out, expert, pair, known, units, outputs, inputs,
    ROWS: tl.constexpr, SHARED: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Some pairs of an expert."""
    lanes = tl.arange(0, INPUTS)
    height = outputs * 2 if GATED else outputs
    own = weight + (expert.to(tl.int64) * height + units) * inputs
    ups = own + outputs.to(tl.int64) * inputs
    pair = pair.to(tl.int64)
    if ROWS == 1:
        places = rows + (pair // SHARED)[:, None] * inputs + lanes[None, :]
        inside = lanes[None, :] >= 0
        sums = tl.zeros([units.shape[0], INPUTS // 8], tl.float32)
    else:
        places = rows + (pair // SHARED)[None, :] * inputs + lanes[:, None]
        inside = known[None, :]
        sums = tl.zeros([units.shape[0], ROWS], tl.float32)
    up_sums = sums
    if STAGES == 1:
        w = tl.load(own[:, None] + lanes[None, :])
        u = w
        if GATED:
            u = tl.load(ups[:, None] + lanes[None, :])
        x = tl.load(places, mask=inside, other=0.0)
        for at in tl.range(INPUTS, inputs, INPUTS, num_stages=1):
            next_x = tl.load(places + at, mask=inside, other=0.0)
            next_w = tl.load(own[:, None] + at + lanes[None, :])
            if GATED:
                next_u = tl.load(ups[:, None] + at + lanes[None, :])
                up_sums = add_products(u, x, up_sums, ROWS)
                u = next_u
            sums = add_products(w, x, sums, ROWS)
            w = next_w
            x = next_x
        sums = add_products(w, x, sums, ROWS)
        if GATED:
            up_sums = add_products(u, x, up_sums, ROWS)
    else:
        for at in tl.range(0, inputs, INPUTS, num_stages=STAGES):
            x = tl.load(places + at, mask=inside, other=0.0)
            w = tl.load(own[:, None] + at + lanes[None, :])
            sums = add_products(w, x, sums, ROWS)
            if GATED:
                w = tl.load(ups[:, None] + at + lanes[None, :])
                up_sums = add_products(w, x, up_sums, ROWS)
    if ROWS == 1:
        sums = tl.sum(sums, 1)[:, None]
        up_sums = tl.sum(up_sums, 1)[:, None]
    if GATED:
        # Rounded as the output of an unfused product would be.
        kind = out.dtype.element_ty
        sums = silu(sums.to(kind).to(tl.float32), up_sums.to(kind).to(tl.float32))
    else:
        sums *= tl.load(shares + pair, mask=known, other=0.0)[None, :]
    tl.store(out + pair[None, :] * outputs + units[:, None], sums, mask=known[None, :])


@triton.jit
def _add_pairs(
    pairs, rows, squares, counts, width, chosen, total, WIDTH: tl.constexpr, CHOSEN: tl.constexpr,
    CLEARED: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    if CHAINED:
        lead()
    row = tl.program_id(0).to(tl.int64)
    if CLEARED > 0:
        experts = row + tl.arange(0, CLEARED) * tl.num_programs(0)
        tl.store(counts + experts, 0, mask=experts < total)
    lanes = tl.arange(0, WIDTH)
    inside = lanes < width
    place = rows + row * width + lanes
    old = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    turns = tl.arange(0, CHOSEN)
    found = tl.load(
        pairs + (row * chosen + turns)[:, None] * width + lanes[None, :],
        mask=inside[None, :] & (turns < chosen)[:, None],
        other=0.0,
    )
    total = (old + tl.sum(found.to(tl.float32), 0)).to(rows.dtype.element_ty)
    tl.store(place, total, mask=inside)
    total = tl.where(inside, total.to(tl.float32), 0.0)
    tl.store(squares + row, tl.sum(total * total, 0))


@triton.jit
def _add_experts(
    middle, weight, ids, shares, rows, squares, outputs, inputs,
    CHOSEN: tl.constexpr, LISTED: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """A tile of a row's outputs, of all its experts at once."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    # Outputs of the first expert, then those of the second one.
    lines = tl.arange(0, LISTED * OUTPUTS)
    turns = lines // OUTPUTS
    known = (turns < CHOSEN)[:, None]
    pairs = row * CHOSEN + turns
    lanes = tl.arange(0, INPUTS)
    # The kernel in front has waited for the router's before it let this one start.
    experts = tl.load(ids + pairs, mask=turns < CHOSEN, other=0).to(tl.int64)
    share = tl.load(shares + pairs, mask=turns < CHOSEN, other=0.0)
    heights = experts * outputs + tile * OUTPUTS + lines % OUTPUTS
    own = weight + heights[:, None] * inputs + lanes[None, :]
    given = middle + pairs[:, None] * inputs + lanes[None, :]
    w = tl.load(own, mask=known, other=0.0)
    if CHAINED:
        lead()
    units = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    place = rows + row * outputs + units
    old = tl.load(place).to(tl.float32)
    x = tl.load(given, mask=known, other=0.0)
    sums = tl.zeros([LISTED * OUTPUTS, INPUTS // 8], tl.float32)
    for at in tl.range(INPUTS, inputs, INPUTS, num_stages=1):
        next_x = tl.load(given + at, mask=known, other=0.0)
        next_w = tl.load(own + at, mask=known, other=0.0)
        sums = add_products(w, x, sums, 1)
        w = next_w
        x = next_x
    sums = add_products(w, x, sums, 1)
    added = tl.reshape(tl.sum(sums, 1) * share, [LISTED, OUTPUTS])
    total = (old + tl.sum(added, 0)).to(rows.dtype.element_ty)
    tl.store(place, total)
    total = total.to(tl.float32)
    tl.store(squares + row * tl.num_programs(0) + tile, tl.sum(total * total, 0))
