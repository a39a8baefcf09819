"""Memory of the graph path by the sizes of its graphs."""

from __future__ import annotations

import array

import pytest

from pie_driver_sglang import _core


def graph_path(results: int, grouped: list[int]) -> _core.GraphPath:
    """A graph path with graphs of 8 rows and 64 slots, and of `grouped` rows."""
    return _core.GraphPath.call(
        bytearray(1 << 20),
        array.array("i", [0]),
        array.array("Q", [0] * results),
        array.array("i", [0]),
        [8],
        64,
        8,
        lambda graph: None,
        grouped,
    )


def test_results_have_a_word_for_each_slot_of_the_largest_graph() -> None:
    for fewest, grouped in [(8, []), (8, [4]), (16, [4, 16]), (64, [64])]:
        graph_path(fewest, grouped)
        with pytest.raises(ValueError, match=f"results.*{8 * fewest}"):
            graph_path(fewest - 1, grouped)
