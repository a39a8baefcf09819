"""SGLang's engine on text that repeats itself: without drafts, with its n-gram drafter, with ours.

    python benches/gpu/plugin_check.py --out DIR [--pocket DIR] [--engines plain,sglang,pie]

Each engine is a process of its own; `pie` is SGLang with ``SGLANG_PLUGINS=pie_ngram``, everything
else being equal. A repeat takes the prompts after those of the one before, and what drafters and
caches know is flushed before it, so that no engine drafts from its own answer to the same prompt.

Greedy tokens of the last repeat are compared with those of the first engine. Verification computes
several rows at once, so texts part where two logits are nearly equal; what counts is the share of
the tokens before that.

The record is DIR/plugin_check.json, everything that was printed goes to DIR/plugin_check.log. The
status is 1 if an engine failed, drafted nothing or said something else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import frame
from draft_check import prompts
from frame import Report
from processes import Runner

ENGINES = {
    "plain": {},
    "sglang": {"speculative_algorithm": "NGRAM"},
    "pie": {"speculative_algorithm": "NGRAM"},
}
"""Arguments of each engine, in addition to those of all."""
BATCHES = (1, 4, 16)
LEAST_SAME = 0.75
"""Of an engine's tokens, those before the first that differs in their text. Near ties part some
texts somewhere; a verification that is wrong parts all of them near their start."""
LEAST_A_STEP = 1.2
"""Tokens of a step, of an engine whose drafts are accepted."""
FLUSH_S = 10.0
"""Until when an engine that has answered must be idle."""


def file_of(arguments: argparse.Namespace, name: str) -> Path:
    """Where an engine's process leaves its figures."""
    folder: Path = arguments.out
    return folder / f"plugin.{name}.json"


def flush(engine: Any) -> None:
    """Has the engine forget what was said. It is idle a little after its last answer."""
    end = time.monotonic() + FLUSH_S
    while not engine.flush_cache().success:
        assert time.monotonic() < end, "the engine is not idle"
        time.sleep(0.05)


def serve(arguments: argparse.Namespace) -> None:
    """One engine's figures, written after every batch size."""
    import sglang
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(arguments.pocket / "tokenizer.json"))
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in prompts()]
    started = time.perf_counter()
    engine = sglang.Engine(
        model_path=str(arguments.pocket),
        attention_backend=arguments.backend,
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        disable_prefill_cuda_graph=True,
        cuda_graph_max_bs_decode=max(BATCHES),
        mem_fraction_static=arguments.mem_fraction,
        log_level="error",
        **ENGINES[arguments.serve],
    )
    figures: dict[str, Any] = {"start_s": time.perf_counter() - started, "batches": {}}
    file = file_of(arguments, arguments.serve)
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": arguments.output}
    for batch in BATCHES:
        for repeat in range(arguments.repeats):
            chosen = [texts[(repeat * batch + row) % len(texts)] for row in range(batch)]
            flush(engine)
            started = time.perf_counter()
            results = engine.generate(input_ids=chosen, sampling_params=sampling)
            seconds = time.perf_counter() - started
        said = [result["output_ids"] for result in results]
        steps = [result["meta_info"].get("spec_verify_ct", 0) for result in results]
        count = sum(map(len, said))
        figures["batches"][batch] = {
            "tokens_per_s": count / seconds,
            "tokens_a_step": count / sum(steps) if sum(steps) else 1.0,
            "tokens": said,
        }
        file.write_text(json.dumps(figures) + "\n")
    engine.shutdown()
    figures["ended"] = True
    file.write_text(json.dumps(figures) + "\n")


def common(said: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(said, other, strict=True))
    return next((at for at, (one, another) in pairs if one != another), len(said))


def compare(figures: dict[str, Any], report: Report) -> None:
    """Prints a row for each batch and engine, and holds the engines to the first."""
    first = next(iter(figures), None)
    for name, found in figures.items():
        print(f"{name}: start {found['start_s']:.1f} s")
        before = count = 0
        for batch, row in found["batches"].items():
            base = figures[first]["batches"].get(batch)
            line = f"  batch {batch:>2}: {row['tokens_per_s']:>8.0f} tokens/s"
            line += f", {row['tokens_a_step']:.2f} tokens a step"
            if base is not None:
                pairs = list(zip(row["tokens"], base["tokens"], strict=True))
                same = [common(said, other) for said, other in pairs]
                equal = sum(said == other for said, other in pairs)
                before += sum(same)
                count += sum(len(said) for said, _ in pairs)
                line += f", {row['tokens_per_s'] / base['tokens_per_s']:.2f} of {first}'s speed"
                line += f", {equal} of {len(pairs)} texts equal"
            print(line)
            if name != "plain":
                said = f"{name}, batch {batch}: tokens a step"
                report.hold(said, row["tokens_a_step"], at_least=LEAST_A_STEP)
        if name != first:
            share = before / max(count, 1)
            print(f"  {share:.1%} of the tokens before a difference to {first}")
            same_share = f"{name}: share of tokens before a difference to {first}"
            report.hold(same_share, share, at_least=LEAST_SAME)


def run(name: str, arguments: argparse.Namespace, runner: Runner) -> dict[str, Any] | None:
    """An engine's figures; of one that failed those it got to, or None."""
    environment = {key: value for key, value in os.environ.items() if key != "SGLANG_PLUGINS"}
    if name == "pie":
        environment["SGLANG_PLUGINS"] = "pie_ngram"
    file = file_of(arguments, name)
    file.unlink(missing_ok=True)
    command = [sys.executable, __file__, *sys.argv[1:], "--serve", name]
    runner.run(name, command, arguments.limit, environment)
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    file.unlink(missing_ok=True)
    return found


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "pocket")
    made.add_argument("--engines", default=",".join(ENGINES))
    made.add_argument("--backend", default="flashinfer", help="SGLang's attention_backend")
    made.add_argument("--mem-fraction", type=float, default=0.3)
    made.add_argument("--output", type=int, default=384, help="tokens of every text")
    made.add_argument("--repeats", type=int, default=2, help="the last one counts")
    made.add_argument("--limit", type=float, default=180.0, help="seconds of one engine")
    made.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Runs the engines one after the other."""
    arguments = parser().parse_args()
    if arguments.serve:
        serve(arguments)
        return
    names = arguments.engines.split(",")
    with Report(__file__, arguments) as report:
        runner = Runner(arguments.out / "plugin_check.log", arguments.limit * len(names))
        figures: dict[str, Any] = {}
        failed = 0
        for name in names:
            found = run(name, arguments, runner)
            if found is None or "ended" not in found:
                print(f"{name} failed")
                failed += 1
            if found is not None:
                figures[name] = found
                report.put(name, found)
        report.hold("engines that failed", failed, at_most=0)
        compare(figures, report)


if __name__ == "__main__":
    main()
