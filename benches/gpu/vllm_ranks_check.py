"""A model of vLLM on several GPUs: its tokens, and its decode steps beside those of one GPU.

    python benches/gpu/vllm_ranks_check.py --out DIR [--pocket DIR] [--shapes CONFIG_DIR] \
        [--ranks 1,2] [--device cuda]

For each number of GPUs, and captured and eager steps:

1. `pocket` in bfloat16: greedy tokens against transformers in float32.
2. Random weights in the shape of CONFIG_DIR: round trips of decode steps of 1 and 64 rows, each
   with 512 tokens of KV. Without CONFIG_DIR it is left out.

A case that fails prints its traceback and costs the others nothing. The record is
DIR/vllm_ranks_check.json. `--device cpu` runs the same on CPUs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import traceback
from pathlib import Path
from typing import Any, Final

import frame
from frame import Report
from serving import PAGE, compare_greedy, decode_greedily, driver, round_trip_us, step

from pie_driver_sglang import _core

SAID: Final = 48
"""Greedy tokens of each prompt."""
KV, ROWS, REPEATS = 512, (1, 64), 60
WAYS: Final[dict[str, dict[str, Any]]] = {"captured": {}, "eager": {"enforce_eager": True}}
OPTIONS: Final = {"max_num_seqs": 64, "max_model_len": 1024}


def devices(kind: str, ranks: int) -> str:
    """So many devices; CPUs have different names, too."""
    return ",".join(f"{kind}:{index}" for index in range(ranks))


def tokens(model: Path, options: dict[str, Any], device: str, dtype: str) -> dict[str, int]:
    """Greedy tokens that are decided, and those of them that differ from transformers'."""
    with driver(model, options, device, dtype=dtype, package="pie_driver_vllm") as (client, _):
        said = decode_greedily(client, SAID)
    clear, wrong = compare_greedy(model, said)
    return {"decided": clear, "wrong": wrong}


def steps(model: Path, options: dict[str, Any], device: str, dtype: str) -> dict[str, float]:
    """Median round trips of decode steps, in microseconds."""
    found = {}
    options = {**options, "load_format": "dummy"}
    with driver(model, options, device, dtype=dtype, package="pie_driver_vllm") as (client, _):
        each = -(-(KV + 1) // PAGE)
        for context in range(max(ROWS)):
            client.forward([step([7] * KV, 0, each * context, context + 1)])
        for rows in ROWS:
            batch = [step([7], KV, each * context, context + 1) for context in range(rows)]
            frame_ = _core.encode_forward(batch)
            times = [round_trip_us(client, frame_) for _ in range(REPEATS)]
            found[f"rows_{rows}_us"] = round(statistics.median(times[REPEATS // 4 :]), 1)
    return found


def play(arguments: argparse.Namespace, report: Report) -> None:
    """Runs every case."""
    kind = arguments.device.partition(":")[0]
    dtype = "float32" if kind == "cpu" else "bfloat16"
    cases: list[tuple[str, Any, Path]] = [("tokens", tokens, arguments.pocket)]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.shapes is not None:
            cases.append(("steps", steps, frame.model_folder(arguments.shapes, Path(folder))))
        failed = wrong = 0
        for ranks in map(int, arguments.ranks.split(",")):
            for way, changed in WAYS.items():
                for name, case, model in cases:
                    options = {**OPTIONS, **changed}
                    print(f"{name}, {way}, {ranks} ranks", flush=True)
                    try:
                        found = case(model, options, devices(kind, ranks), dtype)
                    except (Exception, SystemExit):
                        failed += 1
                        print(traceback.format_exc(), flush=True)
                        continue
                    wrong += found.get("wrong", 0)
                    print(f"    {found}", flush=True)
                    report.add(case=name, way=way, ranks=ranks, **found)
    report.hold("failed cases", failed, at_most=0)
    report.hold("decided tokens that differ", wrong, at_most=0)


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__, "out", "pocket", "shapes", "device")
    made.add_argument("--ranks", default="1,2", help="numbers of devices")
    return made


def main() -> None:
    """Runs the check."""
    arguments = parser().parse_args()
    with Report(__file__, arguments) as report:
        play(arguments, report)


if __name__ == "__main__":
    main()
