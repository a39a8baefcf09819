"""Compares the offline `Engine` with the driver alone and with SGLang's `Engine`, on a CUDA GPU.

    python benches/gpu/engine_check.py --shapes CONFIG_DIR --pie-load BINARY --out DIR
        [--parts engine,text,ring,sglang,chat] [--backends flashinfer,triton]

The standard workload: 256 requests at once, prompts and outputs of 100 to 1,024 tokens, as token
ids, temperature 0.6, no end before the asked length. Weights are random. `text` is the same with
texts in and out, by a tokenizer of the model's size. `ring` is the load generator, which plays a
runtime without a scheduler. Parts are processes, one after the other; the third repeat of each
counts, of SGLang's that of the best backend. Ours and the load generator say how many steps a
repeat took, how many rows they had, and how long the driver was waited for. Ours also says how long
the driver waited for the next step, and `text` how long tokenizing takes by itself.

`engine` plays `chat` as well, after the standard workload, with the same engine.

`chat`: 64 conversations of 8 turns that share a prompt of 2,000 tokens; a turn has 40 to 120 tokens
of question and 64 of answer. Every conversation asks its next question when it is answered. Both
engines keep prefixes. What counts is the mean time to the first token, and the time of all, of the
third repeat. The part `chat` is SGLang's.
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


def standard(engine: Any, has_texts: bool) -> None:
    """Prints the tokens per second of each repeat, and what the steps were."""
    lengths, draw = json.loads(LENGTHS.read_text()), random.Random(0)
    sampling = [
        {"temperature": 0.6, "ignore_eos": True, "max_new_tokens": count}
        for count in lengths["outputs"]
    ]
    kind = "text" if has_texts else "engine"
    before = counts(engine)
    for repeat in range(REPEATS):
        prompts: dict[str, Any]
        if has_texts:
            prompts = {"prompt": texts.make_texts(lengths["prompts"], repeat)}
        else:
            drawn = [draw.choices(range(VOCABULARY), k=count) for count in lengths["prompts"]]
            prompts = {"input_ids": drawn}
        begin = time.perf_counter()
        answers = engine.generate(**prompts, sampling_params=sampling)
        seconds = time.perf_counter() - begin
        said = sum(len(answer["output_ids"]) for answer in answers)
        assert said == sum(lengths["outputs"])
        assert not has_texts or all(answer["text"] for answer in answers)
        print(f"{kind} repeat {repeat}: {said / seconds:.0f} tokens/s", flush=True)
        after = counts(engine)
        print(f"{kind} repeat {repeat} {explain(before, after, seconds)}", flush=True)
        before = after


def tokenizing(engine: Any) -> None:
    """Prints what tokenizing and decoding the workload's texts take, without any step."""
    lengths = json.loads(LENGTHS.read_text())
    for repeat in range(2):
        prompts = texts.make_texts(lengths["prompts"], 10 + repeat)
        begin, used = time.perf_counter(), time.process_time()
        tokens = engine.tokenizer.encode(prompts)
        wall, used = time.perf_counter() - begin, time.process_time() - used
        begin = time.perf_counter()
        for each in tokens:
            engine.tokenizer.decode(each)
        print(
            f"tokenizing {sum(map(len, prompts))} characters: {1e3 * wall:.0f} ms, "
            f"{1e3 * used:.0f} ms of CPU; decoding: {1e3 * (time.perf_counter() - begin):.0f} ms",
            flush=True,
        )


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
        f"{driver_s:.3f} s, host {1e6 * host_s / max(1, steps):.1f} us a step (so far p50 "
        f"{after['gap_us_p50']:.1f}, p99 {after['gap_us_p99']:.1f}), before and after "
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


def chats(side: str, engine: Any) -> None:
    """Prints the times of each repeat."""
    loop = getattr(engine, "loop", None) or asyncio.new_event_loop()
    for repeat in range(REPEATS):
        engine.flush_cache()
        first, whole = loop.run_until_complete(chat(engine, repeat + 1))
        text = f"first {first * 1e3:.1f} ms, all {whole:.2f} s"
        print(f"chat {side} repeat {repeat}: {text}", flush=True)


def play(arguments: argparse.Namespace) -> None:
    """One part, in a process of its own."""
    shapes, kind = arguments.shapes, arguments.play
    if kind == "sglang":
        engine = engine_of("sglang", shapes, arguments.backends.split(",")[0])
        chats("sglang", engine)
        engine.shutdown()
        return
    tokenizer = None
    if kind == "text":
        tokenizer = texts.make_tokenizer(arguments.out / "tokenizer", MODEL_VOCABULARY)
    with engine_of("ours", shapes, "", tokenizer) as engine:
        if tokenizer is not None:
            tokenizing(engine)
        standard(engine, tokenizer is not None)
        if tokenizer is None:
            chats("ours", engine)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "shapes", "pie-load")
    made.add_argument("--parts", default=",".join(PARTS))
    made.add_argument(
        "--backends", default="flashinfer", help="SGLang's attention_backend, one or several"
    )
    made.add_argument("--budget-s", type=float, default=550.0, help="seconds for all parts")
    made.add_argument("--play", choices=("engine", "text", "sglang"), help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Runs the parts and compares."""
    arguments = parser().parse_args()
    shapes: Path = arguments.shapes
    backends = arguments.backends.split(",")
    if arguments.play:
        play(arguments)
        return
    with Report(__file__, arguments) as report:
        runner = Runner(arguments.out / "engine_check.log", arguments.budget_s)
        again = [sys.executable, __file__, "--shapes", shapes, "--out", arguments.out]
        again += ["--pie-load", arguments.pie_load, "--backends", arguments.backends, "--play"]
        load = [arguments.pie_load, "throughput", "--python", sys.executable, "--model", shapes]
        load += ["--device", "cuda:0", "--profile", "latency", "--option", 'load_format="dummy"']
        peer = [sys.executable, PEERS / "sglang_engine.py", shapes]
        speed, times = r"repeat \d+: (\d+)()", r"first ([\d.]+) ms, all ([\d.]+) s"
        commands: dict[str, tuple[list[object], dict[str, str]]] = {
            "ring": (load, {"ring": r"output tokens in [\d.]+ s = (\d+)()"}),
            "engine": ([*again, "engine"], {"engine": f"engine {speed}", "chat ours": times}),
            "text": ([*again, "text"], {"text": f"text {speed}"}),
            **{
                f"sglang {backend}": (
                    [*peer, backend],
                    {f"sglang {backend}": r"repeat \d+: .* = (\d+)()"},
                )
                for backend in backends
            },
            "chat sglang": ([*again, "sglang"], {"chat sglang": times}),
        }
        found: dict[str, list[float]] = {}
        for name, (command, patterns) in commands.items():
            if name.split()[0] not in arguments.parts.split(","):
                continue
            output = runner.run(name, command, LIMIT_S)
            for what, pattern in patterns.items():
                matches = re.findall(pattern, output)
                # The third repeat: what fewer say was measured while something was compiled.
                last = matches[-1] if len(matches) == REPEATS else ()
                found[what] = [float(each) for each in last if each]
                report.add(part=what, repeats=matches)
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
