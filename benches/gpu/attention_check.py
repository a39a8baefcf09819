"""Decode attention on a GPU: parity, times compared with peers and a copy, and tuning.

    python benches/gpu/attention_check.py [--parity] [--times] [--tune] [--prompts] [--fa3]
        [--seconds N] [--shapes A,B] [--batches 256,16] [--json FILE]

Without one of the five it does the first two.

--parity: the kernels against dense attention in float64: types, head sizes, groups, pages, windows,
    caps and sinks; each case twice, and the results equal.
--times: microseconds of one layer, in graphs of many layers whose KV exceeds the L2 cache. Next to
    the backend `pie`: SGLang's Triton kernel, flashinfer's paged decode and FlashAttention-3 where
    they can be imported, and a copy that moves as many bytes. What is made once a step is left out:
    plans, lists of slots, and our `shares`, which have a column. `of copy` is the share of the
    copy's bandwidth, `best` the time of the fastest peer in times of ours.
--tune: every parameter of the cut in turn, with the others at the best so far, until none helps.
--prompts: the same for steps in which every token of a prompt is a row.

With --fa3 such steps are timed by the kernel of decodes alone, and with prompts left to
FlashAttention-3, as in long steps. What both compute is compared first.

With `TRITON_INTERPRET=1 ... --device cpu` everything runs on tiny sizes; its times mean nothing.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import frame
import torch
from frame import Report

sys.path.insert(0, str(frame.REPOSITORY / "tests"))

from attention_peers import (
    PEERS,
    SHAPES,
    Call,
    Layers,
    Shape,
    Step,
    Storage,
    Work,
    copy,
    first_line,
    importable,
    multiprocessors,
    pie,
    share_out,
    with_fa3,
)

from pie_driver_sglang.kernels.attention.split_plan import (
    SplitTuning,
    split_tuning,
)
from support.kernels.paged_decode import PADDING, Case, check_attention

PARTS = ("parity", "times", "tune", "prompts", "fa3")
LENGTHS = (128, 512, 1024, 2048, 8192, 32768)
RAGGED = (100, 2048)
ROUNDS = 3
TUNED = {
    "block": (16, 32, 64, 128),
    "warps": (1, 2, 4, 8),
    "stages": (2, 3, 4, 5),
    "programs": (1, 2, 3, 4, 6, 8),
}
TUNED_FOR_PROMPTS = TUNED | {"queries": (16, 32, 64, 128), "programs": (1, 2, 3)}
DISAGREES = 0.02
"""Of the largest value, the most by which a peer may differ."""


def microseconds(step: Step, call: Call) -> float:
    """Of one layer: the median of some rounds."""
    layers = Layers(step, call)
    return statistics.median(layers.round() for _ in range(ROUNDS))


def time_step(step: Step, peers: list[str]) -> dict[str, Any]:
    """Every contender's microseconds; None for one that cannot run or computes something else.

    They take turns, so that a GPU that is slower after one of them slows all of them alike.
    """
    contenders: dict[str, Layers] = {}
    expected = None
    for name in ["pie", *peers, "shares", "copy"]:
        try:
            call = {"pie": pie, "shares": share_out, "copy": copy, **PEERS}[name](step)
            out = call(0).float()
            if name == "pie":
                expected = out
            elif name in PEERS and expected is not None:
                error = float((out.view_as(expected) - expected).abs().max() / expected.abs().max())
                if not error < DISAGREES:
                    raise ValueError(f"differs by {error:.1e}")
            contenders[name] = Layers(step, call)
        except Exception as error:
            print(f"    {step.work.shape.name} {step.work.name}, {name}: {first_line(error)}")
    times = frame.in_turns({name: each.round for name, each in contenders.items()}, ROUNDS)
    row: dict[str, Any] = {"work": step.work.name, "shape": step.work.shape.name}
    row |= {name: statistics.median(times[name]) if name in times else None
            for name in ["pie", *peers, "shares", "copy"]}  # fmt: skip
    row["pie_rounds"] = times.get("pie")
    return summed_up(row, step, peers)


def summed_up(row: dict[str, Any], step: Step, peers: list[str]) -> dict[str, Any]:
    """The row with bandwidth, share of the copy's, and the fastest peer's time in ours."""
    ours, times = row["pie"], [row[name] for name in peers if row[name]]
    if ours:
        row["gb_s"] = step.kv_bytes / ours / 1e3
        row["of_copy"] = row["copy"] / ours if row["copy"] else None
        row["best_peer"] = min(times) / ours if times else None
    return row


def spread(batch: int, seed: int = 0) -> tuple[int, ...]:
    """Lengths of many kinds."""
    draw = random.Random(seed)
    return tuple(draw.randint(*RAGGED) for _ in range(batch))


def grid(shape: Shape, tiny: bool, batches: Sequence[int]) -> Iterator[Work]:
    """Every step, what matters most first."""
    lengths = (40, 70) if tiny else LENGTHS
    for batch in sorted(batches, key=lambda batch: -batch):
        yield Work(shape, spread(batch) if not tiny else (5, 40, 17)[:batch], f"{batch} x ragged")
    for length in sorted(lengths, key=lambda length: (length not in (512, 2048), length)):
        for batch in sorted(batches, key=lambda batch: -batch):
            yield Work(shape, (length,) * batch, f"{batch} x {length}")


class Run:
    """What the arguments say, and the record."""

    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        self.arguments, self.report = arguments, report
        self.device = torch.device(arguments.device)
        self.tiny = self.device.type == "cpu"
        self.until = time.monotonic() + arguments.seconds

    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self.until

    def shapes(self) -> list[Shape]:
        """The models asked for."""
        names = self.arguments.shapes.split(",")
        if self.tiny:
            return [Shape("tiny", 4, 2, 16)]
        return [shape for shape in SHAPES if shape.name in names]

    def batches(self) -> list[int]:
        """The numbers of rows asked for."""
        return [1, 3] if self.tiny else [int(rows) for rows in self.arguments.batches.split(",")]

    def storage(self, shape: Shape) -> Storage:
        """As much as asked for and free."""
        gib = self.arguments.gib
        if self.tiny:
            gib = 2**-9
        else:
            gib = min(gib, 0.7 * torch.cuda.mem_get_info(self.device)[0] / 2**30)
        return Storage(shape, gib, self.device)


def parity_cases() -> list[Case]:
    """Types, head sizes, groups and pages of real models; some rows are cut into many parts."""
    bfloat16, float16, float32 = torch.bfloat16, torch.float16, torch.float32
    lengths = (2999, 0, 1, 64, 65, 700, 16, 1500, 3000, 31)
    return [
        Case(lengths, 16, 8, 128, 128, 16, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 40, 8, 128, 128, 16, dtype=bfloat16, pool=bfloat16, sinks=True),
        Case((5000,), 40, 8, 128, 128, 16, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 16, 8, 128, 128, 1, dtype=bfloat16, pool=bfloat16, window=1023),
        Case(lengths, 8, 2, 64, 64, 64, dtype=float16, pool=float16, window=40),
        Case(lengths, 4, 4, 80, 80, 8, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 8, 4, 256, 256, 32, dtype=bfloat16, pool=bfloat16, cap=5.0, window=500),
        Case(lengths, 16, 1, 192, 128, 16, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 71, 1, 64, 64, 16, dtype=bfloat16, pool=bfloat16),
        Case(lengths, 8, 2, 128, 128, 16, dtype=float32, pool=float32, cap=5.0, sinks=True),
        Case(lengths, 16, 8, 128, 128, 16, dtype=bfloat16, pool=torch.float8_e4m3fn,
             value_scale=0.5),
        Case(lengths, 16, 8, 128, 128, 24, dtype=float16, pool=torch.float8_e5m2),
        Case((2999, 700, 2900, 0, 1500, 3000, 31, 2100, 650), 16, 8, 128, 128, 16, dtype=bfloat16,
             pool=bfloat16, groups=((0, 7, 2, 5), (1, 4, 8)), common=(2048, 640)),
        Case(tuple(range(1700, 1790)), 40, 8, 128, 128, 16, dtype=bfloat16, pool=bfloat16,
             sinks=True, groups=(tuple(range(90)),), common=(1664,)),
    ]  # fmt: skip


def check_parity(run: Run) -> int:
    """Returns how many cases are wrong."""
    generator = torch.Generator().manual_seed(1)
    wrong = 0
    cases = parity_cases()[:: 4 if run.tiny else 1]
    for case in cases:
        group = case.heads // case.kv_heads
        how = split_tuning(
            max(case.dim, case.value_dim), group, case.pool.itemsize, len(case.lengths) + PADDING
        )
        case = case._replace(multiprocessors=multiprocessors(run.device))
        if run.tiny:
            shorter = tuple(length // 40 for length in case.lengths)
            case = case._replace(lengths=shorter, dtype=torch.float32, pool=torch.float32)
            case = case._replace(groups=(), common=())
        try:
            right = check_attention(case, generator, str(run.device), how)
        except Exception as error:
            right = False
            print(f"WRONG {first_line(error)}: {case}")
        wrong += not right
        sys.stdout.flush()
    print(f"parity: {wrong} of {len(cases)} cases wrong", flush=True)
    return wrong


def time_grid(run: Run) -> None:
    """A table, row by row."""
    peers = importable([name for name in run.arguments.peers.split(",") if name])
    columns = ["pie", *peers, "shares", "copy"]
    print(f"{'shape':>6} {'step':>14}" + "".join(f"{name:>12}" for name in columns)
          + f"{'GB/s':>8}{'of copy':>9}{'best':>7}")  # fmt: skip
    for shape in run.shapes():
        storage = run.storage(shape)
        for work in grid(shape, run.tiny, run.batches()):
            if run.over():
                print("the time is up", flush=True)
                return
            try:
                row = time_step(Step(work, storage), peers)
            except MemoryError as error:
                print(f"{shape.name:>6} {work.name:>14}  {error}")
                continue
            figures = "".join(f"{row[name] or math.nan:12.1f}" for name in columns)
            last = (row.get("gb_s"), row.get("of_copy"), row.get("best_peer"))
            gb_s, of_copy, best = (math.nan if value is None else value for value in last)
            print(f"{shape.name:>6} {work.name:>14}{figures}{gb_s:8.0f}{of_copy:9.2f}{best:7.2f}",
                  flush=True)  # fmt: skip
            run.report.add(part="times", **row)
        del storage


def tuned_steps(shape: Shape, tiny: bool) -> list[Work]:
    """What a cut is chosen by."""
    if tiny:
        return [Work(shape, (40, 7), "2 x ragged")]
    steps = [(256, 512), (64, 2048), (16, 8192), (1, 512), (1, 8192)]
    uniform = [Work(shape, (length,) * batch, f"{batch} x {length}") for batch, length in steps]
    return [Work(shape, spread(256), "256 x ragged"), *uniform]


def prompt_steps(shape: Shape, tiny: bool) -> list[Work]:
    """What a cut for prompts is chosen by."""
    if tiny:
        return [Work(shape, (40, 7, 300), "2 and 300", prompt=True)]
    steps = [(64, 2048), (64, 512), (0, 2048), (0, 1024), (200, 1024)]
    return [
        Work(shape, (*(512 for _ in range(batch)), length), f"{batch} and {length}", prompt=True)
        for batch, length in steps
    ]


def time_prompts(run: Run) -> None:
    """Steps with prompts by one kernel and by two, once these agree."""
    for shape in run.shapes():
        storage = run.storage(shape)
        for work in prompt_steps(shape, run.tiny):
            step = Step(work, storage)
            calls = {"pie": pie(step), "fa3": with_fa3(step)}
            one, two = (call(0).float() for call in calls.values())
            off = float((two - one).abs().max() / one.abs().max())
            run.report.hold(f"{shape.name} {work.name}, fa3 differs", off, at_most=DISAGREES)
            layers = {name: Layers(step, call).round for name, call in calls.items()}
            times = frame.in_turns(layers, ROUNDS)
            us = {name: statistics.median(rounds) for name, rounds in times.items()}
            print(f"{shape.name:>8} {work.name:>14}  " + "".join(f"{us[x]:10.1f}" for x in us))
            run.report.add(part="fa3", shape=shape.name, work=work.name, us=us)
        del storage


class Tuner:
    """The search for the cut of a shape's steps."""

    def __init__(
        self, run: Run, shape: Shape, steps: list[Work], choices: dict[str, tuple[int, ...]]
    ) -> None:
        self.run, self.shape, self.choices = run, shape, choices
        storage = run.storage(shape)
        self.steps = [Step(work, storage) for work in steps]
        self.default = self.steps[0].default()
        self.tried: dict[SplitTuning, float] = {}
        print(f"{shape.name}: mean | {', '.join(step.work.name for step in self.steps)}")

    def score(self, how: SplitTuning) -> float:
        """Geometric mean of the times; infinite for a cut that does not run."""
        if how in self.tried or self.run.over():
            return self.tried.get(how, math.inf)
        self.tried[how] = math.inf
        started = time.monotonic()
        try:
            times = [microseconds_checked(step, how) for step in self.steps]
        except Exception as error:
            print(f"{how}: {first_line(error)}", flush=True)
            return math.inf
        self.tried[how] = statistics.geometric_mean(times)
        figures = " ".join(f"{each:8.1f}" for each in times)
        seconds = time.monotonic() - started
        print(f"{self.tried[how]:8.1f} |{figures} | {how} ({seconds:.1f} s)", flush=True)
        self.run.report.add(part="tune", shape=self.shape.name, **asdict(how), us=times)
        return self.tried[how]

    def descend(self) -> None:
        """Each parameter in turn, with the others at the best so far."""
        best, before = self.default, None
        while best != before and not self.run.over():
            before = best
            for name, choices in self.choices.items():
                best = min((replace(best, **{name: choice}) for choice in choices), key=self.score)
        gain = self.tried.get(self.default, math.nan) / self.tried.get(best, math.nan)
        over = ", the time is up" if self.run.over() else ""
        print(f"{self.shape.name}: best {best}, {gain:.3f} times the default's speed{over}")


