"""Operators of Triton's interpreter for the usual operands, without the steps of its semantics.

Usual are a tensor with another of its type, int32 with int64, and a tensor with a number that its
type can hold. Triton makes up to ten objects for a sum of two such tensors, which take longer than
the sum. Loads, casts and axes that are added to a block are numpy's as well. Anything else goes
Triton's way, as do types that numpy lacks. Results, types and overflow checks are the same:
`tests/test_interpreter.py` compares both ways.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

_WIDE: Final = frozenset({"int64", "uint64"})
_INTS: Final = frozenset({"int32", "uint32", *_WIDE})
_FLOATS: Final = frozenset({"fp32", "fp64"})
_NUMBERS: Final = _INTS | _FLOATS
_SELECTED: Final = _NUMBERS | {"int1"}
_BITS: Final = _INTS | {"int1"}
_SIGNED_INTS: Final = frozenset({"int32", "int64"})
"""Types of which Triton makes a literal that fits int32."""
_SIGNED: Final = _FLOATS | _SIGNED_INTS
_HALVES: Final = frozenset({"fp16", "bf16"})
_ALL: Final = slice(None)
_TINY, _HUGE = 2.0**-126, 2.0**127
"""Literals between them are float32."""

_np_dtype = functools.cache(interpreter._get_np_dtype)

_Compute = Callable[[Any, Any], Any]
_types: dict[tuple[str, tuple[int, ...]], tuple[Any, Any, Any]] = {}


def _shaped(kind: Any, sizes: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Type, shape and number of elements of a block."""
    found = _types.get((kind.name, sizes))
    if found is None:
        block = core.block_type(kind, list(sizes))
        model = core.tensor(interpreter.TensorHandle(np.zeros(sizes), core.float64), block)
        found = _types[kind.name, sizes] = block, model.shape, model.numel
    return found


_SCALAR: Final = core.tensor(interpreter.TensorHandle(np.zeros(1), core.float64), core.float64)


def _tensor(data: Any, kind: Any, scalar: bool) -> Any:
    """A tensor of numpy's data, which has the type `kind`; a scalar has one element, too."""
    handle = interpreter.TensorHandle.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, kind, {}
    found = core.tensor.__new__(core.tensor)
    found.handle, found.dtype = handle, kind
    if scalar:
        found.type, found.shape, found.numel = kind, _SCALAR.shape, _SCALAR.numel
    else:
        found.type, found.shape, found.numel = _shaped(kind, data.shape)
    return found


def _is_literal(value: Any, name: str) -> bool:
    """Whether an operation of a tensor with this number has the tensor's type."""
    if type(value) is int:
        return name in _FLOATS or (name in _SIGNED_INTS and -(2**31) <= value < 2**31)
    return type(value) is float and name in _FLOATS and (
        value == 0 or _TINY <= abs(value) <= _HUGE or abs(value) == float("inf")
    )  # fmt: skip


def _narrow(name: str, operation: str, wide: Any) -> Any:
    """A sum, difference or product in its type, in which it must fit."""
    found = wide.astype(np.int32 if name == "int32" else np.uint32)
    if not (found == wide).all():
        raise AssertionError(f"{name} overflow in {operation}")
    return found


def _checked(name: str, compute: Any) -> Any:
    """What adds, subtracts or multiplies numbers of a type; int64 is not checked."""
    if name not in _INTS or name in _WIDE:
        return compute
    # Half as wide as int64 at most, so this does not overflow.
    return lambda left, right: _narrow(name, compute.__name__, compute(left, right, dtype=np.int64))


def _divide(left: Any, right: Any) -> Any:
    """Division of integers, which rounds towards zero."""
    return (left - np.fmod(left, right)) // right


