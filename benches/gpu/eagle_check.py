"""EAGLE heads on a GPU: greedy tokens beside those without a head, and tokens/s.

    python benches/gpu/eagle_check.py [--streams 1,4,16] [--json FILE]

Trains an EAGLE-3 and an EAGLE-2 head for `models/pocket` on the CPU (seconds), and starts an engine
without a head and one with each: two minutes in all. `same` is the share of requests whose tokens
are those without a head: in bfloat16 near ties may differ. The model is so small that its speeds
say nothing of larger ones. A case that fails is recorded, and the next one runs; the file is
written after each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import frame

from pie_driver_sglang import Engine

sys.path.insert(0, str(frame.REPOSITORY / "tests"))
from support.models.eagle_heads import HeadReference
from support.models.tiny_models import POCKET

TOKENS = 256
LEAST_SAME = 0.75
"""Share of equal answers that a case needs."""
Answers = dict[int, list[list[int]]]


def run_case(arguments: dict[str, Any], prompts: list[list[int]], streams: list[int]) -> Any:
    """Greedy answers by streams, and a record of one engine."""
    record: dict[str, Any] = {}
    answers: Answers = {}
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
    with Engine(model_path=str(POCKET), device="cuda", **arguments) as engine:
        record["active"] = engine.get_server_info()["active"]
        for count in streams:
            given = [prompts[index % len(prompts)] for index in range(count)]
            engine.generate(input_ids=given, sampling_params=sampling)
            started = time.monotonic()
            found = engine.generate(input_ids=given, sampling_params=sampling)
            seconds = time.monotonic() - started
            record[f"tokens_per_s_{count}"] = round(count * TOKENS / seconds, 1)
            answers[count] = [answer["output_ids"] for answer in found]
            print(f"  {count} streams: {count * TOKENS / seconds:.0f} tokens/s", flush=True)
        record["state"] = engine.get_server_info()["internal_states"][0]
    return record, answers


def same_share(answers: Answers, plain: Answers) -> float:
    """Share of requests with the same tokens."""
    pairs = [a == b for count in plain for a, b in zip(answers[count], plain[count], strict=True)]
    return sum(pairs) / len(pairs)


def main() -> int:
    """Runs all cases; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    streams = [int(count) for count in options.streams.split(",")]
    records: dict[str, Any] = {}
    plain: Answers = {}
    prompts: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("plain", "eagle3", "eagle2"):
            print(name, flush=True)
            try:
                head = HeadReference(eagle3=name == "eagle3")
                prompts = head.texts[:, :16].tolist()
                arguments: dict[str, Any] = {}
                if name != "plain":
                    arguments = {
                        "speculative_algorithm": "EAGLE3" if name == "eagle3" else "EAGLE",
                        "speculative_draft_model_path": str(head.save(Path(folder) / name)),
                    }
                records[name], answers = run_case(arguments, prompts, streams)
                plain = plain or answers
                share = same_share(answers, plain)
                records[name] |= {"same": share, "passed": share >= LEAST_SAME}
            except Exception as error:
                records[name] = {"passed": False, "error": f"{type(error).__name__}: {error}"}
            print(f"  {records[name]}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(records, indent=1, default=str))
    return int(not all(record["passed"] for record in records.values()))


if __name__ == "__main__":
    sys.exit(main())
