"""Sums over ranks inside the norm, against what SGLang and NCCL do in front of one.

    python benches/gpu/sums_check.py [--ranks 2,4] [--width 5120] [--times]

Spawns a process for each GPU. Checks random turns of random rows against float64; with `--times`
prints for each number of rows what a sum with its norm takes, captured 80 times in one graph.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROWS = (1, 8, 16, 32, 64, 128, 256)
EPSILON = 1e-6
STEPS = 200
SUMS = 80
REPEATS = 20


def captured_us(step: Callable[[int], Any], within: AbstractContextManager[Any]) -> float:
    """Microseconds of one of the steps of a graph; all ranks call this at the same time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for turn in range(2):
            step(turn)
        stream.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with within:
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

    def tokens(self) -> None:
        """Compares random turns with sums in float64."""
        for shared_out in (False, True):
            worst = 0.0
            for step in range(STEPS):
                pick = torch.randint(1, ROWS[-1] + 1, (1,), generator=self.common, device="cuda")
                rows = int(pick)
                parts, residual = (
                    self.random(self.count, rows, self.width),
                    self.random(rows, self.width),
                )
                exact = residual.double() + parts.double().sum(0)
                self.sums._own[step % 2][:rows].copy_(parts[self.rank])
                out, after = self.sums.add_norm(
                    step % 2, residual, self.norm, shared_out=shared_out
                )
                scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON)
                normed = exact * scale * self.norm.weight.double()
                for found, right in ((out, normed), (after, exact)):
                    error = (found.double() - right).abs() / right.abs().clamp(min=1.0)
                    worst = max(worst, float(error.max()))
                theirs = [torch.empty_like(out) for _ in range(self.count)]
                dist.all_gather(theirs, out)
                if not all(torch.equal(out, other) for other in theirs):
                    raise AssertionError(f"step {step}: the ranks go on with different numbers")
            if worst > 0.02:
                raise AssertionError(f"off by {worst:.3f}")
            self.say(f"{STEPS} turns, shared out {shared_out}: off by {worst:.4f} at most")

    def times(self) -> None:
        """Prints a line for each number of rows."""
        from pie_driver_sglang.sglang.dense_triton import add_norm

        theirs = self.all_reduce_of_sglang()
        for rows in ROWS:
            residual, parts = self.random(rows, self.width), self.random(rows, self.width)

            def own(turn: int, shared_out: bool, residual: torch.Tensor = residual) -> None:
                self.sums.add_norm(turn, residual, self.norm, shared_out=shared_out)

            def nccl(
                _: int, parts: torch.Tensor = parts, residual: torch.Tensor = residual
            ) -> None:
                dist.all_reduce(parts)
                add_norm(parts[None], residual, self.norm)

            def sglang(
                _: int, parts: torch.Tensor = parts, residual: torch.Tensor = residual
            ) -> None:
                add_norm(theirs.custom_all_reduce(parts)[None], residual, self.norm)

            def norm(
                _: int, parts: torch.Tensor = parts, residual: torch.Tensor = residual
            ) -> None:
                add_norm(parts[None], residual, self.norm)

            row = {
                "every rank": captured_us(lambda turn: own(turn, False), nullcontext()),
                "shared out": captured_us(lambda turn: own(turn, True), nullcontext()),
                "NCCL and norm": captured_us(nccl, nullcontext()),
                "norm alone": captured_us(norm, nullcontext()),
            }
            shown = ", ".join(f"{name} {us:.1f}" for name, us in row.items())
            self.say(f"{self.count} ranks, {rows} x {self.width}: {shown} us")
            if theirs is not None and theirs.should_custom_ar(parts):
                self.say(f"    SGLang and norm {captured_us(sglang, theirs.capture()):.1f} us")

    def all_reduce_of_sglang(self) -> Any:
        """Its default on NVLink; None where it does not start."""
        from sglang.srt.distributed.device_communicators import custom_all_reduce_v2

        custom_all_reduce_v2.in_the_same_node_as = lambda *_args, **_named: [True] * self.count
        try:
            theirs = custom_all_reduce_v2.CustomAllReduceV2(
                self.group, torch.device("cuda", self.rank)
            )
        except Exception as error:
            self.say(f"SGLang's all-reduce does not start: {error}")
            return None
        return None if theirs.disabled else theirs

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
        check.tokens()
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
