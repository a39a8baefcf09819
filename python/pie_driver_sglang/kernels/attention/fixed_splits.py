"""Splits of KV at fixed positions, and their plan for a step, computed on the device, in Triton.

How a row is split depends on its KV length alone, so that batch-invariant attention adds in one
order whatever the batch is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.attention.split_plan import SKIP_ROW, DecodeRows
from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

MAX_SPLITS = 16
"""Most splits of a row."""
MIN_SPLIT_LEN = 256
"""Tokens of a split of short contexts."""
_MAX_SPLITS, _MIN_SPLIT_LEN, _SKIP_ROW = (
    tl.constexpr(MAX_SPLITS),
    tl.constexpr(MIN_SPLIT_LEN),
    tl.constexpr(SKIP_ROW),
)
_PLANNED_ROWS = 256
"""Rows of an iteration of :func:`plan_fixed_splits`."""


class FixedSplits(NamedTuple):
    """The splits of the rows of a step, for `batch_invariant.attend_split_rows`."""

    total: torch.Tensor
    """``[1]`` int32: splits of all rows."""
    items: torch.Tensor
    """``[most]`` int32: ``row * MAX_SPLITS + split`` of each, in ascending order."""
    semaphores: torch.Tensor
    """``[rows, kv_heads]`` int32, zeros between layers: splits of a row that are stored."""


def split_len(kv_len: int) -> int:
    """Tokens of a split of a row that sees so many.

    256 up to 4,096, then a sixteenth of the next power of two.
    """
    return max(MIN_SPLIT_LEN, int(triton.next_power_of_2(kv_len)) // MAX_SPLITS)


def plan_fixed_splits(rows: DecodeRows, kv_heads: int, max_rows: int) -> FixedSplits:
    """Lists the splits of a step's rows. Can be captured. Rows of `SKIP_ROW` have none.

    A kernel without PDL must run before the first `attend_split_rows`.

    Args:
        rows: The rows of the step.
        kv_heads: Of all layers.
        max_rows: Most rows that have more than one split, by which partial results are sized.
    """
    count = len(rows.kv_lens)
    most = count + MAX_SPLITS * min(count, max_rows)
    new = rows.kv_lens.new_empty
    splits = FixedSplits(
        new(1, dtype=torch.int32),
        new(most, dtype=torch.int32),
        new((count, kv_heads), dtype=torch.int32),
    )
    _plan_fixed_splits[(1,)](
        rows.table_rows, rows.kv_lens, *splits, count,
        ROWS=_PLANNED_ROWS, KV_HEADS=kv_heads, num_warps=8, **pdl_options(rows.kv_lens.device),
    )  # fmt: skip
    return splits


@triton.jit
def row_split_len(kv_len):
    """As :func:`split_len`, for one KV length."""
    length = _MIN_SPLIT_LEN
    # Lengths are below 2^31.
    for _ in tl.static_range(20):
        length = tl.where(kv_len > length * _MAX_SPLITS, length * 2, length)
    return length


@triton.jit(do_not_specialize=["row_count"])
def _plan_fixed_splits(
    table_rows, kv_lens, total, items, semaphores, row_count, ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program lists all splits, row by row."""
    if PDL:
        pdl_wait_trigger()
    passed = 0
    for first in range(0, row_count, ROWS):
        rows = first + tl.arange(0, ROWS)
        known = rows < row_count
        listed = known & (tl.load(table_rows + rows, mask=known, other=_SKIP_ROW) != _SKIP_ROW)
        kv_len = tl.load(kv_lens + rows, mask=listed, other=0).to(tl.int32)
        count = tl.where(listed, tl.maximum(tl.cdiv(kv_len, row_split_len(kv_len)), 1), 0)
        start = passed + tl.cumsum(count, 0) - count
        for split in tl.static_range(_MAX_SPLITS):
            tl.store(items + start + split, rows * _MAX_SPLITS + split, mask=split < count)
        for head in range(KV_HEADS):
            tl.store(semaphores + rows * KV_HEADS + head, 0, mask=known)
        passed += tl.sum(count)
    tl.store(total, passed)