_ARITHMETIC: Final[dict[str, tuple[Any, frozenset[str]]]] = {
    "add": (np.add, _NUMBERS),
    "sub": (np.subtract, _NUMBERS),
    "mul": (np.multiply, _NUMBERS),
    "truediv": (np.divide, _FLOATS),
    "floordiv": (_divide, _INTS),
    "mod": (np.fmod, _INTS),
    "and": (np.bitwise_and, _BITS),
    "or": (np.bitwise_or, _BITS),
}
_COMPARISONS: Final = {
    "gt": np.greater,
    "ge": np.greater_equal,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
_LARGER: Final = {"maximum": np.maximum, "minimum": np.minimum}


def _by_type(compute: Any, kinds: frozenset[str], checked: bool) -> dict[str, _Compute]:
    return {name: _checked(name, compute) if checked else compute for name in kinds}


def _binary(usual: Any, computes: dict[str, _Compute], truth: bool, swapped: bool) -> Any:
    """A binary operator, `usual` where operands are not.

    Args:
        usual: Triton's.
        computes: What computes it, by the operands' type.
        truth: Whether results are true or false.
        swapped: Whether the tensor is its right operand.
    """

    def call(self: Any, other: Any, **more: Any) -> Any:
        kind = self.dtype
        compute = computes.get(kind.name)
        if compute is None:
            return usual(self, other, **more)
        given = type(other)
        scalar = self.type is kind
        if given is core.constexpr:
            other = other.value
            given = type(other)
        if given is core.tensor:
            scalar = scalar and other.type is other.dtype
            if other.dtype.name != kind.name:
                if {kind.name, other.dtype.name} != _SIGNED_INTS:
                    return usual(self, other, **more)
                # Both are int64 then, which numpy makes of them as well.
                compute, kind = computes["int64"], core.int64
            other_data = other.handle.data
        elif _is_literal(other, kind.name):
            other_data = other
        else:
            return usual(self, other, **more)
        own = self.handle.data
        data = compute(other_data, own) if swapped else compute(own, other_data)
        return _tensor(data, core.int1 if truth else kind, scalar)

    return call


def _offset(usual: Any, others: Any) -> Any:
    """A sum with a tensor, which may be of pointers; `others` adds numbers."""

    def call(self: Any, other: Any, **more: Any) -> Any:
        kind = self.dtype
        if type(kind) is not core.pointer_type:
            return others(self, other, **more)
        if type(other) is not core.tensor or other.dtype.name not in _INTS:
            return usual(self, other, **more)
        width = max(1, kind.element_ty.primitive_bitwidth // 8)
        # Two's complement: negative offsets wrap around, as addresses do.
        data = self.handle.data + width * other.handle.data.astype(np.uint64)
        return _tensor(data, kind, self.type is kind and other.type is other.dtype)

    return call


def _select(usual: Any) -> Any:
    """`tl.where`."""

    def call(condition: Any, x: Any, y: Any, **more: Any) -> Any:
        sides = [each.value if type(each) is core.constexpr else each for each in (x, y)]
        tensors = [each for each in sides if type(each) is core.tensor]
        if not tensors or type(condition) is not core.tensor or condition.dtype is not core.int1:
            return usual(condition, x, y, **more)
        kind = tensors[0].dtype
        name = kind.name
        alike = name in _SELECTED and all(
            each.dtype.name == name if type(each) is core.tensor else _is_literal(each, name)
            for each in sides
        )
        if not alike:
            return usual(condition, x, y, **more)
        scalar = all(each.type is each.dtype for each in (condition, *tensors))
        data = [each.handle.data if type(each) is core.tensor else each for each in sides]
        return _tensor(np.where(condition.handle.data, *data), kind, scalar)

    return call


def _function(usual: Any, found: Any) -> Any:
    """A function of two operands, of which the first one must be a tensor."""

    def call(*args: Any, **more: Any) -> Any:
        usable = len(args) == 2 and not more and type(args[0]) is core.tensor
        return found(*args) if usable else usual(*args, **more)

    return call


def _index(usual: Any) -> Any:
    """A block with more axes, as `x[:, None]` and `x[None, :]`."""

    def call(self: Any, slices: Any, **more: Any) -> Any:
        whole = [each for each in slices if each is not None] if type(slices) is tuple else None
        if (
            whole is None
            or self.type is self.dtype
            or len(whole) != self.handle.data.ndim
            or any(type(each) is not slice or each != _ALL for each in whole)
        ):
            return usual(self, slices, **more)
        return _tensor(self.handle.data[slices], self.dtype, scalar=False)

    return call


def _cast(usual: Any) -> Any:
    """`x.to(type)`."""

    def call(self: Any, kind: Any, *rules: Any, **more: Any) -> Any:
        given = kind.value if type(kind) is core.constexpr else kind
        if rules or more or type(given) is not core.dtype or self.dtype.name not in _NUMBERS:
            return usual(self, kind, *rules, **more)
        if given.name == self.dtype.name:
            return self
        if given.name not in _SIGNED or self.dtype.name not in _SIGNED:
            return usual(self, kind)
        return _tensor(self.handle.data.astype(_np_dtype(given)), given, self.type is self.dtype)

    return call


def _load(usual: Any) -> Any:
    """`tl.load` by tensors of pointers, with a mask or without; `other` is a number, or none."""

    def call(pointer: Any, mask: Any = None, other: Any = None, **more: Any) -> Any:
        kind = pointer.dtype
        element = kind.element_ty if type(kind) is core.pointer_type else None
        scalar = pointer.type is kind
        usable = element is not None and not more and (
            (other is None or (mask is not None and _is_literal(other, element.name)))
            if element.name in _NUMBERS
            else other is None and element.name in _HALVES
        )  # fmt: skip
        if usable and mask is not None:
            usable = type(mask) is core.tensor and mask.dtype is core.int1
            usable = usable and (not scalar or mask.type is mask.dtype)
        if not usable:
            return usual(pointer, mask, other, **more)
        addresses, width = pointer.handle.data, _np_dtype(element)
        if mask is None:
            seen = np.ones(addresses.shape, bool)
        else:
            seen = mask.handle.data
            if seen.shape != addresses.shape:
                both = np.broadcast_arrays(addresses, seen)
                addresses, seen = map(np.ascontiguousarray, both)
        hidden = np.full(addresses.shape, other or 0, width)
        found = interpreter._interpreter.load(addresses, seen, hidden, width)
        return _tensor(found, element, scalar)

    return call


def find(owner: Any, name: str, usual: Any) -> Any:
    """What replaces an operator or function of the language; `usual` where nothing does."""
    if owner is core.tensor and name == "to":
        return _cast(usual)
    if owner is core.tensor and name == "__getitem__":
        return _index(usual)
    if owner in (tl, core) and name == "load":
        return _load(usual)
    if owner is core.tensor and name.startswith("__"):
        plain = name.strip("_")
        if plain in _COMPARISONS:
            computes = _by_type(_COMPARISONS[plain], _NUMBERS, checked=False)
            return _binary(usual, computes, truth=True, swapped=False)
        swapped = plain not in _ARITHMETIC
        base = plain.removeprefix("r")
        if base in _ARITHMETIC:
            compute, kinds = _ARITHMETIC[base]
            computes = _by_type(compute, kinds, checked=base in ("add", "sub", "mul"))
            found = _binary(usual, computes, truth=False, swapped=swapped)
            return _offset(usual, found) if plain == "add" else found
    if owner in (tl, core):
        if name in _LARGER:
            computes = _by_type(_LARGER[name], _NUMBERS, checked=False)
            return _function(usual, _binary(usual, computes, truth=False, swapped=False))
        if name == "where":
            return _select(usual)
    return usual
