"""The endpoints of Ollama."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.servers.pie_server import PROMPT, refusal
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

BODIES: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "/api/generate": {"prompt": PROMPT},
}


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["response"] if "response" in answer else answer["message"]["content"])


@pytest.mark.parametrize("path", sorted(BODIES))
class TestOllama:
    def test_a_stream_is_the_whole_answer(self, server: Server, path: str) -> None:
        options = {"temperature": 0, "num_predict": 6, "seed": 5}
        body = {"model": "m", "options": options, **BODIES[path]}
        whole = json.loads(server.fetch(path, {**body, "stream": False}))
        assert (whole["eval_count"], whole["done"]) == (6, True)
        parts = list(map(json.loads, server.fetch(path, {**body, "stream": True}).splitlines()))
        assert "".join(map(text_of, parts)) == text_of(whole) != ""
        assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]

    def test_a_mistake_is_a_bad_request(self, server: Server, path: str) -> None:
        body = {"model": "m", "stream": False, **BODIES[path]}
        body["options"] = {"temperature": -1, "num_predict": 6}
        status, text = refusal(server, body, path)
        assert (status, "temperature must be" in text) == (400, True)

    def test_a_mistake_in_a_stream_is_a_line_of_it(self, server: Server, path: str) -> None:
        body = {"model": "m", "stream": True, **BODIES[path]}
        body["options"] = {"temperature": -1, "num_predict": 6}
        [line] = server.fetch(path, body).splitlines()
        assert "temperature must be" in json.loads(line)["error"]
