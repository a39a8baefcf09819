"""Serves models on a CUDA GPU through the installed wheel, and checks and times the answers.

    python benches/gpu/serve_check.py [--pocket DIR] [--shapes CONFIG_DIR] [--backends A,B]

Two parts, both against a driver process spawned as the Pie runtime does it:

1. `pocket` in bfloat16: the greedy tokens must be those of `transformers` (eager attention, float32
   on the CPU, the same weights) wherever the reference's two best logits are more than `MIN_GAP`
   apart.
2. Random weights in the shape of CONFIG_DIR: decode steps at a context of 512 by batch size, as the
   client sees them (round trip, p50 over the steps), with the driver's own probes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pie_driver_sglang import _core
from pie_driver_sglang._core import Client, Request, Sampler

PAGE = 16
MIN_GAP = 0.25
"""Logit gap above which bfloat16 must agree with float32."""
CONTEXT = 512
STEPS = 50


@contextmanager
def driver(
    model: Path,
    options: dict[str, object],
    device: str = "cuda:0",
    *,
    dtype: str = "bfloat16",
    spin_budget_us: int = 2**64 - 1,
) -> Iterator[tuple[Client, dict[str, int]]]:
    """A driver process on one device, or several with commas between, and its capabilities."""
    folder = Path(tempfile.mkdtemp())
    group = os.getpid() % 100_000
    lines = ["[model]", 'name = "check"', 'hf_repo = ""', f'snapshot_dir = "{model}"', "[driver]"]
    devices = device.split(",")
    lines += [f"group_id = {group}", f"device = {json.dumps(devices)}"]
    lines += [f"tensor_parallel_size = {len(devices)}", f'activation_dtype = "{dtype}"']
    lines += [f'spin_budget_us = "{spin_budget_us}"', "[driver.options]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    config = folder / "driver.toml"
    config.write_text("\n".join(lines))
    read, write = os.pipe()
    command = [sys.executable, "-m", "pie_driver_sglang", "--config", str(config)]
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


def pages(first: int, tokens: int) -> list[int]:
    """Consecutive pages that hold `tokens`."""
    return list(range(first, first + -(-tokens // PAGE)))


def step(tokens: list[int], start: int, first_page: int, context: int) -> Request:
    """Tokens at positions `start..`, sampled greedily at the last."""
    end = start + len(tokens)
    length = (end - 1) % PAGE + 1
    positions = list(range(start, end))
    slots = [(len(tokens) - 1, Sampler.greedy())]
    return Request(tokens, positions, pages(first_page, end), length, slots, context_id=context)


def check_pocket(
    model: Path, backend: str, new_tokens: int = 48, *, device: str = "cuda:0"
) -> None:
    """Greedy parity of four contexts decoded together."""
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    prompts = [[(7 * i + 11 * c) % 2000 + 300 for i in range(5 + 30 * c)] for c in range(4)]
    with driver(model, {"attention_backend": backend, "page_size": PAGE}, device) as (client, _):
        ids = [list(prompt) for prompt in prompts]
        batch = [step(prompt, 0, 200 * c, c + 1) for c, prompt in enumerate(prompts)]
        for _ in range(new_tokens):
            for context, (token,) in zip(ids, client.forward(batch).tokens, strict=True):
                context.append(token)
            batch = [step(all_[-1:], len(all_) - 1, 200 * c, c + 1) for c, all_ in enumerate(ids)]
    clear = wrong = 0
    for prompt, got in zip(prompts, ids, strict=True):
        with torch.no_grad():
            logits = reference(torch.tensor([got[:-1]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        for token, gap, expected in zip(
            got[len(prompt) :],
            (best.values[:, 0] - best.values[:, 1]).tolist(),
            best.indices[:, 0].tolist(),
            strict=True,
        ):
            clear += gap > MIN_GAP
            wrong += gap > MIN_GAP and token != expected
    print(f"    {4 * new_tokens} tokens, {clear} with a gap > {MIN_GAP}, {wrong} of those differ")
    if wrong:
        raise SystemExit("greedy tokens differ from the reference")


def time_shapes(model: Path, backend: str) -> None:
    """Decode steps by batch size."""
    options = {"attention_backend": backend, "page_size": PAGE, "load_format": "dummy"}
    with driver(model, options) as (client, caps):
        print(f"    {caps['total_pages']} pages of {caps['kv_page_size']} tokens")
        print("    batch   step p50 us   driver: plan  h2d  launch  sync")
        for size in (1, 8, 64, 256):
            stride = 2 * CONTEXT // PAGE
            prompt = [3 + i % 1000 for i in range(CONTEXT)]
            for c in range(size):
                client.forward([step(prompt, 0, c * stride, c + 1)])
            times, probes = [], (0, 0, 0, 0, 0, 0)
            for n in range(STEPS):
                batch = [step([5], CONTEXT + n, c * stride, c + 1) for c in range(size)]
                # With a request that has no token the answer is an archive, which has probes.
                batch.append(Request([], [], [], 1))
                started = time.perf_counter_ns()
                probes = client.forward(batch).probes
                times.append((time.perf_counter_ns() - started) / 1000)
            _, plan, h2d, launch, sync, _ = probes
            p50 = statistics.median(times)
            print(f"    {size:5}   {p50:11.0f}   {plan:12} {h2d:4} {launch:7} {sync:5}")


def main() -> None:
    """Checks and times every backend."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pocket", type=Path, default=Path("models/pocket"))
    parser.add_argument("--shapes", type=Path)
    parser.add_argument("--backends", default="triton,flashinfer")
    arguments = parser.parse_args()
    print(f"python {sys.version.split()[0]}, {_core.build_info()}")
    for backend in arguments.backends.split(","):
        print(f"pocket, bfloat16, {backend}")
        check_pocket(arguments.pocket.resolve(), backend)
        if arguments.shapes:
            print(f"{arguments.shapes.name} shape, random weights, {backend}")
            time_shapes(arguments.shapes.resolve(), backend)


if __name__ == "__main__":
    main()
