"""Start spans of kernels that Triton compiles; those that it finds in its cache have none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from pie_driver_sglang.observability import start_spans

try:
    from triton import knobs
except ImportError:  # a machine without Triton has no kernels to compile
    knobs = None


@contextlib.contextmanager
def triton_compiles() -> Iterator[None]:
    """Within it, each compilation of a Triton kernel is recorded as a start span."""
    if knobs is None:
        yield
        return
    previous = knobs.compilation.listener

    def on_compiled(*, src: Any, times: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            now = time.monotonic()
            name = getattr(src, "name", "kernel")
            start_spans.add(f"compile {name}", now - times.total / 1e6, now)
        if previous is not None:
            previous(src=src, times=times, cache_hit=cache_hit, **others)

    knobs.compilation.listener = on_compiled
    try:
        yield
    finally:
        knobs.compilation.listener = previous
