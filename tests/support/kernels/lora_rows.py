"""The kernels of LoRA in Triton's interpreter, against float64, for random ranks, slots and rows.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple
from unittest import mock

import torch

from pie_driver_sglang.kernels.gemm import lora as lora_module
from pie_driver_sglang.kernels.gemm import small_m
from pie_driver_sglang.kernels.gemm.lora import (
    LoraRows,
    LoraWeights,
    Shrunk,
    lora_expand,
    lora_shrink,
)
from pie_driver_sglang.kernels.gemm.types import (
    LinearWeights,
    Residual,
    TileConfig,
    Workspace,
)
from support.kernels.float64 import EPSILON, close, normalized

CASES = 8
COUNTS = (1, 3, 16, 17, 40, 70)
MAX_RANKS = (8, 16, 24, 64, 128)


class Case(NamedTuple):
    """Adapters of rows, and the inputs of a layer."""

    rng: random.Random
    rows: LoraRows
    x: torch.Tensor
    max_rank: int

    def weights(self, inputs: int, parts: tuple[int, ...]) -> LoraWeights:
        """Random adapters in slots whose unused memory is NaN."""
        ranks, most = self.rows.ranks.tolist(), self.max_rank
        down = torch.full((len(ranks), len(parts) * most, inputs), float("nan"))
        up = torch.full((len(ranks), sum(parts), most), float("nan"))
        for slot, rank in enumerate(ranks):
            down[slot, : len(parts) * rank] = torch.randn(len(parts) * rank, inputs)
            up[slot, :, :rank] = torch.randn(sum(parts), rank)
        return LoraWeights(down, up, parts)


def make_case(seed: int, inputs: int, most_rows: int = max(COUNTS)) -> Case:
    """Some slots are empty or not used, some rows without an adapter."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    counts = [count for count in COUNTS if count <= most_rows]
    count = counts[seed % len(counts)]
    most = rng.choice(MAX_RANKS)
    ranks = [rng.choice([0, 1, most, rng.randint(0, most)]) for _ in range(rng.randint(2, 9))]
    # Of every other case rows have all slots.
    used = rng.sample(range(-1, len(ranks)), rng.randint(2, len(ranks) + 1))
    used = list(range(-1, len(ranks))) if seed % 2 == 0 else used
    slots = torch.tensor([rng.choice(used) for _ in range(count)], dtype=torch.int32)
    rows = LoraRows(slots, torch.tensor(ranks, dtype=torch.int32))
    return Case(rng, rows, torch.randn(count, inputs), most)


def exact_shrunk(x: torch.Tensor, rows: LoraRows, weights: LoraWeights) -> list[list[torch.Tensor]]:
    """``A @ x`` of each row and part, in float64."""
    found = []
    for row, slot in zip(x.double(), rows.slots.tolist(), strict=True):
        rank = int(rows.ranks[slot]) if slot >= 0 else 0
        own = weights.down[slot, : len(weights.parts) * rank].double() @ row
        found.append(list(own.view(len(weights.parts), rank)))
    return found


def exact_added(x: torch.Tensor, rows: LoraRows, weights: LoraWeights) -> torch.Tensor:
    """``B @ (A @ x)`` of each row, in float64."""
    total = torch.zeros(len(x), sum(weights.parts), dtype=torch.float64)
    for row, parts in enumerate(exact_shrunk(x, rows, weights)):
        slot, start = int(rows.slots[row]), 0
        for size, part in zip(weights.parts, parts, strict=True):
            up = weights.up[slot, start : start + size, : len(part)].double()
            total[row, start : start + size] = up @ part
            start += size
    return total


def shrink(x: torch.Tensor, rows: LoraRows, weights: LoraWeights) -> Shrunk:
    """What is not written is NaN."""
    with mock.patch.object(torch.Tensor, "new_empty", _nan_filled):
        return lora_shrink(x, rows, weights)


def _nan_filled(like: torch.Tensor, *sizes: int, **_: Any) -> torch.Tensor:
    value = float("nan") if like.is_floating_point() else 0
    return torch.full(sizes, value, dtype=like.dtype)


