"""GEMM configs found by measurement: errors, gains over the rule, and the steps of whole models.

    python benches/gpu/tune_check.py --out DIR [--names 3b,8b] [--rows 1,64,16] [--budget-s 20]
        [--parts compile,search,invariant,head,steps,kernels] [--total-s 480]

- `compile`: all candidates, in as many processes as there are cores.
- `search`: for each shape of `shapes_check.py`, the search that a first load runs, on random
  weights; every config of the table that it leaves is compared with float64.
- `invariant`: the same for batch-invariant GEMMs of many rows, whose bits must not change, with
  cuBLAS's time.
- `head`: the LM head by `wgmma`, compared with cuBLAS.
- `steps`: microseconds of a step with the table and with the rule (`step_check.py`), and the time
  to move its bytes; with `kernels` also where the kernels of some layers begin and end.

Each shape has processes of its own. DIR gets the table (`<GPU>.json`, as the package ships it),
every measurement (`measured.jsonl`) and the record, which grow shape by shape.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import frame
import torch
from frame import Report
from isolated import in_process
from processes import find
from shapes_check import SHAPES, bytes_per_s, bytes_us
from tune_candidates import (
    INVARIANT_ROWS,
    STEP_ROWS,
    compile_all,
    head_problem,
    layer_shape,
    make_workspace,
    problems,
)

from pie_driver_sglang.engine.layers import gemm_search
from pie_driver_sglang.engine.layers.gemm_runner import GemmRunner
from pie_driver_sglang.engine.layers.gemm_search import GemmSearch, LayerChain, time_graphs
from pie_driver_sglang.engine.layers.gemm_table import GemmTable
from pie_driver_sglang.engine.layers.invariant_search import search_invariant
from pie_driver_sglang.engine.layers.random_layers import random_layers
from pie_driver_sglang.engine.layers.small_batch import SmallBatchLayers
from pie_driver_sglang.kernels.gemm import wgmma
from pie_driver_sglang.kernels.gemm.search_space import (
    GemmConfig,
    GemmProblem,
    candidates,
)
from pie_driver_sglang.kernels.gemm.types import (
    STORE,
    Epilogue,
    LinearWeights,
    TileConfig,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig

NAMES: Final = "3b,qwen2.5-7b,8b,0.6b,14b,phi-4,qwen3-4b,mistral-7b"
TOLERANCE: Final = 1e-2
"""Largest relative error against float64: bfloat16 operands and results."""
STEP_S, STEP_LEAST_S = 150.0, 25.0
HEAD_CANDIDATES: Final = 10
NO_SEARCH: Final = ("tune_gemms = false",)


# Search


class Notes:
    """Lines of JSON, flushed one by one."""

    def __init__(self, path: Path, **about: Any) -> None:
        self._file = path.open("a")
        self._about = about

    def __call__(self, measurement: dict[str, Any]) -> None:
        """Writes a line."""
        self._file.write(json.dumps({**self._about, **measurement}, default=_plain) + "\n")
        self._file.flush()


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else str(value)


def open_table(gpu: str, out: Path) -> GemmTable:
    """The shipped table with what this check has found, which :meth:`GemmTable.save` adds to."""
    table = GemmTable.load(gpu)
    table.path = out / f"{gpu.replace(' ', '_')}.json"
    if table.path.exists():
        table.update(table.path.read_text())
    return table


def invariant(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Searches the batch-invariant GEMMs of a shape; returns microseconds by rows and GEMM."""
    device = torch.device("cuda:0")
    gpu = torch.cuda.get_device_name(device)
    table = open_table(gpu, arguments.out)
    gemm = wgmma.WgmmaGemm(torch.bfloat16, device)
    notes = Notes(arguments.out / "measured.jsonl", shape=name)
    found: dict[str, Any] = {}
    ends = time.monotonic() + arguments.budget_s
    for rows in INVARIANT_ROWS:
        for what, plain in layer_shape(SHAPES[name]).problems(rows).items():
            if time.monotonic() > ends:
                continue
            problem = plain._replace(invariant=True)
            weight = torch.empty(problem.height, problem.inputs, device=device).bfloat16()
            weight.normal_(std=problem.inputs**-0.5)
            gain = search_invariant(gemm, problem, weight, table, notes)
            if gain is None:
                continue
            x = torch.randn(rows, problem.inputs, device=device).bfloat16()
            [cublas] = time_graphs([functools.partial(torch.nn.functional.linear, x, weight)], 2)
            found[f"{what} {rows}"] = {
                "us": gain.us, "rule_us": gain.rule_us, "cublas_us": cublas,
                "differing": gain.differing, "config": str(gain.config),
            }  # fmt: skip
            print(
                f"{name} invariant {what} {rows}: {gain.us:.1f} µs, rule {gain.rule_us:.1f}, "
                f"cuBLAS {cublas:.1f}, {gain.measured} measured, {gain.differing} differ: "
                f"{gain.config}",
                flush=True,
            )
        table.save()
        _install(table)
    return found


