"""Drivers that checks spawn as the Pie runtime does, and requests to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pie_driver_sglang._core import Client, Request, Sampler

PAGE = 16
MIN_GAP = 0.25
"""Logit gap above which bfloat16 must agree with float32."""
NEVER_PARK = 2**64 - 1
"""A spin budget of the latency profile."""


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
) -> Iterator[tuple[Client, dict[str, int]]]:
    """A driver process on one device, or several with commas between, and its capabilities."""
    folder = Path(tempfile.mkdtemp())
    group = os.getpid() % 100_000
    lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
    config = write_config(
        folder, model, lines, device, group=group, dtype=dtype, spin_budget_us=spin_budget_us
    )
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
