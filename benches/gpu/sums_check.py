"""Sums over ranks inside the norm, beside NCCL's and the norm behind them.

    python benches/gpu/sums_check.py [--ranks 2,4] [--width 5120] [--times]

Spawns a process for each GPU. Checks random turns of random rows against float64, and graphs of
products and sums, as layers have them, against where they began. With `--times` prints what a turn
of such a graph takes for each number of rows: a product of 128 inputs and the sum with its norm,
the same by cuBLAS and NCCL, and without the other ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pie_driver_sglang.sglang.dense_triton import Linear, Norm, add_norm, tiling
from pie_driver_sglang.sglang.environment import prepare
from pie_driver_sglang.sglang.rank_sums import RankSums, share

ROWS = (1, 8, 16, 32, 64, 128, 256)
INPUTS = 128
EPSILON = 1e-6
TOLERANCE = 2e-2
DRIFT = 0.25
"""Of numbers to which products were added 40 times, and taken away; a product is of about 1."""
STEPS = 200
LAUNCHES = 40
TURNS = 80


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error, of numbers above 1 their share."""
    return float(((found.double() - exact).abs() / exact.abs().clamp(min=1.0)).max())


class Graph:
    """Turns that are captured; all ranks make it and launch it at the same time."""

    def __init__(self, step: Callable[[int], Any]) -> None:
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream):
            for turn in range(2):
                step(turn)
            self._stream.synchronize()
            dist.barrier()
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin(capture_error_mode="thread_local")
            for number in range(TURNS):
                step(number % 2)
            self._graph.capture_end()

    def launch(self, repeats: int = 1) -> float:
        """Launches it to its end; returns microseconds of a turn."""
        with torch.cuda.stream(self._stream):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            start.record()
            for _ in range(repeats):
                self._graph.replay()
            end.record()
            self._stream.synchronize()
        return start.elapsed_time(end) * 1000 / repeats / TURNS


class Rows:
    """Products of so many rows, which one turn adds to a residual and the next one takes away."""

    def __init__(self, check: Check, rows: int) -> None:
        self._check = check
        self.start, self.residual = check.random(rows, check.width), check.random(rows, check.width)
        self._given = check.random(rows, INPUTS)
        self._tiling = tiling(rows, check.width, INPUTS)

    def ours(self, turn: int) -> None:
        """As two ranks do it."""
        sums, matrix = self._check.sums, self._check.matrices[turn]
        sums.multiply(turn, self._given, matrix, self._tiling)
        sums.add_norm(turn, self.residual, self._check.norm)

    def nccl(self, turn: int) -> None:
        """With an all-reduce between product and norm."""
        parts = torch.mm(self._given, self._check.matrices[turn].weight.T)
        dist.all_reduce(parts)
        add_norm(parts[None], self.residual, self._check.norm)

    def alone(self, turn: int) -> None:
        """Without the other ranks."""
        parts = torch.mm(self._given, self._check.matrices[turn].weight.T)
        add_norm(parts[None], self.residual, self._check.norm)


class Check:
    """One rank's part."""

    def __init__(self, rank: int, count: int, width: int) -> None:
        self.rank, self.count, self.width = rank, count, width
        self.group = dist.new_group(backend="gloo")
        device = torch.device("cuda", rank)
        size = RankSums.size(count, ROWS[-1], width, torch.bfloat16)
        shared = share(self.group, device, size)
        self.sums = RankSums(shared, rank, ROWS[-1], width, torch.bfloat16)
        self.common = torch.Generator(device).manual_seed(0)
        self.norm = Norm(self.random(width), EPSILON)
        own = self.random(count, width, INPUTS)[rank] / INPUTS**0.5
        self.matrices = [Linear(own), Linear(-own)]

    def random(self, *shape: int) -> torch.Tensor:
        """The same numbers on all ranks."""
        numbers = torch.randn(shape, generator=self.common, device="cuda")
        return numbers.to(torch.bfloat16)

    def compare(self) -> None:
        """Compares random turns with sums in float64, and the ranks with each other."""
        worst = 0.0
        for turn in range(STEPS):
            pick = torch.randint(1, ROWS[-1] + 1, (1,), generator=self.common, device="cuda")
            parts = self.random(self.count, int(pick), self.width)
            residual = self.random(int(pick), self.width)
            exact = residual.double() + parts.double().sum(0)
            self.sums._own[turn % 2][: int(pick)].copy_(parts[self.rank])
            out, after = self.sums.add_norm(turn % 2, residual, self.norm)
            scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON)
            normed = exact * scale * self.norm.weight.double()
            worst = max(worst, off(out, normed), off(after, exact))
            self.expect_equal(out, f"turn {turn}")
        self.say(f"{self.count} ranks, {STEPS} turns: off by {worst:.4f} at most")
        if worst > TOLERANCE:
            raise AssertionError(f"more than {TOLERANCE}")

    def compare_graphs(self) -> None:
        """Launches graphs of products and sums in random order: each ends where it began."""
        works = [Rows(self, rows) for rows in ROWS]
        graphs = [Graph(work.ours) for work in works]
        worst = 0.0
        for launch in range(LAUNCHES):
            pick = int(torch.randint(len(works), (1,), generator=self.common, device="cuda"))
            works[pick].residual.copy_(works[pick].start)
            graphs[pick].launch()
            worst = max(worst, off(works[pick].residual, works[pick].start.double()))
            self.expect_equal(works[pick].residual, f"launch {launch}")
        self.say(f"{self.count} ranks, {LAUNCHES} launches: off by {worst:.3f} at most")
        if worst > DRIFT:
            raise AssertionError(f"more than {DRIFT}")

    def expect_equal(self, numbers: torch.Tensor, when: str) -> None:
        """All ranks go on with the same numbers."""
        theirs = [torch.empty_like(numbers) for _ in range(self.count)]
        dist.all_gather(theirs, numbers)
        if not all(torch.equal(numbers, other) for other in theirs):
            raise AssertionError(f"{when}: the ranks go on with different numbers")

    def times(self) -> None:
        """Prints a line for each number of rows."""
        for rows in ROWS:
            work = Rows(self, rows)
            ways = {"ours": work.ours, "NCCL": work.nccl, "alone": work.alone}
            shown = ", ".join(f"{name} {Graph(way).launch(20):.1f}" for name, way in ways.items())
            self.say(f"{self.count} ranks, {rows} x {self.width}: {shown} us")

    def say(self, line: str) -> None:
        """Prints, once for all ranks."""
        if self.rank == 0:
            print(line, flush=True)


def play(rank: int, count: int, width: int, path: str, times: bool) -> None:
    """Runs in a process of its own."""
    torch.cuda.set_device(rank)
    store = dist.FileStore(path, count)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=count)
    with torch.inference_mode():
        check = Check(rank, count, width)
        check.compare()
        check.compare_graphs()
        if times:
            check.times()
    dist.barrier()


def main() -> None:
    """Runs the check for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--width", type=int, default=5120)
    parser.add_argument("--times", action="store_true")
    arguments = parser.parse_args()
    for count in map(int, arguments.ranks.split(",")):
        prepare("cuda:0", [], spins=True, ranks=count)
        with tempfile.TemporaryDirectory() as folder:
            given = (count, arguments.width, str(Path(folder) / "store"), arguments.times)
            torch.multiprocessing.spawn(play, given, nprocs=count)
    sys.exit(0)


if __name__ == "__main__":
    main()
