"""Batches of requests: records, validation, and runs that are killed at every commit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang.config.http_limits import BatchLimits
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.frontends.batches import (
    batch_runner,
    batch_store,
    line_requests,
    output_files,
)
from pie_driver_sglang.frontends.batches.batch_records import (
    Batch,
    BatchStatus,
    LineResult,
    new_batch,
)
from pie_driver_sglang.frontends.batches.batch_runner import MAX_STARTS, BatchRunner
from pie_driver_sglang.frontends.batches.batch_store import BatchStore, FileWriter, StoreLimitError
from pie_driver_sglang.frontends.batches.input_lines import MAX_ERRORS, MAX_LINE_BYTES, validate
from pie_driver_sglang.frontends.batches.line_requests import Application, LineResponse
from pie_driver_sglang.frontends.batches.line_slots import LineSlots
from pie_driver_sglang.frontends.batches.storage_lock import LockState, StorageLock
from pie_driver_sglang.frontends.sglang_server import batch_service
from pie_driver_sglang.frontends.sglang_server.batch_endpoints import SERVICE, add_routes
from pie_driver_sglang.frontends.sglang_server.batch_service import (
    BatchService,
    InteractiveRequests,
    lowest_priority,
)

URL = "/v1/completions"
HOUR = 3600


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": f"prompt {number}"}
    return {"custom_id": f"id-{number}", "method": "POST", "url": URL, "body": body, **changes}


def text_of(lines: list[Any]) -> bytes:
    return "".join(f"{json.dumps(each)}\n" for each in lines).encode()


class Server:
    """An application that answers by a rule, and counts how often it was asked what."""

    def __init__(self, answer: Callable[[str, int], int] = lambda _prompt, _count: 200) -> None:
        self.asked: Counter[str] = Counter()
        self.aborted: set[str] = set()
        self.most = self.running = 0
        self._answer = answer
        self.hangs: set[str] = set()

    async def send(self, url: str, body: dict[str, Any]) -> LineResponse:
        assert url == URL
        self.running += 1
        self.most = max(self.most, self.running)
        prompt = str(body["prompt"])
        self.asked[prompt] += 1
        await asyncio.sleep(0.002)
        while prompt in self.hangs and body["rid"] not in self.aborted:
            await asyncio.sleep(0.005)
        self.running -= 1
        status = self._answer(prompt, self.asked[prompt])
        return LineResponse(status, json.dumps({"text": prompt}).encode())

    @property
    def application(self) -> Application:
        return Application(self.send, self.aborted.add)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    found = BatchStore(tmp_path / "store")
    yield found
    found.close()


def begun(store: BatchStore, content: bytes, window_s: int = HOUR, **others: Any) -> Batch:
    with store.new_file("in.jsonl", "batch") as writer:
        writer.write(content)
    batch = new_batch(writer.record.id, URL, f"{window_s}s", window_s, **others)
    store.add_batch(batch)
    return batch


async def run(
    store: BatchStore, batch: Batch, server: Server, slots: int = 4, **others: Any
) -> Batch:
    limits = LineSlots(slots, lambda: 0)
    ended = await BatchRunner(store, batch, server.application, limits, **others).run()
    assert limits.used == 0
    return ended


def output(store: BatchStore, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    record = store.find_file(file_id)
    assert record is not None
    content = store.path_of(file_id).read_bytes()
    assert (len(content), record.purpose) == (record.bytes, "batch_output")
    return list(map(json.loads, content.splitlines()))


class TestRuns:
    def test_results_are_in_order_and_errors_in_their_own_file(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(number) for number in range(20)]), metadata='{"a": "b"}')
        server = Server(lambda prompt, _: 400 if prompt.endswith("7") else 200)
        ended = asyncio.run(run(store, batch, server))
        assert (ended.status, ended.total, ended.completed, ended.failed) == (
            BatchStatus.COMPLETED,
            20,
            18,
            2,
        )
        done, failed = output(store, ended.output_file_id), output(store, ended.error_file_id)
        assert [each["custom_id"] for each in failed] == ["id-7", "id-17"]
        names = [f"id-{number}" for number in range(20) if number % 10 != 7]
        assert [each["custom_id"] for each in done] == names
        assert {each["response"]["status_code"] for each in done} == {200}
        assert {each["response"]["status_code"] for each in failed} == {400}
        assert done[3]["response"]["body"] == {"text": "prompt 3"}
        assert done[3]["error"] is None
        assert done[3]["id"] == f"batch_req_{done[3]['response']['request_id']}"
        assert set(server.asked.values()) == {1}
        assert server.most == 4
        assert ended.as_object()["metadata"] == {"a": "b"}
        assert store.lines_with_results(batch.id) == set()

    def test_transient_errors_are_tried_again(
        self, store: BatchStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(line_requests, "_FIRST_WAIT_S", 0.001)
        batch = begun(store, text_of([line(1), line(2), line(3)]))
        # The first is never served, the second is when there is room, the third is too long.
        statuses = {"prompt 1": 500, "prompt 2": 503, "prompt 3": 503}
        server = Server(lambda prompt, count: 200 if count == 9 else statuses[prompt])
        send = server.send

        async def sent(url: str, body: dict[str, Any]) -> LineResponse:
            found = await send(url, body)
            late = b"Request running timeout reached." * (body["prompt"] == "prompt 3")
            return LineResponse(found.status, late or found.body)

        app = Application(sent, server.aborted.add)
        ended = asyncio.run(BatchRunner(store, batch, app, LineSlots(4, lambda: 0)).run())
        assert server.asked == {"prompt 1": 3, "prompt 2": 9, "prompt 3": 1}
        assert (ended.completed, ended.failed) == (1, 2)
        [late] = [
            each for each in output(store, ended.error_file_id) if each["custom_id"] == "id-3"
        ]
        assert late["response"]["body"]["message"] == "Request running timeout reached."

    def test_a_cancelled_batch_keeps_its_results(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(number) for number in range(12)]))
        server = Server()
        server.hangs = {f"prompt {number}" for number in range(5, 9)}

        async def cancelled() -> Batch:
            running = asyncio.create_task(run(store, batch, server))
            while store.batch(batch.id).completed < 5:
                await asyncio.sleep(0.01)
            before = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
            assert store.move(batch.id, before, BatchStatus.CANCELLING)
            return await running

        ended = asyncio.run(cancelled())
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.CANCELLED, 5, 7)
        assert len(server.aborted) == 4
        assert [each["custom_id"] for each in output(store, ended.output_file_id)] == [
            f"id-{number}" for number in range(5)
        ]
        missing = output(store, ended.error_file_id)
        assert [each["custom_id"] for each in missing] == [
            f"id-{number}" for number in range(5, 12)
        ]
        assert {(each["response"], each["error"]["code"]) for each in missing} == {
            (None, "batch_cancelled")
        }

    def test_a_late_batch_expires(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1), line(2)]))
        server = Server()
        server.hangs = {"prompt 2"}

        async def late() -> Batch:
            running = asyncio.create_task(run(store, batch, server))
            while store.batch(batch.id).completed < 1:
                await asyncio.sleep(0.01)
            store.update(batch.id, expires_at=int(time.time()))
            return await running

        ended = asyncio.run(late())
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.EXPIRED, 1, 1)
        assert ended.expired_at is not None
        [missing] = output(store, ended.error_file_id)
        assert missing["error"]["code"] == "batch_expired"

    def test_a_stopped_batch_continues(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(number) for number in range(8)]))
        server = Server()
        server.hangs = {"prompt 4"}

        async def stopped() -> Batch:
            runner = BatchRunner(store, batch, server.application, LineSlots(2, lambda: 0))
            running = asyncio.create_task(runner.run())
            while store.batch(batch.id).completed < 7:
                await asyncio.sleep(0.01)
            runner.stop()
            return await running

        found = asyncio.run(stopped())
        assert (found.status, found.starts) == (BatchStatus.IN_PROGRESS, 0)
        server.hangs = set()
        ended = asyncio.run(run(store, found, server))
        assert ended.status is BatchStatus.COMPLETED
        assert len(output(store, ended.output_file_id)) == 8
        assert {prompt for prompt, count in server.asked.items() if count > 1} == {"prompt 4"}

    def test_a_batch_that_ends_the_server_each_time_fails(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1), line(2)]))
        server = Server()
        server.hangs = {"prompt 2"}

        async def killed() -> None:
            running = asyncio.create_task(run(store, batch, server))
            while store.batch(batch.id).completed < 1 or not server.running:
                await asyncio.sleep(0.01)
            running.cancel()
            await asyncio.wait([running])

        asyncio.run(killed())
        # As after kills.
        store.update(batch.id, starts=MAX_STARTS)
        ended = asyncio.run(run(store, batch, server))
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.FAILED, 1, 1)
        assert [error["code"] for error in ended.as_object()["errors"]["data"]] == ["server_error"]
        assert len(output(store, ended.output_file_id)) == 1
        assert output(store, ended.error_file_id)[0]["error"]["code"] == "batch_failed"

    def test_a_line_that_raises_is_a_failed_line(
        self, store: BatchStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(line_requests, "_FIRST_WAIT_S", 0.001)
        batch = begun(store, text_of([line(1), line(2)]))
        server = Server()

        async def send(url: str, body: dict[str, Any]) -> LineResponse:
            found = await server.send(url, body)
            if body["prompt"] == "prompt 1":
                raise RecursionError
            return found

        app = Application(send, server.aborted.add)
        ended = asyncio.run(BatchRunner(store, batch, app, LineSlots(4, lambda: 0)).run())
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 1, 1)
        [failed] = output(store, ended.error_file_id)
        assert failed["response"]["status_code"] == 500
        assert "the request failed: RecursionError" in failed["response"]["body"]["message"]
        assert server.asked["prompt 1"] == 3

    def test_a_batch_that_cannot_be_validated_fails(
        self, store: BatchStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any) -> None:
            raise MemoryError

        batch = begun(store, text_of([line(1)]))
        monkeypatch.setattr(batch_runner, "validate", broken)
        for _ in range(MAX_STARTS):
            with pytest.raises(MemoryError):
                asyncio.run(run(store, batch, Server()))
        ended = asyncio.run(run(store, batch, Server()))
        assert (ended.status, ended.output_file_id) == (BatchStatus.FAILED, None)

    def test_a_full_disk_delays_results(
        self, store: BatchStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batch_runner, "_RETRY_S", 0.01)
        batch = begun(store, text_of([line(number) for number in range(6)]))
        commit, failures = store._commit, iter([True] * 3)

        def failing() -> None:
            if "results" in changed and next(failures, False):
                store._database.execute("ROLLBACK")
                raise sqlite3.OperationalError("database or disk is full")
            commit()

        changed: set[str] = set()
        store._database.set_trace_callback(
            lambda text: changed.update({"results"} if "INTO results" in text else ())
        )
        monkeypatch.setattr(store, "_commit", failing)
        server = Server()
        ended = asyncio.run(run(store, batch, server))
        assert next(failures, None) is None
        assert len(output(store, ended.output_file_id)) == ended.completed == 6
        assert set(server.asked.values()) == {1}

    def test_a_full_disk_at_the_end_of_a_batch_loses_no_line(
        self, store: BatchStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batch_runner, "_RETRY_S", 0.01)
        monkeypatch.setattr(output_files, "_GROUP", 2)
        batch = begun(store, text_of([line(number) for number in range(5)]))
        before = (BatchStatus.VALIDATING,)
        assert store.move(batch.id, before, BatchStatus.CANCELLING, in_progress_at=1, total=5)
        add_results, calls = store.add_results, Counter[str]()

        def failing(batch_id: str, results: Any) -> None:
            calls["add"] += 1
            if calls["add"] in (1, 3):
                raise sqlite3.OperationalError("database or disk is full")
            add_results(batch_id, results)

        monkeypatch.setattr(store, "add_results", failing)
        ended = asyncio.run(run(store, batch, Server()))
        assert (ended.status, ended.failed, calls["add"]) == (BatchStatus.CANCELLED, 5, 5)
        assert [each["custom_id"] for each in output(store, ended.error_file_id)] == [
            f"id-{number}" for number in range(5)
        ]

    def test_a_batch_ends_once(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1), line(2)]))
        ended = asyncio.run(run(store, batch, Server()))
        assert ended.status is BatchStatus.COMPLETED
        assert output_files.end_with_files(store, batch.id, tuple) == ended
        store.finish(batch.id, BatchStatus.EXPIRED, None, None)
        assert store.batch(batch.id) == ended
        assert len(output(store, ended.output_file_id)) == 2

    def test_a_batch_whose_lines_are_all_done_does_not_expire(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1), line(2)]))
        store.move(batch.id, (BatchStatus.VALIDATING,), BatchStatus.IN_PROGRESS, total=2)
        store.add_results(batch.id, [LineResult(1, False, "{}"), LineResult(2, True, "{}")])
        late = store.update(batch.id, expires_at=1)
        server = Server()
        ended = asyncio.run(run(store, late, server))
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.COMPLETED, 1, 1)
        assert not server.asked

    def test_a_result_with_half_a_character_is_a_line(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1)]))

        async def send(_url: str, _body: Any) -> LineResponse:
            return LineResponse(200, b'{"text": "\\ud83d \xc3\xa9"}')

        app = Application(send, lambda _: None)
        ended = asyncio.run(BatchRunner(store, batch, app, LineSlots(4, lambda: 0)).run())
        [found] = output(store, ended.output_file_id)
        assert found["response"]["body"]["text"] == "\ud83d é"


class Kills:
    """Copies a folder at every commit, and at every step of a file, as a kill would leave it."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies = folder, copies
        self.count = 0

    def copy(self) -> None:
        shutil.copytree(self.folder, self.copies / str(self.count))
        self.count += 1

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def copied(*arguments: Any, **given: Any) -> Any:
            self.copy()
            found = call(*arguments, **given)
            self.copy()
            return found

        return copied


