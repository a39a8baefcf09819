"""Sums over ranks inside the norm, against SGLang's and NCCL's sums with a norm after them.

    python benches/gpu/sums_check.py [--ranks 2,4] [--width 5120] [--times] [--warps 4,8,16]
        [--json FILE]

Spawns a process for each GPU. Checks random turns of random rows, in one and two shots, against
float64, and graphs of products and sums, as layers have them, against where they began. Of two
ranks SGLang's and NCCL's sums must be those of one addition, for every number of rows. With
`--times` prints what a turn of such a graph takes for each number of rows: a product of 128 inputs
and the sum with its norm. These are in one and two shots by so many warps. The same product is
timed with SGLang's all-reduce and norm, with NCCL's all-reduce, and without the other ranks. Ends
when it takes more than `--limit` seconds.

After that, other processes time FlashInfer's fused all-reduce and norm, which is what SGLang runs
with `--enable-flashinfer-allreduce-fusion`, next to ours. Where it cannot start, a line says why.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashinfer_kernels
import frame
import torch
import torch.distributed as dist
from frame import Report

from pie_driver_sglang import _core
from pie_driver_sglang.backends.sglang.environment import prepare
from pie_driver_sglang.kernels.comm.all_reduce_norm import (
    AllReduceTuning,
    LamportAllReduceNorm,
    map_peer_memory,
)
from pie_driver_sglang.kernels.gemm.linear import find_linear_config, linear
from pie_driver_sglang.kernels.gemm.norm_rope import add_rms_norm
from pie_driver_sglang.kernels.gemm.types import LinearWeights, Norm

ROWS = (1, 8, 16, 32, 64, 128, 256)
INPUTS = 128
EPSILON = 1e-6
TOLERANCE = 2e-2
DRIFT = 0.25
"""Of numbers to which products were added 40 times, and taken away; a product is of about 1."""
LIMITS = {"turns": TOLERANCE, "launches": DRIFT, "rounding": 0}
MANY_ROWS = (2048, 8192)
"""Whose sums SGLang leaves to other kernels than those of few."""
STEPS = 200
LAUNCHES = 40
NUM_BUFFERS = 80
REPEATS = 3
FLASHINFER_ROWS = 2048
"""For so many rows SGLang has FlashInfer make its buffers."""
FLASHINFER_TOLERANCE = 0.15
"""It adds in bfloat16, as SGLang has it; this only says that it has added and normed."""


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest error, of numbers above 1 their share."""
    return float(((found.double() - exact).abs() / exact.abs().clamp(min=1.0)).max())


class Graph:
    """Turns that are captured; all ranks make it and launch it at the same time."""

    def __init__(
        self,
        step: Callable[[int], Any],
        capturing: contextlib.AbstractContextManager[Any] | None = None,
    ) -> None:
        self._stream = torch.cuda.Stream()
        with torch.cuda.stream(self._stream), capturing or contextlib.nullcontext():
            for turn in range(2):
                step(turn)
            self._stream.synchronize()
            dist.barrier()
            self._graph = torch.cuda.CUDAGraph()
            self._graph.capture_begin(capture_error_mode="thread_local")
            for number in range(NUM_BUFFERS):
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
        return start.elapsed_time(end) * 1000 / repeats / NUM_BUFFERS


class Rows:
    """Products of so many rows, which one turn adds to a residual and the next one takes away."""

    def __init__(self, check: Check, rows: int) -> None:
        self._check = check
        self.start, self.residual = check.random(rows, check.width), check.random(rows, check.width)
        self._other, self._normed = (torch.empty_like(self.residual) for _ in range(2))
        self._given = check.random(rows, INPUTS)
        self._config = find_linear_config(rows, check.width, INPUTS)

    def ours(self, sums: LamportAllReduceNorm, turn: int) -> None:
        """As the driver's layers do it."""
        matrix = self._check.matrices[turn]
        if self._config is None:
            part = self._product(turn)
        else:
            [part] = linear(self._given, matrix, self._config)
        sums.add_rms_norm(turn, part, self.residual, self._check.norm)

    def sglang(self, all_reduce: Any, turn: int) -> None:
        """With SGLang's all-reduce and norm."""
        from sgl_kernel import fused_add_rmsnorm

        summed = all_reduce.custom_all_reduce(self._product(turn))
        fused_add_rmsnorm(summed, self.residual, self._check.norm.weight, EPSILON)

    def flashinfer(self, sums: FlashInferSums, turn: int) -> None:
        """With FlashInfer's fused all-reduce and norm; the residuals take turns, as in SGLang."""
        residuals = (self.residual, self._other)
        before, after = residuals[turn], residuals[1 - turn]
        sums.add_rms_norm(self._product(turn), before, after, self._normed)

    def nccl(self, turn: int) -> None:
        """With an all-reduce between product and norm."""
        parts = self._product(turn)
        dist.all_reduce(parts)
        add_rms_norm(parts[None], self.residual, self._check.norm)

    def alone(self, turn: int) -> None:
        """Without the other ranks."""
        add_rms_norm(self._product(turn)[None], self.residual, self._check.norm)

    def _product(self, turn: int) -> torch.Tensor:
        return torch.mm(self._given, self._check.matrices[turn].weight.T)


