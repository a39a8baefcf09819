"""`/v1/files` and `/v1/batches` by the `openai` client, over a kill of the server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
import threading
import time
import urllib.error
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from support.models.tiny_models import POCKET
from support.process import fork_server
from support.servers.pie_server import START_S, running, wait_until
from support.servers.sglang_server import Server, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
openai = pytest.importorskip("openai")

KEY = "key-of-the-users"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LINES = 300
CONCURRENCY = 16
LONG: dict[str, Any] = {"max_tokens": 1800, "ignore_eos": True}
"""A line of this kind takes 450 times as many steps as the others."""


class Served(NamedTuple):
    server: Server
    client: Any
    storage: Path
    killed: str
    """The batch that was killed."""
    before: list[str]
    """Its lines that were done then."""


def line(number: int, url: str = TEXT, **body: Any) -> dict[str, Any]:
    text = f"def f{number}(x):"
    prompt = {"prompt": text} if url == TEXT else {"messages": [{"role": "user", "content": text}]}
    body = {"model": "default", "temperature": 0, "max_tokens": 4, **prompt, **body}
    return {"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}


def client_of(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0, timeout=60)


def upload(client: Any, lines: Iterable[Any]) -> str:
    text = "".join(f"{json.dumps(each)}\n" for each in lines)
    return str(client.files.create(file=("in.jsonl", text.encode()), purpose="batch").id)


def begin(client: Any, lines: Iterable[Any], url: str = TEXT) -> Any:
    return client.batches.create(
        input_file_id=upload(client, lines), endpoint=url, completion_window="24h"
    )


def ended(client: Any, batch: Any, seconds: float = 240) -> Any:
    until = time.monotonic() + seconds
    while (found := client.batches.retrieve(batch.id)).status not in (
        "completed",
        "failed",
        "expired",
        "cancelled",
    ):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


def results(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    text = "" if file_id is None else client.files.content(file_id).text
    return [json.loads(each) for each in text.splitlines()]


def killed_in_a_batch(folder: Path, python: str, flags: list[str]) -> str:
    """The batch that a server ran when it was killed."""
    [port] = free_ports(1)
    log = folder / "killed-log"
    words = ["--model-path", str(POCKET), "--device", "cpu", "--port", str(port), *flags]
    temporary = Path(tempfile.mkdtemp(prefix="serve-", dir="/tmp"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [python, "-m", "pie_driver_sglang", "serve", *words],
            stdout=output,
            stderr=output,
            env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_until(lambda: b"curl" in log.read_bytes() or process.poll() is not None, START_S, "up")
        client = client_of(Server(f"http://127.0.0.1:{port}", log))
        # It cannot end before the kill, because of one line.
        batch = begin(
            client, [line(0, ignore_eos=True, max_tokens=600), *map(line, range(1, LINES))]
        )
        done = 0
        until = time.monotonic() + 120
        while done < LINES // 10:
            assert time.monotonic() < until
            done = client.batches.retrieve(batch.id).request_counts.completed
        family = fork_server.family(process.pid)
        process.kill()
        assert psutil.wait_procs(family, 30)[1] == []
        return str(batch.id)
    finally:
        process.kill()
        process.wait(30)
        shutil.rmtree(temporary, ignore_errors=True)


def rows(storage: Path, query: str, *values: Any) -> list[Any]:
    with contextlib.closing(sqlite3.connect(storage / "batches.sqlite3")) as database:
        found = database.execute(query, values).fetchall()
        database.commit()
        return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Iterator[Served]:
    folder, other = tmp_path_factory.mktemp("batches"), tmp_path_factory.mktemp("other")
    storage = other / "storage"
    flags = ["--scheduler", "pie", "--api-key", KEY, "--file-storage-path", str(storage)]
    flags += ["--enable-priority-scheduling", "--default-priority-value", "0"]
    flags += [
        "--max-stored-bytes",
        "8MiB",
        "--batch-concurrency",
        str(CONCURRENCY),
        "--max-batch-lines",
        str(LINES),
    ]
    killed = killed_in_a_batch(other, forked_python, flags)
    before = rows(storage, "SELECT text FROM results WHERE batch = ?", killed)
    with running(folder, *flags, python=forked_python) as (server, _):
        server.key = KEY
        client = client_of(server)
        yield Served(server, client, storage, killed, [text for (text,) in before])
        # SIGTERM does not wait for lines.
        batch = begin(client, [line(1, **LONG)])
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", 60, "begun")
    query = "SELECT status, completed, failed, starts FROM batches WHERE id = ?"
    assert rows(storage, query, batch.id) == [("in_progress", 0, 0, 0)]


def test_a_killed_server_loses_and_doubles_no_line(served: Served) -> None:
    client = served.client
    assert LINES // 10 <= len(served.before) < LINES
    found = ended(client, client.batches.retrieve(served.killed))
    counts = found.request_counts
    assert (found.status, counts.completed, counts.failed) == ("completed", LINES, 0)
    names = [each["custom_id"] for each in results(client, found.output_file_id)]
    assert names == [f"id-{number}" for number in range(LINES)]
    # What was committed before is there as it was.
    assert set(served.before) <= set(client.files.content(found.output_file_id).text.splitlines())


@pytest.mark.parametrize("url", [TEXT, CHAT])
def test_results_are_those_of_the_endpoint(served: Served, url: str) -> None:
    client = served.client
    wrong = [line(3, url, temperature=-1), line(4, url, max_tokens="many")]
    lines = [line(1, url), line(2, url, n=2), *wrong, line(5, url, priority=7, rid="mine")]
    batch = begin(client, lines, url)
    assert (batch.status, batch.endpoint, batch.completion_window) == ("validating", url, "24h")
    found = ended(client, batch)
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 3, 2)
    assert found.in_progress_at <= found.finalizing_at <= found.completed_at <= found.expires_at
    done, failed = (results(client, file) for file in (found.output_file_id, found.error_file_id))
    assert [each["custom_id"] for each in done] == ["id-1", "id-2", "id-5"]
    assert [each["custom_id"] for each in failed] == ["id-3", "id-4"]
    assert {each["response"]["status_code"] for each in failed} == {400}
    assert "temperature must be" in failed[0]["response"]["body"]["message"]
    for each, asked in zip(done, (lines[0], lines[1], lines[4]), strict=True):
        whole = json.loads(served.server.fetch(url, asked["body"]))
        body = each["response"]["body"]
        assert (body["choices"], body["usage"]["completion_tokens"]) == (
            whole["choices"],
            whole["usage"]["completion_tokens"],
        )
    assert len(done[1]["response"]["body"]["choices"]) == 2


def test_files_are_listed_and_deleted(served: Served) -> None:
    client = served.client
    names = [upload(client, [line(number)]) for number in range(3)]
    page = client.files.list(limit=2, purpose="batch")
    assert [each.id for each in page.data] == names[:0:-1]
    assert page.has_more
    assert next(each.id for each in client.files.list(after=names[1], limit=1)) == names[0]
    first = client.files.retrieve(names[0])
    assert (first.filename, first.purpose, first.status) == ("in.jsonl", "batch", "processed")
    content = client.files.content(names[0])
    assert json.loads(content.text) == line(0)
    assert len(content.content) == first.bytes
    assert client.files.delete(names[0]).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(names[0])
    short = client.files.create(
        file=("a.txt", b"x"),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert short.expires_at == short.created_at + 3600


def test_batches_are_listed_and_wrong_ones_fail(served: Served) -> None:
    client = served.client
    twice = begin(client, [line(1), line(1), line(2, url="/v1/images")])
    many = begin(client, map(line, range(LINES + 1)))
    for batch, lines in ((twice, [2, 3]), (many, [LINES + 1])):
        found = ended(client, batch)
        assert (found.status, found.output_file_id, found.error_file_id) == ("failed", None, None)
        assert [error.line for error in found.errors.data] == lines
    page = client.batches.list(limit=1)
    assert ([each.id for each in page.data], page.has_more) == ([many.id], True)
    assert [each.id for each in client.batches.list(limit=1, after=many.id).data] == [twice.id]
    # The client reads page after page.
    assert served.killed in [each.id for each in client.batches.list(limit=2)]


def test_a_cancelled_batch_and_a_late_one_end_soon(served: Served) -> None:
    client = served.client
    # Their lines take turns of `CONCURRENCY`.
    slow = [line(number, **LONG) for number in range(8 * CONCURRENCY)]
    cancelled, late = begin(client, slow), begin(client, slow)
    wait_until(lambda: client.batches.retrieve(cancelled.id).status == "in_progress", 60, "begun")
    with pytest.raises(openai.ConflictError, match="cancel the batch first"):
        client.files.delete(cancelled.input_file_id)
    # Clients are served meanwhile.
    answer = client.completions.create(model="default", prompt="def f(x):", max_tokens=4)
    assert answer.usage.completion_tokens == 4
    assert client.batches.cancel(cancelled.id).status == "cancelling"
    rows(served.storage, "UPDATE batches SET expires_at = 1 WHERE id = ?", late.id)
    total = len(slow)
    for batch, status in ((cancelled, "cancelled"), (late, "expired")):
        found = ended(client, batch, 30)
        counts = found.request_counts
        assert (found.status, counts.completed + counts.failed) == (status, total)
        lines = results(client, found.output_file_id) + results(client, found.error_file_id)
        assert sorted(each["custom_id"] for each in lines) == sorted(
            f"id-{number}" for number in range(total)
        )
        codes = {each["error"]["code"] for each in lines if each["error"]}
        assert codes == {f"batch_{status}"}
    with pytest.raises(openai.ConflictError, match="is not cancelled: it is expired"):
        client.batches.cancel(late.id)


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/files", {}, 400, "not multipart/form-data"),
        ("/v1/files?limit=0", None, 400, "`limit` is '0', expected 1 to 10000"),
        ("/v1/files?order=up", None, 400, "`order` is 'up', expected asc or desc"),
        ("/v1/files?after=x", None, 400, "`after` is 'x', which does not exist"),
        ("/v1/files/file-x", None, 404, "there is no file 'file-x'"),
        ("/v1/files/..%2Fbatches.sqlite3/content", None, 404, ""),
        ("/v1/batches?limit=101", None, 400, "`limit` is '101', expected 1 to 100"),
        ("/v1/batches/batch_x", None, 404, "there is no batch 'batch_x'"),
        ("/v1/batches/batch_x/cancel", {}, 404, "there is no batch 'batch_x'"),
        ("/v1/batches", [], 400, "the body is [], expected an object"),
        ("/v1/batches", {"endpoint": "/x"}, 400, "`endpoint` is '/x', expected one of /v1/chat"),
        ("/v1/batches", {"endpoint": "/v1/embeddings"}, 400, "this model serves /v1/chat"),
        ("/v1/batches", {"endpoint": TEXT}, 400, "`completion_window` is None, expected"),
        ("/v1/batches", {"completion_window": "31d"}, 400, "`completion_window` is '31d'"),
        ("/v1/batches", {"input_file_id": 3}, 400, "`input_file_id` is 3, expected the id"),
        ("/v1/batches", {"input_file_id": "file-x"}, 400, "there is no file 'file-x'"),
        ("/v1/batches", {"metadata": {"a": 1}}, 400, "`metadata` is {'a': 1}, expected up to"),
        ("/v1/batches", {"output_expires_after": 5}, 400, "`output_expires_after` is 5, expected"),
        ("/v1/batches", {"colour": 1}, 400, "`colour` is not a parameter of a batch"),
    ],
)
def test_a_mistake_is_one_line(
    served: Served, path: str, body: Any, status: int, text: str
) -> None:
    if path == "/v1/batches" and body and "endpoint" not in body:
        body = {"endpoint": TEXT, "completion_window": "24h", "input_file_id": "file-x", **body}
    with pytest.raises(urllib.error.HTTPError) as error:
        served.server.fetch(path, body)
    assert error.value.code == status
    found = json.loads(error.value.read())
    message = str(found.get("message") or found.get("error", found))
    assert text in message
    assert "\n" not in message


def test_uploads_that_are_no_input_are_refused(served: Served) -> None:
    client = served.client
    with pytest.raises(openai.BadRequestError, match="`purpose` is 'games', expected one of batch"):
        client.files.create(file=("a", b"x"), purpose="games")
    with pytest.raises(openai.BadRequestError, match="expected anchor 'created_at' and 3600 to"):
        late = {"anchor": "created_at", "seconds": 5}
        client.files.create(file=("a", b"x"), purpose="batch", expires_after=late)
    with pytest.raises(openai.APIStatusError, match="and with this one more than 8388608") as full:
        client.files.create(file=("a", b"x" * (8 << 20)), purpose="batch")
    assert full.value.status_code == 507
    other = client.files.create(file=("a", b"x"), purpose="vision")
    with pytest.raises(openai.BadRequestError, match="has the purpose 'vision': upload it with"):
        client.batches.create(input_file_id=other.id, endpoint=TEXT, completion_window="24h")


def test_all_of_it_needs_the_key(served: Served) -> None:
    stranger = openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="none", max_retries=0)
    for call in (
        stranger.files.list,
        stranger.batches.list,
        lambda: stranger.files.content("file-x"),
        lambda: stranger.batches.retrieve(served.killed),
        lambda: upload(stranger, [line(1)]),
    ):
        with pytest.raises(openai.AuthenticationError):
            call()


def test_many_clients_upload_at_once(served: Served) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(upload(client_of(served.server), map(line, range(200))))
        )
        for _ in range(8)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(found)) == 8
    assert {served.client.files.retrieve(name).bytes for name in found} == {
        sum(len(json.dumps(line(number))) + 1 for number in range(200))
    }
