"""The server with several tokenizer workers and detokenizers, each a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from pie_driver_sglang.frontends.sglang_server.compat.front_forks import TITLE
from support.models.embedding_models import build
from support.models.tiny_models import POCKET
from support.process import fork_server
from support.servers.pie_server import refusal, running, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

KEY = "key-of-the-users"
PROMPTS = [[20 + number, 7, 300 + 11 * number] for number in range(24)]


@pytest.fixture(scope="module")
def workers(
    forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, list[psutil.Process]]]:
    flags = ["--tokenizer-worker-num", "2", "--detokenizer-worker-num", "2"]
    flags += ["--api-key", KEY]
    flags += ["--file-storage-path", str(tmp_path_factory.mktemp("files") / "storage")]
    folder = tmp_path_factory.mktemp("workers")
    with running(folder, "--scheduler", "pie", *flags, python=forked_python) as (server, process):
        # The server serves when the first of them does; each has its name from its own start.
        wait_until(lambda: len(_workers(process.pid)) == 2, 120, "both workers have started")
        server.key = KEY
        yield server, _workers(process.pid)


def _workers(pid: int) -> list[psutil.Process]:
    """The workers among a process's descendants, but those that end meanwhile."""
    found = []
    for each in fork_server.family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "tokenizer_worker" in each.name():
                found.append(each)
    return found


def test_each_worker_has_the_answers_to_its_requests(
    workers: tuple[Server, list[psutil.Process]],
) -> None:
    server, processes = workers
    assert len(processes) == 2
    before = [sum(each.cpu_times()[:2]) for each in processes]
    alone = [server.generate(prompt, 16)[0] for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = list(pool.map(lambda prompt: list(server.stream(prompt, 16))[-1], PROMPTS))
    assert streams == alone
    after = [sum(each.cpu_times()[:2]) for each in processes]
    assert all(now > then for now, then in zip(after, before, strict=True))
    wait_until(lambda: state(server)["open_requests"] == 0, 60, "nothing is left")
    # They have no pipe to acknowledge outputs by, so none are counted.
    assert state(server)["outputs_in_flight"] == 0


def test_every_worker_refuses_what_is_not_served(
    workers: tuple[Server, list[psutil.Process]],
) -> None:
    """By chance one of the two takes a connection: 12 times the same one, once in 2,048 runs."""
    server, _ = workers
    for _ in range(12):
        status, reason = refusal(server, {"forward_sleep_time": 0.1}, "/slow_down")
        assert (status, "as fast as it can be" in reason) == (400, True)


def test_a_stream_that_fails_ends_with_an_error(
    workers: tuple[Server, list[psutil.Process]],
) -> None:
    """The status comes as a number, which SGLang's OpenAI layer would take for no error."""
    server, _ = workers
    body = {"model": "pocket", "messages": [{"role": "user", "content": "x"}], "regex": "("}
    for _ in range(6):
        status, reason = refusal(server, body, "/v1/chat/completions")
        assert (status, "the regular expression is wrong" in reason) == (400, True)
        lines = server.fetch("/v1/chat/completions", {**body, "stream": True}).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        [error] = [event["error"] for event in events if "error" in event]
        assert "the regular expression is wrong" in error["message"]


def test_one_worker_runs_the_batches_that_any_takes(
    workers: tuple[Server, list[psutil.Process]],
) -> None:
    openai = pytest.importorskip("openai")
    server, _ = workers
    lines = [
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"def f{number}(x):", "max_tokens": 4},
        }
        for number in range(20)
    ]
    text = "".join(f"{json.dumps(each)}\n" for each in lines).encode()
    batches = []
    for _ in range(4):
        # A connection of its own, which either of the workers takes.
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            file = client.files.create(file=("in.jsonl", text), purpose="batch")
            made = {"endpoint": "/v1/completions", "completion_window": "24h"}
            batches.append(client.batches.create(input_file_id=file.id, **made).id)

    def retrieve() -> list[Any]:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            return [client.batches.retrieve(name) for name in batches]

    wait_until(lambda: {each.status for each in retrieve()} == {"completed"}, 120, "completed")
    assert [each.request_counts.completed for each in retrieve()] == [20] * 4


