"""Copies rows of many buffers in one launch, in Triton: pages of the KV cache in all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

COPY_BLOCK = 1024
"""Elements that a program copies."""


class BufferRows(NamedTuple):
    """Buffers of one dtype, by their addresses."""

    dtype: torch.dtype
    starts: torch.Tensor
    """``[buffers]`` int64: the address of each buffer's row 0."""
    strides: torch.Tensor
    """``[buffers]`` int64: elements from one row to the next."""
    widths: torch.Tensor
    """``[buffers]`` int32: elements of a row."""
    widest: int

    @classmethod
    def of(cls, buffers: Sequence[torch.Tensor]) -> BufferRows:
        """The rows of ``[rows, width]`` buffers, which must outlive this."""
        device = buffers[0].device
        widths = [buffer.shape[1] for buffer in buffers]
        return cls(
            buffers[0].dtype,
            torch.tensor([buffer.data_ptr() for buffer in buffers], device=device),
            torch.tensor([buffer.stride(0) for buffer in buffers], device=device),
            torch.tensor(widths, dtype=torch.int32, device=device),
            max(widths),
        )


@triton.jit
def _copy_rows(
    source_starts, source_strides, source_rows, target_starts, target_strides, target_rows, widths,
    ELEMENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    buffer = tl.program_id(1)
    elements = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = elements < tl.load(widths + buffer)
    pointer = tl.pointer_type(ELEMENT)
    source = tl.load(source_starts + buffer).to(pointer)
    source += tl.load(source_rows + pair) * tl.load(source_strides + buffer)
    target = tl.load(target_starts + buffer).to(pointer)
    target += tl.load(target_rows + pair) * tl.load(target_strides + buffer)
    tl.store(target + elements, tl.load(source + elements, mask=inside), mask=inside)


def copy_rows(
    source: BufferRows, source_rows: torch.Tensor, target: BufferRows, target_rows: torch.Tensor
) -> None:
    """Copies one row of every buffer for each pair; targets and sources are disjoint.

    Grid: (pairs, buffers, blocks of a row).

    Args:
        source: Buffers to read, of the same widths as those of `target`.
        source_rows: ``[pairs]`` int64.
        target: Buffers to write.
        target_rows: ``[pairs]`` int64, all different.
    """
    grid = (len(source_rows), len(source.starts), triton.cdiv(source.widest, COPY_BLOCK))
    _copy_rows[grid](
        source.starts, source.strides, source_rows,
        target.starts, target.strides, target_rows, source.widths,
        ELEMENT=tl.int64 if source.dtype == torch.int64 else tl.uint8, BLOCK=COPY_BLOCK,
    )  # fmt: skip
