"""`pie-sglang replay FILE`: sends requests at recorded times, and reports latencies."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pie_driver_sglang.cli.engine_options import add_engine_options, sampling_of, started
from pie_driver_sglang.cli.generate import Prompt, read_prompts
from pie_driver_sglang.cli.report import write_output
from pie_driver_sglang.cli.workloads import quantiles
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError, quoted

if TYPE_CHECKING:
    from pie_driver_sglang.frontends.offline.engine import Engine

_MEASURES: Final = {
    "first_token_ms": "to the first token",
    "token_gap_ms": "between tokens",
    "total_ms": "to the end",
    "late_ms": "sent late by",
}


class RecordedRequest(NamedTuple):
    """A request of a trace."""

    at_s: float
    """Arrival time in seconds."""
    prompt: Prompt


class RequestResult(NamedTuple):
    """The result of a request; times in milliseconds."""

    late_ms: float
    """Delay of its submission, because this process was busy."""
    first_token_ms: float | None
    total_ms: float
    token_gaps_ms: list[float]
    """Inter-token latencies."""
    answer: dict[str, Any] | None
    error: str
    """The error; empty without."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    options = _parser().parse_args(arguments)
    if not options.speed > 0:
        raise ConfigError(f"`--speed` is {options.speed}", "set it to more than 0, e.g. 2.0")
    recorded = read_trace(options.file)
    defaults = sampling_of(options)
    with started(options) as engine:
        tokens = _tokenized(engine, recorded)
        begun = time.perf_counter()
        found = asyncio.run(replay(engine, recorded, tokens, defaults, options.speed))
        seconds = time.perf_counter() - begun
    record = summarize(found, seconds)
    write_output(options.output, "".join(map(_line, range(len(found)), recorded, found)))
    write_output(options.json, json.dumps(record, indent=2) + "\n")
    if options.json != "-":
        sys.stdout.write(latency_table(record))
    return int(record["failed"] > 0)


def read_trace(path: str) -> list[RecordedRequest]:
    """The requests of a file, in the order of their times.

    Raises:
        ConfigError: The file cannot be read, has no requests, or a line is wrong.
    """
    found = []
    for number, prompt in enumerate(read_prompts([], path, sys.stdin), 1):
        others = dict(prompt.others)
        at_s = others.pop("at", 0.0)
        is_number = isinstance(at_s, int | float) and not isinstance(at_s, bool)
        if not is_number or not 0 <= at_s < float("inf"):
            raise ConfigError(
                f"request {number} has the arrival time `at` {quoted(at_s)}",
                "write seconds from the beginning of the trace, e.g. 0.25",
            )
        found.append(RecordedRequest(float(at_s), prompt._replace(others=others)))
    if not found:
        raise ConfigError(
            f"there are no requests in {quoted(path)}",
            'write lines as {"at": 0.25, "prompt": "...", "sampling_params": {...}}',
        )
    return sorted(found, key=lambda request: request.at_s)


async def replay(
    engine: Engine,
    recorded: Sequence[RecordedRequest],
    tokens: Sequence[Sequence[int]],
    defaults: dict[str, Any],
    speed: float,
) -> list[RequestResult]:
    """Send every request at its arrival time (open loop).

    Args:
        engine: It answers.
        recorded: Requests by their times.
        tokens: The prompt of each.
        defaults: Sampling parameters of those that do not name them.
        speed: Times are divided by it.
    """
    begun = time.perf_counter()

    async def send(request: RecordedRequest, prompt: Sequence[int]) -> RequestResult:
        due = begun + request.at_s / speed
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await _send(engine, prompt, {**defaults, **request.prompt.sampling}, due)

    return list(await asyncio.gather(*map(send, recorded, tokens)))