@settings(max_examples=6)
@given(
    statuses=st.lists(st.sampled_from([200, 200, 400]), min_size=1, max_size=9),
    slots=st.integers(1, 4),
    cancelled=st.booleans(),
)
def test_a_kill_at_any_moment_loses_and_doubles_nothing(
    statuses: list[int], slots: int, cancelled: bool
) -> None:
    def answer(prompt: str, _count: int) -> int:
        return statuses[int(prompt.split()[1])]

    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder, copies = Path(name, "store"), Path(name, "copies")
        store = BatchStore(folder)
        kills = Kills(folder, copies)
        patch.setattr(BatchStore, "_commit", kills.around(BatchStore._commit))
        patch.setattr(FileWriter, "finished", kills.around(FileWriter.finished))
        patch.setattr(Path, "replace", kills.around(Path.replace))
        batch = begun(store, text_of([line(number) for number in range(len(statuses))]))
        if cancelled:
            store.move(batch.id, (BatchStatus.VALIDATING,), BatchStatus.IN_PROGRESS, total=9)
            store.move(batch.id, (BatchStatus.IN_PROGRESS,), BatchStatus.CANCELLING)
        ended = asyncio.run(run(store, batch, Server(answer), slots))
        store.close()
        patch.undo()
        check(BatchStore(folder), ended, statuses, cancelled=cancelled)
        assert kills.count >= 12
        for number in range(kills.count):
            resumed = BatchStore(copies / str(number))
            found = resumed.find_batch(batch.id)
            if found is not None:
                if found.is_open:
                    found = asyncio.run(run(resumed, found, Server(answer), slots))
                was_cancelled = found.cancelling_at is not None
                check(resumed, found, statuses, cancelled=was_cancelled)
            else:
                resumed.close()


