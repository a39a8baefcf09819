"""Compares the offline `Engine` with the driver alone and with SGLang's `Engine`, on a CUDA GPU.

    python benches/gpu/engine_check.py --shapes CONFIG_DIR --pie-load BINARY --out DIR
        [--parts engine,text,ring,sglang,chat] [--backends flashinfer,triton]

The standard workload: 256 requests at once, prompts and outputs of 100 to 1,024 tokens, as token
ids, temperature 0.6, no end before the asked length. Weights are random. `text` is the same with
texts in and out, by a tokenizer of the model's size. `ring` is the load generator, which plays a
runtime without a scheduler. Parts are processes, one after the other; the third repeat of each
counts, of SGLang's that of the best backend. Ours and the load generator say how many steps a
repeat took, how many rows they had, and how long the driver was waited for; ours also how long the
driver waited for the next step.

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
import texts
from frame import Report
from processes import Runner

PEERS = Path(__file__).resolve().parents[1] / "peers"
LENGTHS = PEERS.parent / "pie_load" / "lengths.json"
PARTS = ("engine", "text", "ring", "sglang", "chat")
LIMIT_S = 150.0
REPEATS = 3
VOCABULARY = 150_000
MODEL_VOCABULARY = 151_936
CONVERSATIONS, TURNS, SHARED = 64, 8, 2000
QUESTION, ANSWER = (40, 120), 64
OF_RING, TEXT_OF_RING, OF_SGLANG, OF_FIRST, OF_CHAT = 0.97, 0.95, 1.35, 0.6, 0.75
"""Bars: tokens/s over the ring's, with texts too, and over SGLang's; time to the first token and of
all over SGLang's."""


def engine_of(side: str, shapes: Path, backend: str, tokenizer: Path | None = None) -> Any:
    """An engine of either side; ours takes texts where it has a tokenizer."""
    common: dict[str, Any] = {"model_path": str(shapes), "load_format": "dummy"}
    if side == "ours" and tokenizer is not None:
        common["tokenizer_path"] = str(tokenizer)
    else:
        common["skip_tokenizer_init"] = True
    if side == "ours":
        from pie_driver_sglang import Engine

        return Engine(**common)
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


def standard(shapes: Path, tokenizer: Path | None) -> None:
    """Prints the tokens per second of each repeat, and what the steps were."""
    lengths, draw = json.loads(LENGTHS.read_text()), random.Random(0)
    sampling = [
        {"temperature": 0.6, "ignore_eos": True, "max_new_tokens": count}
        for count in lengths["outputs"]
    ]
    kind = "engine" if tokenizer is None else "text"
    with engine_of("ours", shapes, "", tokenizer) as engine:
        before = counts(engine)
        for repeat in range(REPEATS):
            prompts: dict[str, Any]
            if tokenizer is None:
                drawn = [draw.choices(range(VOCABULARY), k=count) for count in lengths["prompts"]]
                prompts = {"input_ids": drawn}
            else:
                prompts = {"prompt": texts.make_texts(lengths["prompts"], repeat)}
            begin = time.perf_counter()
            answers = engine.generate(**prompts, sampling_params=sampling)
            seconds = time.perf_counter() - begin
            said = sum(len(answer["output_ids"]) for answer in answers)
            assert said == sum(lengths["outputs"])
            assert tokenizer is None or all(answer["text"] for answer in answers)
            print(f"{kind} repeat {repeat}: {said / seconds:.0f} tokens/s", flush=True)
            after = counts(engine)
            print(f"{kind} repeat {repeat} {explain(before, after, seconds)}", flush=True)
            before = after


def counts(engine: Any) -> dict[str, float]:
    """What the engine has counted so far."""
    found: dict[str, float] = engine.get_server_info()["internal_states"][0]
    return found


def explain(before: dict[str, float], after: dict[str, float], seconds: float) -> str:
    """The steps of a repeat: how many, with how many rows, and where its time went."""
    names = ("steps", "prompt_steps", "rows", "prompt_tokens", "cached_tokens", "retractions")
    steps, with_prompts, rows, prompt, cached, retractions = (
        int(after[name] - before[name]) for name in names
    )
    driver_s, host_s = (after[name] - before[name] for name in ("driver_s", "host_s"))
    rest_ms = 1e3 * (seconds - driver_s - host_s)
    return (
        f"steps: {steps}, {with_prompts} of them with {prompt} tokens of prompts ({cached} "
        f"cached, {retractions} retractions), {rows / max(1, steps):.1f} rows a step; driver "
        f"{driver_s:.3f} s, host {1e6 * host_s / max(1, steps):.1f} us a step, before and after "
        f"{rest_ms:.1f} ms"
    )


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
    made.add_argument(
        "--backends", default="flashinfer", help="SGLang's attention_backend, one or several"
    )
    made.add_argument("--budget-s", type=float, default=550.0, help="seconds for all parts")
    kinds = ("engine", "text", "ours", "sglang")
    made.add_argument("--play", choices=kinds, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Runs the parts and compares."""
    arguments = parser().parse_args()
    shapes: Path = arguments.shapes
    backends = arguments.backends.split(",")
    if arguments.play in ("engine", "text"):
        folder = arguments.out / "tokenizer"
        is_text = arguments.play == "text"
        standard(shapes, texts.make_tokenizer(folder, MODEL_VOCABULARY) if is_text else None)
        return
    if arguments.play:
        chats(arguments.play, shapes, backends[0])
        return
    with Report(__file__, arguments) as report:
        runner = Runner(arguments.out / "engine_check.log", arguments.budget_s)
        again = [sys.executable, __file__, "--shapes", shapes, "--out", arguments.out]
        again += ["--pie-load", arguments.pie_load, "--backends", arguments.backends, "--play"]
        load = [arguments.pie_load, "throughput", "--python", sys.executable, "--model", shapes]
        load += ["--device", "cuda:0", "--profile", "latency", "--option", 'load_format="dummy"']
        peer = [sys.executable, PEERS / "sglang_engine.py", shapes]
        commands: dict[str, tuple[list[object], str]] = {
            "engine": ([*again, "engine"], r"engine repeat \d+: (\d+)()"),
            "text": ([*again, "text"], r"text repeat \d+: (\d+)()"),
            "ring": (load, r"output tokens in [\d.]+ s = (\d+)()"),
            **{
                f"sglang {backend}": ([*peer, backend], r"repeat \d+: .* = (\d+)()")
                for backend in backends
            },
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
    peers = [each for name, each in found.items() if name.startswith("sglang") and each]
    best = max(peers, default=None)
    for name, words, other, bar in (
        ("engine", "tokens/s over the ring's", found.get("ring"), OF_RING),
        ("text", "tokens/s with texts over the ring's", found.get("ring"), TEXT_OF_RING),
        ("engine", "tokens/s over sglang's", best, OF_SGLANG),
    ):
        ours = found.get(name)
        if ours and other:
            report.hold(words, ours[0] / other[0], at_least=bar)
    mine, theirs = found.get("chat ours"), found.get("chat sglang")
    if mine and theirs:
        report.hold("first token over sglang's", mine[0] / theirs[0], at_most=OF_FIRST)
        report.hold("chats over sglang's", mine[1] / theirs[1], at_most=OF_CHAT)


if __name__ == "__main__":
    main()
