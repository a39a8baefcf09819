"""What models take of a GPU's memory, compared with what was planned before loading.

    python benches/gpu/memory_check.py --shapes DIR [--shapes DIR ...] [--device cuda:0]
        [--option KEY=VALUE ...] [--json FILE]

Each DIR names a model's shape by its `config.json`; the weights are random. A model is loaded in a
process of its own and warmed up. Then it gets the two passes that need the most. They are a prompt
of as many tokens as a pass may have, and a decode of the largest batch whose requests list a
distribution for all slots of logits. Prints the plan, and for each row what it became:

- `weights`, `graphs`, `KV`: bytes, and the pool's tokens.
- `activations`: the peak of torch's allocations in those passes, over what was there before them.
  The plan has distributions in its reserve.
- `left`: the least that was free on the GPU, torch's own cache included; next to it the reserve.

The script ends with status 1 if a start fails, a pass runs out of memory, or nothing is left.
`--device cpu` tries it out; a host has no such peaks.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import frame
from frame import Report
from serving import write_config

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler

LIMIT_S = 280.0
LISTED = 8
"""Tokens that a distribution lists."""


def check(shapes: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Loads one model, runs its largest passes and returns the figures."""
    from pie_driver_sglang.backends.sglang.start import load_rank
    from pie_driver_sglang.config.config_file import load_config
    from pie_driver_sglang.driver.serving_loop import warm_up
    from pie_driver_sglang.logs import configure_logging
    from pie_driver_sglang.ranks.types import ALONE

    configure_logging()
    folder = Path(tempfile.mkdtemp())
    lines = ['load_format = "dummy"', *arguments.option]
    model = frame.model_folder(shapes, folder)
    config = load_config(
        write_config(folder, model, lines, arguments.device, dtype=None, spin_budget_us=None)
    )
    name = f"/pie_shmem_g{os.getpid() % 100_000}"
    server = _core.Server(name, _core.ExitGuard(), spin_budget_us=0)
    server.unlink()
    planner, engine = load_rank(config, ALONE)
    server.serve(planner, engine.block.data, print, graph_path=engine.make_graph_path())
    warm_up(server, engine)
    loaded, plan = engine.measure_memory(), engine.plan
    row: dict[str, Any] = {
        "model": shapes.name,
        "planned": {**plan._asdict(), "device": plan.device._asdict(), "kv": plan.kv},
        "loaded": loaded._asdict(),
    }
    chunk = dict(planner.layout)["input_ids"][2]
    return row | measure_passes(server, engine, chunk)


def measure_passes(server: _core.Server, engine: Any, chunk: int) -> dict[str, int]:
    """Runs the largest passes; on a GPU, their peak and the least that was left."""
    import torch

    from pie_driver_sglang.driver.serving_loop import run_batch

    on_cuda = engine.backend.runner.device != "cpu"
    before = 0
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for requests in largest_batches(engine, chunk):
        batch = server.warm_up(_core.encode_forward(requests))
        run_batch(batch, engine)
        batch.commit()
    if not on_cuda:
        return {}
    torch.cuda.synchronize()
    # What torch has reserved is never given back by itself: the least is what is free now.
    free = torch.cuda.mem_get_info()[0]
    return {"activations": torch.cuda.max_memory_allocated() - before, "left": free}


def largest_batches(engine: Any, chunk: int) -> Iterator[list[Request]]:
    """A prompt that fills a pass, and a decode whose slots all list a distribution."""
    from pie_driver_sglang.memory.batch_sizes import MAX_SLOTS

    info, args = engine.model_info, engine.backend.runner.server_args
    length = min(chunk, info.context_length, info.total_pages * info.page_size)
    pages = list(range(-(-length // info.page_size)))
    last = (length - 1) % info.page_size + 1
    slot = (length - 1, Sampler.greedy())
    yield [Request([0] * length, list(range(length)), pages, last, [slot])]
    count = min(info.total_pages, len(engine.block_table.pages), args.max_running_requests)
    each = -(-MAX_SLOTS // count)
    slots = [(0, Sampler.dist(1.0, LISTED))] * each
    yield [Request([0], [0], [page], 1, slots) for page in range(count)]


def show(row: dict[str, Any]) -> None:
    """The figures of one model for people."""
    planned, loaded = row["planned"], row["loaded"]
    lines = [(name, planned[name], loaded[name]) for name in ("weights", "graphs", "kv")]
    if "activations" in row:
        lines.append(("activations", planned["activations"], row["activations"]))
        lines.append(("left", planned["reserve"], row["left"]))
    print(f"{row['model']}: mem_fraction_static {planned['fraction']:.4f}, "
          f"{loaded['tokens']} tokens, {planned['tokens']} planned")  # fmt: skip
    for name, plan, real in lines:
        print(f"    {name:<12} planned {plan / 2**30:8.3f} GiB  real {real / 2**30:8.3f} GiB")


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "device", "option")
    made.add_argument("--shapes", action="append", required=True, **frame.SHAPES)
    made.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Checks every shape in a process of its own."""
    arguments = parser().parse_args()
    if arguments.one is not None:
        row = check(arguments.shapes[0], arguments)
        arguments.one.write_text(json.dumps(row))
        return
    with Report(__file__, arguments) as report:
        check_all(arguments, report)


def check_all(arguments: argparse.Namespace, report: Report) -> None:
    """Every shape, and what was left of the memory."""
    failed = 0
    for shapes in arguments.shapes:
        print(f"--- {shapes}", flush=True)
        found = Path(tempfile.mkdtemp()) / "row.json"
        options = [f"--option={option}" for option in arguments.option]
        command = [sys.executable, __file__, "--shapes", shapes, "--device", arguments.device]
        command += [*options, "--one", found]
        status = subprocess.run(command, timeout=LIMIT_S, check=False).returncode
        if status:
            print(f"    failed with status {status}", flush=True)
            failed += 1
            continue
        row = json.loads(found.read_text())
        show(row)
        report.add(**row)
        if "left" in row:
            report.hold(f"{shapes.name}: bytes left", row["left"], at_least=1)
    report.hold("shapes that failed", failed, at_most=0)


if __name__ == "__main__":
    main()
