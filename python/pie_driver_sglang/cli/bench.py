"""`pie-sglang bench`: throughput on a workload, alone or alternating with a peer.

`--serve` measures a running server: `bench_server.py`. `--one-batch` measures single batches:
`one_batch.py`. `--start` measures the start of a server: `bench_start.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.cli import bench_start, one_batch
from pie_driver_sglang.cli.bench_server import add_server_options, measure_server, server_table
from pie_driver_sglang.cli.engine_options import add_engine_options, default_model, started
from pie_driver_sglang.cli.report import write_output
from pie_driver_sglang.cli.version import version_line
from pie_driver_sglang.cli.workloads import LENGTHS, REQUESTS, WORKLOADS, Workload, make_workload
from pie_driver_sglang.config.arch import vocab_size
from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError, StartError, quoted
from pie_driver_sglang.frontends.common.model_location import model_folder

DRIVER_SIDE: Final = "pie"
PEERS: Final = ("sglang",)


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    if one_batch.FLAG in arguments:
        return one_batch.main([each for each in arguments if each != one_batch.FLAG])
    if bench_start.START_FLAG in arguments:
        return bench_start.main([each for each in arguments if each != bench_start.START_FLAG])
    options = _parser().parse_args(arguments)
    if options.serve is not None:
        records = measure_server(options)
        write_output(options.json, json.dumps(records, indent=2) + "\n")
        if options.json != "-":
            sys.stdout.write(server_table(records))
        return 0
    options.model = default_model(options.model)
    workload = _workload(options)
    if options.side is not None:
        write_output(options.json, json.dumps(_measure(options, workload)) + "\n")
        return 0
    sides = [DRIVER_SIDE, *dict.fromkeys(options.peer)]
    found = []
    for number in range(options.rounds):
        # Processes one after the other: a device has memory for one engine.
        for side in sides:
            run = _run_side(side, arguments)
            found.append({"side": side, "round": number, **run})
            rates = ", ".join(f"{rate:,.0f}" for rate in run["tokens_per_s"])
            sys.stderr.write(f"{side}, round {number + 1}: {rates} tok/s\n")
    record = _record(options, workload, sides, found)
    write_output(options.json, json.dumps(record, indent=2) + "\n")
    if options.json != "-":
        sys.stdout.write(_table(record))
    return 0


def _measure(options: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Start one engine and run the workload, after a warm-up run."""
    if options.side == DRIVER_SIDE:
        with started(options) as engine:
            return _run_workload(engine, workload, options.repeats)
    from pie_driver_sglang.backends.sglang.compat.offline_peer import peer_engine

    engine = peer_engine(
        options.model,
        options.device,
        tp_size=options.tp or 1,
        keeps_prefixes=workload.keeps_prefixes,
        requests=len(workload.prompts),
    )
    try:
        return _run_workload(engine, workload, options.repeats)
    finally:
        engine.shutdown()


def _run_workload(engine: Any, workload: Workload, repeats: int) -> dict[str, Any]:
    seconds, cached, asked = [], 0, sum(workload.outputs)
    for repeat in range(repeats + 1):
        engine.flush_cache()
        begun = time.perf_counter()
        answers = engine.generate(input_ids=workload.prompts, sampling_params=workload.sampling())
        took = time.perf_counter() - begun
        said = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        if said != asked:
            raise StartError(
                f"{asked} tokens were asked for, and {said} came",
                "shorten the requests by `--longest`: a context must hold prompt and output",
            )
        if repeat:
            seconds.append(took)
            cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    return {
        "seconds": seconds,
        "tokens_per_s": [asked / took for took in seconds],
        "cached_tokens": cached,
    }


