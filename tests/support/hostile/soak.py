"""Soak test (`make soak`): servers under attack lose no answer and do not grow.

Two servers on the CPU, one with each HTTP frontend, have three kinds of clients: those that know
their answers (`known_requests`), those that attack (`hostile_requests`), and those that leave, read
slowly or send nothing. Meanwhile drivers and grammar compilers are killed. Prints what happened,
and ends with status 1 if an answer was lost or wrong, a hostile request had no proper answer, or
memory, descriptors or `/dev/shm` grew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from support.hostile import attack_clients, hostile_requests, known_requests
from support.hostile.attack_clients import Address, Neighbours
from support.hostile.hostile_requests import GATEWAY, ROWS, SGLANG, Call
from support.models import lora_adapters
from support.models.tiny_models import POCKET
from support.process import fork_server
from support.process.inspection import command_line
from support.servers import gateway_server, pie_server

SAMPLE_S: Final = 5.0
DRIVER_S: Final = 60.0
"""From one kill of a driver to the next."""
COMPILER_S: Final = 20.0
MOST_GROWTH: Final = 0.15
"""Of the memory from the second quarter of the time to the last: a leak, not a cache."""
SLACK_BYTES: Final = 64 << 20
SLACK_DESCRIPTORS: Final = 64


@dataclass
class Sample:
    """What the processes of a server hold."""

    seconds: float
    memory: int
    descriptors: int


@dataclass
class Soaked:
    """A server under load, and what is known of it."""

    kind: str
    address: Address
    path: str
    process: psutil.Process
    folder: Path
    neighbours: Neighbours
    attacks: Counter[str] = field(default_factory=Counter)
    complaints: Counter[str] = field(default_factory=Counter)
    left: int = 0
    reported: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)

    def family(self) -> list[psutil.Process]:
        return [self.process, *fork_server.family(self.process.pid)]

    def measure(self, began: float) -> Sample:
        memory = descriptors = 0
        for process in self.family():
            with contextlib.suppress(psutil.Error, OSError):
                memory += process.memory_info().rss
                descriptors += process.num_fds()
        return Sample(time.monotonic() - began, memory, descriptors)


def calls_of(soaked: Soaked) -> list[Call]:
    """Every hostile request that a frontend can be sent."""
    is_sglang = soaked.kind == SGLANG
    written = hostile_requests.for_sglang if is_sglang else hostile_requests.for_gateway
    rows = [row for rows in ROWS.values() for row in rows if soaked.kind in row.at]
    calls = [written(row) for row in rows]
    calls += [*hostile_requests.chat_calls(), *hostile_requests.body_calls(soaked.path)]
    if is_sglang:
        calls += hostile_requests.sglang_calls(str(soaked.folder / "made"))
    return calls


def attack(soaked: Soaked, over: threading.Event, seed: int) -> None:
    """Sends hostile requests, all of them in any order, again and again."""
    chance = random.Random(seed)
    calls = calls_of(soaked)
    raw = attack_clients.raw_bytes(soaked.path)
    while not over.is_set():
        chance.shuffle(calls)
        for call in calls:
            if over.is_set():
                return
            for complaint in attack_clients.attack(soaked.address, call):
                soaked.complaints[f"{call.name}: {complaint}"] += 1
            soaked.attacks[call.name] += call.copies
        for name, data in raw.items():
            answer = attack_clients.give(soaked.address, data)
            if answer.startswith(b"HTTP/1.1 5"):
                soaked.complaints[f"{name}: {answer[:60]!r}"] += 1
            soaked.attacks[name] += 1


def leave(soaked: Soaked, over: threading.Event, seed: int) -> None:
    """Clients that go, at any moment, that do not read, and that send nothing."""
    chance = random.Random(seed)
    request = attack_clients.stream_request(soaked.path)
    while not over.is_set():
        count = chance.choice([1, 4, 16, 64])
        data = chance.choice([b"", request[:40], request, request])
        with attack_clients.held(soaked.address, count, data) as connections:
            over.wait(chance.choice([0, 0.01, 0.3, 2.0]))
            soaked.left += len(connections)


def kill(soaked: Soaked, over: threading.Event, seed: int) -> None:
    """Kills drivers and grammar compilers."""
    chance = random.Random(seed)
    next_driver = time.monotonic() + DRIVER_S
    while not over.wait(COMPILER_S * chance.uniform(0.5, 1.5)):
        victims = {"compiler": [each for each in soaked.family() if is_compiler(each)]}
        if time.monotonic() > next_driver:
            family = soaked.family()
            victims["driver"] = [each for each in family if "--config" in command_line(each)]
            next_driver = time.monotonic() + DRIVER_S * chance.uniform(0.5, 1.5)
        for name, found in victims.items():
            if found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    chance.choice(found).kill()
                    soaked.killed[name] += 1


def is_compiler(process: psutil.Process) -> bool:
    return any("run_grammar_compiler" in word for word in command_line(process))


@contextlib.contextmanager
def serving(kind: str, folder: Path) -> Iterator[Soaked]:
    """A server, whose every question was asked alone."""
    log = folder / kind
    log.mkdir()
    with contextlib.ExitStack() as stack:
        restarts = ("--option", "max_restarts=1000000")
        if kind == SGLANG:
            made = lora_adapters.make_for(POCKET, "linear", folder)
            flags = ["--scheduler", "pie", "--served-model-name", "pocket", *restarts]
            flags += ["--enable-lora", "--max-lora-rank", "16", "--lora-target-modules", "all"]
            flags += ["--lora-paths", f"linear={made.adapter}"]
            server, process = stack.enter_context(pie_server.running(log, *flags))
            pid, path, asks = process.pid, "/generate", known_requests.SGLANG
        else:
            server = stack.enter_context(gateway_server.running(log, *restarts))
            pid, path, asks = server.process.pid, "/v1/completions", known_requests.OPENAI
        address = Address.of(server.url)
        neighbours = Neighbours(lambda number: asks[number](address), len(asks))
        yield Soaked(kind, address, path, psutil.Process(pid), folder, neighbours)


def soak(servers: Sequence[Soaked], seconds: float, seed: int) -> None:
    """Has all clients at work for a while."""
    over = threading.Event()
    actions: tuple[Callable[..., None], ...] = (attack, leave, kill)
    threads = [
        threading.Thread(target=action, args=(server, over, seed + number))
        for server in servers
        for number, action in enumerate(actions)
    ]
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.enter_context(server.neighbours)
        for thread in threads:
            thread.start()
        try:
            while (now := time.monotonic() - began) < seconds:
                for server in servers:
                    server.samples.append(server.measure(began))
                report(servers, now)
                time.sleep(min(SAMPLE_S, max(0.0, seconds - now)))
        finally:
            over.set()
            for thread in threads:
                thread.join()


def report(servers: Sequence[Soaked], now: float) -> None:
    """One line on stderr, each minute."""
    if int(now) % 60 >= SAMPLE_S:
        return
    for server in servers:
        last = server.samples[-1]
        sys.stderr.write(
            f"{now / 60:5.1f} min  {server.kind:8} {server.neighbours.answers} answers, "
            f"{len(server.neighbours.troubles)} lost or wrong, {server.attacks.total()} attacks, "
            f"{server.complaints.total()} without a proper answer, {server.left} clients left, "
            f"killed {dict(server.killed)}, {last.memory >> 20} MiB, {last.descriptors} fds\n"
        )
        for trouble in server.neighbours.troubles[server.reported :]:
            sys.stderr.write(f"          {server.kind:8} {trouble}\n")
            server.reported += 1


def troubles(server: Soaked, idle: tuple[Sample, Sample]) -> Iterator[str]:
    """What was wrong with a server."""
    for found in server.neighbours.troubles[:20]:
        yield f"lost or wrong: {found}"
    for name, count in server.complaints.most_common(20):
        yield f"{count} times: {name}"
    if (server.folder / "made").exists():
        yield "code in a pickle was run"
    first, last = idle
    if last.descriptors > first.descriptors + SLACK_DESCRIPTORS:
        yield f"descriptors grew from {first.descriptors} to {last.descriptors}"
    quarter = len(server.samples) // 4
    if quarter > 10:
        early, late = (
            sorted(sample.memory for sample in part)[quarter // 2]
            for part in (server.samples[quarter : 2 * quarter], server.samples[-quarter:])
        )
        if late > early * (1 + MOST_GROWTH) + SLACK_BYTES:
            yield f"memory grew from {early >> 20} to {late >> 20} MiB"


def row(server: Soaked, idle: tuple[Sample, Sample]) -> dict[str, Any]:
    """The figures of a server."""
    first, last = idle
    return {
        "frontend": server.kind,
        "answers": server.neighbours.answers,
        "lost or wrong": len(server.neighbours.troubles),
        "hostile": server.attacks.total(),
        "without a proper answer": server.complaints.total(),
        "clients that left": server.left,
        "killed drivers": server.killed["driver"],
        "killed compilers": server.killed["compiler"],
        "memory before, MiB": first.memory >> 20,
        "peak memory, MiB": max(sample.memory for sample in server.samples) >> 20,
        "memory after, MiB": last.memory >> 20,
        "descriptors before": first.descriptors,
        "most descriptors": max(sample.descriptors for sample in server.samples),
        "descriptors after": last.descriptors,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frontend", choices=[SGLANG, GATEWAY], help="one of the two alone")
    parser.add_argument("--record", type=Path, help="a file for the figures, as JSON")
    args = parser.parse_args()
    kinds = [args.frontend] if args.frontend else [SGLANG, GATEWAY]
    shm = pie_server.shared_memory()
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(serving(kind, Path(name))) for kind in kinds]
            before = [server.measure(time.monotonic()) for server in servers]
            soak(servers, 60 * args.minutes, args.seed)
            # What was sent last ends, and kept connections with it.
            time.sleep(10)
            idle = [
                (first, server.measure(time.monotonic()))
                for first, server in zip(before, servers, strict=True)
            ]
        rows = [row(server, each) for server, each in zip(servers, idle, strict=True)]
        for server, each in zip(servers, idle, strict=True):
            found += [f"{server.kind}: {trouble}" for trouble in troubles(server, each)]
    left = sorted(pie_server.shared_memory() - shm)
    found += [f"left in /dev/shm: {name}" for name in left]
    for title in rows[0]:
        sys.stdout.write(f"{title:26}" + "".join(f"{each[title]!s:>12}" for each in rows) + "\n")
    sys.stdout.write(f"{'files left in /dev/shm':26}{len(left):>12}\n")
    for trouble in found:
        sys.stdout.write(f"FAILED {trouble}\n")
    if args.record:
        args.record.write_text(json.dumps({"minutes": args.minutes, "servers": rows}, indent=1))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
