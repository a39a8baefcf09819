"""How long kernels take that are launched as a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ROUNDS, _LAUNCHES = 6, 5


def time_graph(run: Callable[[], Any], count: int) -> float:
    """Microseconds of one of `count` products that are launched as a graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_LAUNCHES):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / _LAUNCHES / count)
    return min(times)
