"""Compares `pie-sglang serve`, with both of its frontends, with SGLang's own server.

    python benches/gpu/server_check.py --shapes CONFIG_DIR --out DIR
        [--loads 256,1,64,all,prefix] [--repeats 2] [--bars small|large|none] [--device cuda|cpu]
        [--sides sglang,ours,gateway] [--peer-mini CHECKOUT]

The servers have the same flags. By default they share the GPU, each with a part of its memory, and
the loads of `sglang.bench_serving` alternate between them, so that a drift of the machine affects
all. With `--one-at-a-time` each server has the GPU to itself, with its own default memory fraction:
it starts, runs all loads and ends before the next one starts. Weights are random, the tokenizer has
a text for every token (`texts.py`). Before the loads, 16 greedy answers are checked: each must have
all tokens, and the same first token alone and in a batch.

A load `N` is N streams at once, of 128 random tokens in and 256 out. `all` sends its requests at
once. `prefix` is `generated-shared-prefix`: groups that share a system prompt of 1,024 tokens. What
counts is the median of the repeats. Bars are ratios to SGLang's. The gateway is asked by
`/v1/completions`, the others by `/generate`; loads of 64 streams and more come from several
clients (`bench_clients.py`). `front_cpu_us` is the CPU time of a server's HTTP and text processes
for a token.

With `--peer-mini`, a clone of https://github.com/sgl-project/mini-sglang, its server is asked, too,
as `mini` and by `/v1/chat/completions`: it has no other endpoint that bench_serving knows. Every
prompt has the tokens of a chat's template more. No bar is on its figures. Its prefix index is never
flushed, so that the request that warms up may be found there.
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
import msgspec
import texts
from bench_clients import COUNTS, MINI, Load
from frame import Report
from processes import Runner

SIDES: Final = ("sglang", "ours", "gateway")
"""In the order of starts. Mini-SGLang's is the last one."""
PORTS: Final = {"ours": 31811, "sglang": 31911, "gateway": 31711, MINI: 31611}
READY: Final = {"gateway": "/readiness", MINI: "/v1/models"}
"""What a server answers when it is ready, where that is not `/health`."""
BACKENDS: Final = {"gateway": "sglang-oai", MINI: "sglang-oai-chat"}
"""bench_serving's names of the APIs, where it is not `sglang`."""
LEFT: Final = 0.9
"""Of the memory that is free when ours start."""
POOL: Final = 200_000
"""Tokens of SGLang's pool: two times what the largest load needs."""
MANY: Final = ("64", "256", "all")
"""Loads of several clients."""
FIGURES: Final = (
    "output_throughput", "median_itl_ms", "median_ttft_ms", "p99_itl_ms", "front_cpu_us",
)  # fmt: skip


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
    gateway: float = 1.0
    """Of tokens/s of the gateway with 256 streams, at least."""


LIMITS: Final = {"small": Limits(1.3, gateway=2.5), "large": Limits(1.15)}


def main() -> None:
    """Starts the servers, checks them, and alternates the loads."""
    arguments = parser().parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for side in PORTS:
        if is_ready(side, f"http://127.0.0.1:{PORTS[side]}"):
            raise SystemExit(f"something serves at port {PORTS[side]} already")
    with Report(__file__, arguments) as report, contextlib.ExitStack() as stack:
        model = model_folder(arguments)
        sides = sorted(arguments.sides.split(","), key=SIDES.index)
        sides += [MINI] if arguments.peer_mini else []
        started: dict[str, Served] = {}
        signal.signal(signal.SIGTERM, lambda *_: give_up(started))
        until = begin + arguments.start_s
        runner = Runner(arguments.out / "server_check.log", arguments.budget_s)
        if arguments.one_at_a_time:
            found = one_at_a_time(arguments, sides, model, started, runner, report)
            report.hold("loads that failed", len(runner.failed), at_most=0)
            compare(found, report, LIMITS.get(arguments.bars))
            return
        ready = {}
        for number, side in enumerate(sides):
            log = arguments.out / f"{side}.log"
            share = 1 - arguments.share if side == "sglang" else LEFT / (len(sides) - number)
            served = stack.enter_context(server(side, arguments, model, log, share))
            started[side] = served
            if answers(side, served, until, report):
                ready[side] = served
        report.add(part="start", took_s=round(time.monotonic() - begin, 1))
        found = alternate(arguments, ready, model, runner, report)
        report.hold("loads that failed", len(runner.failed), at_most=0)
        compare(found, report, LIMITS.get(arguments.bars))


