"""EAGLE heads on a GPU: greedy tokens beside those without a head, and tokens/s.

    python benches/gpu/eagle_check.py [--device cuda] [--streams 1,4,16,256] [--limit-s 140]
        [--json FILE]

Trains an EAGLE-3 and an EAGLE-2 head for `models/pocket` on the CPU (seconds). An engine without a
head, one without fused layers and one with each head run in processes of their own, which print the
driver's log with the time of each line, and the time line of the start. Three to five minutes in
all, ten at most: an engine that takes longer than `--limit-s` prints the Python stacks of its
driver and is given up. `same` is the share of requests whose tokens are those without a head: in
bfloat16 near ties may differ. `over_unfused` has tokens/s with a head by those of the same layers
without one, by streams: with many streams nothing is drafted, and this is the cost of the head's
KV. The model is so small that its speeds say nothing of larger ones. A case that fails is
recorded, and the next one runs; the record is written after each.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import frame
import psutil
from processes import STOP_S, Runner

from pie_driver_sglang import Engine
from pie_driver_sglang.observability import start_spans

sys.path.insert(0, str(frame.REPOSITORY / "tests"))
from support.models.eagle_heads import HeadReference
from support.models.tiny_models import POCKET

TOKENS: Final = 256
LEAST_SAME: Final = 0.75
"""Share of equal answers that a case needs."""
STACKS_S: Final = 3.0
"""How long a driver has to write its stacks."""
Answers = dict[str, list[list[int]]]


def print_stacks() -> None:
    """Prints this process's stacks, and has its drivers write theirs to the log."""
    faulthandler.dump_traceback()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--handshake-fd" in process.cmdline():
                process.send_signal(signal.SIGUSR1)


def run_case(asked: dict[str, Any]) -> dict[str, Any]:
    """Greedy answers by streams, and a record of one engine."""
    limit_s: float = asked["limit_s"]
    # A request that hangs is ended by the parent.
    watchdog = threading.Timer(limit_s, print_stacks)
    watchdog.daemon = True
    watchdog.start()
    began = time.monotonic()

    def on_start(seconds: float, line: str) -> None:
        if line:
            print(f"  {seconds:7.2f} s  {line}", flush=True)
        if seconds > limit_s + STACKS_S:
            raise TimeoutError(f"the engine is not ready after {limit_s:.0f} s")

    record: dict[str, Any] = {}
    answers: Answers = {}
    sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": TOKENS}
    with Engine(model_path=str(POCKET), on_start=on_start, **asked["options"]) as engine:
        record["ready_s"] = round(time.monotonic() - began, 1)
        info = engine.get_server_info()
        record["active"], record["start"] = info["active"], info["start"]
        for line in start_spans.time_line(info["start"]):
            print(f"  {line}", flush=True)
        for count in asked["streams"]:
            given = [asked["prompts"][index % len(asked["prompts"])] for index in range(count)]
            engine.generate(input_ids=given, sampling_params=sampling)
            started = time.monotonic()
            found = engine.generate(input_ids=given, sampling_params=sampling)
            seconds = time.monotonic() - started
            record[f"tokens_per_s_{count}"] = round(count * TOKENS / seconds, 1)
            answers[str(count)] = [answer["output_ids"] for answer in found]
            print(f"  {count} streams: {count * TOKENS / seconds:.0f} tokens/s", flush=True)
        record["state"] = engine.get_server_info()["internal_states"][0]
    return {"record": record, "answers": answers}


def same_share(answers: Answers, plain: Answers) -> float:
    """Share of requests with the same tokens."""
    pairs = [a == b for count in plain for a, b in zip(answers[count], plain[count], strict=True)]
    return sum(pairs) / len(pairs)


def prepare_case(name: str, folder: Path, arguments: argparse.Namespace) -> Path:
    """Trains the head of a case; the file that its process reads."""
    head = HeadReference(eagle3=name == "eagle3")
    options = {"device": arguments.device, "log_level": "info"}
    if name == "unfused":
        options["fuse_layers"] = False
    elif name != "plain":
        options["spec_eagle_path"] = str(head.save(folder / name))
    asked = {
        "prompts": head.texts[:, :16].tolist(),
        "options": options,
        "streams": [int(count) for count in arguments.streams.split(",")],
        "limit_s": arguments.limit_s,
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(asked))
    return path


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__)
    made.add_argument("--device", default="cuda", help="cuda, or cpu to try the check itself")
    made.add_argument("--streams", default="1,4,16,256", help="requests at once, with comma")
    made.add_argument("--limit-s", type=float, default=140.0, help="seconds of each engine")
    made.add_argument("--case", type=Path, help=argparse.SUPPRESS)
    return made


def main() -> None:
    """Runs all cases, each in a process of its own, or one of them."""
    arguments = parser().parse_args()
    if arguments.case is not None:
        found = run_case(json.loads(arguments.case.read_text()))
        arguments.case.with_suffix(".found").write_text(json.dumps(found))
        return
    plain: Answers = {}
    failed = 0
    with frame.Report(__file__, arguments) as report, tempfile.TemporaryDirectory() as folder:
        runner = Runner(Path(folder) / "log", math.inf)
        unfused: dict[str, Any] = {}
        for name in ("plain", "unfused", "eagle3", "eagle2"):
            try:
                case = prepare_case(name, Path(folder), arguments)
                # Time to print stacks and to end.
                limit_s = arguments.limit_s + 2 * STACKS_S + STOP_S
                environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
                command = [sys.executable, __file__, "--case", case]
                output = runner.run(name, command, limit_s, environment)
                if not case.with_suffix(".found").is_file():
                    raise RuntimeError(output[-4000:] or "it has printed nothing")
                found = json.loads(case.with_suffix(".found").read_text())
                plain = plain or found["answers"]
                record = found["record"]
                if name == "unfused":
                    unfused = record
                elif name != "plain" and unfused:
                    record["over_unfused"] = {
                        count: round(record[key] / unfused[key], 3)
                        for count in plain
                        if (key := f"tokens_per_s_{count}") in unfused
                    }
                report.put(name, record)
                share = same_share(found["answers"], plain)
                report.hold(f"{name}: requests with the same tokens", share, at_least=LEAST_SAME)
            except Exception as error:
                failed += 1
                report.put(name, {"error": f"{type(error).__name__}: {error}"})
        runner.close()
        report.hold("failed cases", failed, at_most=0)


if __name__ == "__main__":
    main()
