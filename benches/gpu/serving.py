"""Drivers that checks spawn as the Pie runtime does, requests to them, and their references."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang import _core
from pie_driver_sglang._core import Client, Request, Sampler

PAGE = 16
MIN_GAP = 0.25
"""Logit gap above which bfloat16 must agree with float32."""
NEVER_PARK = 2**64 - 1
"""A spin budget of the latency profile."""
PROMPTS: Final = [[(7 * i + 11 * c) % 2000 + 300 for i in range(5 + 30 * c)] for c in range(4)]
"""Token ids of the embedded model, of several lengths."""
CONTEXT_TOKENS: Final = 256
"""Tokens that :func:`decode_greedily` has pages for, of each context."""


def write_config(
    folder: Path,
    model: Path,
    options: Sequence[str],
    device: str = "cuda:0",
    *,
    group: int = 0,
    dtype: str | None = "bfloat16",
    spin_budget_us: int | None = NEVER_PARK,
) -> Path:
    """Writes a `driver.toml` and returns its path.

    Args:
        folder: Where to put it.
        model: Its snapshot.
        options: Lines of `[driver.options]`.
        device: One device, or several with commas between.
        group: The group's number.
        dtype: Of the activations; None for the driver's default.
        spin_budget_us: The driver's; None for its default.
    """
    devices = device.split(",")
    lines = ["[model]", 'name = "check"', 'hf_repo = ""', f'snapshot_dir = "{model}"', "[driver]"]
    lines += [f"group_id = {group}", f"device = {json.dumps(devices)}"]
    lines += [f"tensor_parallel_size = {len(devices)}"]
    lines += [] if dtype is None else [f'activation_dtype = "{dtype}"']
    lines += [] if spin_budget_us is None else [f'spin_budget_us = "{spin_budget_us}"']
    lines += ["[driver.options]", *options]
    path = folder / "driver.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@contextmanager
def driver(
    model: Path,
    options: dict[str, object],
    device: str = "cuda:0",
    *,
    dtype: str = "bfloat16",
    spin_budget_us: int = NEVER_PARK,
    package: str = "pie_driver_sglang",
) -> Iterator[tuple[Client, dict[str, int]]]:
    """A driver process on one device, or several with commas between, and its capabilities.

    `package` is what `python -m` runs: `pie_driver_vllm` for vLLM's models.
    """
    folder = Path(tempfile.mkdtemp())
    group = os.getpid() % 100_000
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    config = write_config(
        folder, model, lines, device, group=group, dtype=dtype, spin_budget_us=spin_budget_us
    )
    read, write = os.pipe()
    command = [sys.executable, "-m", package, "--config", str(config)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--handshake-fd", str(write)],
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stderr=log,
        )
    os.close(write)
    with os.fdopen(read) as pipe:
        announced = pipe.read().splitlines()
    try:
        if not announced:
            status = process.wait(20)
            text = (folder / "log").read_text()[-4000:]
            raise SystemExit(f"{text}\nThe driver ended with status {status}")
        caps = json.loads(announced[0])["caps"]
        yield Client(f"/pie_shmem_g{group}", spin_budget_us=spin_budget_us), caps
    except Exception:
        print((folder / "log").read_text()[-4000:])
        raise
    finally:
        process.terminate()
        started = time.monotonic()
        status = process.wait(20)
        text = (folder / "log").read_text()
        line = next((line for line in text.splitlines() if "serving" in line), text[-2000:])
        seconds = time.monotonic() - started
        left = Path(f"/dev/shm/pie_shmem_g{group}").exists()
        print(f"    {line}")
        print(f"    SIGTERM: status {status} after {seconds:.2f} s, region left: {left}")


@contextmanager
def driver_here(
    model: Path,
    options: Sequence[str],
    device: str = "cuda:0",
    *,
    tracer: Any = None,
    steps: bool = False,
) -> Iterator[tuple[str, Any, Any]]:
    """A driver in this process, whose loop runs in a thread of its own.

    Args:
        model: Its snapshot.
        options: Lines of `[driver.options]`.
        device: One device, or several with commas between: the others are worker processes.
        tracer: Of the serving loop.
        steps: Whether the planner stages steps of all ranks.

    Yields:
        The region's name, the first rank's engine, and the workers (None with one device).
    """
    import torch

    from pie_driver_sglang.backends.sglang.library import LIBRARY
    from pie_driver_sglang.config.config_file import load_config
    from pie_driver_sglang.driver.serving_loop import serve, warm_up
    from pie_driver_sglang.ranks.leader import LeaderExecutor
    from pie_driver_sglang.ranks.parallel import Workers
    from pie_driver_sglang.ranks.types import ALONE

    names = device.split(",")
    path = write_config(Path(tempfile.mkdtemp()), model, options, device)
    config = load_config(path)
    name = f"/pie_shmem_g{os.getpid() % 100_000}"
    guard = _core.ExitGuard()

    def fail(error: Exception) -> None:
        print(error, flush=True)
        guard.exit(1)

    workers = Workers(path, names, LIBRARY.module, fail) if len(names) > 1 else None
    server = _core.Server(name, guard, spin_budget_us=NEVER_PARK)
    planner, own = LIBRARY.load_rank(config, workers.rank if workers else ALONE)
    engine = LeaderExecutor(own, workers.broadcast) if workers else own
    server.serve(
        planner, engine.block.data, print, graph_path=engine.make_graph_path(), steps=steps
    )
    warm_up(server, engine)
    stream = torch.cuda.current_stream()

    def run() -> None:
        torch.cuda.set_stream(stream)
        serve(server, engine, tracer)

    threading.Thread(target=run, daemon=True).start()
    try:
        yield name, own, workers
    finally:
        server.unlink()


def pages(first: int, tokens: int, page_size: int = PAGE) -> list[int]:
    """Consecutive pages that hold `tokens`."""
    return list(range(first, first + -(-tokens // page_size)))


def step(
    tokens: list[int],
    start: int,
    first_page: int,
    context: int,
    samplers: Sequence[Sampler] | None = None,
    *,
    page_size: int = PAGE,
    **more: Any,
) -> Request:
    """Tokens at positions `start..`, sampled at the last: greedily, if nothing else is given.

    `more` has other arguments of `Request`. Drafts have pages, too.
    """
    end = start + len(tokens)
    samplers = [Sampler.greedy()] if samplers is None else samplers
    slots = [(len(tokens) - 1, each) for each in samplers]
    listed = pages(first_page, end + len(more.get("drafts", ())), page_size)
    last = (end - 1) % page_size + 1
    positions = list(range(start, end))
    return Request(tokens, positions, listed, last, slots, context_id=context, **more)


def round_trip_us(client: Client, frame: bytes) -> float:
    """Microseconds from a request to its response."""
    started = time.perf_counter_ns()
    client.call(frame)
    return (time.perf_counter_ns() - started) / 1000


def decode_greedily(client: Client, count: int, page_size: int = PAGE) -> list[list[int]]:
    """Continues `PROMPTS` together by `count` tokens each; prompts and tokens."""
    ids = [list(prompt) for prompt in PROMPTS]
    stored = [0] * len(ids)
    for _ in range(count):
        batch = [
            step(all_[at:], at, CONTEXT_TOKENS * c // page_size, c + 1, page_size=page_size)
            for c, (all_, at) in enumerate(zip(ids, stored, strict=True))
        ]
        stored = [len(all_) for all_ in ids]
        for all_, (token,) in zip(ids, client.forward(batch).tokens, strict=True):
            all_.append(token)
    return ids


def load_reference(model: Path) -> Any:
    """The model in `transformers`: float32 on the CPU, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )


def decided(logits: Any, tokens: Sequence[int], gap: float = MIN_GAP) -> tuple[int, int]:
    """Rows of logits whose two best are more than `gap` apart, and those whose token differs."""
    import torch

    best = logits.topk(2)
    sure = best.values[:, 0] - best.values[:, 1] > gap
    differs = best.indices[:, 0] != torch.tensor(tokens)
    return int(sure.sum()), int((sure & differs).sum())


def compare_greedy(model: Path, ids: Sequence[list[int]], gap: float = MIN_GAP) -> tuple[int, int]:
    """What :func:`decided` counts of :func:`decode_greedily`, against the reference."""
    import torch

    reference = load_reference(model)
    counts = []
    for prompt, got in zip(PROMPTS, ids, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([got[:-1]])).logits[0, len(prompt) - 1 :]
        counts.append(decided(logits, got[len(prompt) :], gap))
    clear, wrong = (sum(column) for column in zip(*counts, strict=True))
    return clear, wrong
