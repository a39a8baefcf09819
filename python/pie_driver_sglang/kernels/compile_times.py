"""Times of kernels that Triton compiles; those that it finds in its cache have none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from triton import knobs

RecordTime = Callable[[str, float, float], None]
"""Takes a name, and begin and end in seconds of `time.monotonic`."""


@contextlib.contextmanager
def timing_compilations(record: RecordTime) -> Iterator[None]:
    """Within it, each compilation of a Triton kernel is recorded, by the kernel's name."""
    previous = knobs.compilation.listener

    def on_compiled(*, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            now = time.monotonic()
            record(f"compile {getattr(src, 'name', 'kernel')}", now - times.total / 1e6, now)
        if previous is not None:
            previous(src=src, times=times, cache_hit=cache_hit, **others)

    knobs.compilation.listener = on_compiled
    try:
        yield
    finally:
        knobs.compilation.listener = previous
