"""Loads of `sglang.bench_serving`, played in one process that imports it once.

    python benches/gpu/bench_clients.py PLAN.json

A plan is a list of `Load`. One client is one process with one event loop, which is busy with
some 30,000 tokens/s. So loads of many streams are shared out to several clients that begin at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
import traceback
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

INPUT, OUTPUT = 128, 256
COUNTS: Final[Mapping[str, int]] = {
    "1": 6,
    "16": 64,
    "64": 256,
    "256": 768,
    "all": 1024,
    "prefix": 256,
}
"""How many requests each load has."""
SHARED_OUTPUT: Final = 64
"""Tokens of an answer with a shared prefix."""
MINI: Final = "mini"
"""The side of Mini-SGLang's server, which has fewer endpoints than the others."""
GROUPS: Final = 16
LIMIT_S: Final = 90.0
"""What one client may take."""
MEDIANS: Final = ("median_itl_ms", "median_ttft_ms")


class Load(msgspec.Struct, frozen=True):
    """A load on a server.

    Attributes:
        name: `N` streams at once, `all` requests at once, or `prefix`.
        side: Which server.
        url: Where it listens.
        backend: bench_serving's name of the API.
        count: How many requests, of all clients together.
        clients: How many processes ask.
        seed: Of the prompts.
        tokenizer: Its folder.
        pid: The server's first process.
    """

    name: str
    side: str
    url: str
    backend: str
    count: int
    clients: int
    seed: int
    tokenizer: str
    pid: int

    @property
    def asked(self) -> int:
        """Requests that all clients make together."""
        each = max(2, self.count // self.clients)
        if self.name == "prefix":
            each = GROUPS * max(1, each // GROUPS)
        return each * self.clients

    def words(self, client: int, record: Path) -> list[str]:
        """The arguments of a client's bench_serving."""
        count = max(2, self.count // self.clients)
        words: list[object] = ["--backend", self.backend, "--base-url", self.url, "--model", "m"]
        words += ["--tokenizer", self.tokenizer, "--seed", self.seed * 100 + client]
        words += ["--disable-tqdm", "--warmup-requests", 1, "--output-file", record]
        if self.backend == "sglang-oai":
            # The gateway refuses streams with it, whatever its value.
            words += ["--extra-request-body", '{"best_of": null}']
        if self.side == MINI:
            # It reads only the older name of the limit.
            limit = SHARED_OUTPUT if self.name == "prefix" else OUTPUT
            words += ["--extra-request-body", json.dumps({"max_tokens": limit})]
        if self.name == "prefix":
            words += ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", GROUPS]
            words += ["--gsp-prompts-per-group", max(1, count // GROUPS)]
            words += ["--gsp-system-prompt-len", 1024, "--gsp-question-len", 64]
            words += ["--gsp-output-len", SHARED_OUTPUT, "--max-concurrency", 64]
            if self.side != MINI:
                # What warms up would be cached. Mini-SGLang's has neither.
                words += ["--cache-report", "--flush-cache"]
        else:
            words += ["--dataset-name", "random-ids", "--num-prompts", count]
            words += ["--random-input-len", INPUT, "--random-output-len", OUTPUT]
            words += ["--random-range-ratio", 1.0]
            if self.name != "all":
                words += ["--max-concurrency", max(1, int(self.name) // self.clients)]
        return [str(word) for word in words]


def play(plan: Sequence[Load], out: Path) -> None:
    """Plays loads one after the other; a line of figures in `results.jsonl` for each that ends."""
    from sglang.benchmark import serving

    for number, load in enumerate(plan):
        if load.side != MINI:
            flush(load.url)
        records = [out / f"load-{number}-{client}.jsonl" for client in range(load.clients)]
        before = cpu_s(load.pid)
        begin = time.perf_counter()
        children = [_fork(serving, load, client, record) for client, record in enumerate(records)]
        failed = [status for child in children if (status := _wait(child, begin + LIMIT_S))]
        took = time.perf_counter() - begin
        label = f"{load.name} {load.side}"
        if failed:
            print(f"{label}: clients ended with {failed}", flush=True)
            continue
        found = together([json.loads(record.read_text()) for record in records])
        tokens = found.pop("tokens")
        if load.side != MINI:
            # Its processes all have the same command line.
            for part, seconds in cpu_s(load.pid).items():
                used = seconds - before[part]
                found[f"{part}_cpu_us"] = round(used / tokens * 1e6, 2)
        for record in records:
            record.unlink()
        line = {"load": load.name, "side": load.side, "clients": load.clients, "asked": load.asked}
        line.update(found)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{label}: {found} ({took:.1f} s)", flush=True)


def together(figures: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures of clients that began at once: all tokens in the time of the slowest."""
    longest = max(float(each["duration"]) for each in figures)
    tokens = sum(int(each["total_output_tokens"]) for each in figures)
    found = {
        "tokens": tokens,
        "completed": sum(int(each["completed"]) for each in figures),
        "output_throughput": round(tokens / longest, 1),
        "p99_itl_ms": round(max(float(each["p99_itl_ms"]) for each in figures), 3),
    }
    for name in MEDIANS:
        found[name] = round(statistics.median(float(each[name]) for each in figures), 3)
    rates = [(each.get("cache_report") or {}).get("cache_hit_rate_pct") for each in figures]
    known = [float(rate) for rate in rates if rate is not None]
    if known:
        found["hit_rate_pct"] = round(statistics.mean(known), 2)
    return found


def cpu_s(pid: int) -> dict[str, float]:
    """CPU seconds of a server's processes so far, by part.

    `driver` is our processes with the model, `scheduler` those of a scheduler; SGLang's has the
    model, too. `front` is all others: HTTP, tokens to text, the gateway.
    """
    found = dict.fromkeys(("front", "scheduler", "driver"), 0.0)
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times, words = process.cpu_times(), " ".join(process.cmdline())
            schedules = "sglang::scheduler" in words or "sglang::rank" in words
            part = "driver" if "--handshake-fd" in words else "front"
            found["scheduler" if schedules else part] += times.user + times.system
    return found


def flush(url: str) -> None:
    """Empties a server's prefix index; SGLang's refuses while a step runs."""
    until = time.monotonic() + 5.0
    while time.monotonic() < until:
        request = urllib.request.Request(f"{url}/flush_cache", b"", method="POST")
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(request, timeout=10).close()
            return
        time.sleep(0.1)


def _fork(serving: Any, load: Load, client: int, record: Path) -> int:
    """A client, in a process of its own; returns its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        record.unlink(missing_ok=True)
        sys.argv = ["bench_serving", *load.words(client, record)]
        with (
            record.with_suffix(".log").open("w", encoding="utf-8") as log,
            contextlib.redirect_stdout(log),
        ):
            serving.cli_main()
        record.with_suffix(".log").unlink()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Nothing of the parent's is flushed or closed twice.
        os._exit(status)


def _wait(child: int, until: float) -> int:
    """The status of a client; one that takes too long is killed."""
    while time.perf_counter() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -9


def main() -> None:
    """Plays the plan that is named."""
    path = Path(sys.argv[1])
    play(msgspec.json.decode(path.read_bytes(), type=list[Load]), path.parent)


if __name__ == "__main__":
    main()
