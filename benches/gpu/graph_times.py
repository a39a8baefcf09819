"""How long kernels take that are launched as a graph, and what kernels a launch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ROUNDS, _ROUND_US = 6, 3000
_SHOWN = 20


def time_graph(run: Callable[[], Any], count: int) -> float:
    """Microseconds of one of `count` calls that are captured as a graph: the best round."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def round_us(launches: int) -> float:
        start.record()
        for _ in range(launches):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000 / launches

    launches = max(5, int(_ROUND_US / round_us(2)))
    return min(round_us(launches) for _ in range(_ROUNDS)) / count


def print_kernels(run: Callable[[], object]) -> None:
    """Prints the kernels of a run by name: launches and time, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    print(averages.table(sort_by="cuda_time_total", row_limit=_SHOWN, max_name_column_width=90))
