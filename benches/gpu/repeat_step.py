"""A command for the ranks of a model that is timed."""

from __future__ import annotations

from typing import Any, NamedTuple


class Repeat(NamedTuple):
    """Launch the graph for `rows` rows back to back."""

    rows: int
    repeats: int = 50

    def run(self, engine: Any) -> float:
        """Launches it; returns the microseconds of each."""
        return float(engine.steps.time(self.rows, self.repeats))