def search(name: str, arguments: argparse.Namespace, rows: Sequence[int]) -> dict[str, Any]:
    """Searches a shape; returns its figures. Runs in a process of its own."""
    began = time.monotonic()
    device = torch.device("cuda:0")
    torch.manual_seed(0)
    shape = SHAPES[name]
    gpu = torch.cuda.get_device_name(device)
    table = open_table(gpu, arguments.out)
    before = {problem for problem, _ in table}
    layers, norm = random_layers(layer_shape(shape), device, gemm_search.CHAIN_BYTES)
    no_attention: Any = None
    small = SmallBatchLayers.of(layers, norm, no_attention, table)
    if small is None:
        raise ValueError(f"no kernels for {name}")
    notes = Notes(arguments.out / "measured.jsonl", shape=name)
    started = time.monotonic()
    figures: dict[str, Any] = {"name": name, "rows": {}, "ready_s": started - began}
    finder = GemmSearch(
        small, budget_s=arguments.budget_s, most=arguments.most, note=notes,
        broken=arguments.broken,
    )  # fmt: skip
    for count in rows:
        gains = finder.run([count])
        table.save()
        _install(table)
        if not gains:
            continue
        layer_us = gains[0].chain_us
        weights = sum(problem.weight_bytes for problem, _ in problems(shape, count))
        figures["rows"][count] = {
            "layer_us": layer_us,
            "bytes_us": weights / bytes_per_s(gpu) * 1e6,
            "gains_us": {each.name: each.gain_us for each in gains},
            "configs": {each.name: str(each.config) for each in gains},
        }
        gained = "  ".join(f"{each.name} {each.gain_us:.2f}" for each in gains)
        bytes_share = figures["rows"][count]["bytes_us"] / layer_us
        print(
            f"{name} {count} rows: {layer_us:.1f} µs a layer, its bytes / that {bytes_share:.3f}; "
            f"gained µs: {gained}",
            flush=True,
        )
    figures["measured"], figures["search_s"] = finder.measured, time.monotonic() - started
    figures["errors"] = errors(small, table, before)
    return figures


def _install(table: GemmTable) -> None:
    """Puts the table where a load reads it."""
    read = GemmTable.load(table.gpu)
    for problem, found in table:
        read.put(problem, found)
    read.save()


def errors(small: SmallBatchLayers, table: GemmTable, before: set[GemmProblem]) -> dict[str, float]:
    """Relative errors against float64 of the configs that were found."""
    found: dict[str, float] = {}
    for count in sorted({problem.rows for problem, _ in table if problem not in before}):
        chain = LayerChain(small.layers[:2], small.runner, count)
        for gemm, problem in chain.problems.items():
            entry = table.get(problem)
            if entry is not None and entry.config is not None:
                for rows in {count, max(1, count - 3)}:
                    part = LayerChain(small.layers[:2], small.runner, rows)
                    error = part.error(gemm, entry.config, torch.float64)
                    key = f"{gemm} {count}"
                    found[key] = max(found.get(key, 0.0), error)
    return found


