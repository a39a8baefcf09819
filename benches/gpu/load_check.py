"""Plays the runtime's load against a driver on a CUDA GPU, compared with SGLang.

    python benches/gpu/load_check.py --shapes CONFIG --pie-load BINARY --out DIR \
        [--parts A,B] [--peer-mini CHECKOUT]

Parts, each in processes of its own; one that fails costs the others nothing:

1. `steps`, `throughput`: round trips of decode steps, and tokens per second of the standard
   workload, on one driver.
2. `peers`: SGLang's own tokens per second, by attention backend, and with `--peer-mini` those of
   Mini-SGLang.
3. `runner`, only when named: the same steps by SGLang's `ModelRunner` with its own graphs, by
   attention backend, and how long the memory takes to move what a step must read (the roofline).

The record is DIR/load_check.json, with a row for each kind of figures; everything that was printed
goes to DIR/load_check.log. The status is 1 when a process of a part failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import frame
from frame import Report
from processes import Runner

PEERS = Path(__file__).parents[1] / "peers"
HBM_BYTES_PER_S = 4.8e12
"""Of an H200, by its data sheet."""
PART_S = {"load": 240.0, "peers": 150.0, "runner": 90.0}
"""The longest that a process of each part may take."""
_RUNNER_LINE = re.compile(r"runner \S+ (\d+x\d+): (\d+) us")
_BYTES_LINE = re.compile(r"runner bytes: weights (\d+), a token (\d+)")
_MINI_LINE = re.compile(r"^mini-sglang (.*?): \{", re.MULTILINE)
_PEER_LINE = re.compile(r"(?:mini-)?sglang (\S+) repeat \d+: .* = (\d+) tok/s")


def peer_figures(output: str) -> list[float]:
    """Tokens per second of each repeat."""
    return [float(speed) for _, speed in _PEER_LINE.findall(output)]


def runner_figures(output: str) -> dict[str, float]:
    """Step times in µs by batch and context."""
    return {step: float(us) for step, us in _RUNNER_LINE.findall(output)}


def roofline_us(output: str, steps: Iterable[str]) -> dict[str, float]:
    """How long the memory takes to move what each step must read, in µs; empty if not printed."""
    found = _BYTES_LINE.search(output)
    if found is None:
        return {}
    weights, token = map(int, found.groups())
    times = {}
    for step in steps:
        batch, context = map(int, step.split("x"))
        times[step] = (weights + batch * context * token) / HBM_BYTES_PER_S * 1e6
    return times


class Check:
    """The parts and their figures."""

    def __init__(self, arguments: argparse.Namespace, model: Path, report: Report) -> None:
        """Begins with empty figures."""
        self._arguments = arguments
        self._model = model
        self._report = report
        self._out: Path = arguments.out
        self._runner = Runner(self._out / "load_check.log", arguments.budget_s)
        self._figures: dict[str, Any] = {
            "tokens_per_s": {"ours": None, "sglang": {}, "mini_sglang": {}},
            "steps": None,
            "detail": {},
        }

    def play(self) -> None:
        """Plays the parts that were asked for."""
        parts = self._arguments.parts.split(",")
        loads = [part for part in ("steps", "throughput") if part in parts]
        if loads:
            self._part("load", lambda: self._load(loads))
        if "peers" in parts:
            for backend in self._arguments.peer_backends.split(","):
                self._part(f"peer {backend}", lambda backend=backend: self._peer(backend))
            if self._arguments.peer_mini:
                self._part("peer mini", self._mini_peer)
        if "runner" in parts:
            for backend in self._arguments.peer_backends.split(","):
                self._part(f"runner {backend}", lambda backend=backend: self._model_runner(backend))
        self._runner.say(json.dumps({**self._figures, "detail": "..."}, indent=1))
        for name in self._runner.failed:
            self._runner.say(f"failed: {name}")
        self._report.hold("failed processes", len(self._runner.failed), at_most=0)

    def _part(self, what: str, play: Any) -> None:
        started = time.monotonic()
        try:
            play()
        except Exception as error:
            self._runner.say(f"{what} failed: {type(error).__name__}: {error}")
            self._runner.failed.append(what)
        self._runner.say(f"--- {what} took {time.monotonic() - started:.0f} s")
        for name, figures in self._figures.items():
            self._report.put(name, figures)

    def _load(self, workloads: list[str]) -> None:
        found = self._pie_load("load", workloads, PART_S["load"])
        if "throughput" in workloads and not found.get("throughput"):
            # What ended the steps may spare the rest.
            again = self._pie_load("throughput", ["throughput"], PART_S["load"])
            found = {**again, "steps": found.get("steps", [])}
        rows = [row for row in found.get("steps", []) if row["skipped"] is None]
        trips = {f"{r['batch']}x{r['context']}": r["round_trip_us"]["p50"] for r in rows}
        speeds = [run["tokens_per_s"] for run in found.get("throughput", [])]
        detail = {
            "round_trip_p50_us": trips,
            "client_p50_us": {f"{r['batch']}x{r['context']}": r["client_us"]["p50"] for r in rows},
            "ours_repeats": speeds,
            "ours": found,
        }
        self._figures["detail"] |= detail
        if speeds:
            self._figures["tokens_per_s"]["ours"] = speeds[-1]
        if rows:
            self._figures["steps"] = "load.samples.json"

    def _pie_load(self, name: str, workloads: list[str], limit_s: float) -> dict[str, Any]:
        """Plays workloads on a driver and returns what was written."""
        arguments, path = self._arguments, self._out / f"{name}.json"
        path.unlink(missing_ok=True)
        command: list[object] = [arguments.pie_load, *workloads, "--python", sys.executable]
        command += ["--model", self._model, "--device", arguments.device, "--json", path]
        command += ["--profile", arguments.profile, "--log", self._out / f"{name}.driver.log"]
        command += ["--batch", arguments.batch, "--context", arguments.context]
        command += ["--repeats", arguments.repeats, "--commit", frame.commit()]
        if arguments.lengths:
            command += ["--lengths", arguments.lengths]
        for option in arguments.option:
            command += ["--option", option]
        self._runner.run(name, command, limit_s)
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def _peer(self, backend: str) -> None:
        if backend == "fa3" and not _has_fa3():
            self._runner.say("peer fa3: its kernels are not installed")
            return
        arguments = self._arguments
        command = [sys.executable, PEERS / "sglang_engine.py", self._model, backend]
        command += ["--repeats", arguments.repeats]
        command += ["--lengths", arguments.lengths] if arguments.lengths else []
        method = quantization(arguments.option)
        if method is not None:
            command += ["--quantization", method]
        speeds = peer_figures(self._runner.run(f"peer {backend}", command, PART_S["peers"]))
        self._figures["detail"].setdefault("sglang_repeats", {})[backend] = speeds
        if speeds:
            self._figures["tokens_per_s"]["sglang"][backend] = speeds[-1]

    def _mini_peer(self) -> None:
        arguments, backend = self._arguments, self._arguments.peer_mini_backend
        name, _, page_size = backend.partition(":")
        command = [sys.executable, PEERS / "mini_sglang.py", arguments.peer_mini, self._model, name]
        command += ["--page-size", page_size or "1"]
        if arguments.lengths:
            command += ["--lengths", arguments.lengths]
        output = self._runner.run("peer mini", command, PART_S["peers"])
        speeds, detail = peer_figures(output), self._figures["detail"]
        detail["mini_sglang_repeats"] = {backend: speeds}
        detail["mini_sglang_version"] = next(iter(_MINI_LINE.findall(output)), "unknown")
        if speeds:
            self._figures["tokens_per_s"]["mini_sglang"][backend] = speeds[-1]

    def _model_runner(self, backend: str) -> None:
        if backend == "fa3" and not _has_fa3():
            self._runner.say("runner fa3: its kernels are not installed")
            return
        arguments, detail = self._arguments, self._figures["detail"]
        command = [sys.executable, PEERS / "sglang_runner.py", self._model, backend]
        command += ["--batches", arguments.batch, "--contexts", arguments.context]
        output = self._runner.run(f"runner {backend}", command, PART_S["runner"])
        found = runner_figures(output)
        detail.setdefault("sglang_runner_us", {})[backend] = found
        detail.setdefault("roofline_us", {}).update(roofline_us(output, found))


def quantization(options: Sequence[str]) -> str | None:
    """The method by which lines of [driver.options] have weights quantized, for the peers, too."""
    method: str | None = tomllib.loads("\n".join(options)).get("quantization")
    return method


def _has_fa3() -> bool:
    spec = importlib.util.find_spec("sgl_kernel")
    folders = spec.submodule_search_locations if spec else None
    return any((Path(folder) / "flash_ops.abi3.so").exists() for folder in folders or ())


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "pie-load", "device", "option")
    model = made.add_mutually_exclusive_group(required=True)
    model.add_argument("--shapes", **frame.SHAPES)
    model.add_argument("--model", type=Path, help="a whole model folder instead")
    made.add_argument("--parts", default="steps,throughput,peers")
    made.add_argument("--peer-backends", default="fa3,flashinfer,triton")
    made.add_argument("--peer-mini", type=Path, help="a clone of Mini-SGLang")
    made.add_argument("--peer-mini-backend", default="fi", help="fi, or fa:256 with its page size")
    made.add_argument("--batch", default="1,8,64,256")
    made.add_argument("--context", default="512,2048")
    made.add_argument("--lengths", type=Path, help="another workload, for a try on the CPU")
    made.add_argument("--profile", default="latency")
    made.add_argument("--repeats", type=int, default=3, help="of the workload; the last one counts")
    made.add_argument("--budget-s", type=float, default=520.0, help="seconds for all parts")
    return made


def main() -> None:
    """Plays the parts."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        if arguments.shapes:
            arguments.model = frame.model_folder(arguments.shapes, Path(folder))
            arguments.option.append('load_format="dummy"')
        Check(arguments, arguments.model, report).play()


if __name__ == "__main__":
    main()
