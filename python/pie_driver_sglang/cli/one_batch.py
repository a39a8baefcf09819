"""`pie-sglang bench --one-batch`: latencies of single batches, as SGLang's `bench_one_batch`.

The times are those of the driver's steps, from the trace of the native runtime. A batch is
prefilled as a whole and then decoded, without a server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pie_driver_sglang.cli.engine_options import add_engine_options, default_model, started
from pie_driver_sglang.cli.report import write_output
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError, StartError

if TYPE_CHECKING:
    from pie_driver_sglang.frontends.offline.engine import Engine

FLAG: Final = "--one-batch"
_COLUMNS: Final = (
    ("batch_size", "batch", "{:,}"),
    ("input_len", "input", "{:,}"),
    ("output_len", "output", "{:,}"),
    ("prefill_latency", "prefill s", "{:.5f}"),
    ("prefill_throughput", "prefill tok/s", "{:,.1f}"),
    ("median_decode_latency", "decode s", "{:.5f}"),
    ("median_decode_throughput", "decode tok/s", "{:,.1f}"),
    ("total_latency", "total s", "{:.3f}"),
    ("overall_throughput", "total tok/s", "{:,.1f}"),
)
"""Fields of a record, which have SGLang's names, and how they are shown."""


class BatchShape(NamedTuple):
    """Requests of a batch, and tokens of each one's prompt and output."""

    batch_size: int
    input_len: int
    output_len: int


class Step(NamedTuple):
    """A step of the driver, in microseconds since the start of the trace."""

    begun: float
    ended: float
    requests: int
    tokens: int


def main(arguments: Sequence[str]) -> int:
    """Run the command, without `FLAG`; returns its exit status."""
    options = _parser().parse_args(arguments)
    options.model = default_model(options.model)
    if (options.dp or 1) > 1:
        raise ConfigError(f"`{FLAG}` measures one replica", "remove `--dp-size`")
    axes = (options.batch_size, options.input_len, options.output_len)
    if min(itertools.chain(*axes)) < 1 or min(options.input_len) < 2:
        raise ConfigError(
            "a batch has at least 1 request, with 2 tokens in and 1 token out",
            "set `--batch-size`, `--input-len` and `--output-len`",
        )
    with started(options) as engine:
        shapes = [BatchShape(*shape) for shape in itertools.product(*axes)]
        records = []
        for shape in shapes:
            if record := _measure(engine, shape):
                records.append(record)
                if options.profile:
                    sys.stderr.write(f"profile: {_profile(engine, shape)}\n")
    write_output(options.json, json.dumps(records, indent=2) + "\n")
    if options.json != "-":
        sys.stdout.write(batch_table(records))
    return 0


def _measure(engine: Engine, shape: BatchShape) -> dict[str, float] | None:
    """The record of a batch, which runs once before it counts; None if it does not fit."""
    info = engine.get_server_info()
    able = info["capabilities"]
    tokens = int(able["total_pages"]) * int(able["kv_page_size"])
    longest = shape.input_len + shape.output_len
    limits = (
        (shape.batch_size, int(able["max_forward_requests"]), "requests of a step"),
        (longest, engine.context_length, "positions of the context"),
        (shape.batch_size * (longest + int(able["kv_page_size"])), tokens, "tokens of the KV pool"),
    )
    for needed, most, what in limits:
        if needed > most:
            sys.stderr.write(f"skipping {tuple(shape)}: {needed:,} is above the {most:,} {what}\n")
            return None
    for _ in range(2):
        steps = _run(engine, shape, int(able["vocab_size"]))
    return record_of(shape, steps)


def _run(engine: Engine, shape: BatchShape, vocabulary: int) -> list[Step]:
    """The steps of a batch of random tokens."""
    with tempfile.TemporaryDirectory(prefix="pie-bench-") as folder:
        path = Path(folder) / "steps.json"
        with engine.trace_steps(path):
            _generate(engine, shape, vocabulary)
        return read_steps(path)


