"""Sessions: requests that continue others."""

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


def open_session(server: Server, **requested: Any) -> str:
    return str(
        json.loads(server.fetch("/open_session", {"capacity_of_str_len": 1000, **requested}))
    )


def generate_in(
    server: Server, session: str, prompt: list[int], tokens: int = 6, **params: Any
) -> Any:
    requested = {"id": session, **params}
    return json.loads(
        server.fetch("/generate", server.body(prompt, tokens, session_params=requested))
    )


class TestSessions:
    @pytest.fixture
    def session(self, server: Server) -> Iterator[str]:
        name = open_session(server)
        yield name
        server.fetch("/close_session", {"session_id": name})

    def test_a_turn_has_all_tokens_of_the_one_before(self, server: Server, session: str) -> None:
        server.flush()
        first = generate_in(server, session, FIRST)
        assert first["meta_info"]["prompt_tokens"] == len(FIRST)
        rid = first["meta_info"]["id"]
        more = [300, 301]
        second = generate_in(server, session, more, rid=rid)
        whole = [*FIRST, *first["output_ids"], *more]
        assert second["meta_info"]["prompt_tokens"] == len(whole)
        # Everything except for what is new, in pages of 16.
        assert second["meta_info"]["cached_tokens"] >= (len(whole) - len(more)) // 16 * 16 - 16
        assert second["output_ids"] == server.generate(whole, 6)[0]

    def test_drop_offset_replace(self, server: Server, session: str) -> None:
        first = generate_in(server, session, FIRST)
        rid = first["meta_info"]["id"]
        dropped = generate_in(server, session, [300], rid=rid, drop_previous_output=True)
        assert dropped["output_ids"] == server.generate([*FIRST, 300], 6)[0]
        cut = generate_in(server, session, [300], rid=rid, offset=10)
        assert cut["output_ids"] == server.generate([*FIRST[:10], 300], 6)[0]
        again = generate_in(server, session, [300], rid=rid, replace=True)
        whole = [*FIRST, *first["output_ids"], 300]
        assert again["output_ids"] == server.generate(whole, 6)[0]
        # What continued from there is gone.
        body = server.body([1], 1, session_params={"id": session, "rid": cut["meta_info"]["id"]})
        status, text = refusal(server, body)
        assert (status, "has no request" in text) == (400, True)

    def test_unknown_sessions_and_names_taken(self, server: Server, session: str) -> None:
        body = server.body([1], 1, session_params={"id": "none"})
        status, text = refusal(server, body)
        assert (status, "session id none does not exist" in text) == (400, True)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            open_session(server, session_id=session)

    def test_one_that_streams_has_one_request_at_a_time(self, server: Server) -> None:
        session = open_session(server, streaming=True)
        first = generate_in(server, session, FIRST)
        second = generate_in(server, session, [300])
        whole = [*FIRST, *first["output_ids"], 300]
        assert second["output_ids"] == server.generate(whole, 6)[0]
        body = server.body([1], 1, session_params={"id": session, "replace": True})
        assert "do not support replace" in refusal(server, body)[1]
        server.fetch("/close_session", {"session_id": session})

    def test_any_number_is_a_timeout(self, server: Server) -> None:
        forever = open_session(server, timeout=1e300)
        assert generate_in(server, forever, FIRST)["output_ids"]
        server.fetch("/close_session", {"session_id": forever})
        body = server.body([1], 1, session_params={"id": open_session(server, timeout=-1)})
        assert "does not exist" in refusal(server, body)[1]

    def test_nothing_is_kept_of_a_session_that_was_closed(self, server: Server) -> None:
        server.flush()
        session = open_session(server, timeout=3.0)
        generate_in(server, session, FIRST)
        kept = state(server)
        assert kept["pages_free"] + kept["pages_cached"] < kept["pages_total"]

        def is_over() -> bool:
            now = state(server)
            return bool(now["pages_free"] + now["pages_cached"] == now["pages_total"])

        wait_until(is_over, 60, "the session timed out")
        body = server.body([1], 1, session_params={"id": session})
        assert "does not exist" in refusal(server, body)[1]
        # What is closed while a request runs is let go afterwards.
        session = open_session(server)
        lines = server.stream(FIRST, 60, session_params={"id": session})
        next(iter(lines))
        server.fetch("/close_session", {"session_id": session})
        assert len(list(lines)[-1]) == 60
        wait_until(is_over, 60, "its pages are free")