def check(store: BatchStore, ended: Batch, statuses: list[int], *, cancelled: bool) -> None:
    done, failed = output(store, ended.output_file_id), output(store, ended.error_file_id)
    files = {path.name for path in (store.folder / "files").iterdir()}
    ids = {ended.input_file_id, ended.output_file_id, ended.error_file_id} - {None}
    assert {name for name in files if not name.endswith(".partial")} == ids
    assert (store.open_batches(9), store.lines_with_results(ended.id)) == ([], set())
    store.close()
    if cancelled:
        assert (ended.status, done) == (BatchStatus.CANCELLED, [])
        assert [each["custom_id"] for each in failed] == [
            f"id-{number}" for number in range(len(statuses))
        ]
        return
    for found, status in ((done, 200), (failed, 400)):
        assert [each["custom_id"] for each in found] == [
            f"id-{number}" for number, each in enumerate(statuses) if each == status
        ]
    assert (ended.completed, ended.failed) == (statuses.count(200), statuses.count(400))


def problem(tmp_path: Path, *lines: Any, most: int | None = 4) -> tuple[str, str, int | None]:
    path = tmp_path / "in.jsonl"
    raw = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines]
    path.write_bytes(b"\n".join(raw))
    [error] = validate(path, URL, most).errors
    assert "\n" not in error.message
    return error.code, error.message, error.line


