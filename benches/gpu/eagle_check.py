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


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__)
    made.add_argument("--streams", default="1,4,16", help="requests at once, with comma")
    return made


def main() -> None:
    """Runs all cases."""
    arguments = parser().parse_args()
    streams = [int(count) for count in arguments.streams.split(",")]
    plain: Answers = {}
    failed = 0
    with frame.Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        for name in ("plain", "eagle3", "eagle2"):
            print(name, flush=True)
            try:
                head = HeadReference(eagle3=name == "eagle3")
                prompts = head.texts[:, :16].tolist()
                options: dict[str, Any] = {}
                if name != "plain":
                    options["spec_eagle_path"] = str(head.save(Path(folder) / name))
                record, answers = run_case(options, prompts, streams)
                plain = plain or answers
                report.put(name, record)
                share = same_share(answers, plain)
                report.hold(f"{name}: requests with the same tokens", share, at_least=LEAST_SAME)
            except Exception as error:
                failed += 1
                report.put(name, {"error": f"{type(error).__name__}: {error}"})
        report.hold("failed cases", failed, at_most=0)


if __name__ == "__main__":
    main()
