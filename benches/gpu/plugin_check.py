"""SGLang's engine on text that repeats itself: without drafts, with its n-gram drafter, with ours.

    python benches/gpu/plugin_check.py --pocket models/pocket --out DIR [--engines plain,sglang,pie]

Each engine is a process of its own; `pie` is SGLang with ``SGLANG_PLUGINS=pie_ngram``, everything
else being equal. Greedy tokens of the last repeat are compared with those of the first engine:
verification computes several rows at once, so a few may differ where two logits are nearly equal.
Figures go to DIR/plugin.json. The status is 1 if an engine failed or drafted nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from draft_check import prompts

ENGINES = {
    "plain": {},
    "sglang": {"speculative_algorithm": "NGRAM"},
    "pie": {"speculative_algorithm": "NGRAM"},
}
"""What each engine is told beside what all are."""
BATCHES = (1, 4, 16)


def serve(arguments: argparse.Namespace) -> None:
    """One engine's figures, as the last line of what it prints."""
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
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": arguments.output}
    for batch in BATCHES:
        for _ in range(arguments.repeats):
            started = time.perf_counter()
            results = engine.generate(input_ids=texts[:batch], sampling_params=sampling)
            seconds = time.perf_counter() - started
        said = [result["output_ids"] for result in results]
        steps = [result["meta_info"].get("spec_verify_ct", 0) for result in results]
        count = sum(map(len, said))
        figures["batches"][batch] = {
            "tokens_per_s": count / seconds,
            "tokens_a_step": count / sum(steps) if sum(steps) else 1.0,
            "tokens": said,
        }
    engine.shutdown()
    print(json.dumps(figures))


def compare(figures: dict[str, Any]) -> list[str]:
    """Prints a row for each batch and engine; returns what is wrong."""
    wrong = []
    base = next(iter(figures.values()))["batches"]
    for name, found in figures.items():
        print(f"{name}: start {found['start_s']:.1f} s")
        for batch, row in found["batches"].items():
            plain = base[batch]
            same = sum(a == b for a, b in zip(row["tokens"], plain["tokens"], strict=True))
            print(
                f"  batch {batch:>2}: {row['tokens_per_s']:>8.0f} tokens/s, "
                f"{row['tokens_per_s'] / plain['tokens_per_s']:.2f} of the first, "
                f"{row['tokens_a_step']:.2f} tokens a step, "
                f"{same} of {len(row['tokens'])} texts equal"
            )
            if name != "plain" and row["tokens_a_step"] < 1.2:
                wrong.append(f"{name}, batch {batch}: no drafts came true")
    return wrong


def run(name: str, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """An engine's figures, or None if it failed."""
    environment = {key: value for key, value in os.environ.items() if key != "SGLANG_PLUGINS"}
    if name == "pie":
        environment["SGLANG_PLUGINS"] = "pie_ngram"
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--serve", name],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=arguments.limit,
    )
    if done.returncode:
        print(f"{name}: status {done.returncode}")
        return None
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> int:
    """Runs the engines one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pocket", type=Path, required=True, help="folder of the embedded model")
    parser.add_argument("--out", type=Path, required=True, help="folder for figures")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--backend", default="flashinfer", help="SGLang's attention_backend")
    parser.add_argument("--mem-fraction", type=float, default=0.3)
    parser.add_argument("--output", type=int, default=384, help="tokens of every text")
    parser.add_argument("--repeats", type=int, default=2, help="the last one counts")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of one engine")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return 0
    figures = {name: run(name, arguments) for name in arguments.engines.split(",")}
    found = {name: figure for name, figure in figures.items() if figure}
    wrong = [f"{name} failed" for name in figures if name not in found]
    wrong += compare(found) if found else []
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "plugin.json").write_text(json.dumps(found) + "\n")
    print("\n".join(wrong or ["every engine is right"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
