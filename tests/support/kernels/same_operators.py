"""Compares fast operators of Triton's interpreter with Triton's own, operand by operand.

Run with ``TRITON_INTERPRET=1`` before any kernel, which would patch the language.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from triton import language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from support.kernels import fast_operators

KINDS = (tl.int1, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float32, tl.float64, tl.int8)
"""The last one is always left to Triton."""
SHAPES = ((), (1,), (4,), (2, 1), (2, 4))
LITERALS = (0, 3, -2, 2**31, 0.0, 2.5, -1e-40, 1e300, float("inf"), True, tl.constexpr(5))
OPERATORS = [
    f"__{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "radd", "rsub",
                 "rmul", "rtruediv", "rfloordiv", "rmod", "rand", "ror", "gt", "ge", "lt", "le",
                 "eq", "ne")
]  # fmt: skip
FUNCTIONS = ("maximum", "minimum")


def operand(kind: Any, shape: tuple[int, ...], generator: np.random.Generator) -> Any:
    """A random tensor, with numbers at the ends of its range and zeros."""
    data = generator.integers(-3, 4, shape or (1,))
    if kind.is_int_unsigned() or kind is tl.int1:
        data = abs(data)
    found = data.astype(interpreter._get_np_dtype(kind))
    if generator.random() < 0.2 and kind.is_int():
        found.flat[0] = kind.get_int_max_value()
    return made(found, kind, shape)


def made(data: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    """A tensor of numpy's data."""
    block = core.block_type(kind, list(shape)) if shape else kind
    return core.tensor(interpreter.TensorHandle(data, kind), block)


def pointer(shape: tuple[int, ...]) -> Any:
    """Addresses of int32."""
    kind = core.pointer_type(tl.int32)
    return made(np.arange(np.prod(shape, dtype=int), dtype=np.uint64).reshape(shape or (1,)) + 4096,
                kind, shape)  # fmt: skip


def operands(generator: np.random.Generator) -> Iterator[tuple[Any, Any]]:
    """Tensors with others of their type, with others, and with literals."""
    for kind, shape in itertools.product(KINDS, SHAPES):
        left = operand(kind, shape, generator)
        for other, size in itertools.product((kind, tl.int32, tl.int64, tl.float32), SHAPES):
            yield left, operand(other, size, generator)
        for literal in LITERALS:
            yield left, literal
    for shape, size, kind in itertools.product(SHAPES, SHAPES, KINDS[:6]):
        yield pointer(shape), operand(kind, size, generator)


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What it returns, or that it fails."""
    try:
        found = function(*arguments)
    except Exception as error:
        return "fails", "overflow" in str(error)
    data = found.handle.data
    shape, size = [each.value for each in found.shape], found.numel.value
    return str(found.type), str(found.dtype), data.dtype, data.shape, data.tobytes(), shape, size


def compare(owner: Any, name: str, cases: Iterator[tuple[Any, ...]]) -> tuple[int, int]:
    """How many results were compared, and how many of them had no need of Triton's way."""
    semantic = TritonSemantic(interpreter.interpreter_builder)
    member = getattr(owner, name)
    assert core.is_builtin(member), name
    calls = 0

    def usual(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return member(*args, _semantic=semantic)

    fast, count, own = fast_operators.find(owner, name, usual), 0, 0
    assert fast is not usual, name
    for arguments in cases:
        calls = 0
        found = outcome(fast, arguments)
        own += not calls
        count += 1
        expected = outcome(usual, arguments)
        assert found == expected, (name, *map(shown, arguments), found, expected)
    return count, own


def shown(value: Any) -> Any:
    """An operand in a message."""
    return (value.type, value.handle.data) if isinstance(value, core.tensor) else value


def selections(generator: np.random.Generator) -> Iterator[tuple[Any, Any, Any]]:
    """Conditions with both orders of what they choose from."""
    for left, right in operands(generator):
        for shape in ((), (4,)):
            condition = operand(tl.int1, shape, generator)
            yield condition, left, right
            yield condition, right, left


def casts(generator: np.random.Generator) -> Iterator[tuple[Any, Any]]:
    """Tensors of all types with all types, plain and as constants."""
    for kind, shape, to in itertools.product((*KINDS, tl.bfloat16), SHAPES, (*KINDS, tl.float16)):
        given = operand(kind, shape, generator)
        yield given, to
        yield given, tl.constexpr(to)


def indices(generator: np.random.Generator) -> Iterator[tuple[Any, Any]]:
    """Axes before, between and behind those of a block, and what is not allowed."""
    whole, places = slice(None), []
    for count in range(4):
        places += itertools.product((None, whole), repeat=count)
    for shape, place in itertools.product(SHAPES, [*places, None, whole, (slice(1), None)]):
        yield operand(tl.float32, shape, generator), place
        yield pointer(shape), place


def loads(generator: np.random.Generator, kept: list[Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Loads of all types, with masks of all shapes or none; what they read is put into `kept`."""
    for kind in (*KINDS, tl.float16, tl.bfloat16):
        kept.append(operand(kind, (64,), generator).handle.data)
        for shape, hidden in itertools.product(SHAPES, (None, 0, 0.0, -0.0, 7, float("-inf"), 2.5)):
            offsets = generator.permutation(64)[: np.prod(shape, dtype=int)].astype(np.uint64)
            places = kept[-1].ctypes.data + offsets * np.uint64(kept[-1].itemsize)
            address = made(places.reshape(shape or (1,)), core.pointer_type(kind), shape)
            yield address, None, hidden
            for size in SHAPES:
                yield address, operand(tl.int1, size, generator), hidden
            yield address, operand(tl.int32, shape, generator), hidden
            yield address, operand(tl.int1, shape, generator), operand(kind, shape, generator)


def main() -> None:
    """Compares all of them."""
    kept = list[Any]()
    generator = np.random.default_rng(3)
    for name in OPERATORS:
        counts = compare(core.tensor, name, operands(generator))
        assert counts[1] > 50, name
    for name in FUNCTIONS:
        counts = compare(tl, name, operands(generator))
        assert counts[1] > 50, name
    assert compare(tl, "where", selections(generator))[1] > 500
    assert compare(core.tensor, "to", casts(generator))[1] > 150
    assert compare(core.tensor, "__getitem__", indices(generator))[1] > 20
    assert compare(tl, "load", loads(generator, kept))[1] > 500
    print("the same")


if __name__ == "__main__":
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        main()
