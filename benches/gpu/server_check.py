"""Compares `pie-sglang serve` with SGLang's own server, by `sglang.bench_serving`.

    python benches/gpu/server_check.py --shapes CONFIG_DIR --out DIR
        [--loads 1,64,256,all,prefix] [--repeats 2] [--bars small|large|none] [--device cuda|cpu]

Both servers have the same flags and run at once on one GPU, each with its share of the memory. The
loads alternate between them, so that a drift of the machine meets both. Weights are random, the
tokenizer has a text for every token (`texts.py`). First some prompts are asked of each: greedy
answers must have all tokens, and begin alike alone and at once.

A load `N` is N streams at once, of 128 random tokens in and 256 out. `all` sends its requests at
once. `prefix` is `generated-shared-prefix`: groups that share a system prompt of 1,024 tokens. What
counts is the median of the repeats. Bars are ratios of ours to SGLang's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import frame
import texts
from frame import Report
from processes import Runner

SIDES: Final = ("ours", "sglang")
PORTS: Final = {"ours": 31811, "sglang": 31911}
START_S: Final = 240.0
INPUT, OUTPUT = 128, 256
LOADS: Final[Mapping[str, int]] = {
    "1": 8,
    "16": 64,
    "64": 256,
    "256": 768,
    "all": 1024,
    "prefix": 256,
}
"""How many requests each has."""
GROUPS: Final = 16
FIGURES: Final = ("output_throughput", "median_itl_ms", "median_ttft_ms", "p99_itl_ms")


class Limits(NamedTuple):
    """Bars of a model's size: ours over SGLang's."""

    throughput: float
    """Of tokens/s with all requests at once, at least."""
    one: float = 0.6
    """Of the median time between tokens, with one stream, at most."""
    many: float = 0.8
    """The same with 64 streams."""
    prefix: float = 1.25
    """Of tokens/s with shared prefixes, at least."""


LIMITS: Final = {"small": Limits(1.3), "large": Limits(1.15)}


def main() -> None:
    """Starts both servers, checks them, and alternates the loads."""
    arguments = parser().parse_args()
    if arguments.play is not None:
        play(arguments.play)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    with Report(__file__, arguments) as report, contextlib.ExitStack() as stack:
        tokenizer = _tokenizer(arguments)
        sides = arguments.sides.split(",")
        urls = {}
        for side in sides:
            log = arguments.out / f"{side}.log"
            urls[side] = stack.enter_context(server(side, arguments, tokenizer, log))
        for side in sides:
            wait_ready(urls[side], arguments.out / f"{side}.log")
            report.hold(f"{side}: answers that differ", differing(urls[side]), at_most=0)
        runner = Runner(arguments.out / "server_check.log", arguments.budget_s)
        found = alternate(arguments, urls, tokenizer, runner, report)
        report.hold("loads that failed", len(runner.failed), at_most=0)
        compare(found, report, LIMITS.get(arguments.bars))


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__ or "", "out", "shapes", "device")
    made.add_argument("--loads", default="1,64,256,all,prefix")
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--bars", choices=[*LIMITS, "none"], default="small")
    made.add_argument("--sides", default=",".join(SIDES), help="servers, the first one ours")
    made.add_argument("--backend", default="flashinfer", help="SGLang's attention backend")
    made.add_argument("--share", type=float, default=0.4, help="of the memory for each server")
    made.add_argument("--scale", type=float, default=1.0, help="requests, as a share of the usual")
    made.add_argument("--flag", action="append", default=[], help="a flag for both, as one word")
    made.add_argument("--budget-s", type=float, default=500.0, help="seconds for all loads")
    made.add_argument("--play", help=argparse.SUPPRESS)
    return made


def _tokenizer(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.shapes
    if (folder / "tokenizer.json").is_file():
        return folder
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    return texts.make_tokenizer(arguments.out / "tokenizer", vocabulary)


@contextlib.contextmanager
def server(side: str, arguments: argparse.Namespace, tokenizer: Path, log: Path) -> Iterator[str]:
    """A server that starts, in a session of its own; gives its address."""
    on_cpu = str(arguments.device) == "cpu"
    port = PORTS[side]
    flags = ["--model-path", arguments.shapes, "--tokenizer-path", tokenizer, "--port", port]
    flags += ["--device", "cpu" if on_cpu else "cuda", "--served-model-name", "m"]
    if not (arguments.shapes / "model.safetensors").is_file():
        flags += ["--load-format", "dummy"]
    if not on_cpu:
        flags += ["--mem-fraction-static", arguments.share, "--max-running-requests", 256]
    flags += [word for flag in arguments.flag for word in flag.split()]
    if side == "ours" or on_cpu:
        command = [sys.executable, "-m", "pie_driver_sglang", "serve"]
        flags += ["--scheduler", "pie" if side == "ours" else "sglang"]
    else:
        command = [sys.executable, "-m", "sglang.launch_server"]
        flags += ["--attention-backend", arguments.backend, "--log-level", "warning"]
        flags += ["--cuda-graph-max-bs-decode", 256, "--disable-prefill-cuda-graph"]
    words = [str(word) for word in (*command, *flags)]
    print(f"--- {side}: {' '.join(words)}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        # SGLang's waits for requests that are given up; nothing is lost by ending both at once.
        for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 1.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            time.sleep(patience)


def wait_ready(url: str, log: Path) -> None:
    """Waits until a server answers.

    Raises:
        TimeoutError: It does not; with the end of its log.
    """
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(urllib.error.URLError, OSError):
            ask(url, "/health")
            return
        time.sleep(0.5)
    raise TimeoutError(f"{url} does not answer; its log ends:\n{log.read_text()[-3000:]}")


def ask(url: str, path: str, body: Any = None, limit_s: float = 120.0) -> bytes:
    """What a server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        found: bytes = answer.read()
    return found