class FlashInferSums:
    """FlashInfer's fused all-reduce, residual and norm, by the memory of peers without multicast.

    It is called as SGLang's `flashinfer_comm_fusion.py` calls it on Hopper.
    """

    def __init__(self, check: Check) -> None:
        """Shares buffers with the other ranks."""
        from flashinfer import comm
        from flashinfer.comm.mnnvl import TorchDistBackend

        self._comm, self._norm = comm, check.norm
        self._workspace = comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=check.count,
            rank=check.rank,
            max_token_num=FLASHINFER_ROWS,
            hidden_dim=check.width,
            dtype=torch.bfloat16,
            # Through the host: objects go through it, and NCCL has its own buffers.
            comm_backend=TorchDistBackend(group=check.group),
            group=check.group,
        )

    def add_rms_norm(
        self, part: torch.Tensor, before: torch.Tensor, after: torch.Tensor, normed: torch.Tensor
    ) -> None:
        """Writes the residual with the sum of all ranks' parts, and its norm."""
        self._comm.allreduce_fusion(
            input=part,
            workspace=self._workspace,
            pattern=self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            launch_with_pdl=True,
            trigger_completion_at_end=False,
            residual_in=before,
            residual_out=after,
            norm_out=normed,
            rms_gamma=self._norm.weight,
            rms_eps=EPSILON,
        )

    def error(self, check: Check, rows: int) -> float:
        """How far a turn of so many rows is off."""
        parts, residual = (
            check.random(check.count, rows, check.width),
            check.random(rows, check.width),
        )
        after, normed = torch.empty_like(residual), torch.empty_like(residual)
        self.add_rms_norm(parts[check.rank], residual, after, normed)
        exact = residual.double() + parts.double().sum(0)
        return max(off(after, exact), off(normed, check.normed(exact)))


