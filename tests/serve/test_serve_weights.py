"""Weights that change, and memory that is released, by the HTTP server's endpoints."""

from __future__ import annotations

import base64
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support import versions
from support.models.random_pair import PROMPT, TOKENS, Checkpoint, checkpoint
from support.servers import sglang_server
from support.servers.pie_server import refusal, running, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

ADMIN = "key-of-the-admin"
Served = tuple[Server, Checkpoint, Checkpoint]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("weights")
    old, new = checkpoint(folder / "old", 1), checkpoint(folder / "new", 2)
    log = tmp_path_factory.mktemp("server")
    flags = ["--scheduler", "pie", "--skip-tokenizer-init", "--weight-version", "first"]
    flags += ["--admin-api-key", ADMIN]
    with running(log, *flags, model=old.folder, python=forked_python) as (server, _):
        server.key = ADMIN
        yield server, old, new


def ask(server: Server, path: str, **body: Any) -> Any:
    text = server.fetch(path, body)
    return json.loads(text) if text else None


def tokens(server: Server) -> list[int]:
    return server.generate(PROMPT, TOKENS)[0]


def update(server: Server, made: Checkpoint, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = ask(
        server, "/update_weights_from_disk", model_path=str(made.folder), **more
    )
    return found


def test_twenty_updates_under_load(served: Served) -> None:
    server, old, new = served
    answers: list[list[int]] = []
    ended = threading.Event()

    def client() -> None:
        while not ended.is_set():
            answers.append(tokens(server))

    clients = [threading.Thread(target=client) for _ in range(4)]
    for each in clients:
        each.start()
    for number in range(20):
        target = (new, old)[number % 2]
        found = update(server, target, weight_version=f"v{number}")
        assert found["success"], found
        assert tokens(server) == target.tokens
    ended.set()
    for each in clients:
        each.join()
    assert all(answer in (old.tokens, new.tokens) for answer in answers)
    assert json.loads(server.fetch("/model_info"))["weight_version"] == "v19"
    last = json.loads(server.fetch("/generate", server.body(PROMPT, 1)))
    assert last["meta_info"]["weight_version"] == "v19"


def test_what_does_not_fit_changes_nothing(served: Served, tmp_path: Path) -> None:
    server, old, _ = served
    update(server, old)
    status, text = refusal(server, {"model_path": "/nowhere"}, "/update_weights_from_disk")
    assert (status, "neither a folder" in text) == (400, True), text
    other = checkpoint(tmp_path / "other", 5, intermediate_size=128)
    body = {"model_path": str(other.folder)}
    status, text = refusal(server, body, "/update_weights_from_disk")
    assert (status, "but the model's (96, 64)" in text) == (400, True), text
    assert tokens(server) == old.tokens


def test_tensors_as_safetensors_and_no_pickles(served: Served) -> None:
    server, _, new = served
    from safetensors.torch import save

    data = base64.b64encode(save(new.model.state_dict())).decode()
    body = {"serialized_named_tensors": [data], "load_format": "safetensors"}
    assert ask(server, "/update_weights_from_tensor", **body)["success"]
    assert tokens(server) == new.tokens
    body = {"serialized_named_tensors": [data]}
    status, text = refusal(server, body, "/update_weights_from_tensor")
    assert (status, "`--allow-pickled-weights`" in text) == (400, True), text


@versions.of_the_newest("it has no sessions of updates")
def test_tensors_within_a_session(served: Served) -> None:
    """As a trainer of SGLang 0.5.23 sends them."""
    server, old, new = served
    from safetensors.torch import save

    update(server, old)
    data = base64.b64encode(save(new.model.state_dict())).decode()
    body = {"serialized_named_tensors": [data], "load_format": "safetensors"}
    assert ask(server, "/begin_weight_update")["success"]
    assert ask(server, "/update_weights_from_tensor", **body)["success"]
    assert ask(server, "/end_weight_update")["success"]
    assert tokens(server) == new.tokens
    status, text = refusal(server, {}, "/end_weight_update")
    assert (status, "no weight-update session is open" in text) == (400, True), text
    status, text = refusal(server, {"selector": "draft", **body}, "/update_weights_from_tensor")
    assert (status, "there is no draft model" in text) == (400, True), text


def test_a_restarted_driver_without_its_tensors_serves_nobody(served: Served) -> None:
    server, old, new = served
    from safetensors.torch import save

    data = base64.b64encode(save(new.model.state_dict())).decode()
    body = {"serialized_named_tensors": [data], "load_format": "safetensors"}
    assert ask(server, "/update_weights_from_tensor", **body)["success"]
    os.kill(state(server)["driver_pids"][0], signal.SIGKILL)
    # It waits for the next driver, which has the weights of the start.
    status, text = refusal(server, server.body(PROMPT, TOKENS))
    assert (status, "update all weights" in text) == (503, True), text
    assert refusal(server, server.body(PROMPT, 1))[0] == 503
    assert update(server, old)["success"]
    assert tokens(server) == old.tokens


def test_weights_are_read_and_checked(served: Served) -> None:
    server, old, new = served
    update(server, old)
    name = "model.layers.1.self_attn.v_proj.weight"
    found = ask(server, "/get_weights_by_name", name=name, truncate_size=2)
    assert found == old.model.state_dict()[name][:2].tolist()
    status, text = refusal(server, {"name": "x"}, "/get_weights_by_name")
    assert (status, "no tensor 'x'" in text) == (400, True), text
    sums = ask(server, "/weights_checker")
    ask(server, "/weights_checker", action="snapshot")
    assert ask(server, "/weights_checker", action="compare")["success"]
    ask(server, "/weights_checker", action="reset_tensors")
    status, text = refusal(server, {"action": "compare"}, "/weights_checker")
    assert (status, "differ from the snapshot" in text) == (400, True), text
    update(server, new)
    assert ask(server, "/weights_checker")["per_engine_checksum"] != sums["per_engine_checksum"]
    update(server, old)
    assert ask(server, "/weights_checker", action="compare")["success"]
    assert ask(server, "/weights_checker") == sums


def test_requests_that_are_paused(served: Served) -> None:
    """In each mode of a pause; an update does not wait for what is paused."""
    server, old, new = served
    for mode, continues in (("retract", True), ("in_place", False), ("abort", True)):
        update(server, old)
        with ThreadPoolExecutor(1) as pool:
            request = pool.submit(server.generate, PROMPT, 400)
            wait_until(lambda: state(server)["running"] == 1, 60, "it runs")
            ask(server, "/pause_generation", mode=mode)
            if continues:
                assert update(server, new)["success"]
            else:
                body = {"model_path": str(new.folder)}
                status, text = refusal(server, body, "/update_weights_from_disk")
                assert (status, "paused in place" in text) == (400, True), text
                assert update(server, new, flush_cache=False)["success"]
            ask(server, "/continue_generation")
        assert len(request.result()[0]) == 400 or mode == "abort"
        assert tokens(server) == new.tokens


@versions.of_the_newest("`meta_info` has no `weight_versions`")
def test_answers_name_the_weights_of_each_token(served: Served) -> None:
    server, old, new = served
    update(server, old, weight_version="old")
    body = server.body(PROMPT, 400)
    events: list[dict[str, Any]] = []

    def stream() -> dict[str, Any]:
        request = server.request("/generate", {**body, "stream": True})
        with urllib.request.urlopen(request, timeout=400) as lines:
            events.extend(found for line in lines if (found := sglang_server.event(line)))
        return events[-1]

    with ThreadPoolExecutor(2) as pool:
        # One that does not stream has its tokens at its end only.
        whole = pool.submit(server.fetch, "/generate", body)
        streamed = pool.submit(stream)
        wait_until(lambda: state(server)["running"] == 2 and len(events) > 3, 60, "both run")
        ask(server, "/pause_generation", mode="retract")
        failing = {"model_path": "/nowhere", "weight_version": "none"}
        assert refusal(server, failing, "/update_weights_from_disk")[0] == 400
        assert update(server, new, weight_version="new")["success"]
        ask(server, "/continue_generation")
        answers = [streamed.result(), json.loads(whole.result())]
    for found in (each["meta_info"] for each in answers):
        first, second = found["weight_versions"]
        assert [first["version"], second["version"]] == ["old", "new"]
        assert first["start"] == 0
        assert 0 < first["end"] == second["start"] < second["end"] == 400
        assert found["weight_version"] == "new"
    # A name alone, while nothing runs.
    ask(server, "/update_weight_version", new_version="third")
    found = json.loads(server.fetch("/generate", server.body(PROMPT, 2)))["meta_info"]
    assert found["weight_versions"] == [{"version": "third", "start": 0, "end": 2}]


def test_sleep_and_wake(served: Served) -> None:
    server, old, _ = served
    update(server, old)
    ask(server, "/release_memory_occupation")
    status, text = refusal(server, server.body(PROMPT, 2))
    assert (status, "`/resume_memory_occupation`" in text) == (503, True), text
    server.fetch("/health")
    server.fetch("/health_generate")
    status, text = refusal(server, {"tags": ["x"]}, "/release_memory_occupation")
    assert (status, "the tag is 'x'" in text) == (400, True), text
    ask(server, "/resume_memory_occupation", tags=["weights", "cuda_graph"])
    assert refusal(server, server.body(PROMPT, 2))[0] == 503
    ask(server, "/resume_memory_occupation", tags=["kv_cache"])
    assert tokens(server) == old.tokens


def test_what_is_not_served_is_named(served: Served) -> None:
    server, *_ = served
    for path, body in (
        ("/update_weights_from_ipc", {"zmq_handles": {}}),
        ("/send_weights_to_remote_instance", {"master_address": "x", "ports": "1"}),
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            server.fetch(path, body)
        assert error.value.code == 400
        assert "not served" in error.value.read().decode()
