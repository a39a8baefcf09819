"""Two replicas behind the gateway: cache-aware routing, metrics, a lost driver."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.models.tiny_models import POCKET
from support.process import fork_server
from support.process.inspection import command_line
from support.servers.gateway_client import Scrape, complete, openai_client, refusal, scrape
from support.servers.pie_server import START_S, wait_until
from support.servers.sglang_server import free_ports

pytest.importorskip("smg")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_two_replicas_share_the_work_by_what_they_have_cached(
    forked_python: str, tmp_path: Path
) -> None:
    """Each family of prompts stays with the replica that has its beginning; drivers may die.

    The gateway is started by the line that the command prints.
    """
    log, gateway_log = tmp_path / "log", tmp_path / "gateway.log"
    port, metrics = free_ports(2)
    command = [forked_python, "-m", "pie_driver_sglang", "serve", "--front=gateway"]
    command += ["--model-path", str(POCKET), "--served-model-name", "pocket", "--device", "cpu"]
    command += ["--dp-size", "2", "--grpc-contract", "sglang", "--no-gateway"]
    # A driver that starts again has as much, whatever other tests have taken meanwhile.
    command += ["--max-total-tokens", "16384"]
    command += ["--port", str(port), "--api-key", "secret", "--prometheus-port", str(metrics)]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(started(command, log))
        wait_until(
            lambda: b"smg launch" in log.read_bytes() or process.poll() is not None,
            START_S,
            "start",
        )
        [line] = re.findall(r"^  smg (launch .+)$", log.read_text(), re.MULTILINE)
        words = shlex.split(line)
        assert len([word for word in words if word.startswith("grpc://")]) == 2
        # The key is not printed.
        assert words[-2:] == ["--api-key", "***"]
        gateway = [sys.executable, "-m", "smg", *words[:-1], "secret"]
        url = f"http://127.0.0.1:{port}"
        smg = stack.enter_context(started(gateway, gateway_log))
        wait_until(lambda: is_ready(url) or smg.poll() is not None, 60, "the gateway starts")
        stranger = stack.enter_context(openai_client(url, "wrong"))
        assert refusal(lambda: complete(stranger))[0] == 401
        client = stack.enter_context(openai_client(url, "secret"))
        share_by_family(client)
        show_each_replica(metrics, gateway=True)
        lose_the_drivers(process, client)
        smg.kill()
        smg.wait()
        assert show_each_replica(metrics, gateway=False).total("pie_runtime:restarts_total") == 2
        family = fork_server.family(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert psutil.wait_procs(family, 10)[1] == []


def show_each_replica(port: int, *, gateway: bool) -> Scrape:
    """Both replicas have worked by the metrics; those of the gateway come while it runs."""
    found = scrape(port)
    for rank in ("0", "1"):
        for name in ("sglang:max_total_num_tokens", "sglang:kv_evictable_tokens"):
            assert found.total(name, dp_rank=rank, model_name="pocket") > 0, name
        assert found.total("sglang:realtime_tokens_total", dp_rank=rank, mode="decode") > 0
    assert any(name.startswith("smg_") for name in found.names) == gateway
    return found


def share_by_family(client: Any) -> None:
    """Asks prompts of several families: both replicas have some, each family has one of them.

    The gateway draws lots over a family that is new, so more than four are asked if one has all.
    """
    workers: dict[str, Counter[str]] = {}

    def send(family: str, turn: int) -> None:
        answer = client.completions.with_raw_response.create(
            model="pocket", prompt=f"{family} " * 60 + str(turn), max_tokens=4, temperature=0
        )
        workers.setdefault(family, Counter())[answer.headers["x-smg-routed-worker-id"]] += 1

    while len(workers) < 4 or len({worker for seen in workers.values() for worker in seen}) < 2:
        assert len(workers) < 32, workers
        send(f"{len(workers)} family", 0)
    for turn in range(1, 5):
        for family in list(workers):
            send(family, turn)
    assert all(max(seen.values()) >= 4 for seen in workers.values()), workers


def lose_the_drivers(process: subprocess.Popen[bytes], client: Any) -> None:
    """Kills the drivers of two replicas while they stream: every stream continues."""

    def drivers() -> set[psutil.Process]:
        family = fork_server.family(process.pid)
        return {each for each in family if "--config" in command_line(each)}

    expected = complete(client, tokens=300).choices[0].text
    before = drivers()
    assert len(before) == 2
    parts: list[list[str]] = [[] for _ in range(8)]

    def stream(mine: list[str]) -> None:
        for chunk in complete(client, tokens=300, stream=True):
            mine.append(chunk.choices[0].text)  # noqa: PERF401 (read while it grows)

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, mine) for mine in parts]
        wait_until(lambda: min(map(len, parts)) > 3, 60, "they stream")
        for driver in before:
            driver.kill()
        for each in streams:
            each.result(200)
    assert {"".join(mine) for mine in parts} == {expected}
    wait_until(lambda: len(drivers() - before) == 2, 60, "there are two others")


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
