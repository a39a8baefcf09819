"""Times SGLang's engine on a CUDA GPU without a prefix cache, with its own tree, and with ours.

    python benches/gpu/prefix_cache_check.py --shapes CONFIG_DIR --out DIR [--engines off,pie]

The engines are processes on one GPU, with random weights in the shape of CONFIG_DIR. They take
turns: each answers the same requests while the others are idle. Groups of eight requests begin with
a common prefix of 200 to 600 tokens; each continues with 30 to 100 tokens of its own, and asks for
32 tokens. `--at-once` says how many requests run at a time; a turn has four times as many, and new
prefixes. One row with another backend: `--at-once 8 --attention-backend triton`. The engine
`declines` is ours, and uses no prefix: the cost of the bookkeeping alone.

The status is 1 if an engine failed or found no prefix, and if ours makes fewer tokens a second than
SGLang's tree or none, by the medians over the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import frame
from frame import Report

ENGINES: dict[str, dict[str, Any]] = {
    "off": {"disable_radix_cache": True},
    "sglang": {},
    "pie": {"radix_cache_backend": "pie"},
    "declines": {"radix_cache_backend": "pie"},
}
"""Arguments of each engine, in addition to those of all. The last one has `PIE_RADIX_MIN_HIT`."""
DECLINED = 1000
"""Tokens of a prefix from which on the last engine uses it: more than any here has."""
SHARING = 8
PREFIX = (200, 600)
OWN = (30, 100)
OUTPUT = 32
KV_TOKENS = 160_000
"""Of each engine, so that three fit a GPU. Prefixes of earlier turns are evicted."""
VOCABULARY = 150_000


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts in random order."""
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> list[int]:
        return draw.choices(range(VOCABULARY), k=draw.randint(least, most))

    prefixes = [tokens(*PREFIX) for _ in range(-(-count // SHARING))]
    texts = [prefixes[n // SHARING] + tokens(*OWN) for n in range(count)]
    draw.shuffle(texts)
    return texts


async def play(engine: Any, texts: list[list[int]], at_once: int) -> dict[str, float]:
    """Answers all texts, so many at once: seconds, tokens, cached tokens, mean latency."""
    gate = asyncio.Semaphore(at_once)
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": OUTPUT}
    latencies, cached, said = [], 0, 0

    async def ask(text: list[int]) -> None:
        nonlocal cached, said
        async with gate:
            begin = time.perf_counter()
            answer = await engine.async_generate(input_ids=text, sampling_params=sampling)
            latencies.append(time.perf_counter() - begin)
        cached += answer["meta_info"]["cached_tokens"]
        said += answer["meta_info"]["completion_tokens"]

    begin = time.perf_counter()
    await asyncio.gather(*(ask(text) for text in texts))
    seconds = time.perf_counter() - begin
    return {
        "tokens_per_s": said / seconds,
        "latency_ms": statistics.mean(latencies) * 1e3,
        "cached": cached / sum(map(len, texts)),
    }


def serve(name: str, shapes: Path, backend: str) -> None:
    """An engine, which plays a turn for each line of stdin."""
    import sglang

    engine = sglang.Engine(
        model_path=str(shapes),
        load_format="dummy",
        attention_backend=backend,
        skip_tokenizer_init=True,
        disable_prefill_cuda_graph=True,
        max_total_tokens=KV_TOKENS,
        max_running_requests=256,
        cuda_graph_max_bs_decode=256,
        log_level="error",
        **ENGINES[name],
    )
    print("ready", flush=True)
    for line in sys.stdin:
        count, at_once, seed = map(int, line.split())
        found = engine.loop.run_until_complete(play(engine, prompts(count, seed), at_once))
        print(json.dumps(found), flush=True)
    engine.shutdown()


class Engine:
    """An engine's process."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        """Starts it."""
        command = [sys.executable, __file__, "--shapes", arguments.shapes, "--serve", name]
        command += ["--backend", arguments.backend, "--out", arguments.out]
        ours = "radix_cache_backend" in ENGINES[name]
        environment = {**os.environ, "SGLANG_PLUGINS": "pie_radix" if ours else ""}
        if name == "declines":
            environment["PIE_RADIX_MIN_HIT"] = str(DECLINED)
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def answer(self) -> str:
        """The next line that is its own, not a library's."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("ready", "{")):
                return line
        raise RuntimeError(f"the engine ended with status {self._process.wait()}")

    def turn(self, count: int, at_once: int, seed: int) -> dict[str, float]:
        """Plays a turn."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count} {at_once} {seed}\n")
        self._process.stdin.flush()
        found: dict[str, float] = json.loads(self.answer())
        return found

    def end(self) -> None:
        """Ends it."""
        self._process.kill()


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "shapes")
    made.add_argument("--engines", default="off,sglang,pie")
    made.add_argument(
        "--backend",
        "--attention-backend",
        default="flashinfer",
        help="SGLang's attention_backend",
    )
    made.add_argument("--at-once", default="8,64,256")
    made.add_argument("--turns", type=int, default=5)
    made.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    return made


def compare(engines: dict[str, Engine], at_once: int, turns: int, report: Report) -> None:
    """Has the engines take turns, and adds a row for each."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    # The first turn pays for what is compiled on the way.
    for turn in range(turns + 1):
        for name, engine in engines.items():
            took = engine.turn(4 * at_once, at_once, 1000 * at_once + turn)
            found[name] += [took] if turn else []
    rows = {
        name: {key: statistics.median(turn[key] for turn in all_) for key in all_[0]}
        for name, all_ in found.items()
    }
    for name, row in rows.items():
        report.add(at_once=at_once, engine=name, **row, turns=found[name])
        text = f"{row['tokens_per_s']:.0f} tokens/s, {row['latency_ms']:.1f} ms a request"
        print(f"{at_once:>4} at once, {name:>6}: {text}, {row['cached']:.0%} cached")
        cached = row["cached"] > 0
        uses = name not in ("off", "declines")
        report.hold(f"{name} caches at {at_once}", cached == uses, at_least=1)
    ours = rows.pop("pie", None)
    for name, row in rows.items():
        if ours:
            ratio = ours["tokens_per_s"] / row["tokens_per_s"]
            report.hold(f"pie / {name} at {at_once}", ratio, at_least=1)


def main() -> None:
    """Starts the engines and has them take turns."""
    arguments = parser().parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.shapes, arguments.backend)
        return
    with Report(__file__, arguments) as report:
        engines = {name: Engine(name, arguments) for name in arguments.engines.split(",")}
        try:
            for name, engine in engines.items():
                engine.answer()
                print(f"{name} is ready", flush=True)
            for at_once in map(int, arguments.at_once.split(",")):
                compare(engines, at_once, arguments.turns, report)
        finally:
            for engine in engines.values():
                engine.end()


if __name__ == "__main__":
    main()