def _profile(engine: Engine, shape: BatchShape) -> str:
    """Run a batch once more under torch's profiler, which slows it down; returns the file."""
    name = "batch{}_input{}_output{}".format(*shape)
    path = engine.start_profile(profile_prefix=name)
    _generate(engine, shape, int(engine.get_server_info()["capabilities"]["vocab_size"]))
    engine.stop_profile()
    return path


def _generate(engine: Engine, shape: BatchShape, vocabulary: int) -> None:
    draw = random.Random(0).randrange
    count, length, output = shape
    prompts = [[draw(min(vocabulary, 10_000)) for _ in range(length)] for _ in range(count)]
    engine.flush_cache()
    engine.generate(
        input_ids=prompts,
        sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": output},
    )


def read_steps(path: Path) -> list[Step]:
    """The steps of a trace file, in the order of their start."""
    events = json.loads(path.read_text())
    steps = [
        Step(
            event["ts"],
            event["ts"] + event["dur"],
            event["args"]["requests"],
            event["args"]["tokens"],
        )
        for event in events
        if event["ph"] == "X" and "args" in event
    ]
    return sorted(steps)


def record_of(shape: BatchShape, steps: Sequence[Step]) -> dict[str, float]:
    """SGLang's figures of a batch; times in seconds.

    A prefill in several steps counts from the start of the first to the end of the last, with the
    decodes that share these steps. A decode takes from the end of one step to the end of the next.

    Raises:
        StartError: Not all prompts were traced.
    """
    computed = itertools.accumulate(step.tokens for step in steps)
    prompts = shape.batch_size * shape.input_len
    whole_prompts = next((at for at, tokens in enumerate(computed) if tokens >= prompts), None)
    if whole_prompts is None:
        raise StartError(f"no step of {tuple(shape)} was traced", "the driver's log says why")
    # Decodes in a step with prefills are among its tokens.
    chunks = (at for at, step in enumerate(steps) if step.tokens > step.requests)
    begun, last = steps[0].begun, max(whole_prompts, *chunks)
    prefill_s = (steps[last].ended - begun) / 1e6
    total_s = (steps[-1].ended - begun) / 1e6
    whole = [
        (after.ended - before.ended) / 1e6
        for before, after in itertools.pairwise(steps[last:])
        if after.requests == shape.batch_size
    ]
    tokens = shape.input_len + shape.output_len
    record: dict[str, float] = {
        **shape._asdict(),
        "prefill_latency": prefill_s,
        "prefill_throughput": shape.batch_size * shape.input_len / prefill_s,
        "total_latency": total_s,
        "overall_throughput": shape.batch_size * tokens / total_s,
    }
    if whole:
        decode_s = statistics.median(whole)
        record["median_decode_latency"] = decode_s
        record["median_decode_throughput"] = shape.batch_size / decode_s
    return record


def batch_table(records: Sequence[dict[str, float]]) -> str:
    """A line for each batch; `-` for what was not measured."""
    rows = [[title for _, title, _ in _COLUMNS]]
    for record in records:
        cells = ((record.get(name), form) for name, _, form in _COLUMNS)
        rows.append(["-" if value is None else form.format(value) for value, form in cells])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"pie-sglang bench {FLAG}",
        description="Measures the latency of single batches: prefill, decode and both, for every "
        "combination of the sizes. Each batch runs twice, and the second run counts.",
    )
    add = parser.add_argument
    sizes = (("--batch-size", 1, "requests"), ("--input-len", 1024, "prompt tokens of a request"))
    for name, default, what in (*sizes, ("--output-len", 16, "output tokens of a request")):
        text = f"{what}; several values are all measured (default: {default})"
        add(name, type=int, nargs="+", default=[default], metavar="N", help=text)
    text = "profile each batch in a run of its own, into $SGLANG_TORCH_PROFILER_DIR or /tmp"
    add("--profile", action="store_true", help=text)
    add("--json", metavar="FILE", help="write the records there; - for stdout")
    add_engine_options(parser, samples=False)
    return parser
