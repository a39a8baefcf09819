"""Batches in a server: endpoints, the lock of its folder, and the slots that clients keep."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from pie_driver_sglang.config.http_limits import BatchLimits
from pie_driver_sglang.frontends.batches import batch_store
from pie_driver_sglang.frontends.batches.batch_records import BatchStatus
from pie_driver_sglang.frontends.batches.batch_store import BatchStore
from pie_driver_sglang.frontends.batches.line_requests import Application
from pie_driver_sglang.frontends.batches.line_slots import LineSlots
from pie_driver_sglang.frontends.batches.storage_lock import LockState, StorageLock
from pie_driver_sglang.frontends.sglang_server import batch_service
from pie_driver_sglang.frontends.sglang_server.batch_endpoints import SERVICE, add_routes
from pie_driver_sglang.frontends.sglang_server.batch_service import (
    BatchService,
    InteractiveRequests,
    lowest_priority,
)
from support.batches import URL, Server, begun, line, text_of


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