class Check:
    """One rank's part."""

    def __init__(self, rank: int, count: int, width: int, warps: list[int], rows: Path) -> None:
        self.rank, self.count, self.width, self._rows = rank, count, width, rows
        self.group = dist.new_group(backend="gloo")
        device = torch.device("cuda", rank)
        size = LamportAllReduceNorm.size(count, ROWS[-1], width, torch.bfloat16)
        shared = map_peer_memory(self.group, device, size)
        self.sums = {
            way: LamportAllReduceNorm(shared, rank, width, torch.bfloat16, tuning)
            for way, tuning in tunings(warps).items()
        }
        self.common = torch.Generator(device).manual_seed(0)
        self.norm = Norm(self.random(width), EPSILON)
        own = self.random(count, width, INPUTS)[rank] / INPUTS**0.5
        self.matrices = [LinearWeights(own), LinearWeights(-own)]

    def random(self, *shape: int) -> torch.Tensor:
        """The same numbers on all ranks."""
        numbers = torch.randn(shape, generator=self.common, device="cuda")
        return numbers.to(torch.bfloat16)

    def pick(self, most: int) -> int:
        """A number below that; the same on all ranks."""
        return int(torch.randint(most, (1,), generator=self.common, device="cuda"))

    def compare(self) -> None:
        """Compares random turns with sums in float64, and the ranks with each other."""
        worst, ways = 0.0, list(self.sums.values())
        for turn in range(STEPS):
            rows = 1 + self.pick(ROWS[-1])
            parts = self.random(self.count, rows, self.width)
            residual = self.random(rows, self.width)
            exact = residual.double() + parts.double().sum(0)
            sums = ways[self.pick(len(ways))]
            out, after = sums.add_rms_norm(turn % 2, parts[self.rank], residual, self.norm)
            worst = max(worst, off(out, self.normed(exact)), off(after, exact))
            self.expect_equal(out, f"turn {turn}")
        self.say(f"{self.count} ranks, {STEPS} turns: off by {worst:.4f} at most")
        self.keep(part="turns", off=worst)
        if worst > TOLERANCE:
            raise AssertionError(f"more than {TOLERANCE}")

    def compare_rounding(self) -> None:
        """Of two ranks SGLang's and NCCL's sums of every size are rounded once, as a GPU adds."""
        if self.count != 2:
            return
        theirs, wrong = self.sglang(), 0
        for rows in (*ROWS, *MANY_ROWS):
            sizes = self.random(self.count, rows, self.width).exp2()
            parts = self.random(self.count, rows, self.width) * sizes
            expected = (parts[0].float() + parts[1].float()).to(parts.dtype)
            found = [parts[self.rank].clone()]
            dist.all_reduce(found[0])
            if theirs is not None and theirs.should_custom_ar(parts[self.rank]):
                found.append(theirs.custom_all_reduce(parts[self.rank]))
            wrong += sum(int((each != expected).sum()) for each in found)
        self.say(f"{self.count} ranks: {wrong} sums rounded otherwise")
        self.keep(part="rounding", off=wrong)

    def normed(self, exact: torch.Tensor) -> torch.Tensor:
        """The norm of sums in float64."""
        scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPSILON)
        return exact * scale * self.norm.weight.double()

    def compare_graphs(self) -> None:
        """Launches graphs of products and sums in random order: each ends where it began."""
        works = [
            (Rows(self, rows), sums) for rows, sums in itertools.product(ROWS, self.sums.values())
        ]
        graphs = [Graph(functools.partial(work.ours, sums)) for work, sums in works]
        worst = 0.0
        for launch in range(LAUNCHES):
            pick = self.pick(len(works))
            work, _ = works[pick]
            work.residual.copy_(work.start)
            graphs[pick].launch()
            worst = max(worst, off(work.residual, work.start.double()))
            self.expect_equal(work.residual, f"launch {launch}")
        self.say(f"{self.count} ranks, {LAUNCHES} launches: off by {worst:.3f} at most")
        self.keep(part="launches", off=worst)
        if worst > DRIFT:
            raise AssertionError(f"more than {DRIFT}")

    def expect_equal(self, numbers: torch.Tensor, when: str) -> None:
        """All ranks continue with the same numbers."""
        theirs = [torch.empty_like(numbers) for _ in range(self.count)]
        dist.all_gather(theirs, numbers)
        if not all(torch.equal(numbers, other) for other in theirs):
            raise AssertionError(f"{when}: the ranks go on with different numbers")

    def times(self) -> None:
        """Prints lines for each number of rows."""
        theirs = self.sglang()
        for rows in ROWS:
            work = Rows(self, rows)
            graphs = {
                way: Graph(functools.partial(work.ours, sums)) for way, sums in self.sums.items()
            }
            if theirs is not None:
                step = functools.partial(work.sglang, theirs)
                graphs["SGLang"] = Graph(step, theirs.capture())
            graphs["NCCL"], graphs["alone"] = Graph(work.nccl), Graph(work.alone)
            self._time("times", rows, graphs)

    def flashinfer_times(self) -> None:
        """Prints FlashInfer's times and ours for each number of rows."""
        theirs = FlashInferSums(self)
        worst = max(theirs.error(self, rows) for rows in ROWS)
        self.say(f"{self.count} ranks: FlashInfer is off by {worst:.4f} at most")
        if not worst <= FLASHINFER_TOLERANCE:
            raise AssertionError(f"more than {FLASHINFER_TOLERANCE}")
        for rows in ROWS:
            work = Rows(self, rows)
            graphs = {
                way: Graph(functools.partial(work.ours, sums)) for way, sums in self.sums.items()
            }
            graphs["FlashInfer"] = Graph(functools.partial(work.flashinfer, theirs))
            self._time("flashinfer", rows, graphs)

    def _time(self, part: str, rows: int, graphs: dict[str, Graph]) -> None:
        """Prints and keeps microseconds of a turn."""
        # The best of some: other processes may hold up a launch.
        found = {
            way: min(graph.launch(10) for _ in range(REPEATS)) for way, graph in graphs.items()
        }
        shown = ", ".join(f"{way} {micros:.1f}" for way, micros in found.items())
        self.say(f"{self.count} ranks, {rows} x {self.width}, us: {shown}")
        self.keep(part=part, rows=rows, width=self.width, us=found)

    def sglang(self) -> Any:
        """SGLang's all-reduce, as its groups make it; None where it cannot be had."""
        from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import (
            CustomAllReduceV2,
        )

        # The check asks for groups of its own.
        os.environ["SGLANG_SKIP_P2P_CHECK"] = "1"
        try:
            found = CustomAllReduceV2(self.group, torch.device("cuda", self.rank))
        except Exception as error:
            self.say(f"without SGLang's all-reduce: {error}")
            return None
        return None if found.disabled else found

    def keep(self, **figures: Any) -> None:
        """Leaves a row for the record, once for all ranks."""
        if self.rank == 0:
            with self._rows.open("a", encoding="utf-8") as file:
                print(json.dumps({"ranks": self.count, **figures}), file=file)

    def say(self, line: str) -> None:
        """Prints, once for all ranks."""
        if self.rank == 0:
            print(line, flush=True)


