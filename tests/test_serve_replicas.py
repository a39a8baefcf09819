"""The server over several drivers: data-parallel replicas, and ranks of one model."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.frontends.sglang_server.compat.front_forks import TITLE
from support.models.tiny_models import POCKET
from support.process import fork_server
from support.process.inspection import command_line
from support.servers.otel_collector import (
    STAGES,
    Collector,
    check_stages,
    collecting,
    parent_of,
    traced_request,
)
from support.servers.pie_server import refusal, running, wait_until
from support.servers.server_metrics import total
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ADMIN = "key-of-the-admin"
PROMPTS = [[20 + number, 7, 300 + 11 * number] for number in range(16)]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def started(
    forked_python: str, collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    flags = ["--scheduler", "pie", "--dp-size", "2", "--enable-metrics"]
    flags += ["--enable-trace", "--otlp-traces-endpoint", collector.endpoint]
    flags += ["--admin-api-key", ADMIN]
    folder = tmp_path_factory.mktemp("replicas")
    with running(folder, *flags, python=forked_python) as found:
        found[0].key = ADMIN
        yield found


@pytest.fixture(scope="module")
def replicas(started: tuple[Server, subprocess.Popen[bytes]]) -> Server:
    return started[0]


def states(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(server.fetch("/server_info"))["internal_states"]
    return sorted(found, key=lambda state: int(state["dp_rank"]))


def request_all(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(16) as pool:
        answers = pool.map(lambda prompt: server.generate(prompt, 16), PROMPTS)
        return [tokens for tokens, _ in answers]


def test_schedulers_are_forks_of_a_process_with_sglang(
    started: tuple[Server, subprocess.Popen[bytes]],
) -> None:
    """And not of the controller, which starts each from a thread."""
    family = fork_server.family(started[1].pid)
    schedulers = [each for each in family if command_line(each)[:1] == ["sglang::scheduler"]]
    assert len(schedulers) == 2
    [parent] = {each.ppid() for each in schedulers}
    assert next(each for each in family if each.pid == parent).cmdline()[0] == TITLE


def test_tensors_update_one_replica_only(replicas: Server) -> None:
    group = {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2}
    for path, body in {
        "/update_weights_from_tensor": {"serialized_named_tensors": []},
        "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
        "/init_weights_update_group": group,
        "/destroy_weights_update_group": {"group_name": "g"},
    }.items():
        status, text = refusal(replicas, body, path)
        assert (status, "`--dp-size` is larger" in text) == (400, True), text


def test_two_replicas_share_the_requests(replicas: Server) -> None:
    before = [state["finished"] for state in states(replicas)]
    found = request_all(replicas)
    # Each replica says the same.
    assert found == request_all(replicas)
    after = [state["finished"] for state in states(replicas)]
    assert [now - then for now, then in zip(after, before, strict=True)] == [16, 16]
    pids = [pid for state in states(replicas) for pid in state["driver_pids"]]
    assert len(set(pids)) == 2
    loads = json.loads(replicas.fetch("/v1/loads"))["loads"]
    assert [load["dp_rank"] for load in loads] == [0, 1]


def test_a_request_may_name_its_replica(replicas: Server) -> None:
    before = [state["finished"] for state in states(replicas)]
    for _ in range(3):
        answer = json.loads(replicas.fetch("/generate", replicas.body([5, 6], 2, routed_dp_rank=1)))
        assert answer["meta_info"]["dp_rank"] == 1
    after = [state["finished"] for state in states(replicas)]
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 3]


def test_a_request_is_traced_in_all_processes(replicas: Server, collector: Collector) -> None:
    body = replicas.body(list(range(300, 364)), 6, routed_dp_rank=1)
    for turn, cached in enumerate((0, 48)):
        name = f"turn {turn}"
        answer = traced_request(replicas, turn, "/generate", {**body, "rid": name})
        assert answer["meta_info"]["cached_tokens"] == cached
        found = collector.trace(turn, {"Scheduler", *STAGES, f" Req {name}", "DP Controller"})
        front = found[f" Req {name}"]
        assert front.parent == parent_of(turn)[1]
        assert found["DP Controller"].parent == front.id
        check_stages(found, front)
        assert found["Scheduler"].attributes == {
            "dp_rank": 1,
            "gen_ai.request.id": name,
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.response.model": str(POCKET),
            "gen_ai.usage.cache_read.input_tokens": cached,
            "gen_ai.usage.input_tokens": 64,
            "gen_ai.usage.output_tokens": 6,
            "pie.cached_tokens.device": cached,
            "pie.cached_tokens.host": 0,
            "pie.retractions": 0,
        }


def test_control_reaches_all_replicas(replicas: Server) -> None:
    request_all(replicas)
    assert all(state["pages_cached"] or state["finished"] for state in states(replicas))
    replicas.flush()
    for state in states(replicas):
        assert state["pages_free"] == state["pages_total"]
    for rank in ("0", "1"):
        wait_until(
            lambda rank=rank: total(replicas, "pie_runtime:steps_total", dp_rank=rank) > 0,
            20,
            "each has metrics",
        )


def test_nothing_is_computed_while_nothing_comes(
    started: tuple[Server, subprocess.Popen[bytes]],
) -> None:
    """By the HTTP server, the controller, the schedulers and the drivers.

    What came before may still be cleaned up; one that spins has no quiet second.
    """
    family = fork_server.family(started[1].pid)

    def computed() -> dict[int, float]:
        return {each.pid: sum(each.cpu_times()[:2]) for each in family}

    def is_quiet() -> bool:
        before, begin = computed(), time.monotonic()
        time.sleep(1)
        after, passed = computed(), time.monotonic() - begin
        return all(after[pid] - before[pid] <= 0.2 * passed for pid in after)

    wait_until(is_quiet, 30, "a second in which nothing is computed")


def test_sglangs_controller_spins() -> None:
    """What `frontends/sglang_server/compat/dp_controller.py` is for."""
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    source = Path(root, "srt", "managers", "data_parallel_controller.py").read_text()
    loop = source.partition("def event_loop")[2].partition("\ndef ")[0]
    assert "flags=zmq.NOBLOCK" in loop


def test_a_driver_that_is_killed_loses_nothing(replicas: Server) -> None:
    expected, _ = replicas.generate([31, 32, 33], 150)
    streams: list[list[list[int]]] = [[], []]

    def stream(rank: int) -> None:
        streams[rank].extend(replicas.stream([31, 32, 33], 150, routed_dp_rank=rank))

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(stream, rank) for rank in (0, 1)]
        wait_until(lambda: min(len(found) for found in streams) > 5, 60, "both stream")
        os.kill(states(replicas)[1]["driver_pids"][0], signal.SIGKILL)
        for answer in answers:
            answer.result(400)
    assert [found[-1] for found in streams] == [expected, expected]
    assert [state["restarts"] for state in states(replicas)] == [0, 1]


def test_two_ranks_of_one_model(
    replicas: Server, forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    expected = request_all(replicas)
    flags = ("--scheduler", "pie", "--tp-size", "2")
    folder = tmp_path_factory.mktemp("ranks")
    with running(folder, *flags, python=forked_python) as (server, _):
        assert request_all(server) == expected
        [state] = states(server)
        assert state["resolved"]["devices"] == ["cpu", "cpu:1"]
        assert state["resolved"]["tensor_parallel_size"] == 2
