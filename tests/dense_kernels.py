"""The kernels of dense layers under Triton's interpreter, against float64.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools
import math
import threading
import time

import torch

from pie_driver_sglang.sglang.dense_triton import (
    Heads,
    Linear,
    Norm,
    Tiling,
    add_norm,
    gated,
    linear,
    prepare,
)
from pie_driver_sglang.sglang.rank_sums import TURNS, RankSums

ROWS = (1, 16, 17, 40)
TOLERANCE = 1e-5
EPSILON = 1e-6


def close(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Up to rounding in float32."""
    error = float((found.double() - exact).abs().max() / exact.abs().max())
    assert error < TOLERANCE, error


def normalized(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    rows = rows.double()
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + EPSILON) * weight.double()


def check_linear() -> None:
    """Products of any number of rows, whole and in parts, with a bias and without."""
    for count, parts, biased in itertools.product(ROWS, (1, 3), (False, True)):
        if parts > 1 and biased:
            continue
        # Rows lie in something wider.
        rows = torch.randn(count, 200)[:, :192]
        matrix = Linear(torch.randn(64, 192), torch.randn(64) if biased else None)
        tiling = Tiling(rows=16, outputs=32, inputs=32, parts=parts)
        assert tiling.fits(64, 192)
        exact = rows.double() @ matrix.weight.double().T
        if matrix.bias is not None:
            exact += matrix.bias.double()
        found = linear(rows, matrix, tiling)
        assert found.shape == (parts, count, 64)
        close(found.sum(0), exact)


def check_gated() -> None:
    """Gates and ups of an MLP."""
    for count in ROWS:
        rows, matrix = torch.randn(count, 64), Linear(torch.randn(96, 64))
        gate, up = (rows.double() @ matrix.weight.double().T).chunk(2, dim=-1)
        exact = torch.nn.functional.silu(gate) * up
        close(gated(rows, matrix, Tiling(rows=16, outputs=16, inputs=32)), exact)


def check_add_norm() -> None:
    """One part and several, with and without a residual, of a width that is no power of two."""
    for count, parts, adds in itertools.product(ROWS, (1, 4), (False, True)):
        given = torch.randn(parts, count, 80)
        residual = torch.randn(count, 80) if adds else None
        norm = Norm(torch.randn(80), EPSILON)
        total = given.double().sum(0) + (0.0 if residual is None else residual.double())
        out, after = add_norm(given, residual, norm)
        close(after, total)
        close(out, normalized(total, norm.weight))
        assert residual is None or after is residual


def turned(rows: torch.Tensor, angles: torch.Tensor, halves: bool) -> torch.Tensor:
    """Rotary embedding as a product of complex numbers: ``[rows, heads, dim]``."""
    dim = rows.shape[-1]
    pairs = rows.double().unflatten(-1, (2, dim // 2) if halves else (dim // 2, 2))
    if halves:
        pairs = pairs.transpose(-1, -2)
    numbers = torch.view_as_complex(pairs.contiguous())
    numbers = numbers * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    pairs = torch.view_as_real(numbers)
    return (pairs.transpose(-1, -2) if halves else pairs).flatten(-2)


def check_prepare() -> None:
    """Heads that are normalized and that are not, and turn either way; nothing else is written."""
    shapes = ((4, 2, 32), (7, 1, 48), (16, 8, 16))
    for (queries, kv_heads, dim), halves, normed in itertools.product(
        shapes, (False, True), (False, True)
    ):
        count = 5
        positions = torch.tensor([0, 3, 3, 63, 17])
        angles = torch.rand(64, dim // 2, dtype=torch.float64) * 2 * math.pi
        rows = torch.randn(count, (queries + 2 * kv_heads) * dim)
        q, k, v = rows.clone().view(count, -1, dim).split([queries, kv_heads, kv_heads], dim=1)
        keys, values = (torch.full((9, kv_heads, dim), math.nan) for _ in range(2))
        slots = torch.tensor([8, 1, 4, 2, 6])
        norms = [Norm(torch.randn(dim), EPSILON) if normed else None for _ in range(2)]
        heads = Heads(
            queries, *norms, torch.cat([angles.cos(), angles.sin()], -1).float(), halves,
            keys, values,
        )  # fmt: skip
        found = prepare(rows, heads, positions, slots)
        q, k = (
            part if norm is None else normalized(part, norm.weight)
            for part, norm in zip((q, k), norms, strict=True)
        )
        close(found, turned(q, angles[positions], halves))
        close(keys[slots], turned(k, angles[positions], halves))
        assert torch.equal(values[slots], v)
        others = [slot for slot in range(9) if slot not in slots.tolist()]
        assert keys[others].isnan().all()
        assert values[others].isnan().all()


def check_rank_sums() -> None:
    """Three ranks' parts, as one of them sees it; the last of the others is late by some steps."""
    ranks, own, most, width, rows = 3, 1, 8, 80, 5
    size = RankSums.size(ranks, most, width, torch.float32)
    shared = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
    flags = [memory[-4 * ranks * most :].view(torch.int32).view(ranks, most) for memory in shared]
    # Counts may pass the largest number.
    start = 2**31 - 3
    sums = RankSums(shared, own, most, width, torch.float32)
    sums._said.fill_(start)
    for flag in flags:
        flag.fill_(start)
    norm = Norm(torch.randn(width), EPSILON)
    matrix = Linear(torch.randn(width, 32))
    for number in range(1, 5):
        turn = number % TURNS
        residual, given = torch.randn(rows, width), torch.randn(rows, 32)
        sums.multiply(turn, given, matrix, Tiling(16, 16, 16) if number > 2 else None)
        total = residual.double() + given.double() @ matrix.weight.double().T
        for rank in (0, 2):
            place = turn * most * width
            part = shared[rank][: -4 * ranks * most].view(torch.float32)[place:][: rows * width]
            total += part.uniform_(-1, 1).double().view(rows, width)
        said = torch.tensor(start + number).int()
        flags[own][0] = said
        late = threading.Timer(0.3, flags[own][2].copy_, [said.expand(most)])
        late.start()
        began = time.monotonic()
        out, after = sums.add_norm(turn, residual, norm)
        assert time.monotonic() - began >= 0.3, "it did not wait"
        close(after, total)
        close(out, normalized(total, norm.weight))
        for flag in flags:
            assert (flag[own][:rows] == said).all()
            assert (flag[own][rows:] == start).all()


if __name__ == "__main__":
    torch.manual_seed(2)
    check_linear()
    check_gated()
    check_add_norm()
    check_prepare()
    check_rank_sums()
    print("dense layers: all close")
