"""Sessions: requests that go on from others."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest

from support.servers.pie_server import refusal, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

FIRST = list(range(200, 240))


def opened(server: Server, **asked: Any) -> str:
    return str(json.loads(server.ask("/open_session", {"capacity_of_str_len": 1000, **asked})))


def say(server: Server, session: str, prompt: list[int], tokens: int = 6, **params: Any) -> Any:
    asked = {"id": session, **params}
    return json.loads(server.ask("/generate", server.body(prompt, tokens, session_params=asked)))


class TestSessions:
    @pytest.fixture
    def session(self, server: Server) -> Iterator[str]:
        name = opened(server)
        yield name
        server.ask("/close_session", {"session_id": name})

    def test_a_turn_has_all_tokens_of_the_one_before(self, server: Server, session: str) -> None:
        server.flush()
        first = say(server, session, FIRST)
        assert first["meta_info"]["prompt_tokens"] == len(FIRST)
        rid = first["meta_info"]["id"]
        more = [300, 301]
        second = say(server, session, more, rid=rid)
        whole = [*FIRST, *first["output_ids"], *more]
        assert second["meta_info"]["prompt_tokens"] == len(whole)
        # Everything except for what is new, in pages of 16.
        assert second["meta_info"]["cached_tokens"] >= (len(whole) - len(more)) // 16 * 16 - 16
        assert second["output_ids"] == server.generate(whole, 6)[0]

    def test_drop_offset_replace(self, server: Server, session: str) -> None:
        first = say(server, session, FIRST)
        rid = first["meta_info"]["id"]
        dropped = say(server, session, [300], rid=rid, drop_previous_output=True)
        assert dropped["output_ids"] == server.generate([*FIRST, 300], 6)[0]
        cut = say(server, session, [300], rid=rid, offset=10)
        assert cut["output_ids"] == server.generate([*FIRST[:10], 300], 6)[0]
        again = say(server, session, [300], rid=rid, replace=True)
        whole = [*FIRST, *first["output_ids"], 300]
        assert again["output_ids"] == server.generate(whole, 6)[0]
        # What went on from there is gone.
        body = server.body([1], 1, session_params={"id": session, "rid": cut["meta_info"]["id"]})
        status, text = refusal(server, body)
        assert (status, "has no request" in text) == (400, True)

    def test_unknown_sessions_and_names_taken(self, server: Server, session: str) -> None:
        body = server.body([1], 1, session_params={"id": "none"})
        status, text = refusal(server, body)
        assert (status, "session id none does not exist" in text) == (400, True)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            opened(server, session_id=session)

    def test_one_that_streams_has_one_request_at_a_time(self, server: Server) -> None:
        session = opened(server, streaming=True)
        first = say(server, session, FIRST)
        second = say(server, session, [300])
        whole = [*FIRST, *first["output_ids"], 300]
        assert second["output_ids"] == server.generate(whole, 6)[0]
        body = server.body([1], 1, session_params={"id": session, "replace": True})
        assert "do not support replace" in refusal(server, body)[1]
        server.ask("/close_session", {"session_id": session})

    def test_any_number_is_a_timeout(self, server: Server) -> None:
        forever = opened(server, timeout=1e300)
        assert say(server, forever, FIRST)["output_ids"]
        server.ask("/close_session", {"session_id": forever})
        body = server.body([1], 1, session_params={"id": opened(server, timeout=-1)})
        assert "does not exist" in refusal(server, body)[1]

    def test_nothing_is_kept_of_a_session_that_was_closed(self, server: Server) -> None:
        server.flush()
        session = opened(server, timeout=1.0)
        say(server, session, FIRST)
        kept = state(server)
        assert kept["pages_free"] + kept["pages_cached"] < kept["pages_total"]

        def is_over() -> bool:
            now = state(server)
            return bool(now["pages_free"] + now["pages_cached"] == now["pages_total"])

        wait_until(is_over, 20, "the session timed out")
        body = server.body([1], 1, session_params={"id": session})
        assert "does not exist" in refusal(server, body)[1]
        # What is closed while a request runs is let go afterwards.
        session = opened(server)
        lines = server.stream(FIRST, 60, session_params={"id": session})
        next(iter(lines))
        server.ask("/close_session", {"session_id": session})
        assert len(list(lines)[-1]) == 60
        wait_until(is_over, 20, "its pages are free")
