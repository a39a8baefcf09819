"""Compares the offline `Engine` with the driver alone and with SGLang's `Engine`, on a CUDA GPU.

    python benches/gpu/engine_check.py --shapes CONFIG_DIR --pie-load BINARY --out DIR
        [--parts engine,ring,sglang,chat] [--backend flashinfer]

The standard workload: 256 requests at once, prompts and outputs of 100 to 1,024 tokens, as token
ids, temperature 0.6, no end before the asked length. Weights are random. `ring` is the load
generator, which plays a runtime without a scheduler. Parts are processes, one after the other; the
third repeat of each counts.

`chat`: 64 conversations of 8 turns that share a prompt of 2,000 tokens; a turn has 40 to 120 tokens
of question and 64 of answer. Every conversation asks its next question when it is answered. Both
engines keep prefixes. What counts is the mean time to the first token, and the time of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import frame
from frame import Report
from processes import Runner

PEERS = Path(__file__).resolve().parents[1] / "peers"
LENGTHS = PEERS.parent / "pie_load" / "lengths.json"
PARTS = ("engine", "ring", "sglang", "chat")
LIMIT_S = 150.0
REPEATS = 3
VOCABULARY = 150_000
CONVERSATIONS, TURNS, SHARED = 64, 8, 2000
QUESTION, ANSWER = (40, 120), 64
OF_RING, OF_SGLANG, OF_FIRST, OF_CHAT = 0.97, 1.35, 0.6, 0.75
"""Bars: tokens/s over the ring's and SGLang's, time to the first token and of all over SGLang's."""


