"""The attention of a step of one row under Triton's interpreter, against float64.

Run with ``TRITON_INTERPRET=1``. Storage that the row may not see holds what is NaN.
"""

from __future__ import annotations

import torch

from pie_driver_sglang.kernels.dense_layers import Heads, Norm
from pie_driver_sglang.kernels.lone_attend import LoneRow, LoneTuning, attend_lone, takes

EPSILON = 1e-6
TOLERANCE = 1e-5
SLOTS = 256
NO_SLOT = 2**31 - 1


def make_heads(queries: int, kv_heads: int, dim: int, *, normed: bool) -> Heads:
    """Random ones, over storage of what may not be seen."""
    norms = [Norm(torch.rand(dim) + 0.5, EPSILON) if normed else None for _ in range(2)]
    angles = torch.rand(SLOTS, dim // 2) * 6.28
    keys, values = (torch.full((SLOTS, kv_heads, dim), torch.nan) for _ in range(2))
    rotations = torch.cat([angles.cos(), angles.sin()], -1)
    return Heads(queries, *norms, rotations, True, keys, values)


def turned(heads: torch.Tensor, norm: Norm | None, rotation: torch.Tensor) -> torch.Tensor:
    """Normed and turned heads, ``[heads, dim]``, in float64."""
    heads = heads.double()
    if norm is not None:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPSILON)
        heads = heads * norm.weight.double()
    (x, y), (cosine, sine) = heads.chunk(2, -1), rotation.double().chunk(2)
    return torch.cat([x * cosine - y * sine, y * cosine + x * sine], -1)


def check(
    length: int, queries: int, kv_heads: int, dim: int, programs: int, block: int, *, normed: bool
) -> None:
    """One row."""
    heads = make_heads(queries, kv_heads, dim, normed=normed)
    assert takes(heads)
    table = torch.full((3, SLOTS), NO_SLOT, dtype=torch.int32)
    slots = torch.randperm(SLOTS)[:length]
    table[2, :length] = slots.int()
    old = slots[:-1]
    heads.keys[old], heads.values[old] = torch.randn(2, length - 1, kv_heads, dim)
    keys, values = heads.keys.double(), heads.values.double()
    qkv = torch.randn(1, (queries + 2 * kv_heads) * dim)
    position = torch.tensor([length + 3])
    row = LoneRow(table, torch.tensor([2]), torch.tensor([length]), position, slots[-1:])
    arrived = torch.zeros(kv_heads, programs, dtype=torch.int32)
    found = attend_lone(qkv, heads, row, arrived, 0.2, LoneTuning(block, 4, programs, 128, 256))
    assert not arrived.any()
    given = qkv.view(-1, dim)
    rotation = heads.rotations[position[0]]
    q = turned(given[:queries], heads.query_norm, rotation)
    k = turned(given[queries : queries + kv_heads], heads.key_norm, rotation)
    v = given[queries + kv_heads :].double()
    keys[slots[-1]], values[slots[-1]] = k, v
    # Nothing but the new token is stored.
    assert torch.allclose(heads.keys.double(), keys, atol=TOLERANCE, equal_nan=True)
    assert torch.equal(heads.values.double().nan_to_num(), values.nan_to_num())
    group = queries // kv_heads
    k, v = (each[slots].repeat_interleave(group, 1) for each in (keys, values))
    weights = torch.softmax(torch.einsum("hd,thd->ht", q, k) * 0.2, -1)
    exact = torch.einsum("ht,thd->hd", weights, v).flatten()
    error = float((found[0].double() - exact).abs().max() / exact.abs().max())
    assert error < TOLERANCE, (error, length, programs, block)


if __name__ == "__main__":
    torch.manual_seed(5)
    # One token; a block to the edge and beyond it; several blocks of a program; idle programs.
    for length, programs, block, normed in (
        (1, 3, 16, True), (16, 1, 16, False), (17, 40, 16, True), (33, 1, 16, True),
        (100, 3, 16, False), (100, 40, 32, True),
    ):  # fmt: skip
        check(length, 4, 2, 32, programs, block, normed=normed)
    check(120, 5, 1, 64, 9, 16, normed=True)
    check(70, 16, 1, 32, 4, 16, normed=False)
    check(40, 3, 3, 128, 2, 16, normed=True)
    assert not takes(make_heads(4, 2, 32, normed=False)._replace(halves=False))
    assert not takes(make_heads(34, 2, 32, normed=False))
    assert not takes(make_heads(2, 2, 80, normed=False))
    print("all close")