def one_at_a_time(
    arguments: argparse.Namespace,
    sides: Sequence[str],
    model: Path,
    started: dict[str, Served],
    runner: Runner,
    report: Report,
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Starts each server alone, with its own default memory fraction, and runs all loads on it.

    Returns:
        The figures of each repeat by load and side.
    """
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for side in sides:
        begin = time.monotonic()
        log = arguments.out / f"{side}.log"
        with server(side, arguments, model, log, None) as served:
            started[side] = served
            if answers(side, served, begin + arguments.start_s, report):
                took_s = round(time.monotonic() - begin, 1)
                report.add(part="start", side=side, took_s=took_s)
                found |= alternate(arguments, {side: served}, model, runner, report)
        del started[side]
    return found


def answers(side: str, served: Served, until: float, report: Report) -> bool:
    """Whether a server answers in time. That is a bar; of Mini-SGLang's it is only recorded."""
    try:
        wait_ready(side, served, until)
        differ = differing(side, served.url)
    except (OSError, ValueError) as error:
        # The others are compared without it.
        print(f"{side}: {error}", flush=True)
        if side == MINI:
            report.add(part=side, serves=False)
        else:
            report.hold(f"{side}: does not serve", 1, at_most=0)
        return False
    if side == MINI:
        report.add(part=side, serves=True, differ=differ)
    else:
        report.hold(f"{side}: answers that differ", differ, at_most=0)
    return True


def parser() -> argparse.ArgumentParser:
    """The check's arguments."""
    made = frame.parser(__doc__ or "", "out", "shapes", "device")
    made.add_argument("--loads", default="256,1,64,all,prefix", help="the first ones count most")
    made.add_argument("--repeats", type=int, default=2)
    made.add_argument("--bars", choices=[*LIMITS, "none"], default="small")
    made.add_argument("--sides", default=",".join(SIDES), help="servers")
    made.add_argument("--backend", default="flashinfer", help="SGLang's attention backend")
    made.add_argument("--peer-mini", type=Path, help="a clone of Mini-SGLang, on a GPU")
    made.add_argument("--peer-mini-backend", default="fi", help="fi, or fa:256 with its page size")
    made.add_argument("--one-at-a-time", action="store_true", help="each server alone on the GPU")
    made.add_argument("--share", type=float, default=0.5, help="of the memory for all of ours")
    made.add_argument("--clients", type=int, default=4, help="of loads of 64 streams and more")
    made.add_argument("--scale", type=float, default=1.0, help="requests, as a share of the usual")
    made.add_argument("--flag", action="append", default=[], help="a flag for both, as one word")
    made.add_argument("--budget-s", type=float, default=500.0, help="seconds for all loads")
    made.add_argument("--start-s", type=float, default=240.0, help="seconds for the starts")
    return made


def model_folder(arguments: argparse.Namespace) -> Path:
    """The shapes' folder, or one with a tokenizer, too."""
    folder: Path = arguments.shapes
    if (folder / "tokenizer.json").is_file():
        return folder
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    made = texts.make_tokenizer(arguments.out / "model", vocabulary)
    return frame.model_folder(folder, made)


class Served(NamedTuple):
    """A server that was started."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


def give_up(started: Mapping[str, Served]) -> None:
    """Ends the servers, which are in sessions of their own, and this process."""
    for served in started.values():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(served.process.pid, signal.SIGKILL)
    sys.exit("ended by SIGTERM")


@contextlib.contextmanager
def server(
    side: str, arguments: argparse.Namespace, model: Path, log: Path, share: float | None
) -> Iterator[Served]:
    """A server that starts in a session of its own, with a share of the free device memory.

    A share of None leaves the server's own default.
    """
    make = mini_command if side == MINI else serve_command
    words = [str(word) for word in make(side, arguments, model, share)]
    environment = mini_environment(arguments.peer_mini) if side == MINI else None
    print(f"--- {side}: {' '.join(words)}", flush=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        yield Served(f"http://127.0.0.1:{PORTS[side]}", process, log)
    finally:
        # SGLang's waits for requests that are given up; nothing is lost by ending both at once.
        for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 1.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            time.sleep(patience)


def has_weights(model: Path) -> bool:
    """Whether the weights are a file, and not random."""
    return (model / "model.safetensors").is_file()


def serve_command(
    side: str, arguments: argparse.Namespace, model: Path, share: float | None
) -> list[object]:
    """How one of our servers or SGLang's is started."""
    on_cpu = str(arguments.device) == "cpu"
    flags: list[object] = ["--model-path", model, "--port", PORTS[side]]
    flags += ["--device", "cpu" if on_cpu else "cuda", "--served-model-name", "m"]
    if not has_weights(model):
        flags += ["--load-format", "dummy"]
    if not on_cpu:
        flags += ["--max-running-requests", 256]
        flags += [] if share is None else ["--mem-fraction-static", f"{share:.3f}"]
    flags += [word for flag in arguments.flag for word in flag.split()]
    if side == "gateway":
        command = [sys.executable, "-m", "pie_driver_sglang", "serve", "--front", "gateway"]
    elif side == "ours" or on_cpu:
        command = [sys.executable, "-m", "pie_driver_sglang", "serve"]
        flags += ["--scheduler", "pie" if side == "ours" else "sglang"]
    else:
        command = [sys.executable, "-m", "sglang.launch_server"]
        flags += ["--attention-backend", arguments.backend, "--log-level", "warning"]
        flags += [] if share is None else ["--max-total-tokens", POOL]
        flags += ["--cuda-graph-max-bs-decode", 256]
    return [*command, *flags]


def mini_command(
    side: str, arguments: argparse.Namespace, model: Path, share: float | None
) -> list[object]:
    """How Mini-SGLang's server is started; the flags for both others are not its own."""
    backend, _, page_size = arguments.peer_mini_backend.partition(":")
    command: list[object] = [sys.executable, "-m", "minisgl", "--model-path", model]
    command += ["--port", PORTS[side]]
    command += [] if share is None else ["--memory-ratio", f"{share:.3f}"]
    command += ["--max-running-requests", 256, "--cuda-graph-max-bs", 256]
    command += ["--attention-backend", backend, "--page-size", page_size or 1]
    return command if has_weights(model) else [*command, "--dummy-weight"]


def mini_environment(checkout: Path) -> dict[str, str]:
    """With the checkout's package in front of the import path."""
    path = os.environ.get("PYTHONPATH")
    folders = [str(checkout.resolve() / "python"), *([path] if path else [])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def is_ready(side: str, url: str) -> bool:
    """Whether a server answers; the gateway, whether it knows what serves the model."""
    with contextlib.suppress(urllib.error.URLError, OSError):
        ask(url, READY.get(side, "/health"), limit_s=5.0)
        return True
    return False


def wait_ready(side: str, served: Served, until: float) -> None:
    """Waits until a server answers, but not for longer than to a time.

    Raises:
        TimeoutError: It does not, or has ended; with the end of its log.
    """
    while time.monotonic() < until and served.process.poll() is None:
        if is_ready(side, served.url):
            return
        time.sleep(0.5)
    text = served.log.read_text(errors="replace")[-3000:]
    raise TimeoutError(f"{served.url} does not answer; its log ends:\n{text}")


def ask(url: str, path: str, body: Any = None, limit_s: float = 120.0) -> bytes:
    """What a server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=limit_s) as answer:
        found: bytes = answer.read()
    return found


def differing(side: str, url: str) -> int:
    """How many of 16 greedy answers are too short, or begin otherwise when asked at once."""

    def said(number: int) -> tuple[int, str]:
        """How many tokens an answer has, and its first word."""
        prompt = " ".join(str(1000 + 37 * number + at) for at in range(20))
        if side == MINI:
            return mini_said(url, prompt)
        if side == "gateway":
            body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 24}
            body |= {"temperature": 0, "ignore_eos": True}
            answer = json.loads(ask(url, "/v1/completions", body))
            return answer["usage"]["completion_tokens"], answer["choices"][0]["text"][:2]
        params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
        answer = json.loads(ask(url, "/generate", {"text": prompt, "sampling_params": params}))
        return answer["meta_info"]["completion_tokens"], answer["text"][:2]

    numbers = range(16)
    first = [said(number) for number in numbers]
    with ThreadPoolExecutor(16) as pool:
        at_once = list(pool.map(said, numbers))
    # Sums of other batches round otherwise, so a later token may differ; the first must not.
    pairs = zip(first, at_once, strict=True)
    return sum(one != two or one[0] != 24 for one, two in pairs)


def mini_said(url: str, prompt: str) -> tuple[int, str]:
    """The same of Mini-SGLang's, which counts no tokens, but streams one at a time."""
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
    body |= {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "stream": True}
    lines = ask(url, "/v1/chat/completions", body).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    choices = [json.loads(text)["choices"][0] for text in data]
    # The last one has a reason, and no token.
    tokens = [choice["delta"] for choice in choices if choice["finish_reason"] is None]
    return len(tokens), "".join(delta.get("content", "") for delta in tokens)[:2]


def alternate(
    arguments: argparse.Namespace,
    ready: Mapping[str, Served],
    model: Path,
    runner: Runner,
    report: Report,
) -> dict[tuple[str, str], list[dict[str, float]]]:
    """Runs every load on one server after the other; returns the figures of each repeat."""
    results = arguments.out / "results.jsonl"
    results.unlink(missing_ok=True)
    plan = [
        Load(
            name=load,
            side=side,
            url=served.url,
            backend=BACKENDS.get(side, "sglang"),
            count=max(2, round(COUNTS[load] * arguments.scale)),
            clients=arguments.clients if load in MANY else 1,
            seed=1 + repeat,
            tokenizer=str(model),
            pid=served.process.pid,
        )
        for repeat in range(arguments.repeats)
        for load in arguments.loads.split(",")
        for side, served in ready.items()
    ]
    listed = arguments.out / "plan.json"
    listed.write_bytes(msgspec.json.encode(plan))
    environment = _player_environment(arguments.out)
    player = [sys.executable, Path(__file__).with_name("bench_clients.py"), listed]
    runner.run("loads", player, arguments.budget_s, environment)
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    lines = results.read_text().splitlines() if results.is_file() else []
    for line in map(json.loads, lines):
        report.add(**line)
        found.setdefault((line["load"], line["side"]), []).append(line)
    short = len(plan) - len(lines)
    if short:
        runner.failed.append(f"{short} of {len(plan)} loads")
    for figures in (each for several in found.values() for each in several):
        if figures["completed"] < figures["asked"]:
            runner.failed.append(f"{figures['load']} {figures['side']}: not all completed")
    return found


def _player_environment(out: Path) -> dict[str, str]:
    """With an empty module in the place of a package that random ids do not need."""
    # `m` is no model of a hub's.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if find_spec("datasets") is None:
        stubs = out / "stubs"
        stubs.mkdir(exist_ok=True)
        (stubs / "datasets.py").write_text("load_dataset = None\n")
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join([str(stubs), *([path] if path else [])])
    return environment


def compare(
    found: Mapping[tuple[str, str], Sequence[Mapping[str, float]]],
    report: Report,
    limits: Limits | None,
) -> None:
    """Holds the medians of our frontends to SGLang's."""

    def median(load: str, side: str, name: str) -> float:
        return statistics.median(figures.get(name, 0.0) for figures in found[load, side])

    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for load, side in found:
        if side == "sglang" or (load, "sglang") not in found:
            continue
        over = {
            name: round(median(load, side, name) / max(1e-9, median(load, "sglang", name)), 3)
            for name in FIGURES
            if name in found[load, side][0]
        }
        ratios[load, side] = over
        report.add(load=load, side=f"{side} over sglang", **over)
        print(f"{load} {side}: " + ", ".join(f"{name} {of}" for name, of in over.items()))
    if limits is None:
        return
    ratios = {(load, side): over for (load, side), over in ratios.items() if side != MINI}
    for (load, side), over in ratios.items():
        name = f"{load}, {side}"
        report.hold(f"{name}: time to the first token", over["median_ttft_ms"], at_most=1.0)
        if load in ("1", "64"):
            most = limits.one if load == "1" else limits.many
            report.hold(f"{name}: time between tokens", over["median_itl_ms"], at_most=most)
        if load == "64" and side == "ours":
            report.hold(f"{name}: CPU of the front end", over["front_cpu_us"], at_most=1.0)
        if load == "prefix" and side == "ours":
            apart = median(load, side, "hit_rate_pct") - median(load, "sglang", "hit_rate_pct")
            report.hold("prefix: hit rates, percent apart", abs(apart), at_most=1.0)
        if load == "256" and side == "gateway":
            report.hold(f"{name}: tokens/s", over["output_throughput"], at_least=limits.gateway)
    for load, least in (("all", limits.throughput), ("prefix", limits.prefix)):
        reached = [over["output_throughput"] for (of, _), over in ratios.items() if of == load]
        if reached:
            report.hold(f"{load}: tokens/s of the faster frontend", max(reached), at_least=least)


if __name__ == "__main__":
    main()