def check_shrink(seed: int, inputs: int) -> None:
    """Ranks in use are exact, the others zero; rows without an adapter are not written."""
    case = make_case(seed, inputs)
    weights = case.weights(inputs, (64, 32, 32))
    values = shrink(case.x, case.rows, weights).values.view(len(case.x), 3, -1)
    slots = case.rows.slots
    assert values[slots < 0].isnan().all()
    expected = torch.zeros_like(values, dtype=torch.float64)
    for row, parts in enumerate(exact_shrunk(case.x, case.rows, weights)):
        for number, part in enumerate(parts):
            expected[row, number, : len(part)] = part
    found, expected = values[slots >= 0], expected[slots >= 0]
    assert (found == 0).equal(expected == 0)
    if len(found):
        close(found + 1, expected + 1)


def check_expand(seed: int) -> None:
    """Parts of other sizes than tiles, added in place."""
    case = make_case(seed, 96)
    weights = case.weights(96, (48, 16, 64))
    base = torch.randn(len(case.x), 128)
    expected = base.double() + exact_added(case.x, case.rows, weights)
    close(lora_expand(base, shrink(case.x, case.rows, weights)), expected)
    assert lora_expand(base, None) is base


def check_gemms(seed: int) -> None:
    """A layer's GEMMs: a deferred norm and a bias, a residual, SwiGLU; with and without split-K."""
    case = make_case(seed, 128, small_m.MAX_ROWS)
    x, rows, count = case.x, case.rows, len(case.x)
    block_m = 1 if count == 1 else 64
    workspace = Workspace(torch.empty(4 * 64 * 160), torch.zeros(64, dtype=torch.int32))
    qkv = LinearWeights(torch.randn(144, 128), torch.randn(144))
    added = case.weights(128, (80, 32, 32))
    config = TileConfig(block_m, 16 if case.rng.random() < 0.5 else 48, 64, num_stages=1)
    config = config if block_m > 1 else TileConfig(1, 16, 64, num_stages=1)
    scale = torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPSILON)
    given = small_m.small_m_gemm(
        x, qkv, TileConfig(block_m, 16, 64, num_stages=config.num_stages), workspace,
        sum_squares=x.square().view(count, 2, 64).sum(2), epsilon=EPSILON,
        lora=shrink(x, rows, added),
    )  # fmt: skip
    bias = qkv.bias.double() if qkv.bias is not None else 0
    sums = x.double() @ qkv.weight.double().T + exact_added(x, rows, added)
    close(given, sums * scale + bias)
    for split_k in (1, 2):
        out = LinearWeights(torch.randn(96, 128))
        added = case.weights(128, (96,))
        before = torch.randn(count, 96)
        residual = Residual(before.clone(), torch.empty(count, 3))
        config = TileConfig(block_m, 32, 64, split_k=split_k, num_stages=2)
        small_m.small_m_gemm(
            x, out, config, workspace, residual=residual, lora=shrink(x, rows, added)
        )
        expected = before.double() + x.double() @ out.weight.double().T
        close(residual.rows, expected + exact_added(x, rows, added))
        close(residual.sum_squares.sum(1), residual.rows.double().square().sum(1))
        assert not workspace.semaphores.any()
    gate_up = LinearWeights(torch.randn(192, 128))
    added = case.weights(128, (96, 96))
    found = small_m.small_m_gemm(
        x, gate_up, TileConfig(block_m, 32, 64, num_stages=2), workspace, swiglu=True,
        sum_squares=x.square().view(count, 2, 64).sum(2), epsilon=EPSILON,
        lora=shrink(x, rows, added),
    )  # fmt: skip
    sums = normalized(x) @ gate_up.weight.double().T + scale * exact_added(x, rows, added)
    gate, up = sums.chunk(2, dim=1)
    close(found, torch.nn.functional.silu(gate) * up)


def main() -> None:
    """Checks everything."""
    for seed in range(CASES):
        check_shrink(seed, 96)
        # Inputs that tiles do not divide.
        check_shrink(seed, 1300)
        # Tiles of many rows.
        with mock.patch.object(lora_module, "_MAX_CUDA_ROWS", 16):
            check_shrink(seed, 160)
        check_expand(seed)
        check_gemms(seed)
    print("lora rows ok")


if __name__ == "__main__":
    main()
