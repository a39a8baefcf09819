"""Prompts that join decodes on a GPU: what a step with one takes more, in every way there is.

    python benches/gpu/mixed_check.py --shapes CONFIG_DIR [--decodes 64] [--json FILE]
        [--peers fa3,flashinfer] [--option KEY=VALUE]

Random weights in the shape of CONFIG_DIR, in one driver for each way, contexts of 512:

- graph: one frame, which runs as one graph (up to 2,304 rows; longer ones eagerly)
- eager: one frame, every batch without graphs
- split: the decodes' frame, and then the prompt's

Compared with SGLang's engine with mixed chunks (`benches/peers/sglang_mixed.py`), where a delay is
the longest gap between two tokens less the usual one. All times in µs, medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import frame
from frame import Report
from serving import PAGE, driver, round_trip_us, step

from pie_driver_sglang import _core
from pie_driver_sglang._core import Client, Request

CONTEXT = 512
PROMPTS = (256, 512, 1024, 2048)
REPEATS = 12
PEER = Path(__file__).resolve().parents[1] / "peers" / "sglang_mixed.py"
WAYS = {"graph": [], "eager": ["disable_cuda_graph = true"], "split": []}


class Contexts:
    """Decodes that run, and room for a prompt among them."""

    def __init__(self, client: Client, count: int) -> None:
        self._client = client
        stride = CONTEXT // PAGE + 2
        prompt = [3 + i % 1000 for i in range(CONTEXT)]
        for number in range(count):
            client.forward([step(prompt, 0, number * stride, number + 1)])
        # One token for each context.
        self.decodes = [step([5], CONTEXT, number * stride, number + 1) for number in range(count)]
        self._room = count * stride
        self._next = count + 1

    def prompt(self, length: int) -> Request:
        """A context that was never there."""
        self._next += 1
        tokens = [3 + (i * 7 + self._next) % 1000 for i in range(length)]
        return step(tokens, 0, self._room, self._next)


def time_way(client: Client, way: str, decodes: int) -> dict[str, float]:
    """Microseconds of a plain step, and what each prompt adds to it."""
    contexts = Contexts(client, decodes)
    plain = _core.encode_forward(contexts.decodes)
    usual = statistics.median(round_trip_us(client, plain) for _ in range(100))
    found = {"decode": usual}
    for length in PROMPTS:
        times = []
        for _ in range(REPEATS):
            prompt = contexts.prompt(length)
            if way == "split":
                total = round_trip_us(client, plain) + round_trip_us(
                    client, _core.encode_forward([prompt])
                )
            else:
                frame = _core.encode_forward([*contexts.decodes, prompt])
                total = round_trip_us(client, frame)
            times.append(total - usual)
            for _ in range(3):
                round_trip_us(client, plain)
        # The first ones pay for what is compiled.
        found[str(length)] = statistics.median(times[3:])
    return found


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "option", "device")
    made.add_argument("--shapes", required=True, **frame.SHAPES)
    made.add_argument("--decodes", type=int, default=64)
    made.add_argument("--ways", default=",".join(WAYS))
    made.add_argument("--peers", default="", help="SGLang's attention backends")
    return made


def main() -> None:
    """Every way, and the peers."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        model = frame.model_folder(arguments.shapes, Path(folder))
        for way in arguments.ways.split(","):
            lines = ['load_format = "dummy"', f"page_size = {PAGE}", *WAYS[way], *arguments.option]
            with driver(model, tomllib.loads("\n".join(lines)), arguments.device) as (client, _):
                found = time_way(client, way, arguments.decodes)
            report.add(way=way, decodes=arguments.decodes, us=found)
            row = "  ".join(f"{name} {value:.0f}" for name, value in found.items())
            print(f"{way}, {arguments.decodes} decodes: {row}", flush=True)
        for backend in filter(None, arguments.peers.split(",")):
            command = [sys.executable, PEER, model, backend, "--decodes", str(arguments.decodes)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            said = [line for line in done.stdout.splitlines() if " us " in line]
            report.add(way=f"sglang {backend}", decodes=arguments.decodes, said=said)
            print(f"sglang {backend}:", *said or done.stderr.splitlines()[-3:], sep="\n    ")
            report.hold(f"sglang {backend}: lines", len(said), at_least=1)


if __name__ == "__main__":
    main()
