"""What deterministic inference costs the offline `Engine`, next to SGLang's own `Engine`.

    python benches/gpu/deterministic_rates.py --shapes DIR [--requests 1,64,256] [--ranks 1]
        [--ways NAME;NAME] [--json FILE]

DIR is a checkpoint, or the configuration of a model whose weights are random. All requests of a
round are submitted together, greedy, with 64 to 512 random tokens of prompt and 128 of output. Each
way is a process of its own, one after the other; each round is repeated three times after one that
warms up, and the fastest counts. SGLang's ways use fa3 and its defaults.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import frame
from processes import find, hand_over

WAYS: dict[str, dict[str, Any]] = {
    "ours": {},
    "ours, deterministic": {"enable_deterministic_inference": True},
    "sglang": {"attention_backend": "fa3"},
    "sglang, deterministic": {"attention_backend": "fa3", "enable_deterministic_inference": True},
}
"""Arguments of each engine."""
REPEATS, OUTPUT = 3, 128
PROMPTS = (64, 512)
"""Fewest and most tokens of a prompt."""
LIMIT_S = 300.0
"""Of a way."""


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__)
    made.add_argument("--shapes", type=Path, required=True)
    made.add_argument("--requests", default="1,64,256")
    made.add_argument("--ranks", type=int, default=1, help="GPUs that share the model")
    made.add_argument("--ways", default=";".join(WAYS), help="some of these, with ; between them")
    made.add_argument("--way", help=argparse.SUPPRESS)
    return made


def make_engine(way: str, model: Path, ranks: int) -> Any:
    """The engine of a way."""
    options = {"model_path": str(model), "skip_tokenizer_init": True, "tp_size": ranks, **WAYS[way]}
    if not any(model.glob("*.safetensors")):
        options["load_format"] = "dummy"
    if way.startswith("sglang"):
        import sglang

        return sglang.Engine(**options, log_level="error")
    from pie_driver_sglang import Engine

    return Engine(**options)


def measure(way: str, model: Path, counts: list[int], ranks: int) -> dict[int, float]:
    """Output tokens per second by the number of requests."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    vocabulary, engine, rates = int(config["vocab_size"]), make_engine(way, model, ranks), {}
    for count in counts:
        seconds = []
        for repeat in range(REPEATS + 1):
            draw = random.Random(1000 * count + repeat)
            prompts = [
                draw.choices(range(vocabulary), k=draw.randint(*PROMPTS)) for _ in range(count)
            ]
            params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": OUTPUT}
            begin = time.perf_counter()
            answers = engine.generate(input_ids=prompts, sampling_params=params)
            seconds.append(time.perf_counter() - begin)
            assert all(len(answer["output_ids"]) == OUTPUT for answer in answers)
        rates[count] = round(count * OUTPUT / min(seconds[1:]), 1)
    engine.shutdown()
    return rates


def main() -> None:
    """Prints tokens per second of each way."""
    arguments = parser().parse_args()
    counts = [int(count) for count in arguments.requests.split(",")]
    if arguments.way:
        hand_over(measure(arguments.way, arguments.shapes, counts, arguments.ranks))
        return
    with frame.Report(__file__, arguments) as report:
        for way in arguments.ways.split(";"):
            command = [sys.executable, __file__, "--shapes", arguments.shapes, "--way", way]
            command += ["--ranks", str(arguments.ranks)]
            found = find([*command, "--requests", arguments.requests], LIMIT_S)
            if found.value is None:
                print(f"{way}: {found.status}\n{found.output[-2000:]}", flush=True)
                continue
            shown = ", ".join(f"{rate:,.0f} at {count}" for count, rate in found.value.items())
            print(f"{way}: tokens/s {shown}", flush=True)
            report.add(way=way, tokens_per_second=found.value)


if __name__ == "__main__":
    main()
