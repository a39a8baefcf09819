"""The changed Triton interpreter still detects integer overflow."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _double(numbers):
    return numbers + numbers


@triton.jit
def _kernel(out, first, COUNT: tl.constexpr, OPERATION: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    numbers = first + offsets
    if OPERATION == "sub":
        numbers = -2 - numbers
    if OPERATION == "mul":
        numbers = numbers * 2
    if OPERATION == "called":
        numbers = _double(numbers)
    tl.store(out + offsets, numbers)


def outcome(operation: str, first: int) -> str:
    """What a kernel stores, or why it does not."""
    out = torch.zeros(4, dtype=torch.int32)
    try:
        _kernel[(1,)](out, first, 4, operation)
    except InterpreterError as error:
        return "overflow" if "int32 overflow" in str(error) else str(error)
    return str(out.tolist())


if __name__ == "__main__":
    most = 2**31 - 1
    cases = (("add", most - 3), ("add", most - 2), ("sub", most - 3), ("sub", most - 4),
             ("mul", 2**30 - 4), ("mul", 2**30 - 3), ("called", 2**30 - 3))  # fmt: skip
    for operation, first in cases:
        print(f"{operation}: {outcome(operation, first)}")
