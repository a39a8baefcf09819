"""`pie-sglang bench --serve`: measures any server with OpenAI's completions API.

It runs `sglang.bench_serving`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.backends.sglang.compat.process import SERVING_BENCHMARK
from pie_driver_sglang.config.api_keys import KEY_VARIABLES
from pie_driver_sglang.errors import ConfigError, StartError, quoted, reason
from pie_driver_sglang.frontends.common.model_location import model_folder

_DEFAULT_URL: Final = "http://127.0.0.1:30000"
_API_KEY: Final = KEY_VARIABLES["api-key"]
_CONCURRENCY: Final = (1, 16, 64)
_PROMPT_TOKENS: Final = 1024
_OUTPUT_TOKENS: Final = 256
_LEAST_REQUESTS: Final = 8
_ROUNDS: Final = 4
"""Default requests per stream."""
_TIMEOUT_S: Final = 10.0
_SEEDS: Final = 1 << 31
_COLUMNS: Final = (
    ("max_concurrency", "streams", "{:,.0f}"),
    ("completed", "requests", "{:,.0f}"),
    ("output_throughput", "output tok/s", "{:,.1f}"),
    ("total_throughput", "total tok/s", "{:,.1f}"),
    ("median_ttft_ms", "TTFT p50 ms", "{:,.1f}"),
    ("p99_ttft_ms", "TTFT p99 ms", "{:,.1f}"),
    ("median_itl_ms", "ITL p50 ms", "{:,.2f}"),
    ("p99_itl_ms", "ITL p99 ms", "{:,.2f}"),
)
"""Fields of a record of `sglang.bench_serving`, and how they are shown."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options for servers."""
    add = parser.add_argument_group("a running server").add_argument
    add(
        "--serve",
        nargs="?",
        const=_DEFAULT_URL,
        metavar="URL",
        help="measure the server at URL by its OpenAI completions (default: %(const)s); "
        f"{_API_KEY} is the API key; --model is the tokenizer, if /v1/models names none",
    )
    add(
        "--concurrency",
        type=int,
        nargs="+",
        default=_CONCURRENCY,
        metavar="N",
        help="streams at a time, one run for each (default: 1 16 64)",
    )
    for name, tokens in (("--input-len", _PROMPT_TOKENS), ("--output-len", _OUTPUT_TOKENS)):
        add(name, type=int, default=tokens, metavar="N", help="tokens (default: %(default)s)")


def measure_server(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `sglang.bench_serving` for each concurrency, and return its records.

    Raises:
        ConfigError: An option is wrong, or no server responds.
        StartError: A run failed, or requests of it did.
    """
    asked = () if options.requests is None else (options.requests,)
    least = min(*options.concurrency, options.input_len, options.output_len, *asked)
    if least < 1:
        raise ConfigError(
            f"{least} is no number of streams, requests or tokens",
            "set `--concurrency`, `--requests`, `--input-len` and `--output-len` to 1 or more",
        )
    url = options.serve.rstrip("/").removesuffix("/v1")
    served = _get(url, "/v1/models")["data"][0]
    tokenizer = model_folder({"model_path": _tokenizer(options, url, served)}, with_weights=False)
    # A new seed for each run: earlier prompts are in the prefix cache.
    seed = time.time_ns() % _SEEDS if options.seed is None else options.seed
    run = functools.partial(_run, options, url, served["id"], tokenizer, seed)
    return [run(streams) for streams in options.concurrency]


def server_table(records: list[dict[str, Any]]) -> str:
    """A line for each concurrency."""
    rows = [[title for _, title, _ in _COLUMNS]]
    rows += [[form.format(record[name]) for name, _, form in _COLUMNS] for record in records]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(lines) + "\n"


def _key() -> str | None:
    return os.environ.get(_API_KEY) or os.environ.get("OPENAI_API_KEY")


def _get(url: str, path: str) -> Any:
    request = urllib.request.Request(url + path)
    if key := _key():
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        hint = "start it by `pie-sglang serve MODEL`, or name its address: `--serve URL`"
        if isinstance(error, urllib.error.HTTPError) and error.code in (401, 403):
            hint = f"set {_API_KEY} to its key"
        raise ConfigError(f"no server answers at {url}{path}: {reason(error)}", hint) from error


def _tokenizer(options: argparse.Namespace, url: str, served: dict[str, Any]) -> str:
    """The tokenizer: the user's, the server's if it is a local folder, or the model's."""
    if options.model is not None:
        return str(options.model)
    try:
        found = str(_get(url, "/model_info")["tokenizer_path"])
    except (ConfigError, KeyError, TypeError):
        # Of other servers, and of the gateway.
        found = ""
    return found if Path(found).is_dir() else str(served.get("root") or served["id"])


def _run(
    options: argparse.Namespace, url: str, model: str, tokenizer: Path, seed: int, streams: int
) -> dict[str, Any]:
    requests = options.requests or max(_LEAST_REQUESTS, _ROUNDS * streams)
    with tempfile.TemporaryDirectory(prefix="pie-bench-") as folder:
        path = Path(folder) / "record.jsonl"
        flags = {
            "backend": "sglang-oai",
            "base-url": url,
            "model": model,
            "tokenizer": tokenizer,
            "dataset-name": "random-ids",
            "num-prompts": requests,
            "max-concurrency": streams,
            "random-input-len": options.input_len,
            "random-output-len": options.output_len,
            "random-range-ratio": 1.0,
            "seed": seed + streams,
            "output-file": path,
        }
        command = [sys.executable, "-m", SERVING_BENCHMARK]
        command += [f"--{name}={value}" for name, value in flags.items()]
        key = _key()
        variables = {**os.environ, **({"OPENAI_API_KEY": key} if key else {})}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
        if done.returncode or not path.is_file():
            [*_, last] = ["", *done.stderr.strip().splitlines()]
            raise StartError(
                f"`sglang.bench_serving` ended with status {done.returncode}: {last}",
                "a context must hold `--input-len` and `--output-len`, and some tokens more",
            )
        record: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    if record["completed"] != requests:
        raise StartError(
            f"{requests - record['completed']} of {requests} requests to {quoted(url)} failed",
            "the server's log says why",
        )
    return {**record, "seed": seed + streams}