def head(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of the LM head by the best of `wgmma`, and by cuBLAS."""
    device, shape = torch.device("cuda:0"), SHAPES[name]
    found: dict[str, Any] = {}
    vocab, width = shape.config["vocab_size"], shape.config["hidden_size"]
    weight = torch.empty(vocab, width, device=device, dtype=torch.bfloat16)
    matrix = LinearWeights(weight.normal_(std=0.02))
    gemm = wgmma.WgmmaGemm(torch.bfloat16, device)
    runner = GemmRunner(make_workspace(vocab, device), gemm)
    for rows in STEP_ROWS:
        x = torch.randn(rows, width, device=device).bfloat16()
        problem = head_problem(shape, rows)
        tried = candidates(problem, hopper=True, most=HEAD_CANDIDATES)
        if rows == 1:
            tried = [*tried[:8], *(each for each in tried if isinstance(each, WgmmaConfig))]
        exact = x.double() @ weight.double().t()
        times = {}
        for config in tried:

            def own(x: torch.Tensor = x, config: GemmConfig = config) -> torch.Tensor:
                return runner._gemm(x, matrix, config, STORE)

            with contextlib.suppress(RuntimeError, ValueError):
                out = own()
                if float((out.double() - exact).norm() / exact.norm()) < TOLERANCE:
                    [times[str(config)]] = time_graphs([own], 3)
        [cublas] = time_graphs([functools.partial(torch.nn.functional.linear, x, weight)], 3)
        best = min(times, key=times.__getitem__) if times else ""
        found[str(rows)] = {
            "cublas_us": cublas, "us": times.get(best), "config": best,
            "bytes_us": weight.nbytes / bytes_per_s(torch.cuda.get_device_name()) * 1e6,
        }  # fmt: skip
        print(f"{name} head, {rows} rows: {found[str(rows)]}", flush=True)
    return found


def left_s(arguments: argparse.Namespace) -> float:
    """Seconds that are left for everything."""
    return float(arguments.total_s - (time.monotonic() - arguments.began))


# Steps


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process of this check has the GPU."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def profile_steps(path: Path) -> None:
    """Has each timed step profiled: kernels by name, and those of a few layers one by one."""
    import step_check

    timed, found = step_check.Steps._step, []

    def profiled(self: Any, graphs: Any, rows: int, length: int, slots: torch.Tensor) -> float:
        us = timed(self, graphs, rows, length, slots)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            graphs.time(rows, 3)
        events = sorted(
            (event.time_range.start, event.time_range.end - event.time_range.start, event.name)
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        averages = [
            (event.key[:120], event.count, event.self_device_time_total)
            for event in profiler.key_averages()
        ]
        middle = events[len(events) // 2 : len(events) // 2 + 40]
        begins = middle[0][0] if middle else 0.0
        found.append({
            "rows": rows, "us": us, "kernels": averages,
            "some": [(start - begins, took, name[:80]) for start, took, name in middle],
        })  # fmt: skip
        path.write_text(json.dumps(found))
        return us

    step_check.Steps._step = profiled  # type: ignore[method-assign]


def step(name: str, arguments: argparse.Namespace) -> None:
    """Times the steps of a shape with the table and with the rule; prints a line of JSON."""
    import step_check

    from pie_driver_sglang.backends.sglang import environment

    shape = SHAPES[name]
    environment.prepare("cuda:0", shape.config["architectures"], spins=False)
    # Imported before the GPU is asked for, so that it need not wait.
    import pie_driver_sglang.backends.sglang.load  # noqa: F401

    with tempfile.TemporaryDirectory() as folder, locked(arguments.out / "gpu.lock"):
        began = time.monotonic()
        Path(folder, "config.json").write_text(json.dumps(shape.config))
        (Path(folder) / "engine").mkdir()
        steps = step_check.Steps(Path(folder) / "engine", Path(folder), NO_SEARCH)
        print(f"{name}: loaded after {time.monotonic() - began:.0f} s", flush=True)
        if "kernels" in arguments.parts:
            profile_steps(arguments.out / f"kernels-{name}.json")
        rows: list[dict[str, Any]] = []
        found: dict[str, dict[int, float]] = {}
        for way in ({}, {"tuned": 0}):
            collected: Any = SimpleNamespace(add=lambda **row: rows.append(row))
            steps.time(list(STEP_ROWS), [shape.context], way, collected)
            found["rule" if way else "tuned"] = rows[-1]["us_by_rows"]
            (arguments.out / f"steps-{name}.json").write_text(json.dumps(found))
    os._exit(0)


def all_steps(names: Sequence[str], arguments: argparse.Namespace, report: Report) -> None:
    """The steps of all shapes; a shape's process imports while the one before has the GPU."""

    def one(name: str) -> None:
        command: list[object] = [sys.executable, __file__, "--out", arguments.out]
        command += ["--only-step", name, "--parts", arguments.parts]
        if left_s(arguments) < STEP_LEAST_S:
            raise RuntimeError("no time is left")
        ended = find(command, min(STEP_S, left_s(arguments)))
        path = arguments.out / f"steps-{name}.json"
        if not path.exists():
            raise RuntimeError(f"{ended.status}: {ended.output[-1500:]}")
        found = json.loads(path.read_text())
        limit = bytes_us(SHAPES[name], report.record.device)
        shares = {
            way: {rows: round(limit[rows] / us, 3) for rows, us in times.items()}
            for way, times in found.items()
        }
        report.add(part="steps", name=name, us=found, bytes_us=limit, bytes_over_step=shares)
        print(f"{name}: steps {found}\n  bytes / step {shares}", flush=True)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, job in [(name, pool.submit(one, name)) for name in names]:
            if job.exception() is not None:
                print(f"without steps of {name}: {job.exception()}", flush=True)


def names(text: str) -> str:
    """Names of dense shapes, with comma."""
    unknown = [name for name in text.split(",") if name not in SHAPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"no shape {', '.join(unknown)}")
    return text


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out")
    made.add_argument("--names", type=names, default=NAMES)
    made.add_argument("--rows", default="1,64,16,32,8,128,96,160,192,224")
    made.add_argument("--parts", default="compile,search,invariant,head,steps")
    made.add_argument("--invariant", type=names, default="0.6b,8b", help="shapes of that part")
    made.add_argument("--steps", type=names, help="shapes of that part; by default all")
    made.add_argument("--most", type=int, default=16, help="configs of a kernel for a GEMM")
    made.add_argument("--budget-s", type=float, default=20.0, help="seconds of a shape's search")
    made.add_argument("--compile-s", type=float, default=75.0, help="seconds for compilation")
    made.add_argument("--total-s", type=float, default=480.0, help="seconds for everything")
    made.add_argument("--only-step", default="", help=argparse.SUPPRESS)
    return made


def search_reported(
    name: str, arguments: argparse.Namespace, rows: Sequence[int], report: Report
) -> bool:
    """Searches a shape; a config that ends the process is left out from then on."""
    try:
        limit = min(arguments.budget_s + 25, left_s(arguments))
        found = in_process(search, name, arguments, rows, limit_s=limit)
    except RuntimeError as error:
        print(f"without a search of {name}: {error}", flush=True)
        notes = arguments.out / "measured.jsonl"
        lines = notes.read_text().splitlines() if notes.exists() else []
        last = json.loads(lines[-1]) if lines else {}
        if "trying" not in last:
            return True
        kind = WgmmaConfig if "warpgroups" in last["config"] else TileConfig
        arguments.broken.add((Epilogue(last["trying"][0]), kind(**last["config"])))
        print(f"left out: {last}", flush=True)
        return False
    report.add(part="search", **found)
    worst = max(found["errors"].values(), default=0.0)
    report.hold(f"{name}: error", worst, at_most=TOLERANCE)
    print(
        f"{name}: {found['measured']} configs in {found['search_s']:.1f} s, ready after "
        f"{found['ready_s']:.1f} s, worst error {worst:.1e}",
        flush=True,
    )
    return True


def main() -> None:
    """All parts."""
    arguments = parser().parse_args()
    arguments.out = arguments.out.resolve()
    arguments.out.mkdir(parents=True, exist_ok=True)
    # Kernels, and the table that a load reads.
    os.environ["XDG_CACHE_HOME"] = str(Path(tempfile.gettempdir(), "tune_check"))
    arguments.began, arguments.broken, arguments.start = time.monotonic(), set(), "fork"
    if arguments.only_step:
        step(arguments.only_step, arguments)
        return
    wanted, parts = arguments.names.split(","), arguments.parts.split(",")
    rows = [int(each) for each in arguments.rows.split(",")]
    with Report(__file__, arguments) as report:
        if "compile" in parts:
            compile_all(arguments, wanted, rows)
        for name in wanted if "search" in parts else ():
            # The second time without the config that lost the GPU.
            if not search_reported(name, arguments, rows, report):
                search_reported(name, arguments, rows, report)
        for name in arguments.invariant.split(",") if "invariant" in parts else ():
            try:
                limit = min(arguments.budget_s + 25, left_s(arguments))
                found = in_process(invariant, name, arguments, limit_s=limit)
                report.add(part="invariant", name=name, gemms=found)
                differing = sum(each["differing"] for each in found.values())
                report.hold(f"{name}: configs with other bits", differing, at_most=0)
            except RuntimeError as error:
                print(f"without the batch-invariant GEMMs of {name}: {error}", flush=True)
        for name in ("3b", "0.6b", "8b") if "head" in parts else ():
            try:
                found = in_process(head, name, arguments, limit_s=min(40, left_s(arguments)))
                report.add(part="head", name=name, **found)
            except RuntimeError as error:
                print(f"without the head of {name}: {error}", flush=True)
        if "steps" in parts:
            all_steps((arguments.steps or arguments.names).split(","), arguments, report)


if __name__ == "__main__":
    main()
