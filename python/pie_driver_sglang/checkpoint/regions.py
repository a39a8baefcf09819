"""Memory regions of strided tensors, and whether some of them cover another."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pie_driver_sglang.checkpoint.tensors import Region


def region_of(
    offset: int, sizes: Sequence[int], strides: Sequence[int], itemsize: int
) -> Region | None:
    """The region of a tensor; None if it is empty.

    Args:
        offset: Of its first element, in elements.
        sizes: Its shape.
        strides: In elements, none negative.
        itemsize: Bytes of an element.
    """
    dims = _dims(tuple(sizes), tuple(strides), itemsize)
    return Region(offset * itemsize, dims) if dims else None


@functools.lru_cache(maxsize=1024)
def _dims(
    sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, int], ...]:
    """Merged dimensions of a region, empty for no elements. Cached, for there are few shapes."""
    if 0 in sizes:
        return ()
    steps = [
        (stride * itemsize, size)
        for size, stride in zip(sizes, strides, strict=True)
        if size > 1 and stride > 0
    ]
    dims = [(itemsize, 1)]
    for stride, size in sorted(steps):
        length, inner = dims[-1]
        if stride == length * inner:
            dims[-1] = (length * size, inner)
        else:
            dims.append((size, stride))
    return tuple(dims)


def is_covered(whole: Region, parts: Iterable[Region]) -> bool:
    """Whether every byte of `whole` is in one of `parts`."""
    distinct = set(parts)
    if whole in distinct:
        return True
    if sum(_bytes(part) for part in distinct) < _bytes(whole):
        return False
    regions = [whole, *distinct]
    start = min(region.offset for region in regions)
    unit = math.gcd(*(number for region in regions for number in _steps(region, start)))
    covered = np.zeros(-(-(max(region.end for region in regions) - start) // unit), dtype=bool)
    for part in distinct:
        _view(covered, part, start, unit)[...] = True
    return bool(_view(covered, whole, start, unit).all())


def _bytes(region: Region) -> int:
    return math.prod(length for length, _ in region.dims)


def _steps(region: Region, start: int) -> list[int]:
    """Numbers whose greatest common divisor is a unit of this region."""
    (run, _), *others = region.dims
    return [region.offset - start, run, *(stride for _, stride in others)]


def _view(
    memory: npt.NDArray[np.bool_], region: Region, start: int, unit: int
) -> npt.NDArray[np.bool_]:
    """A region as a view of a byte map from `start` on, one element per `unit` bytes."""
    (run, _), *others = region.dims
    shape = [run // unit, *(length for length, _ in others)]
    strides = [1, *(stride // unit for _, stride in others)]
    first = (region.offset - start) // unit
    return np.lib.stride_tricks.as_strided(memory[first:], shape, strides)
