"""Speeds up Triton's interpreter: no repeated patching, cached types, cheaper overflow checks.

What kernels compute and what is checked stay the same. To be imported where `TRITON_INTERPRET` is
set, before kernels run. Of Triton 3.6 and 3.8; with another version a name below may be missing,
which fails the import.
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

from support.kernels import fast_operators

_SUMS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls.

    Triton patches its language for each such call. The kernel's launch has done so already, except
    for modules that only the function knows.
    """
    _patch_lang(self.fn)
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


_block_types: dict[tuple[str, bool, tuple[int, ...]], tuple[Any, int, str]] = {}


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """The type of a block, whose parts are those of the first of its kind."""
    sizes = tuple([getattr(size, "value", size) for size in shape])
    key = element_ty.name, getattr(element_ty, "const", False), sizes
    found = _block_types.get(key)
    if found is None:
        _triton_block_type(self, element_ty, shape)
        _block_types[key] = self.shape, self.numel, self.name
    else:
        self.element_ty = element_ty
        self.shape, self.numel, self.name = found


_triton_block_type = core.block_type.__init__


def _broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Two operands in their common shape, by one operation each instead of one for each axis."""
    left, right = (side.type.shape.values if side.type.is_block() else [] for side in (lhs, rhs))
    if left == right:
        return lhs, rhs
    axes = max(len(left), len(right))
    pairs = zip(*([1] * (axes - len(each)) + each for each in (left, right)), strict=True)
    shape = [b if a == 1 else a for a, b in pairs]
    return _spread(lhs, left, shape), _spread(rhs, right, shape)


def _spread(operand: Any, own: list[int], shape: list[int]) -> Any:
    if own == shape:
        return operand
    kind = operand.type.scalar
    data = operand.handle.data
    if own:
        spread = np.broadcast_to(data.reshape([1] * (len(shape) - len(own)) + own), shape)
    else:
        # One element, whatever its shape in numpy. A store of Triton 3.8 reads it without strides.
        spread = np.full(shape, data.item(), data.dtype)
    return core.tensor(interpreter.TensorHandle(spread, kind), core.block_type(kind, shape))


_PLAIN = frozenset({"int1", "int32", "uint32", "int64", "uint64", "fp32", "fp64"})
"""Types that two operands of one type keep, whatever is computed of them."""
_triton_operands = TritonSemantic.binary_op_type_checking_impl


def _operands(self: Any, lhs: Any, rhs: Any, *rules: Any, **more: Any) -> tuple[Any, Any]:
    """Two operands in their common type and shape."""
    if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
        kind = lhs.dtype.name
        if kind == rhs.dtype.name and kind in _PLAIN:
            return _broadcast(self, lhs, rhs)
    return _triton_operands(self, lhs, rhs, *rules, **more)


def _patch_function(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Gives a function of the language what it computes by, as Triton does with more steps."""
    semantic = TritonSemantic(builder)

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return member(*args, **kwargs)

    scope.set_attr(owner, name, fast_operators.find(owner, name, call))


class _Patched:
    """In place of a scope that is restored: the language stays patched."""

    def restore(self) -> None:
        """Does nothing."""


def _patch_lang(function: Any) -> Any:
    """Patches the modules of the language that a kernel knows, unless they are."""
    names = function.__globals__.values()
    if any(core.is_builtin(lang.arange) for lang in names if lang is tl or lang is core):
        _triton_patch_lang(function)
    return _Patched()


triton_scan = interpreter.ScanOps.generic_scan
_triton_patch_lang = interpreter._patch_lang
_triton_to_tensor = TritonSemantic.to_tensor


def _to_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
    """What every assignment calls, mostly with a tensor."""
    return value if type(value) is core.tensor else _triton_to_tensor(self, value, check_type)


def _scan(self: Any, operands: Any) -> list[Any]:
    """A scan by any function: a call for each doubling of what an element has seen, not for each.

    Only associative functions give the same, as they must on a GPU, too.
    """
    axis, kinds = self.axis, [each.dtype for each in operands]
    found = [each.handle.data.copy() for each in operands]
    count, seen = found[0].shape[axis], 1
    while seen < count:
        # Blocks have sizes of powers of two, so the first elements are combined as well.
        shifted = np.maximum(np.arange(count) - seen, 0)
        before, after = (
            [self.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]
            for parts in ([part.take(shifted, axis) for part in found], found)
        )
        combined = self.combine_fn.fn(*before, *after)
        combined = combined if isinstance(combined, tuple) else (combined,)
        kept = (slice(None),) * axis + (slice(seen, None),)
        for part, each in zip(found, combined, strict=True):
            part[kept] = each.handle.data[kept]
        seen *= 2
    return [self.to_tensor(part, kind) for part, kind in zip(found, kinds, strict=True)]


_scalar_dtype = functools.cache(interpreter._get_np_dtype)
_ADDRESS = np.dtype(np.uint64)


def _np_dtype(kind: Any) -> np.dtype[Any]:
    """Of a type in Triton; there the whole table is made in every call."""
    scalar = kind.scalar
    return _ADDRESS if isinstance(scalar, core.pointer_type) else _scalar_dtype(scalar)


def install() -> None:
    """Changes this process's Triton."""
    assert interpreter.InterpretedFunction.__call__ is not _call
    assert interpreter._patch_lang is not _patch_lang
    assert core.tensor.__init__ is not _init_tensor
    assert TritonSemantic.binary_op_sanitize_overflow_impl is not _check_overflow
    interpreter.InterpretedFunction.__call__ = _call
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    interpreter._get_np_dtype = _np_dtype
    core.tensor.__init__ = _init_tensor
    core.block_type.__init__ = _init_block_type
    TritonSemantic.broadcast_impl_value = _broadcast
    TritonSemantic.binary_op_type_checking_impl = _operands
    TritonSemantic.to_tensor = _to_tensor
    interpreter.ScanOps.generic_scan = _scan
    interpreter._patch_attr = _patch_function
    interpreter._patch_lang = _patch_lang
