"""Triton's interpreter, without what it does again for every call and every sum of integers.

What kernels compute and what is checked stay the same. To be imported where `TRITON_INTERPRET` is
set, before kernels run. Of Triton 3.6; with another version a name below may be missing, which
fails the import.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_SUMS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls.

    Triton patches its language for each such call. The kernel's launch has done so already, except
    for modules that only the function knows.
    """
    names = self.fn.__globals__.values()
    if any(core.is_builtin(lang.arange) for lang in names if lang is tl or lang is core):
        interpreter._patch_lang(self.fn)
    function = self.rewrite()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _check_overflow(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
    """Asserts that a result fits its type, by one operation instead of eight of Triton's."""
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    assert kind == rhs.type.scalar
    assert kind.is_int()
    # Half as wide as int64 at most, so this does not overflow.
    wide = [np.asarray(side.handle.data).astype(np.int64) for side in (lhs, rhs)]
    result = _SUMS[operation.__name__](*wide)
    low, high = kind.get_int_min_value(), kind.get_int_max_value()
    if not ((low <= result) & (result <= high)).all():
        raise AssertionError(f"int{kind.int_bitwidth} overflow in {operation.__name__}")


@functools.cache
def _shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """A tensor's shape and number of elements, as Triton makes them for every tensor."""
    return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    """A tensor; most of its making was its shape's."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape(tuple(type.shape.values) if type.is_block() else ())


_scalar_dtype = functools.cache(interpreter._get_np_dtype)
_ADDRESS = np.dtype(np.uint64)


def _np_dtype(kind: Any) -> np.dtype[Any]:
    """Of a type in Triton; there the whole table is made in every call."""
    scalar = kind.scalar
    return _ADDRESS if isinstance(scalar, core.pointer_type) else _scalar_dtype(scalar)


def install() -> None:
    """Changes this process's Triton."""
    assert interpreter.InterpretedFunction.__call__ is not _call
    assert core.tensor.__init__ is not _init_tensor
    assert TritonSemantic.binary_op_sanitize_overflow_impl is not _check_overflow
    interpreter.InterpretedFunction.__call__ = _call
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    interpreter._get_np_dtype = _np_dtype
    core.tensor.__init__ = _init_tensor
