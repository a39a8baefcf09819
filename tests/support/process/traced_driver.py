"""A driver with a trace of the path of each batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from support.process import drivers

PATHS = {"launch": "graph", "forward": "python"}
"""By the phase that only they have."""


class Traced:
    """A driver that tells which path took a batch."""

    def __init__(self, driver: drivers.Driver, trace: Path) -> None:
        self.driver = driver
        self.client = driver.client()
        self.caps = driver.caps
        self.vocab = int(driver.caps["vocab_size"])
        self._trace = trace

    def paths(self) -> list[str]:
        """The path of each batch so far."""
        # It is answered once the last batch is in the trace.
        self.client.health()
        names = [event["name"] for event in json.loads(self._trace.read_text())]
        return [PATHS[name] for name in names if name in PATHS]


def start(
    folder: Path,
    snapshot: Path,
    ranks: int = 1,
    fork: Callable[[Path], drivers.Driver] = drivers.fork,
    **options: object,
) -> Iterator[Traced]:
    trace = folder / "trace.json"
    options = {"trace_file": str(trace), **options}
    config = drivers.write_config(folder, snapshot, options=options, **drivers.spread(ranks))
    with fork(config) as driver:
        yield Traced(driver, trace)
    assert driver.stop() == 0