def _run_side(side: str, arguments: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pie-bench-") as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "pie_driver_sglang", "bench", *arguments]
        command += ["--side", side, "--json", str(path)]
        # Output of an engine goes to stderr.
        status = subprocess.run(command, stdout=2, check=False).returncode
        if status or not path.is_file():
            raise StartError(f"`{side}` was not measured: its error is above (status {status})")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def _record(
    options: argparse.Namespace,
    workload: Workload,
    sides: list[str],
    found: list[dict[str, Any]],
) -> dict[str, Any]:
    rates = {
        side: statistics.median(
            rate for run in found if run["side"] == side for rate in run["tokens_per_s"]
        )
        for side in sides
    }
    return {
        "version": version_line(),
        "model": options.model,
        "device": options.device or "default",
        "workload": {
            "name": options.workload,
            "seed": options.seed or 0,
            "requests": len(workload.prompts),
            "prompt_tokens": sum(map(len, workload.prompts)),
            "output_tokens": sum(workload.outputs),
        },
        "runs": found,
        "tokens_per_s": rates,
        "ratios": {side: rates[DRIVER_SIDE] / rates[side] for side in sides if side != DRIVER_SIDE},
    }


def _table(record: dict[str, Any]) -> str:
    work = record["workload"]
    lines = [
        f"{work['name']}: {work['requests']:,} requests, {work['prompt_tokens']:,} prompt and "
        f"{work['output_tokens']:,} output tokens; medians"
    ]
    for side, rate in record["tokens_per_s"].items():
        ratio = record["ratios"].get(side)
        times = "" if ratio is None else f"  (pie: {ratio:.2f} x)"
        lines.append(f"{side:<8} {rate:>12,.1f} output tok/s{times}")
    return "\n".join(lines) + "\n"


def _workload(options: argparse.Namespace) -> Workload:
    model = model_folder({"model_path": options.model}, with_weights=False)
    vocabulary = vocab_size(load_hf_config(model))
    if vocabulary is None:
        raise ConfigError(
            f"the configuration of {quoted(options.model)} has no `vocab_size`",
            "name another model",
        )
    if options.rounds < 1 or options.repeats < 1:
        raise ConfigError(
            f"{options.rounds} rounds of {options.repeats} repeats measure nothing",
            "set `--rounds` and `--repeats` to 1 or more",
        )
    return make_workload(
        options.workload,
        requests=REQUESTS if options.requests is None else options.requests,
        longest=options.longest,
        vocabulary=vocabulary,
        seed=options.seed or 0,
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pie-sglang bench",
        description="Measures output tokens per second of an engine that it starts, or with "
        "--serve a running server. All requests of an engine are handed over at once as token ids; "
        "every engine is a process of its own, and its first run is not counted.",
    )
    add = parser.add_argument
    add("--workload", choices=WORKLOADS, default=WORKLOADS[0])
    add(
        "--requests",
        type=int,
        metavar="N",
        help=f"default: {REQUESTS}; with --serve four for each stream",
    )
    add(
        "--longest",
        type=int,
        default=LENGTHS[1],
        metavar="N",
        help="maximum tokens of a prompt, and of an output (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the prompts (default: 0; with --serve another one in each run)",
    )
    add("--repeats", type=int, default=3, metavar="N", help="runs of an engine that count")
    add("--rounds", type=int, default=1, metavar="N", help="starts of every engine")
    add("--peer", choices=PEERS, action="append", default=[], help="compare with it, alternating")
    add("--json", metavar="FILE", help="write a record of all runs there; - for stdout")
    add(
        one_batch.FLAG,
        action="store_true",
        help="measure the latency of single batches instead, of all combinations of --batch-size, "
        "--input-len and --output-len, which take several values then; --profile profiles each",
    )
    add(
        bench_start.START_FLAG,
        metavar="MODEL",
        help="measure the time from a server's start to its first token instead; "
        f"`bench {bench_start.START_FLAG} --help` has its options",
    )
    add("--first", action="store_true", help="with --start: each has an empty kernel cache")
    add("--timeout", type=float, metavar="S", help="with --start: of one (default: 600)")
    # For the processes that the command starts.
    add("--side", choices=(DRIVER_SIDE, *PEERS), help=argparse.SUPPRESS)
    add_server_options(parser)
    add_engine_options(parser, samples=False)
    return parser
