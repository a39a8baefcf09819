"""Finds out what a graph does that is launched over a block staged for a smaller graph.

    python benches/gpu/launch_fault_check.py [--shapes CONFIG_DIR] [--device cuda:0] [--json FILE]
        [--rows 198] [--graph 256] [--limit-s 120]

Such a launch once ended a measurement with a segmentation fault in `cuGraphLaunch`. The larger
graph reads lengths and ids from other places of the block, so a kernel reads an illegal address.
Launches that follow before the error is seen then crash within the CUDA driver (580), with this
driver or without it (`plain`). The driver itself has one launch in flight, of the graph that it has
staged, and `CudaGraphRunner.time` refuses another block. The cases, each in a process of its own:

1. `fields`: the step is staged, and the fields of the larger graph are read from the block. Printed
   are those that lie outside the pool, the block table or the vocabulary.
2. `staged`: the larger graph is staged with padding rows, then launched back to back. It must run.
3. `once`: the larger graph is launched once over the smaller one's block, and waited for.
4. `repeat`: the same, launched back to back as the measurement did.
5. `plain`: a graph of one kernel, without this driver, that reads an illegal address, launched back
   to back by torch, until an error is seen. It says what the CUDA driver does then.
6. `sanitizer`: case 3 under `compute-sanitizer`, where it is installed.

For each case there is a row with its status or signal, the CUDA error, and the top of the native
stack. Bars: cases 1 and 2 end well. Without `--shapes` the model is `pocket`, which is also what
the CPU takes: there, only `fields` and `staged` are run.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import frame
from frame import Report
from serving import NEVER_PARK, PAGE, step, write_config

REPEATS = 50
SANITIZERS = ("compute-sanitizer", "/usr/local/cuda/bin/compute-sanitizer")


def serve_here(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """A driver's engine in this process, and a client that has run one decode of `--rows`."""
    from pie_driver_sglang import _core
    from pie_driver_sglang.backends.sglang import environment
    from pie_driver_sglang.config.config_file import load_config
    from pie_driver_sglang.driver.serving_loop import serve, warm_up

    device, folder = arguments.device, Path(tempfile.mkdtemp())
    if arguments.shapes:
        options = ['load_format = "dummy"', "mem_fraction_static = 0.08"]
        model = frame.model_folder(arguments.shapes, folder)
    else:
        model, options = frame.POCKET, ["mem_fraction_static = 0.05"] if device != "cpu" else []
    config = load_config(write_config(folder, model, [f"page_size = {PAGE}", *options], device))
    environment.prepare(device, config.model.hf_config["architectures"], spins=True)
    from pie_driver_sglang.backends.sglang.load import load_engine

    name = f"/pie_shmem_g{os.getpid() % 100_000}"
    server = _core.Server(name, _core.ExitGuard(), spin_budget_us=NEVER_PARK)
    planner, engine = load_engine(config)
    server.serve(planner, engine.block.data, print, graph_path=engine.make_graph_path())
    warm_up(server, engine)
    stream = None
    if device != "cpu":
        import torch

        stream = torch.cuda.current_stream()

    def run() -> None:
        if stream is not None:
            torch.cuda.set_stream(stream)
        serve(server, engine, None)

    threading.Thread(target=run, daemon=True).start()
    client = _core.Client(name, spin_budget_us=NEVER_PARK)
    # A page for each: what is read from it does not matter here.
    client.forward([step([300 + c], 0, c, c + 1) for c in range(arguments.rows)])
    server.unlink()
    print(f"staged {arguments.rows} rows", flush=True)
    return engine, engine.steps


def larger(steps: Any, arguments: argparse.Namespace) -> Any:
    """The plain graph that runs a decode of `--graph` rows."""
    plain = (graph for graph in steps._graphs if not graph.grouped and not graph.extended)
    return next(graph for graph in plain if graph.rows >= arguments.graph)


def check_fields(arguments: argparse.Namespace) -> None:
    """Prints what the larger graph would read of the block."""
    engine, steps = serve_here(arguments)
    graph, info = larger(steps, arguments), engine.model_info
    table = engine.block_table.slots
    limits = {
        "input_ids": info.vocab_size,
        "out_cache_loc": (info.total_pages + 1) * PAGE,
        "req_pool_indices": table.shape[0],
        "seq_lens": table.shape[1] + 1,
    }
    print(f"the larger graph has {graph.rows} rows", flush=True)
    for name, limit in limits.items():
        field = graph.host[name]
        bad = (field < 0) | (field >= limit)
        worst = field[bad][:1].tolist()
        print(f"outside: {name} {int(bad.sum())} of {len(field)}, limit {limit}, first {worst}")


def check_staged(arguments: argparse.Namespace) -> None:
    """Launches the larger graph over rows that it may compute."""
    from pie_driver_sglang.engine.graph_runner import stage_blank

    _, steps = serve_here(arguments)
    stage_blank(larger(steps, arguments))
    if arguments.device == "cpu":
        steps.run(steps._graphs.index(larger(steps, arguments)))
    else:
        print(f"{steps.time(larger(steps, arguments).rows, REPEATS):.0f} us a launch")