@pytest.mark.parametrize(
    ("wrong", "code", "text"),
    [
        (b"{", "invalid_json_line", "line 2 is not JSON"),
        (b"[" * 100_000, "invalid_json_line", "line 2 is not JSON: it is nested too deeply"),
        ([1], "invalid_json_line", "line 2 is [1]: write a JSON object"),
        (line(2, custom_id=""), "invalid_custom_id", "`custom_id` is '', expected 1 to 512"),
        (line(2, custom_id=7), "invalid_custom_id", "`custom_id` is 7, expected"),
        (line(2, custom_id="id-1"), "duplicate_custom_id", "`custom_id` is 'id-1', as in line 1"),
        (line(2, method="GET"), "invalid_method", "`method` is 'GET', expected 'POST'"),
        (line(2, url="/v1/images"), "invalid_url", "`url` is '/v1/images', expected one of /v1/"),
        (line(2, url=["/v1/images"]), "invalid_url", "`url` is ['/v1/images'], expected one"),
        (line(2, url="/v1/embeddings"), "mismatched_url", "the batch has '/v1/completions'"),
        (line(2, body=[]), "invalid_body", "`body` is [], expected an object"),
        (line(2, body={"model": "m", "stream": True}), "invalid_body", "`stream` is True"),
        (line(2, body={"model": 3}), "invalid_model", "`model` is 3, expected up to 1024"),
        (line(2, body={"model": "\ud800"}), "invalid_model", "`model` is '\\ud800', expected"),
        (line(2, body={"model": "n"}), "mismatched_model", "`model` is 'n', and 'm' in line 1"),
        (b" " * MAX_LINE_BYTES + b"12", "line_too_long", f"more than {MAX_LINE_BYTES} bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "-",
)
def test_a_wrong_line_is_named(tmp_path: Path, wrong: Any, code: str, text: str) -> None:
    found, message, number = problem(tmp_path, line(1), wrong, line(3))
    assert (found, number) == (code, 2)
    assert text in message
    assert message.startswith("line 2")


def test_a_wrong_file_fails_its_batch(store: BatchStore, tmp_path: Path) -> None:
    assert problem(tmp_path, b"", b" ")[0] == "empty_file"
    code, message, number = problem(tmp_path, *map(line, range(5)))
    assert (code, number) == ("too_many_lines", 5)
    assert "the 4 lines that a batch may have" in message
    server = Server()
    batch = begun(store, b"{}\n" * 2 * MAX_ERRORS)
    ended = asyncio.run(run(store, batch, server))
    assert ended.status is BatchStatus.FAILED
    errors = ended.as_object()["errors"]["data"]
    assert [error["line"] for error in errors] == list(range(1, MAX_ERRORS + 1))
    assert not server.asked
    assert ended.output_file_id is ended.error_file_id is None


def test_a_file_with_a_mark_and_empty_lines_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + text_of([line(1)]) + b"\r\n" + text_of([line(2)])[:-1])
    assert validate(path, None, 2)._asdict() == {
        "total": 2,
        "model": "m",
        "endpoint": URL,
        "errors": [],
    }


class TestRecords:
    def test_lists_have_pages(self, store: BatchStore) -> None:
        names = [begun(store, text_of([line(number)])).id for number in range(5)][::-1]
        assert [each.id for each in store.list_batches(None, 2)] == names[:2]
        assert [each.id for each in store.list_batches(names[1], 9)] == names[2:]
        with pytest.raises(ConfigError, match="`after` is 'batch_none'"):
            store.list_batches("batch_none", 9)
        files = [each.id for each in store.list_files("batch", None, 9)]
        assert len(files) == 5
        old_first = store.list_files(None, files[2], 9, newest_first=False)
        assert [each.id for each in old_first] == files[1::-1]
        assert store.list_files("vision", None, 9) == []

    def test_a_line_keeps_its_first_result(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1), line(2)]))
        first, second = LineResult(1, False, "first"), LineResult(1, True, "second")
        store.add_results(batch.id, [first, second])
        store.add_results(batch.id, [second, LineResult(2, True, "other")])
        assert list(store.results(batch.id)) == ["first", "other"]
        found = store.batch(batch.id)
        assert (found.completed, found.failed) == (1, 1)

    def test_an_input_is_kept_while_it_is_read(self, store: BatchStore) -> None:
        batch = begun(store, text_of([line(1)]))
        with pytest.raises(ConfigError, match=f"input of {batch.id}, which is validating"):
            store.delete_file(batch.input_file_id)
        ended = asyncio.run(run(store, batch, Server()))
        assert store.delete_file(batch.input_file_id)
        assert not store.delete_file(batch.input_file_id)
        assert not store.path_of(batch.input_file_id).exists()
        assert output(store, ended.output_file_id)

    def test_files_expire_and_leftovers_are_removed(self, store: BatchStore) -> None:
        with store.new_file("short", "batch", 10) as short:
            short.write(b"x")
        with store.new_file("long", "batch") as long:
            long.write(b"x")
        left = store.path_of("file-left.partial")
        left.write_bytes(b"x")
        store.delete_expired_files(time.time() + 5)
        assert left.exists()
        store.delete_expired_files(time.time() + 2 * HOUR)
        assert store.find_file(short.record.id) is None
        files = [path.name for path in (store.folder / "files").iterdir()]
        assert files == [long.record.id]

    def test_a_failed_upload_leaves_nothing(self, store: BatchStore) -> None:
        with pytest.raises(ConnectionError), store.new_file("a", "batch") as writer:
            writer.write(b"x")
            raise ConnectionError
        assert list((store.folder / "files").iterdir()) == []
        assert store.list_files(None, None, 9) == []

    def test_uploads_at_once_do_not_exceed_the_limit(self, store: BatchStore) -> None:
        with (
            pytest.raises(StoreLimitError, match="have 6 bytes, and with this one more than 10"),
            store.new_file("a", "batch", most=10) as late,
            store.new_file("b", "batch", most=10) as first,
        ):
            late.write(b"x" * 6)
            first.write(b"x" * 6)
        assert [each.filename for each in store.list_files(None, None, 9)] == ["b"]
        assert [path.name for path in (store.folder / "files").iterdir()] == [first.record.id]

    def test_open_batches_are_found_by_an_index_and_have_a_limit(
        self, store: BatchStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names = [begun(store, text_of([line(number)])).id for number in range(3)]
        store.finish(names[1], BatchStatus.CANCELLED, None, None)
        queries: list[str] = []
        store._database.set_trace_callback(queries.append)
        assert store.open_batches(9) == [names[0], names[2]]
        assert store.open_batches(1) == names[:1]
        plan = store._database.execute(f"EXPLAIN QUERY PLAN {queries[0]}").fetchall()
        assert "USING COVERING INDEX" in str(plan) or "USING INDEX batches_by_status" in str(plan)
        monkeypatch.setattr(batch_store, "MAX_OPEN_BATCHES", 3)
        begun(store, text_of([line(1)]))
        with pytest.raises(StoreLimitError, match="3 batches have not ended, all that there may"):
            begun(store, text_of([line(1)]))

    def test_others_cannot_read_what_is_stored(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            found = BatchStore(tmp_path / "new" / "store")
            (tmp_path / "old").mkdir(mode=0o755)
            other = BatchStore(tmp_path / "old")
            for store in (found, other):
                begun(store, text_of([line(1)]))
        finally:
            os.umask(before)
        assert found.folder.stat().st_mode & 0o777 == 0o700
        for store in (found, other):
            modes = {path.name: path.stat().st_mode & 0o777 for path in store.folder.iterdir()}
            assert modes.pop("files") == 0o700
            assert set(modes) == {f"batches.sqlite3{end}" for end in ("", "-shm", "-wal")}
            assert set(modes.values()) == {0o600}
            store.close()

    def test_another_version_and_a_file_as_folder_are_refused(self, tmp_path: Path) -> None:
        store = BatchStore(tmp_path / "store")
        store._database.execute("PRAGMA user_version = 9")
        store.close()
        with pytest.raises(StartError, match="has version 9"):
            BatchStore(tmp_path / "store")
        (tmp_path / "file").write_text("x")
        with pytest.raises(StartError, match="files cannot be stored in"):
            BatchStore(tmp_path / "file")
        assert batch_store.is_storage(tmp_path / "store")


def service_of(folder: Path, owner: str, app: Application | None = None) -> BatchService:
    app = app or Server().application
    slots = LineSlots(1, lambda: 0)
    return BatchService(folder, owner, BatchLimits(), app, slots, (URL,), lambda: True)


@contextlib.asynccontextmanager
async def serving(folder: Path, owner: str = "") -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server with this folder."""
    service = service_of(folder, owner)
    app = FastAPI()
    add_routes(app)
    setattr(app.state, SERVICE, service)
    service.start()
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client
    finally:
        await service.stop()


FORM: dict[str, Any] = {"files": {"file": ("a", b"x")}, "data": {"purpose": "batch"}}


async def post_and_get(folder: Path, owner: str) -> list[tuple[int, str]]:
    """Answers of the endpoints of a server with this folder: an upload, and a list."""
    async with serving(folder, owner) as client:
        listed, sent = await client.get("/v1/files"), await client.post("/v1/files", **FORM)
    return [(each.status_code, each.text) for each in (listed, sent)]


def test_text_that_cannot_be_encoded_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "storage") as client:
            file_id = (await client.post("/v1/files", **FORM)).json()["id"]
            body = {"endpoint": URL, "completion_window": "24h", "input_file_id": file_id}
            wrong = ({"metadata": {"\ud800": "a"}}, {"metadata": {"a": "\udc00"}})
            for change in (*wrong, {"input_file_id": "\ud800"}):
                content = json.dumps({**body, **change})
                answer = await client.post("/v1/batches", content=content)
                assert (answer.status_code, next(iter(change)) in answer.text) == (400, True)
            assert (await client.post("/v1/batches", json=body)).status_code == 200
            assert len((await client.get("/v1/batches")).json()["data"]) == 1
            form = (
                b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
                b'--b\r\nContent-Disposition: form-data; name="file"; filename="\\ud800"\r\n\r\n'
                b"x\r\n--b--\r\n"
            )
            kind = "multipart/form-data; boundary=b; charset=raw_unicode_escape"
            answer = await client.post("/v1/files", content=form, headers={"content-type": kind})
            assert (answer.status_code, "expected Unicode text" in answer.text) == (400, True)
            assert len((await client.get("/v1/files")).json()["data"]) >= 1

    asyncio.run(scenario())


def test_too_many_open_batches_are_answered_429(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_store, "MAX_OPEN_BATCHES", 0)

    async def scenario() -> httpx.Response:
        async with serving(tmp_path / "storage") as client:
            file_id = (await client.post("/v1/files", **FORM)).json()["id"]
            body = {"endpoint": URL, "completion_window": "24h", "input_file_id": file_id}
            return await client.post("/v1/batches", json=body)

    answer = asyncio.run(scenario())
    assert answer.status_code == 429
    assert "0 batches have not ended, all that there may be; wait until one ends" in answer.text


def test_a_folder_stays_locked_while_a_batch_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_service, "_STOP_S", 0.01)
    store = BatchStore(tmp_path)
    batch = begun(store, text_of([line(1)]))
    server = Server()
    server.hangs = {"prompt 1"}

    async def scenario() -> None:
        service = service_of(tmp_path, "first", Application(server.send, lambda _: None))
        service.start()
        while not server.running:
            await asyncio.sleep(0.01)
        await service.stop()
        other = StorageLock(tmp_path, "second")
        assert other.acquire() is LockState.REFUSED
        server.hangs = set()
        while server.running or store.batch(batch.id).starts:
            await asyncio.sleep(0.01)
        await asyncio.gather(*service._tasks.values())
        await service.stop()
        assert other.acquire() is LockState.RUNS
        other.release()

    asyncio.run(scenario())
    assert store.batch(batch.id).status is BatchStatus.IN_PROGRESS
    store.close()


def test_another_server_of_a_folder_answers_503(tmp_path: Path) -> None:
    folder = tmp_path / "storage"
    service = service_of(folder, "")
    assert asyncio.run(service.open_store(create=False)) is None
    assert not folder.exists()
    BatchStore(folder).close()
    held = StorageLock(folder, "first")
    assert held.acquire() is LockState.RUNS
    for status, text in asyncio.run(post_and_get(folder, "second")):
        assert status == 503
        assert f"belong to another server, process {os.getpid()} of" in text
        assert "--file-storage-path" in text
    # A worker of the same server shares it.
    shared = asyncio.run(post_and_get(folder, "first"))
    assert [status for status, _ in shared] == [200, 200]
    held.release()
    assert [status for status, _ in asyncio.run(post_and_get(folder, "second"))] == [200, 200]
    # A folder that cannot be made is an error of one line.
    (tmp_path / "file").write_text("x")
    answers = asyncio.run(post_and_get(tmp_path / "file", "second"))
    assert [status for status, _ in answers] == [200, 503]
    assert "files cannot be stored in" in answers[1][1]


@pytest.mark.parametrize(
    ("is_on", "default", "low_first", "priority"),
    [
        (False, 5, False, None),
        # A request without a priority comes last, so a line with one would come before it.
        (True, None, False, None),
        (True, 5, False, -(2**31)),
        (True, 5, True, 2**31 - 1),
    ],
)
def test_lines_have_the_lowest_priority(
    is_on: bool, default: int | None, low_first: bool, priority: int | None
) -> None:
    settings = SimpleNamespace(
        enable_priority_scheduling=is_on,
        default_priority_value=default,
        schedule_low_priority_values_first=low_first,
    )
    assert lowest_priority(settings) == priority


def test_requests_of_clients_are_counted_while_they_are_open() -> None:
    async def scenario() -> None:
        done = asyncio.Event()

        async def app(_scope: Any, _receive: Any, _send: Any) -> None:
            await done.wait()

        async def none(*_: Any) -> None:
            return None

        counter = InteractiveRequests(app)
        asked = [("POST", "/generate"), ("POST", "/v1/completions"), ("GET", "/health")]
        asked += [("POST", "/v1/files"), ("POST", "/v1/batches/b/cancel")]
        tasks = [
            asyncio.create_task(
                counter({"type": "http", "method": method, "path": path}, none, none)
            )
            for method, path in asked
        ]
        await asyncio.sleep(0.01)
        assert counter.count == 2
        done.set()
        await asyncio.gather(*tasks)
        assert counter.count == 0

    asyncio.run(scenario())


HOLD = """
import sys
from pathlib import Path
from pie_driver_sglang.frontends.batches.storage_lock import StorageLock
print(StorageLock(Path(sys.argv[1]), sys.argv[2]).acquire().name, flush=True)
sys.stdin.read()
"""


def test_one_server_runs_the_batches_of_a_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), "first"]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"RUNS\n"
    worker, second = StorageLock(tmp_path, "first"), StorageLock(tmp_path, "second")
    assert worker.acquire() is LockState.SHARES
    assert second.acquire() is LockState.REFUSED
    assert second.holder.startswith(f"{other.pid} of ")
    other.kill()
    other.communicate()
    assert second.acquire() is second.acquire() is LockState.RUNS
    assert worker.acquire() is LockState.REFUSED
    second.release()
    assert worker.acquire() is LockState.RUNS
    worker.release()


def test_lines_leave_slots_to_clients_and_batches_take_turns() -> None:
    async def scenario() -> None:
        clients = 0
        slots = LineSlots(16, lambda: clients)
        for _ in range(16):
            await slots.acquire()
        clients = 3
        order: list[str] = []

        async def waits(name: str) -> None:
            for _ in range(2):
                await slots.acquire()
                order.append(name)

        tasks = [asyncio.create_task(waits(name)) for name in ("a", "b")]
        for _ in range(14):
            slots.release()
        await asyncio.sleep(0.1)
        assert (slots.used, slots.allowed, order) == (2, 2, [])
        slots.release()
        await asyncio.sleep(0.002)
        slots.release()
        await asyncio.sleep(0.02)
        assert order == ["a", "b"]
        clients = 0
        await asyncio.wait_for(asyncio.gather(*tasks), 5)
        assert (slots.used, order) == (4, ["a", "b", "a", "b"])
        for _ in range(4):
            slots.release()
        given_up = [asyncio.create_task(slots.acquire()) for _ in range(17)]
        await asyncio.sleep(0.002)
        given_up[-1].cancel()
        await asyncio.wait(given_up)
        assert slots.used == 16

    asyncio.run(scenario())
