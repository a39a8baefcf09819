"""The attention of a step of one row against float64: Triton's kernel under its interpreter.

Run with ``TRITON_INTERPRET=1``. Storage that the row may not see holds what is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from pie_driver_sglang.kernels.attention.single_decode import (
    DecodeToken,
    SingleDecodeConfig,
    attend_single,
    supports_single_decode,
)
from pie_driver_sglang.kernels.gemm.types import Heads, Norm

EPSILON = 1e-6
SCALE = 0.2
TOLERANCE = 1e-5
MORE_SLOTS = 156
NO_SLOT = 2**31 - 1
Attend = Callable[[torch.Tensor, Heads, DecodeToken, float], torch.Tensor]


class Case(NamedTuple):
    """A row and its heads."""

    length: int
    queries: int
    kv_heads: int
    dim: int
    normed: bool
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


def make_heads(case: Case) -> Heads:
    """Random ones, over storage of what may not be seen."""
    slots, options = case.length + MORE_SLOTS, {"device": case.device}
    norms = [
        Norm((torch.rand(case.dim, **options) + 0.5).to(case.dtype), EPSILON)
        if case.normed
        else None
        for _ in range(2)
    ]
    angles = torch.rand(slots, case.dim // 2, **options) * 6.28
    keys, values = (
        torch.full((slots, case.kv_heads, case.dim), torch.nan, dtype=case.dtype, **options)
        for _ in range(2)
    )
    rotations = torch.cat([angles.cos(), angles.sin()], -1)
    return Heads(case.queries, *norms, rotations, True, keys, values)


def turned(heads: torch.Tensor, norm: Norm | None, rotation: torch.Tensor) -> torch.Tensor:
    """Normed and turned heads, ``[heads, dim]``, in float64."""
    heads = heads.double()
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPSILON)
        heads = heads * norm.weight.double()
    (x, y), (cosine, sine) = heads.chunk(2, -1), rotation.double().chunk(2)
    return torch.cat([x * cosine - y * sine, y * cosine + x * sine], -1)


def error(case: Case, heads: Heads, attend: Attend, tolerance: float = TOLERANCE) -> float:
    """How far off one row is, relative to the largest number; checks what is stored."""
    dtype, device, dim = case.dtype, case.device, case.dim
    length, queries, kv_heads = case.length, case.queries, case.kv_heads
    table = torch.full((3, len(heads.k_cache)), NO_SLOT, dtype=torch.int32, device=device)
    slots = torch.randperm(len(heads.k_cache), device=device)[:length]
    table[2, :length] = slots.int()
    old = slots[:-1]
    stored = torch.randn(2, length - 1, kv_heads, dim, device=device).to(dtype)
    heads.k_cache[old], heads.v_cache[old] = stored
    keys, values = heads.k_cache.double(), heads.v_cache.double()
    qkv = torch.randn(1, (queries + 2 * kv_heads) * dim, device=device).to(dtype)
    numbers = (torch.tensor([number], device=device) for number in (2, length, length + 3))
    table_row, kv_len, position = numbers
    row = DecodeToken(table, table_row, kv_len, position, slots[-1:].clone())
    found = attend(qkv, heads, row, SCALE)
    given = qkv.view(-1, dim)
    rotation = heads.cos_sin_cache[position[0]]
    q = turned(given[:queries], heads.q_norm, rotation)
    k = turned(given[queries : queries + kv_heads], heads.k_norm, rotation)
    v = given[queries + kv_heads :].double()
    keys[slots[-1]], values[slots[-1]] = k, v
    # Nothing but the new token is stored.
    off = float(keys[slots[-1]].abs().max()) * tolerance
    assert torch.allclose(heads.k_cache.double(), keys, atol=off, rtol=tolerance, equal_nan=True)
    assert torch.equal(heads.v_cache.double().nan_to_num(), values.nan_to_num())
    group = queries // kv_heads
    k, v = (each[slots].repeat_interleave(group, 1) for each in (keys, values))
    weights = torch.softmax(torch.einsum("hd,thd->ht", q, k) * SCALE, -1)
    exact = torch.einsum("ht,thd->hd", weights, v).flatten()
    return float((found[0].double() - exact).abs().max() / exact.abs().max())


def check(case: Case, programs: int, block: int) -> None:
    """One row by Triton's kernel."""
    heads = make_heads(case)
    assert supports_single_decode(heads)
    semaphores = torch.zeros(case.kv_heads, programs, dtype=torch.int32)
    attend = functools.partial(
        attend_single,
        semaphores=semaphores,
        tuning=SingleDecodeConfig(block, 4, programs, 128, 256),
    )

    def by_triton(qkv: torch.Tensor, heads: Heads, row: DecodeToken, scale: float) -> torch.Tensor:
        return attend(qkv, heads, row, scale=scale)

    off = error(case, heads, by_triton)
    assert not semaphores.any()
    assert off < TOLERANCE, (off, case, programs, block)


if __name__ == "__main__":
    torch.manual_seed(5)
    # One token; a block to the edge and beyond it; several blocks of a program; idle programs.
    for length, programs, block, normed in (
        (1, 3, 16, True), (16, 1, 16, False), (17, 40, 16, True), (33, 1, 16, True),
        (100, 3, 16, False), (100, 40, 32, True),
    ):  # fmt: skip
        check(Case(length, 4, 2, 32, normed), programs, block)
    check(Case(120, 5, 1, 64, True), 9, 16)
    check(Case(70, 16, 1, 32, False), 4, 16)
    check(Case(40, 3, 3, 128, True), 2, 16)
    assert not supports_single_decode(make_heads(Case(1, 4, 2, 32, False))._replace(is_neox=False))
    assert not supports_single_decode(make_heads(Case(1, 34, 2, 32, False)))
    assert not supports_single_decode(make_heads(Case(1, 2, 2, 80, False)))
    print("all close")
