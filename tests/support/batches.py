"""Batches of requests for tests: their lines, a store's, and a server that answers by a rule."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from pie_driver_sglang.frontends.batches.batch_records import Batch, new_batch
from pie_driver_sglang.frontends.batches.batch_runner import BatchRunner
from pie_driver_sglang.frontends.batches.batch_store import BatchStore
from pie_driver_sglang.frontends.batches.line_requests import Application, LineResponse
from pie_driver_sglang.frontends.batches.line_slots import LineSlots

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
