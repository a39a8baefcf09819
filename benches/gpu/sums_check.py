"""Sums over ranks inside the norm, beside NCCL's and the norm behind them.

    python benches/gpu/sums_check.py [--ranks 2,4] [--width 5120] [--times]

Spawns a process for each GPU. Checks random turns of random rows against float64; with `--times`
prints for each number of rows what a sum with its norm takes, an all-reduce of
NCCL, and a norm without a sum, each captured 80 times in one graph.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROWS = (1, 8, 16, 32, 64, 128, 256)
EPSILON = 1e-6
TOLERANCE = 2e-2
STEPS = 200
SUMS = 80
REPEATS = 20


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error, of numbers above 1 their share."""
    return float(((found.double() - exact).abs() / exact.abs().clamp(min=1.0)).max())


def captured_us(step: Callable[[int], Any]) -> float:
    """Microseconds of one of the steps of a graph; all ranks call this at the same time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(2):
            step(turn)
        stream.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        for number in range(SUMS):
            step(number % 2)
        graph.capture_end()
        graph.replay()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.synchronize()
        dist.barrier()
        start.record()
        for _ in range(REPEATS):
            graph.replay()
        end.record()
        stream.synchronize()
    return start.elapsed_time(end) * 1000 / REPEATS / SUMS


class Check:
    """One rank's part."""

    def __init__(self, rank: int, count: int, width: int) -> None:
        from pie_driver_sglang.sglang.dense_triton import Norm
        from pie_driver_sglang.sglang.rank_sums import RankSums, share

        self.rank, self.count, self.width = rank, count, width
        self.group = dist.new_group(backend="gloo")
        device = torch.device("cuda", rank)
        size = RankSums.size(count, ROWS[-1], width, torch.bfloat16)
        shared = share(self.group, device, size)
        self.sums = RankSums(shared, rank, ROWS[-1], width, torch.bfloat16)
        self.common = torch.Generator(device).manual_seed(0)
        self.norm = Norm(self.random(width), EPSILON)

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
            theirs = [torch.empty_like(out) for _ in range(self.count)]
            dist.all_gather(theirs, out)
            if not all(torch.equal(out, other) for other in theirs):
                raise AssertionError(f"turn {turn}: the ranks go on with different numbers")
        self.say(f"{self.count} ranks, {STEPS} turns: off by {worst:.4f} at most")
        if worst > TOLERANCE:
            raise AssertionError(f"more than {TOLERANCE}")

    def times(self) -> None:
        """Prints a line for each number of rows."""
        from pie_driver_sglang.sglang.dense_triton import add_norm

        for rows in ROWS:
            residual, parts = self.random(rows, self.width), self.random(rows, self.width)
            ways: dict[str, Callable[[int], Any]] = {
                "ours": functools.partial(self.sums.add_norm, residual=residual, norm=self.norm),
                "NCCL": lambda _, parts=parts: dist.all_reduce(parts),
                "norm": lambda _, parts=parts, residual=residual: add_norm(
                    parts[None], residual, self.norm
                ),
            }
            shown = ", ".join(f"{name} {captured_us(step):.1f}" for name, step in ways.items())
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
    from pie_driver_sglang.sglang.environment import prepare

    for count in map(int, arguments.ranks.split(",")):
        prepare("cuda:0", [], spins=True, ranks=count)
        with tempfile.TemporaryDirectory() as folder:
            given = (count, arguments.width, str(Path(folder) / "store"), arguments.times)
            torch.multiprocessing.spawn(play, given, nprocs=count)
    sys.exit(0)


if __name__ == "__main__":
    main()
