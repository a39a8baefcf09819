"""Byte ranges that strided tensors cover."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from pie_driver_sglang.checkpoint.regions import is_covered, region_of

SHAPE = (6, 4, 10)
Cut = tuple[slice, slice, slice]


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """A part of an array of that shape: some of each dimension, every second at times."""
    slices = []
    for length in SHAPE:
        start = draw(st.integers(0, length - 1))
        stop = draw(st.integers(start, length))
        whole = draw(st.booleans())
        slices.append(slice(None) if whole else slice(start, stop, draw(st.sampled_from([1, 2]))))
    first, second, third = slices
    return first, second, third


@given(st.lists(cuts(), max_size=6), cuts(), st.booleans(), st.sampled_from(["u1", "f4", "f8"]))
def test_as_a_map_of_all_bytes(parts: list[Cut], whole: Cut, turned: bool, dtype: str) -> None:
    memory = np.zeros(SHAPE, dtype=dtype)
    seen = np.zeros(SHAPE, dtype=bool)
    for part in parts:
        seen[part] = True
    regions = [region(memory, part, turned) for part in parts]
    target = region(memory, whole, turned=False)
    if target is None:
        assert memory[whole].size == 0
    else:
        found = [part for part in regions if part is not None]
        assert is_covered(target, found) == bool(seen[whole].all())


def region(memory: npt.NDArray[np.generic], part: Cut, turned: bool) -> object:
    view = memory[part].T if turned else memory[part]
    start = view.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    strides = [stride // view.itemsize for stride in view.strides]
    return region_of(start // view.itemsize, view.shape, strides, view.itemsize)


def test_a_repeated_element_is_one() -> None:
    row = region_of(0, (4, 8), (0, 1), 4)
    assert row == region_of(0, (8,), (1,), 4)


def test_a_large_tensor_costs_little() -> None:
    """Halves of the columns of 10 GB."""
    rows, columns = 100_000, 50_000
    whole = region_of(0, (rows, columns), (columns, 1), 2)
    halves = [region_of(at, (rows, columns // 2), (columns, 1), 2) for at in (0, columns // 2)]
    assert whole is not None
    found = [half for half in halves if half is not None]
    assert is_covered(whole, found)
    assert not is_covered(whole, found[:1])