def tunings(warps: list[int]) -> dict[str, AllReduceTuning]:
    """Ways to sum, by name."""
    shots = {"1-shot": ROWS[-1], "2-shot": 0}
    return {
        f"{name}/{count}": AllReduceTuning(ROWS[-1], rows, count)
        for (name, rows), count in itertools.product(shots.items(), warps)
    }


def play(
    rank: int, count: int, leader: int, path: str, arguments: argparse.Namespace, part: str
) -> None:
    """Runs a part in a process of its own: `sums` for ours, or `flashinfer`."""
    _core.die_with_parent(leader)
    torch.cuda.set_device(rank)
    store = dist.FileStore(path, count)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=count)
    with torch.inference_mode():
        rows = Path(path).with_name("rows")
        check = Check(rank, count, arguments.width, arguments.warps, rows)
        if part == "flashinfer":
            check.flashinfer_times()
        else:
            check.compare()
            check.compare_graphs()
            check.compare_rounding()
            if arguments.times:
                check.times()
    dist.barrier()


def run(count: int, arguments: argparse.Namespace, report: Report, part: str = "sums") -> None:
    """Runs a part on some ranks; kills them when they take too long: a GPU that waits stays."""
    limit = arguments.limit if part == "sums" else arguments.flashinfer_limit
    until = time.monotonic() + limit
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        given = (count, os.getpid(), str(Path(folder) / "store"), arguments, part)
        ranks = torch.multiprocessing.spawn(play, given, nprocs=count, join=False)
        try:
            while not ranks.join(timeout=1.0, grace_period=5.0):
                if time.monotonic() > until:
                    raise TimeoutError(f"{count} ranks took more than {limit} s")
        finally:
            for process in ranks.processes:
                process.kill()
            for row in map(json.loads, rows.read_text().splitlines()):
                report.add(**row)
                if row["part"] in LIMITS:
                    what = f"{count} ranks: errors of {row['part']}"
                    report.hold(what, row["off"], at_most=LIMITS[row["part"]])


def run_flashinfer(arguments: argparse.Namespace, report: Report) -> None:
    """Times FlashInfer's sums for each number of ranks; what fails is one line."""
    missing = flashinfer_kernels.unavailable_reason("all-reduce", arguments.build_limit)
    if missing is not None:
        print(f"without FlashInfer's all-reduce: {missing}", flush=True)
        return
    for count in arguments.ranks:
        try:
            run(count, arguments, report, "flashinfer")
        except Exception as error:
            last = str(error).strip().splitlines() or [""]
            print(f"{count} ranks without FlashInfer: {type(error).__name__}: {last[-1]}")


def numbers(text: str) -> list[int]:
    """Numbers with commas between them."""
    return [int(number) for number in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__)
    made.add_argument("--ranks", type=numbers, default=[2, 4])
    made.add_argument("--width", type=int, default=5120)
    made.add_argument("--warps", type=numbers, default=[8], help="of a program")
    made.add_argument("--times", action="store_true")
    made.add_argument("--limit", type=float, default=240.0, help="seconds for some ranks")
    made.add_argument(
        "--flashinfer-limit", type=float, default=90.0, help="the same for FlashInfer; 0 for none"
    )
    made.add_argument(
        "--build-limit", type=float, default=240.0, help="seconds to build FlashInfer's kernels"
    )
    return made


def main() -> None:
    """Runs the check for each number of ranks."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        for count in arguments.ranks:
            prepare("cuda:0", [], spins=True, ranks=count)
            run(count, arguments, report)
        if arguments.times and arguments.flashinfer_limit > 0:
            run_flashinfer(arguments, report)


if __name__ == "__main__":
    main()
