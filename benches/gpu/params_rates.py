"""What penalties and biases cost the offline `Engine` on a CUDA GPU, next to plain requests.

    python benches/gpu/params_rates.py --shapes CONFIG_DIR [--requests 64,256] [--json FILE]

Random weights in the shape of CONFIG_DIR. All requests are submitted together: 128 tokens of
prompt, 256 of output, temperature 0.8. Kinds take turns, three times each, after a round that warms
up; the medians count. `penalties` has a frequency, a presence and a repetition penalty,
`biases` 300 biases besides, of other tokens for each request.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

REPEATS = 3
PROMPT, OUTPUT = 128, 256
VOCABULARY = 100_000
BIASES = 300
PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1}


def requests_of(kind: str, count: int, draw: random.Random) -> dict[str, Any]:
    """Arguments of `Engine.generate`."""
    prompts = [draw.choices(range(VOCABULARY), k=PROMPT) for _ in range(count)]
    common = {"temperature": 0.8, "ignore_eos": True, "max_new_tokens": OUTPUT}
    asked: list[dict[str, Any]] = []
    for _ in prompts:
        more: dict[str, Any] = {} if kind == "plain" else dict(PENALTIES)
        if kind == "biases":
            tokens = draw.sample(range(VOCABULARY), k=BIASES)
            more["logit_bias"] = {str(token): 0.5 for token in tokens}
        asked.append({**common, **more})
    return {"input_ids": prompts, "sampling_params": asked}


def rates(engine: Any, count: int) -> dict[str, float]:
    """Output tokens per second of each kind, medians."""
    draw = random.Random(count)
    found: dict[str, list[float]] = {"plain": [], "penalties": [], "biases": []}
    for repeat in range(REPEATS + 1):
        for kind, seconds in found.items():
            arguments = requests_of(kind, count, draw)
            begin = time.perf_counter()
            answers = engine.generate(**arguments)
            took = time.perf_counter() - begin
            assert all(len(answer["output_ids"]) == OUTPUT for answer in answers)
            if repeat > 0:
                seconds.append(count * OUTPUT / took)
    return {kind: round(statistics.median(each), 1) for kind, each in found.items()}


def main() -> None:
    """Prints output tokens per second for each number of requests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--requests", default="64,256")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    from pie_driver_sglang import Engine

    found = {}
    with Engine(
        model_path=str(options.shapes), load_format="dummy", skip_tokenizer_init=True
    ) as engine:
        for count in map(int, options.requests.split(",")):
            found[count] = rates(engine, count)
            shares = {kind: rate / found[count]["plain"] for kind, rate in found[count].items()}
            text = ", ".join(f"{kind} {rate:,.0f} tokens/s" for kind, rate in found[count].items())
            print(f"{count} requests: {text}; " + str({k: round(v, 3) for k, v in shares.items()}))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
