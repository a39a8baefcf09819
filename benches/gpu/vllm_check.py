"""The driver on vLLM on one GPU: its kernels, its tokens, and its speed beside vLLM itself.

    python benches/gpu/vllm_check.py --out DIR [--parts kernels,agree,speed] [--shapes 0.6b,8b]
        [--model FOLDER] [--budget-s 360] [--no-compile]

- `kernels`: every attention kernel over the driver's pages, in bfloat16, against torch.
- `agree`: greedy tokens and log-probabilities of a model with weights (`models/pocket`): vLLM
  itself, and the driver in every way to run it: captured or not, fused or not, each attention.
- `speed`: for each shape, with random weights, a step of 1, 16, 64 and 256 rows, and the standard
  workload, by the driver on vLLM and by vLLM with its defaults.
- `experts`: four layers of 30B-A3B with random weights, every way of the driver beside the others.
- `graphs`, if it is named: of the first shape the graph of a step alone.

A step is what 64 tokens more take: requests of 512 tokens, answers of 65 and of 1. Each process
prints what it finds; one that fails prints its traceback and costs the others nothing. vLLM
compiles while `kernels` and `agree` run, and all wait for their turn to measure. `--no-compile`
has vLLM run with `enforce_eager`. FOLDER has weights, and needs no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

import frame
from frame import Report

PARTS: Final = ("kernels", "agree", "experts", "speed")
SCRIPT: Final = Path(__file__).parent / "vllm_parts.py"
BAR: Final = {"0.6b": 1.15, "8b": 1.05}
"""Tokens per second over those of vLLM itself, by shape."""
AGREEING: Final = 0.6
"""Share of prompts whose greedy tokens are those of vLLM; bfloat16 has ties."""
TIE: Final = 0.15
"""By how much the other token may be less probable where tokens part, as a log-probability."""
LOGPROBS_APART: Final = 0.15


class Process:
    """A part in a process of its own: its lines are printed as they come, and kept."""

    def __init__(self, name: str, words: list[object], started: float) -> None:
        """Starts it."""
        self.name = name
        self.found: dict[str, Any] = {}
        self._started = started
        self._process = subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("found "):
                self.found |= json.loads(line[6:])
            if line.startswith("ready"):
                self.ready.set()
            print(f"[{time.monotonic() - self._started:5.0f} {self.name}] {line}", end="")
            sys.stdout.flush()
        self.ready.set()

    def go(self) -> None:
        """Has it measure, after it has said that it is ready."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        except OSError as error:
            print(f"[{self.name}] has ended: {error}", flush=True)

    def wait(self, limit_s: float) -> bool:
        """Waits for its end; ends it, and returns False, where that takes longer."""
        try:
            self._process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            print(f"[{self.name}] is ended: its time is spent", flush=True)
            self.end()
            return False
        self._reader.join(5)
        return self._process.returncode == 0

    def end(self) -> None:
        """Ends it and the processes that it has started, which are of its session."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, 9)
            self._process.wait()


class Check:
    """All processes, within a budget."""

    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        """Starts nothing yet."""
        self._arguments = arguments
        self._report = report
        self._started = time.monotonic()
        self._all: list[Process] = []
        self._failed: list[str] = []

    def left(self) -> float:
        """Seconds of the budget."""
        return float(self._arguments.budget_s - (time.monotonic() - self._started))

    def play(self) -> None:
        """Plays the parts, and ends all processes."""
        parts, shapes = self._arguments.parts.split(","), self._arguments.shapes.split(",")
        waiting: dict[str, Process] = {}
        try:
            if "speed" in parts:
                # They compile meanwhile.
                waiting = {shape: self._start(f"vllm {shape}", "vllm", shape) for shape in shapes}
            (self._arguments.out / "expected.json").unlink(missing_ok=True)
            checks = []
            if "kernels" in parts:
                checks.append(self._start("kernels", "kernels"))
            if "agree" in parts:
                checks += [self._start("agree vllm", "expected"), self._start("agree", "agree")]
            if "experts" in parts:
                checks.insert(0, self._start("experts", "experts"))
            # One waits for its turn, too: two of ours would not fit beside vLLM's.
            ours = self._start(f"ours {shapes[0]}", "ours", shapes[0]) if waiting else None
            for check in checks:
                self._end(check, 200)
            if "agree" in parts:
                self._hold_agreement(checks[-1].found)
            for shape, peer in waiting.items():
                self._speed(shape, peer, ours or self._start(f"ours {shape}", "ours", shape))
                ours = None
            if "graphs" in parts:
                self._graphs(shapes[0])
        finally:
            for process in self._all:
                process.end()
            self._report.hold("failed processes", len(self._failed), at_most=0)
            print("failed:", ", ".join(self._failed) or "none", flush=True)

    def _start(self, name: str, *words: object) -> Process:
        extra: list[object] = ["--out", self._arguments.out, "--model", self._arguments.model]
        extra += ["--no-compile"] if self._arguments.no_compile else []
        process = Process(name, [*words, *extra], self._started)
        self._all.append(process)
        return process

    def _end(self, process: Process, limit_s: float) -> dict[str, Any]:
        if not process.wait(min(limit_s, self.left())):
            self._failed.append(process.name)
        self._report.put(process.name, process.found)
        return process.found

    def _hold_agreement(self, found: dict[str, Any]) -> None:
        for way, figures in found.items():
            self._report.hold(f"{way}: prompts", figures["equal"], at_least=AGREEING)
            apart = figures["logprobs_apart"]
            self._report.hold(f"{way}: log-probabilities", apart, at_most=LOGPROBS_APART)
            self._report.hold(f"{way}: ties", figures["widest_tie"], at_most=TIE)

    def _graphs(self, shape: str) -> None:
        graphs = self._start(f"graphs {shape}", "graphs", shape)
        graphs.ready.wait(min(100.0, max(1.0, self.left())))
        graphs.go()
        self._end(graphs, 60)

    def _speed(self, shape: str, peer: Process, ours: Process) -> None:
        ours.ready.wait(min(120.0, max(1.0, self.left())))
        peer.ready.wait(min(200.0, max(1.0, self.left())))
        ours.go()
        found = self._end(ours, 90)
        peer.go()
        others = self._end(peer, 90)
        if "tokens_per_s" in found and "tokens_per_s" in others:
            ratio = found["tokens_per_s"] / others["tokens_per_s"]
            self._report.hold(f"{shape}: tokens/s over vLLM's", ratio, at_least=BAR.get(shape, 1))


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out")
    made.add_argument("--parts", default=",".join(PARTS))
    made.add_argument("--shapes", default="0.6b,8b", help="of shapes_check.py, with comma")
    made.add_argument("--model", type=Path, default=frame.POCKET, help="with weights, for `agree`")
    made.add_argument("--budget-s", type=float, default=360.0, help="seconds for all parts")
    made.add_argument("--no-compile", action="store_true", help="vLLM with `enforce_eager`")
    return made


def main() -> None:
    """Plays the parts."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        Check(arguments, report).play()


if __name__ == "__main__":
    main()