async def _send(
    engine: Engine, prompt: Sequence[int], sampling: dict[str, Any], due: float
) -> RequestResult:
    sent = time.perf_counter()
    late_ms, first_ms, answer, error = 1000 * (sent - due), None, None, ""
    gaps: list[float] = []
    before, said = sent, 0
    try:
        stream = await engine.async_generate(
            input_ids=list(prompt), sampling_params=sampling, stream=True
        )
        async for answer in stream:
            now, count = time.perf_counter(), len(answer["output_ids"])
            if count > said:
                if said == 0:
                    first_ms = 1000 * (now - sent)
                else:
                    gaps += [1000 * (now - before) / (count - said)] * (count - said)
                before, said = now, count
    except Exception as problem:
        error = str(problem) or type(problem).__name__
    return RequestResult(
        late_ms, first_ms, 1000 * (time.perf_counter() - sent), gaps, answer, error
    )


def summarize(found: Sequence[RequestResult], seconds: float) -> dict[str, Any]:
    """Counts, rates and the quantiles of the latencies, in milliseconds."""
    answers = [one.answer["meta_info"] for one in found if one.answer and not one.error]
    output = sum(meta["completion_tokens"] for meta in answers)
    good = [one for one in found if not one.error]
    return {
        "requests": len(found),
        "failed": len(found) - len(good),
        "seconds": seconds,
        "prompt_tokens": sum(meta["prompt_tokens"] for meta in answers),
        "cached_tokens": sum(meta["cached_tokens"] for meta in answers),
        "output_tokens": output,
        "output_tokens_per_s": output / max(1e-9, seconds),
        "first_token_ms": dict(
            quantiles([one.first_token_ms for one in good if one.first_token_ms is not None])
        ),
        "token_gap_ms": dict(quantiles([gap for one in good for gap in one.token_gaps_ms])),
        "total_ms": dict(quantiles([one.total_ms for one in good])),
        "late_ms": dict(quantiles([one.late_ms for one in found])),
    }


def latency_table(record: dict[str, Any]) -> str:
    """The summary as a text table."""
    lines = [
        f"{record['requests']:,} requests in {record['seconds']:.1f} s, {record['failed']:,} "
        f"failed; {record['output_tokens']:,} tokens ({record['output_tokens_per_s']:,.1f} tok/s), "
        f"{record['cached_tokens']:,} of {record['prompt_tokens']:,} prompt tokens cached",
        f"{'ms':<20}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
    ]
    for name, text in _MEASURES.items():
        values = record[name]
        cells = (f"{values[key]:>10.1f}" if values else f"{'-':>10}" for key in _COLUMNS)
        lines.append(f"{text:<20}{''.join(cells)}")
    return "\n".join(lines) + "\n"


_COLUMNS: Final = ("mean", "p50", "p90", "p99")


def _tokenized(engine: Engine, recorded: Sequence[RecordedRequest]) -> list[Sequence[int]]:
    texts = [one.prompt.text for one in recorded if one.prompt.text is not None]
    if texts and engine.tokenizer is None:
        raise ConfigError("the trace has texts, and there is no tokenizer", "give `input_ids`")
    encoded = iter(engine.tokenizer.encode(texts) if engine.tokenizer and texts else ())
    return [one.prompt.tokens or next(encoded) for one in recorded]


def _line(index: int, recorded: RecordedRequest, found: RequestResult) -> str:
    answer = found.answer or {}
    line = {
        "index": index,
        "at": recorded.at_s,
        **recorded.prompt.others,
        "text": answer.get("text"),
        "output_ids": answer.get("output_ids", []),
        "first_token_ms": found.first_token_ms,
        "total_ms": found.total_ms,
        "late_ms": found.late_ms,
        **({"error": found.error} if found.error else {}),
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="pie-sglang replay",
        description="Sends the requests of a trace at their times and reports latencies. "
        "Each line of the file is a JSON object with `at` (seconds from the beginning), `prompt` "
        "or `input_ids`, and `sampling_params`.",
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="a .jsonl file; - for stdin")
    add("--speed", type=float, default=1.0, metavar="X", help="times are divided by it")
    add("--json", metavar="FILE", help="write the summary as JSON there; - for stdout")
    add("--output", metavar="FILE", help="write a JSON object for each request there")
    add_engine_options(parser)
    return parser