def microseconds_checked(step: Step, how: SplitTuning) -> float:
    """Of one layer, once its result is that of the default cut."""
    call = pie(step, how)
    found, expected = call(0).float(), pie(step)(0).float()
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < DISAGREES:
        raise ValueError(f"differs by {error:.1e}")
    return microseconds(step, call)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device")
    for part in PARTS:
        made.add_argument(f"--{part}", action="store_true")
    made.add_argument("--batches", default="1,4,16,64,128,256", help="rows of a step")
    made.add_argument("--shapes", default=",".join(shape.name for shape in SHAPES))
    made.add_argument("--peers", default=",".join(PEERS))
    made.add_argument("--gib", type=float, default=40.0, help="memory for KV")
    made.add_argument("--seconds", type=float, default=500.0, help="nothing begins later")
    return made


def main() -> None:
    """Runs the parts."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        check(Run(arguments, report))


def check(run: Run) -> None:
    """Parity, then the searches and times that are asked for."""
    arguments = run.arguments
    name = "Triton's interpreter" if run.tiny else torch.cuda.get_device_name(run.device)
    print(f"{name}, torch {torch.__version__}")
    wanted = [getattr(arguments, part) for part in PARTS]
    default = not any(wanted)
    if arguments.parity or default:
        run.report.hold("wrong cases", check_parity(run), at_most=0)
    with torch.inference_mode():
        for shape in run.shapes():
            if arguments.tune:
                Tuner(run, shape, tuned_steps(shape, run.tiny), TUNED).descend()
            if arguments.prompts:
                Tuner(run, shape, prompt_steps(shape, run.tiny), TUNED_FOR_PROMPTS).descend()
        if arguments.fa3:
            time_prompts(run)
        if arguments.times or default:
            time_grid(run)


if __name__ == "__main__":
    main()