def engine_of(side: str, shapes: Path, backend: str, gap_ms: float | None = None) -> Any:
    """An engine of either side; `gap_ms` is our `max_token_gap_ms`."""
    common: dict[str, Any] = {
        "model_path": str(shapes),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
    if side == "ours":
        from pie_driver_sglang import Engine

        return Engine(**common, **({} if gap_ms is None else {"max_token_gap_ms": gap_ms}))
    import sglang

    return sglang.Engine(
        **common,
        attention_backend=backend,
        mem_fraction_static=0.85,
        max_running_requests=256,
        cuda_graph_max_bs_decode=256,
        disable_prefill_cuda_graph=True,
        log_level="error",
    )


def standard(shapes: Path, gap_ms: float | None) -> None:
    """Prints the tokens per second of each repeat."""
    lengths, draw = json.loads(LENGTHS.read_text()), random.Random(0)
    sampling = [
        {"temperature": 0.6, "ignore_eos": True, "max_new_tokens": count}
        for count in lengths["outputs"]
    ]
    with engine_of("ours", shapes, "", gap_ms) as engine:
        for repeat in range(REPEATS):
            prompts = [draw.choices(range(VOCABULARY), k=count) for count in lengths["prompts"]]
            begin = time.perf_counter()
            answers = engine.generate(input_ids=prompts, sampling_params=sampling)
            seconds = time.perf_counter() - begin
            said = sum(len(answer["output_ids"]) for answer in answers)
            assert said == sum(lengths["outputs"])
            print(f"engine repeat {repeat}: {said / seconds:.0f} tokens/s", flush=True)
        info = engine.get_server_info()
        print(json.dumps(info, default=str)[:3000], flush=True)


async def talk(engine: Any, seed: int, first: list[float]) -> None:
    """One conversation; notes the time to each first token."""
    draw = random.Random(seed)
    text = random.Random(0).choices(range(VOCABULARY), k=SHARED)
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": ANSWER}
    for _ in range(TURNS):
        text = text + draw.choices(range(VOCABULARY), k=draw.randint(*QUESTION))
        said: list[int] = []
        begin = time.perf_counter()
        stream = await engine.async_generate(input_ids=text, sampling_params=sampling, stream=True)
        async for answer in stream:
            if not said:
                first.append(time.perf_counter() - begin)
            said = answer["output_ids"]
        text = text + list(said)


async def chat(engine: Any, seed: int) -> tuple[float, float]:
    """All conversations: mean time to a first token, and the time of all, in seconds."""
    first: list[float] = []
    begin = time.perf_counter()
    await asyncio.gather(*(talk(engine, 1000 * seed + n, first) for n in range(CONVERSATIONS)))
    return statistics.mean(first), time.perf_counter() - begin


def chats(side: str, shapes: Path, backend: str) -> None:
    """Prints the times of each repeat."""
    engine = engine_of(side, shapes, backend)
    loop = getattr(engine, "loop", None) or asyncio.new_event_loop()
    for repeat in range(REPEATS):
        first, whole = loop.run_until_complete(chat(engine, repeat + 1))
        text = f"first {first * 1e3:.1f} ms, all {whole:.2f} s"
        print(f"chat {side} repeat {repeat}: {text}", flush=True)
        engine.flush_cache()
    engine.shutdown()


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "shapes", "pie-load")
    made.add_argument("--parts", default=",".join(PARTS))
    made.add_argument("--backend", default="flashinfer", help="SGLang's attention_backend")
    made.add_argument("--gap-ms", type=float, help="`max_token_gap_ms` of the standard workload")
    made.add_argument("--budget-s", type=float, default=550.0, help="seconds for all parts")
    made.add_argument("--play", choices=("standard", "ours", "sglang"), help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Runs the parts and compares."""
    arguments = parser().parse_args()
    shapes: Path = arguments.shapes
    if arguments.play == "standard":
        standard(shapes, arguments.gap_ms)
        return
    if arguments.play:
        chats(arguments.play, shapes, arguments.backend)
        return
    with Report(__file__, arguments) as report:
        runner = Runner(arguments.out / "engine_check.log", arguments.budget_s)
        again = [sys.executable, __file__, "--shapes", shapes, "--out", arguments.out]
        again += ["--pie-load", arguments.pie_load, "--backend", arguments.backend]
        again += [] if arguments.gap_ms is None else ["--gap-ms", arguments.gap_ms]
        again += ["--play"]
        load = [arguments.pie_load, "throughput", "--python", sys.executable, "--model", shapes]
        load += ["--device", "cuda:0", "--profile", "latency", "--option", 'load_format="dummy"']
        peer = [sys.executable, PEERS / "sglang_engine.py", shapes, arguments.backend]
        commands = {
            "engine": ([*again, "standard"], r"engine repeat \d+: (\d+)()"),
            "ring": (load, r"output tokens in [\d.]+ s = (\d+)()"),
            "sglang": (peer, r"repeat \d+: .* = (\d+)()"),
            "chat ours": ([*again, "ours"], r"first ([\d.]+) ms, all ([\d.]+) s"),
            "chat sglang": ([*again, "sglang"], r"first ([\d.]+) ms, all ([\d.]+) s"),
        }
        found: dict[str, list[float]] = {}
        for name, (command, pattern) in commands.items():
            if name.split()[0] in arguments.parts.split(","):
                output = runner.run(name, command, LIMIT_S)
                matches = re.findall(pattern, output)
                found[name] = [float(each) for each in matches[-1] if each] if matches else []
                report.add(part=name, repeats=matches)
        report.hold("parts that failed", len(runner.failed), at_most=0)
        compare(found, report)


def compare(found: dict[str, list[float]], report: Report) -> None:
    """Holds ours to the others."""
    ours = found.get("engine")
    for other, bar in (("ring", OF_RING), ("sglang", OF_SGLANG)):
        if ours and found.get(other):
            ratio = ours[0] / found[other][0]
            report.hold(f"tokens/s over {other}'s", ratio, at_least=bar)
    mine, theirs = found.get("chat ours"), found.get("chat sglang")
    if mine and theirs:
        report.hold("first token over sglang's", mine[0] / theirs[0], at_most=OF_FIRST)
        report.hold("chats over sglang's", mine[1] / theirs[1], at_most=OF_CHAT)


if __name__ == "__main__":
    main()
