"""Runs of batches: results in order, retries, and kills at every commit."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang.frontends.batches import batch_runner, line_requests, output_files
from pie_driver_sglang.frontends.batches.batch_records import Batch, BatchStatus, LineResult
from pie_driver_sglang.frontends.batches.batch_runner import MAX_STARTS, BatchRunner
from pie_driver_sglang.frontends.batches.batch_store import BatchStore, FileWriter
from pie_driver_sglang.frontends.batches.line_requests import Application, LineResponse
from pie_driver_sglang.frontends.batches.line_slots import LineSlots
from support.batches import Server, begun, line, output, run, text_of


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