def differing(url: str) -> int:
    """How many of 16 greedy answers are too short, or begin otherwise when asked at once."""

    def tokens(number: int) -> list[int]:
        prompt = [1000 + 37 * number + at for at in range(40)]
        params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        answer = json.loads(ask(url, "/generate", {"input_ids": prompt, "sampling_params": params}))
        return list(answer["output_ids"])

    numbers = range(16)
    first = [tokens(number) for number in numbers]
    with ThreadPoolExecutor(16) as pool:
        at_once = list(pool.map(tokens, numbers))
    # Sums of other batches round otherwise, so a later token may differ; the first must not.
    pairs = zip(first, at_once, strict=True)
    return sum(len(one) != 24 or len(two) != 24 or one[0] != two[0] for one, two in pairs)


def alternate(
    arguments: argparse.Namespace,
    urls: Mapping[str, str],
    tokenizer: Path,
    runner: Runner,
    report: Report,
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Runs every load on one server after the other; returns the figures of each repeat."""
    results = arguments.out / "results.jsonl"
    results.unlink(missing_ok=True)
    plan = []
    for load in arguments.loads.split(","):
        count = max(2, round(LOADS[load] * arguments.scale))
        for repeat in range(arguments.repeats):
            for side, url in urls.items():
                words = bench_words(load, count, url, tokenizer, seed=1 + repeat)
                label = f"{load} {side} {repeat}"
                plan.append(
                    {"url": url, "words": [*words, "--output-file", str(results)], "of": label}
                )
    listed = arguments.out / "plan.json"
    listed.write_text(json.dumps(plan))
    environment = _player_environment(arguments.out)
    again = [sys.executable, __file__, "--shapes", arguments.shapes, "--out", arguments.out]
    runner.run("loads", [*again, "--play", listed], arguments.budget_s, environment)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    lines = results.read_text().splitlines() if results.is_file() else []
    for entry, line in zip(plan, lines, strict=False):
        load, side, _ = str(entry["of"]).split()
        figures = json.loads(line)
        kept = {name: round(float(figures[name]), 3) for name in FIGURES}
        cached = (figures.get("cache_report") or {}).get("cache_hit_rate_pct")
        if cached is not None:
            kept["hit_rate_pct"] = float(cached)
        report.add(load=load, side=side, completed=figures["completed"], **kept)
        found.setdefault((load, side), []).append(kept)
    if len(lines) < len(plan):
        runner.failed.append(f"{len(plan) - len(lines)} of {len(plan)} loads")
    return found


def bench_words(load: str, count: int, url: str, tokenizer: Path, seed: int) -> list[str]:
    """The arguments of `sglang.bench_serving`."""
    words: list[object] = ["--backend", "sglang", "--base-url", url, "--model", "m"]
    words += ["--tokenizer", tokenizer, "--seed", seed, "--disable-tqdm", "--warmup-requests", 2]
    if load == "prefix":
        each = max(1, count // GROUPS)
        words += ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", GROUPS]
        words += ["--gsp-prompts-per-group", each, "--gsp-system-prompt-len", 1024]
        words += ["--gsp-question-len", 64, "--gsp-output-len", 64, "--cache-report"]
        words += ["--max-concurrency", 64, "--flush-cache"]
    else:
        words += ["--dataset-name", "random-ids", "--num-prompts", count, "--flush-cache"]
        words += ["--random-input-len", INPUT, "--random-output-len", OUTPUT]
        words += ["--random-range-ratio", 1.0]
        if load != "all":
            words += ["--max-concurrency", load]
    return [str(word) for word in words]


def play(plan: str) -> None:
    """Runs loads in this process: `sglang.bench_serving` takes seconds to import."""
    from sglang.benchmark import serving

    for entry in json.loads(Path(plan).read_text()):
        sys.argv = ["bench_serving", *entry["words"]]
        begin = time.perf_counter()
        with (
            Path(os.devnull).open("w", encoding="utf-8") as nothing,
            contextlib.redirect_stdout(nothing),
        ):
            serving.cli_main()
        lines = Path(entry["words"][-1]).read_text().splitlines()
        figures = json.loads(lines[-1])
        shown = ", ".join(f"{name} {figures[name]:.2f}" for name in FIGURES)
        took = time.perf_counter() - begin
        print(f"{entry['of']}: {shown} ({figures['completed']} in {took:.1f} s)", flush=True)


def _player_environment(out: Path) -> dict[str, str]:
    """With an empty module in the place of a package that random ids do not need."""
    environment = dict(os.environ)
    if find_spec("datasets") is None:
        stubs = out / "stubs"
        stubs.mkdir(exist_ok=True)
        (stubs / "datasets.py").write_text("")
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(stubs), *([path] if path else [])])
    return environment


def compare(
    found: Mapping[tuple[str, str], Sequence[Mapping[str, float]]],
    report: Report,
    limits: Limits | None,
) -> None:
    """Holds the medians of ours to SGLang's."""

    def median(load: str, side: str, name: str) -> float:
        return statistics.median(figures[name] for figures in found[load, side])

    for load in {load for load, _ in found}:
        if any((load, side) not in found for side in SIDES):
            continue
        ratios = {
            name: median(load, "ours", name) / max(1e-9, median(load, "sglang", name))
            for name in FIGURES
        }
        report.add(
            load=load, side="ours over sglang", **{k: round(v, 3) for k, v in ratios.items()}
        )
        print(f"{load}: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items()))
        if limits is None:
            continue
        report.hold(f"{load}: time to the first token", ratios["median_ttft_ms"], at_most=1.0)
        between, throughput = ratios["median_itl_ms"], ratios["output_throughput"]
        if load in ("1", "64"):
            most = limits.one if load == "1" else limits.many
            report.hold(f"{load}: time between tokens", between, at_most=most)
        if load == "all":
            report.hold("all: tokens/s", throughput, at_least=limits.throughput)
        if load == "prefix":
            report.hold("prefix: tokens/s", throughput, at_least=limits.prefix)
            rates = [median(load, side, "hit_rate_pct") for side in SIDES]
            report.hold("prefix: hit rates, percent apart", abs(rates[0] - rates[1]), at_most=1.0)


if __name__ == "__main__":
    main()