def check_once(arguments: argparse.Namespace) -> None:
    """Launches the larger graph once over the block of a smaller one."""
    import torch

    _, steps = serve_here(arguments)
    graph = larger(steps, arguments)
    steps._captured[graph.rows, graph.kind].replay()
    print("launched", flush=True)
    torch.cuda.synchronize()
    print("ended", flush=True)


def check_repeat(arguments: argparse.Namespace) -> None:
    """The same, back to back."""
    import torch

    _, steps = serve_here(arguments)
    graph = larger(steps, arguments)
    try:
        steps.time(graph.rows)
    except ValueError as error:
        print(f"ValueError: {error}", flush=True)
    replay = steps._captured[graph.rows, graph.kind].replay
    for turn in range(10 * REPEATS):
        replay()
        if turn % REPEATS == 0:
            print(f"{turn} launches", flush=True)
    torch.cuda.synchronize()
    print("ended", flush=True)


def check_plain(arguments: argparse.Namespace) -> None:
    """A graph that reads an illegal address, without this driver."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def read(place, base, out):  # type: ignore[no-untyped-def]
        tl.store(out, tl.load(base + tl.load(place)))

    place = torch.zeros(1, dtype=torch.int64, device=arguments.device)
    base, out = torch.ones(8, device=arguments.device), torch.zeros(1, device=arguments.device)
    wrong = torch.tensor([1 << 40]).pin_memory()
    filler = torch.zeros(1 << 22, device=arguments.device)
    read[(1,)](place, base, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(300):
            filler.add_(1.0)
        read[(1,)](place, base, out)
    graph.replay()
    torch.cuda.synchronize()
    place.copy_(wrong, non_blocking=True)
    for turn in range(2000):
        graph.replay()
        if turn % 100 == 0:
            print(f"{turn} launches", flush=True)
    torch.cuda.synchronize()


CASES: dict[str, Callable[[argparse.Namespace], None]] = {
    "fields": check_fields,
    "staged": check_staged,
    "once": check_once,
    "repeat": check_repeat,
    "plain": check_plain,
}
ON_CPU = ("fields", "staged")


def run_case(name: str) -> None:
    """A case in this process, with the stacks of a fatal signal on stderr."""
    arguments = parser().parse_args()
    faulthandler.enable()
    if arguments.device != "cpu":
        import torch

        torch._C._set_print_stack_traces_on_fatal_signal(True)
    CASES[name](arguments)
    sys.stdout.flush()
    # Neither the loop nor a lost device has a say in how the case ended.
    os._exit(0)


def outcome(status: int) -> str:
    """A process's status in words."""
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"


def run(name: str, command: list[str], end: float, report: Report) -> str:
    """Runs a case until `end` of the monotonic clock, and notes how it ended."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    process = subprocess.Popen(command, stdout=pipe, stderr=both, text=True, errors="replace")
    try:
        text, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        how = outcome(process.returncode)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        how = "no end within its time"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = ("CUDA error", "Error:", "outside:", "us a launch", "turn ", "launch", "Invalid")
    said = [line for line in lines if any(word in line for word in telling)][-12:]
    stack = [line for line in lines if line.startswith("frame #") or " File " in f" {line}"][:24]
    report.add(case=name, how=how, said=said, stack=stack, last=lines[-40:])
    print(f"{name}: {how}", flush=True)
    for line in [*said, *stack[:14]]:
        print(f"    {line[:200]}", flush=True)
    return how


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "shapes", "device")
    made.add_argument("--rows", type=int, default=198, help="of the step that is staged")
    made.add_argument("--graph", type=int, default=256, help="rows of the graph that is launched")
    made.add_argument("--limit-s", type=float, default=60.0, help="for all cases, in seconds")
    made.add_argument("--cases", default=",".join([*CASES, "sanitizer"]))
    made.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Runs the cases."""
    arguments = parser().parse_args()
    if arguments.case:
        run_case(arguments.case)
    names = arguments.cases.split(",")
    if arguments.device == "cpu":
        names = [name for name in names if name in ON_CPU]
    sanitizer = next((path for path in map(shutil.which, SANITIZERS) if path), None)
    ways: dict[str, list[str]] = {}
    for name in names:
        case = "once" if name == "sanitizer" else name
        command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
        if name != "sanitizer":
            ways[name] = command
        elif sanitizer:
            ways[name] = [sanitizer, "--print-limit", "3", "--error-exitcode", "9", *command]
        else:
            print("sanitizer: compute-sanitizer is not installed here", flush=True)
    with Report(__file__, arguments) as report:
        end = time.monotonic() + arguments.limit_s
        ends = {name: run(name, way, end, report) for name, way in ways.items()}
        sound = [name for name in ON_CPU if name in ends]
        failed = sum(ends[name] != "status 0" for name in sound)
        report.hold("sound cases that failed", failed, at_most=0)


if __name__ == "__main__":
    main()
