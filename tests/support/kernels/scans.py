"""Compares the interpreter's scans with Triton's, which call a function for each element.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import ScanOps

from support.kernels.fast_interpreter import triton_scan


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit
def _last(value, at, other, other_at):
    """The value at the last place that has one: its order matters."""
    return tl.where(other_at > at, other, value), tl.maximum(at, other_at)


@triton.jit
def _kernel(numbers, out, places, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr):
    offsets = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None]
    found = tl.load(numbers + offsets)
    at = tl.where(found > 0, offsets, -1)
    tl.store(out + offsets, tl.associative_scan(found, AXIS, _max))
    last, at = tl.associative_scan((found, at), AXIS, _last)
    tl.store(out + ROWS * COLUMNS + offsets, last)
    tl.store(places + offsets, at)
    back = tl.associative_scan(found, AXIS, _max, reverse=True)
    tl.store(out + 2 * ROWS * COLUMNS + offsets, back)


def scanned(rows: int, columns: int, axis: int) -> list[float]:
    """Everything that the kernel finds."""
    torch.manual_seed(rows + columns)
    numbers = torch.randint(-3, 4, (rows, columns), dtype=torch.int32)
    out, places = torch.zeros(3, rows, columns, dtype=torch.int32), torch.zeros_like(numbers)
    _kernel[(1,)](numbers, out, places, rows, columns, axis)
    found: list[float] = torch.cat([out.flatten(), places.flatten()]).tolist()
    return found


if __name__ == "__main__":
    own = ScanOps.generic_scan
    assert own is not triton_scan
    for shape in ((1, 1), (1, 8), (4, 1), (4, 16)):
        for axis in (0, 1):
            ScanOps.generic_scan = own
            found = scanned(*shape, axis)
            ScanOps.generic_scan = triton_scan
            assert found == scanned(*shape, axis), (shape, axis)
            assert np.any(found), shape
    print("the same")
