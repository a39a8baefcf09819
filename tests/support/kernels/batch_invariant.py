"""Batch-invariant kernels in Triton's interpreter: attention against float64, residual adds.

Run with ``TRITON_INTERPRET=1``. Splits are shorter than on a GPU, since the interpreter is slow.
Storage that no row may see holds what is NaN.
"""

from __future__ import annotations

import itertools
import math
import random

import torch
from triton import language as tl

from pie_driver_sglang.kernels.attention import batch_invariant, fixed_splits
from pie_driver_sglang.kernels.attention.batch_invariant import (
    attend_row_tiles,
    attend_split_rows,
)
from pie_driver_sglang.kernels.attention.fixed_splits import plan_fixed_splits
from pie_driver_sglang.kernels.attention.split_plan import SKIP_ROW, DecodeRows
from pie_driver_sglang.kernels.gemm.small_m import add_to_residual
from pie_driver_sglang.kernels.gemm.types import Residual

PAGE, TABLE_TOKENS = 16, 640
MAX_SPLITS, MIN_SPLIT_LEN = 4, 128
TOLERANCE = 4e-3
"""Of float16, for values of size 1."""
WINDOWS = (-1, 0, 66, 200)
"""Tokens that a row sees before its own; those of 200 begin in an earlier split than they end."""
HEADS, KV_HEADS, DIM = 6, 2, 64
"""A group of three heads, which is no power of two."""


class Model:
    """KV of a few contexts in pages at random places, and queries by context and position."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        pages = sum(-(-length // PAGE) for length in lengths) + 3
        order = random.sample(range(1, pages), pages - 1)
        self.table = torch.zeros(len(lengths) + 1, TABLE_TOKENS, dtype=torch.int32)
        self.lengths = lengths
        shape = (pages * PAGE, KV_HEADS, DIM)
        self.keys, self.values = (torch.full(shape, math.nan, dtype=torch.float16) for _ in "kv")
        for context, length in enumerate(lengths, 1):
            for page in range(-(-length // PAGE)):
                slots = torch.arange(PAGE) + PAGE * order.pop()
                self.table[context, page * PAGE : (page + 1) * PAGE] = slots.int()
            slots = self.table[context, :length].long()
            for stored in (self.keys, self.values):
                stored[slots] = torch.randn(length, KV_HEADS, DIM).half()
        self.queries = [torch.randn(length + 1, HEADS, DIM).half() for length in [8, *lengths]]

    def attend(self, rows: list[tuple[int, int]], window: int = -1, *, tiles: bool) -> torch.Tensor:
        """Attends with rows of (context, KV length); rows of context -1 are skipped."""
        queries = torch.stack([self.queries[max(context, 0)][length] for context, length in rows])
        out = torch.full_like(queries, 7.0)
        contexts, lengths = torch.tensor(rows, dtype=torch.int64).unbind(1)
        step = DecodeRows(self.table, contexts.contiguous(), lengths.contiguous())
        stored, scale = (self.keys, self.values), 1 / math.sqrt(DIM)
        if tiles:
            attend_row_tiles(queries, *stored, out, step, scale, PAGE, window)
        else:
            splits = plan_fixed_splits(step, KV_HEADS, len(rows))
            attend_split_rows(queries, *stored, out, step, splits, scale, PAGE, 3, window)
            assert not splits.semaphores.any()
        return out

    def expected(self, context: int, length: int, window: int) -> torch.Tensor:
        """``[heads, dim]`` in float64."""
        first = 0 if window < 0 else max(0, length - 1 - window)
        slots = self.table[context, first:length].long()
        keys, values = (
            stored[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
            for stored in (self.keys, self.values)
        )
        scores = torch.einsum("hd,lhd->hl", self.queries[context][length].double(), keys)
        weights = torch.softmax(scores / math.sqrt(DIM), -1)
        return torch.einsum("hl,lhd->hd", weights, values)


def check_values(model: Model) -> None:
    """Both kernels compute attention, for rows of every kind; skipped rows stay as they are."""
    longest = model.lengths
    rows = [(1, longest[0]), (-1, 1), (2, 1), *((3, length) for length in range(57, 75)), (2, 300)]
    rows += [(1, 127), (1, 128), (1, 129), (1, 512), (1, 513), (3, 70), (3, 71)]
    for tiles, window in itertools.product((False, True), WINDOWS):
        out = model.attend(rows, window, tiles=tiles)
        for (context, length), found in zip(rows, out, strict=True):
            if context == SKIP_ROW:
                assert bool((found == 7.0).all())
                continue
            error = (found.double() - model.expected(context, length, window)).abs().max()
            assert error < TOLERANCE, (tiles, window, context, length, float(error))


def check_company(model: Model) -> None:
    """A row has the same bits alone and in any company, by each kernel."""
    rows = [(1, 513), (2, 300), *((3, length) for length in range(60, 70)), (1, 500)]
    for tiles, window in itertools.product((False, True), (-1, 66)):
        alone = {row: model.attend([row], window, tiles=tiles)[0] for row in rows}
        for seed in range(3):
            company = random.Random(seed).sample(rows, len(rows) - seed)
            if seed == 2:
                company = rows
            attended = model.attend(company, window, tiles=tiles)
            for row, found in zip(company, attended, strict=True):
                assert torch.equal(found, alone[row]), (tiles, window, seed, row)


def check_residual() -> None:
    """Sums are rounded once, squared as they are stored, and the same alone and in company."""
    rows, width = 5, 72
    # The interpreter does not round to bfloat16 as a GPU does.
    before, part = torch.randn(2, rows, width).half()
    expected = (before.double() + part.double()).half()
    residual = Residual(before.clone(), torch.full((rows, 2), math.nan))
    add_to_residual(part, residual)
    assert torch.equal(residual.rows, expected)
    squares = expected.double().square().sum(1)
    torch.testing.assert_close(residual.sum_squares.double().sum(1), squares, rtol=1e-5, atol=0.0)
    for first, end in ((0, 1), (3, 4), (2, 5)):
        sums = torch.full((end - first, 2), math.nan)
        some = Residual(before[first:end].clone(), sums)
        add_to_residual(part[first:end].contiguous(), some)
        assert torch.equal(some.rows, expected[first:end])
        assert torch.equal(some.sum_squares, residual.sum_squares[first:end])


def main() -> None:
    """Runs all checks."""
    for module in (batch_invariant, fixed_splits):
        module.MAX_SPLITS, module._MAX_SPLITS = MAX_SPLITS, tl.constexpr(MAX_SPLITS)
    fixed_splits._MIN_SPLIT_LEN = tl.constexpr(MIN_SPLIT_LEN)
    model = Model([520, 300, 90])
    check_values(model)
    check_company(model)
    check_residual()
    print("checked")


if __name__ == "__main__":
    main()