def test_every_worker_wants_the_key(workers: tuple[Server, list[psutil.Process]]) -> None:
    """SGLang itself checks no key where it has several workers."""
    server, _ = workers
    for key, path, code in ((None, "/generate", 401), ("other", "/generate", 401)):
        stranger = Server(server.url, server.log, key)
        for _ in range(12):
            assert refusal(stranger, {"input_ids": [1]}, path)[0] == code
    for _ in range(12):
        assert refusal(server, {"log_requests": True}, "/configure_logging")[0] == 403
        deep = {"text": "x", "custom_params": _nested(300)}
        assert refusal(server, deep)[0] == 400
    assert KEY not in server.log.read_text(errors="replace")


def test_a_worker_is_a_fork_and_another_replaces_it(
    workers: tuple[Server, list[psutil.Process]],
) -> None:
    server, [first, second] = workers
    expected = server.generate(PROMPTS[0], 16)[0]
    forks = first.parent()
    assert forks is not None
    assert forks.cmdline()[0] == TITLE
    assert second.ppid() == forks.pid
    first.kill()

    def is_replaced() -> bool:
        left = _workers(forks.ppid())
        return len(left) == 2 and first not in left

    wait_until(is_replaced, 120, "a worker replaces the one that was killed")
    assert {each.ppid() for each in _workers(forks.ppid())} == {forks.pid}
    second.kill()
    # One of the replacements does: both former workers have ended.
    wait_until(lambda: _answers(server) == expected, 120, "an answer")


def _answers(server: Server) -> list[int] | None:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return server.generate(PROMPTS[0], 16)[0]
    return None


def test_an_update_by_one_worker_under_load_of_the_other(
    forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """SGLang holds back the requests of the worker that takes the update, and no others."""
    flags = ("--scheduler", "pie", "--tokenizer-worker-num", "2", "--admin-api-key", KEY)
    with running(tmp_path_factory.mktemp("load"), *flags, python=forked_python) as (
        server,
        process,
    ):
        wait_until(lambda: len(_workers(process.pid)) == 2, 120, "both workers have started")
        server.key = KEY
        alone = server.generate(PROMPTS[0], 24)[0]
        ends = threading.Event()

        def load() -> list[list[int]]:
            found = []
            while not ends.is_set():
                # A stream may wait longer than other answers, as it does for each update.
                found.append(list(server.stream(PROMPTS[0], 24))[-1])
            return found

        with ThreadPoolExecutor(8) as pool:
            loads = [pool.submit(load) for _ in range(8)]
            try:
                for _ in range(3):
                    body = {"model_path": str(POCKET)}
                    said = json.loads(server.fetch("/update_weights_from_disk", body))
                    assert said["success"], said
            finally:
                ends.set()
            answers = [answer for each in loads for answer in each.result()]
        assert len(answers) >= 8
        assert all(answer == alone for answer in answers)


def _nested(depth: int) -> Any:
    return {"a": _nested(depth - 1)} if depth else 1


def test_workers_have_embeddings(
    forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = build("Qwen3-Embedding", tmp_path_factory.mktemp("models"))
    flags = ("--scheduler", "pie", "--is-embedding", "--tokenizer-worker-num", "2")
    folder = tmp_path_factory.mktemp("embeddings")
    with running(folder, *flags, model=model, python=forked_python) as (server, process):
        wait_until(lambda: len(_workers(process.pid)) == 2, 120, "both workers have started")
        bodies = [{"input_ids": [prompt, prompt[1:]]} for prompt in PROMPTS]
        with ThreadPoolExecutor(len(bodies)) as pool:
            fetched = pool.map(lambda body: json.loads(server.fetch("/encode", body)), bodies)
            answers = list(fetched)
        assert [len(answer) for answer in answers] == [2] * len(bodies)
        assert all(len(each["embedding"]) == 64 for answer in answers for each in answer)
        assert len({tuple(answer[0]["embedding"]) for answer in answers}) == len(bodies)
