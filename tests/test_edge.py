"""The HTTP server without a model: connection limits, flags and errors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from pie_driver_sglang.config.api_keys import ApiKeys
from pie_driver_sglang.config.http_limits import (
    HTTP_FLAGS,
    ConnectionLimits,
    HttpSettings,
    take_http_flags,
)
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.sglang_server.access import access_keys
from pie_driver_sglang.frontends.sglang_server.bounded_store import BoundedStore
from pie_driver_sglang.frontends.sglang_server.error_responses import ErrorSender, short_error

uvicorn: Any = pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

LONG_S = 600.0
"""For limits that a test must not reach."""
READ_S = 60.0


class Edge(NamedTuple):
    """A server with limits, and what it holds."""

    port: int
    usage: Any
    server: Any

    def connect(self) -> socket.socket:
        found = socket.create_connection(("127.0.0.1", self.port), READ_S)
        found.settimeout(READ_S)
        return found

    def fetch(self, path: str, body: bytes = b"", method: str = "POST") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=READ_S)
        with contextlib.closing(connection):
            connection.request(method, path, body or None)
            answer = connection.getresponse()
            return answer.status, answer.read()


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body, or with more than any socket holds, or never."""
    if scope["type"] != "http":
        return
    length = 0
    while scope["path"] != "/early":
        message = await receive()
        if message["type"] == "http.disconnect":
            scope["state"]["gone"].set()
            return
        length += len(message["body"])
        if not message["more_body"]:
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/flood":
        part = {"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True}
        while (await asyncio.sleep(0), scope["state"]["gone"].is_set())[1] is False:
            await send(part)
            if scope["state"]["protocols"]() == 0:
                scope["state"]["gone"].set()
        return
    await send({"type": "http.response.body", "body": b"%d" % length})


@contextlib.contextmanager
def edge(**limits: Any) -> Iterator[Edge]:
    from pie_driver_sglang.frontends.sglang_server.connections import LimitedProtocol, ServerUsage

    usage = ServerUsage()
    given = {"header_timeout_s": LONG_S, "body_timeout_s": LONG_S, "write_timeout_s": LONG_S}
    given |= {"keep_alive_timeout_s": LONG_S, **limits}
    protocol = functools.partial(LimitedProtocol, limits=ConnectionLimits(**given), usage=usage)
    gone = threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"] = {"gone": gone, "protocols": lambda: len(server.server_state.connections)}
        await echo(scope, receive, send)

    config = uvicorn.Config(app, http=protocol, lifespan="off", log_level="critical", port=0)
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    server.gone = gone
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    try:
        yield Edge(listener.getsockname()[1], usage, server)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(READ_S)
        listener.close()


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def test_requests_within_the_limits_are_served() -> None:
    with edge() as server:
        assert server.fetch("/", b"x" * 300_000) == (200, b"300000")
        # One after the other on one connection, and the next before the answer to the first.
        with server.connect() as connection:
            one = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc"
            connection.sendall(one + one)
            connection.sendall(one[:-3])
            connection.sendall(b"abc" + one.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            assert read_all(connection).count(b"200 OK") == 4
        wait_for(lambda: server.usage.body_bytes == 0)


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large_is_answered_at_once(declared: bool) -> None:
    with edge(max_body_bytes=1 << 20) as server, server.connect() as connection:
        size = 80 << 20
        head = b"POST / HTTP/1.1\r\nHost: a\r\n"
        if declared:
            # Nothing of it needs to be sent for the answer.
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % size)
            answer = connection.recv(65536)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"x" * size)
        else:
            connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                for _ in range(size >> 16):
                    connection.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            answer = read_all(connection)
        assert status_of(answer) == 413
        assert b"--max-body-bytes" in answer
        assert server.fetch("/", b"abc") == (200, b"3")
        wait_for(lambda: server.usage.body_bytes == 0)


def test_headers_that_are_too_large_are_answered() -> None:
    with edge(max_header_bytes=4096) as server:
        for head in (b"GET / HTTP/1.1\r\nA: " + b"a" * 5000 + b"\r\n\r\n", b"GET /" + b"a" * 5000):
            with server.connect() as connection:
                connection.sendall(head)
                assert status_of(read_all(connection)) == 431
        assert server.fetch("/", b"abc")[0] == 200


def test_a_request_that_does_not_come_is_given_up() -> None:
    with edge(header_timeout_s=0.05, body_timeout_s=0.05) as server:
        for sent in (b"", b"GET / HT", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nabc"):
            with server.connect() as connection:
                connection.sendall(sent)
                assert status_of(read_all(connection)) == 408
        wait_for(lambda: server.usage.body_bytes == 0)
        wait_for(lambda: not server.usage.waiting)


def test_silent_connections_are_closed_for_others() -> None:
    with edge(max_connections=20) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(200)]
        for _ in range(5):
            assert server.fetch("/", b"abc") == (200, b"3")
        # The oldest had to go, and the last are there.
        assert read_all(silent[0]) == b""
        assert len(server.server.server_state.connections) <= 21


def test_busy_connections_are_not_given_up_for_others() -> None:
    head = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n"
    with edge(max_connections=4) as server, contextlib.ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(4)]
        for each in busy:
            each.sendall(head)
        # Each has begun: then none of them waits for a request.
        connections = server.server.server_state.connections
        wait_for(lambda: len(connections) == 4 and not server.usage.waiting)
        with server.connect() as other:
            answer = read_all(other)
        assert status_of(answer) == 503
        assert b"retry-after: 1" in answer
        for each in busy:
            each.sendall(b"abc")
            assert b"200 OK" in each.recv(65536)


def test_the_bodies_of_all_requests_have_a_limit() -> None:
    head = b"POST / HTTP/1.1\r\nContent-Length: 2000000\r\n\r\n"
    with edge(max_buffered_bytes=1_500_000) as server, server.connect() as first:
        first.sendall(head + b"x" * 1_000_000)
        wait_for(lambda: server.usage.body_bytes == 1_000_000)
        with server.connect() as second:
            second.sendall(head + b"x" * 1_000_000)
            answer = read_all(second)
        assert status_of(answer) == 503
        assert b"retry-after" in answer
    wait_for(lambda: server.usage.body_bytes == 0)


def test_uploads_have_a_limit_of_their_own() -> None:
    limits = {"max_body_bytes": 1000, "max_buffered_bytes": 5000, "max_file_bytes": 1_000_000}
    with edge(**limits) as server:
        for path in ("/v1/files", "/v1/files?a=b"):
            assert server.fetch(path, b"x" * 900_000) == (200, b"900000")
            status, body = server.fetch(path, b"x" * 1_000_001)
            assert (status, b"--max-file-bytes" in body) == (413, True)
        for path in ("/v1/files/", "/v1/batches", "/?/v1/files"):
            assert server.fetch(path, b"x" * 1001)[0] == 413
        assert server.usage.body_bytes == 0


def test_open_uploads_have_a_limit_together() -> None:
    head = b"POST /v1/files HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n"
    limits = {"max_buffered_bytes": 1_500_000, "max_file_bytes": 1_000_000}
    with edge(**limits) as server:
        with server.connect() as first, server.connect() as second:
            first.sendall(head + b"x" * 900_000)
            wait_for(lambda: server.usage.upload_bytes == 900_000)
            second.sendall(head + b"x" * 900_000)
            answer = read_all(second)
            assert status_of(answer) == 503
            assert b"the open uploads have 1500000 bytes, all that they may" in answer
            # Other requests are not affected.
            assert server.fetch("/", b"abc") == (200, b"3")
            first.sendall(b"x" * 100_000)
            assert b"200 OK" in first.recv(65536)
        wait_for(lambda: server.usage.upload_bytes == 0)


def test_an_answer_that_nobody_reads_is_given_up() -> None:
    with edge(write_timeout_s=0.05) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: a\r\n\r\n")
        assert server.server.gone.wait(READ_S)
        assert server.fetch("/", b"abc") == (200, b"3")


def test_an_early_answer_lets_the_rest_of_the_body_pass() -> None:
    with edge() as server:
        assert server.fetch("/early", b"x" * 3_000_000) == (200, b"0")
        wait_for(lambda: server.usage.body_bytes == 0)


def wait_for(done: Any) -> None:
    event = threading.Event()
    for _ in range(6000):
        if done():
            return
        event.wait(0.01)
    raise AssertionError("it did not come")


def test_flags_of_the_edge() -> None:
    words = ["--max-body-bytes=80MiB", "--port", "1", "--header-timeout", "2.5", "--tp", "2"]
    settings, rest = take_http_flags([*words, "--allowed-media-domains", "a.example, b.example"])
    assert rest == ["--port", "1", "--tp", "2"]
    assert settings.connections.max_body_bytes == 80 << 20
    assert settings.connections.header_timeout_s == 2.5
    assert settings.media.allowed_domains == ("a.example", "b.example")
    assert settings.given == {"max-body-bytes", "header-timeout", "allowed-media-domains"}
    assert take_http_flags([]) == (HttpSettings(), [])
    assert not HttpSettings().allow_pickled_adapters


@pytest.mark.parametrize("name", HTTP_FLAGS)
def test_a_wrong_value_of_a_flag_is_one_line(name: str) -> None:
    flag = HTTP_FLAGS[name]
    if flag.read is None:
        wrong = [f"--{name}=yes"]
        assert take_http_flags([f"--{name}"])[0].given == {name}
    else:
        wrong = [f"--{name}"]
        with pytest.raises(ConfigError, match=f"--{name}"):
            take_http_flags([f"--{name}="])
    with pytest.raises(ConfigError) as error:
        take_http_flags(wrong)
    assert f"--{name}" in str(error.value)
    assert error.value.hint


def test_the_defaults_in_the_help_text_are_those() -> None:
    default = HttpSettings()
    shown = {name: flag.default for name, flag in HTTP_FLAGS.items()}
    words = [
        f"--{name}={text}" for name, text in shown.items() if text not in ("any", "off", "none")
    ]
    settings, _ = take_http_flags(words)
    assert settings._replace(given=default.given) == default


def test_errors_are_json() -> None:
    from pie_driver_sglang.frontends.sglang_server.access import error_body

    found = json.loads(error_body(413, "too large"))
    assert (found["code"], found["message"]) == (413, "too large")


def sent_status(status: int) -> int:
    return int(sent_start(status)["status"])


def through_middleware(status: int, *headers: tuple[bytes, bytes]) -> dict[bytes, bytes]:
    return dict(sent_start(status, *headers)["headers"])


def sent_start(status: int, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    from pie_driver_sglang.frontends.sglang_server.access import AccessMiddleware

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body"})

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "GET", "path": "/generate", "headers": [], "client": None}
    middleware = AccessMiddleware(app, [], lambda: access_keys(ApiKeys()))
    asyncio.run(middleware(scope, receive, send))
    start: dict[str, Any] = sent[0]
    return start


def test_a_lack_of_capacity_has_retry_after() -> None:
    for status in (429, 503):
        assert through_middleware(status) == {b"retry-after": b"1"}
        assert through_middleware(status, (b"Retry-After", b"7")) == {b"Retry-After": b"7"}
    assert through_middleware(500) == through_middleware(200) == {}


def test_what_is_not_implemented_is_a_400() -> None:
    assert [sent_status(status) for status in (501, 500, 503, 200)] == [400, 500, 503, 200]


def test_errors_are_short() -> None:
    """Whatever a handler repeats of a request."""
    long = "a b\n" * 100_000
    for body in ({"error": {"message": long, "code": 5}}, [[long] * 50], {long: long}, long):
        found = short_error(400, json.dumps(body).encode())
        assert len(found) < 4096
        assert "a b" in str(json.loads(found))
    assert "\n" not in json.loads(short_error(400, json.dumps({"error": long}).encode()))["error"]
    assert json.loads(short_error(400, b"x" * 5000))["code"] == 400
    whole = b'{"error":"a\\nb"}'
    assert short_error(400, whole) == whole


def test_a_long_error_is_sent_in_one_piece() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        headers = [(b"Content-Length", b"9009"), (b"content-type", b"application/json")]
        part = {"type": "http.response.body", "more_body": True}
        to_client = ErrorSender(send)
        await to_client.send({"type": "http.response.start", "status": 400, "headers": headers})
        await to_client.send({**part, "body": b'"' + b"x" * 4500})
        await to_client.send({**part, "body": b"x" * 4500 + b'"', "more_body": False})

    asyncio.run(answer())
    start, body = sent
    assert dict(start["headers"])[b"Content-Length"] == b"%d" % len(body["body"])
    assert len(body["body"]) < 600


def test_a_long_page_becomes_an_error_with_its_own_headers() -> None:
    """What the body was made of does not describe the one that is sent."""
    sent = list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        headers = [(b"content-type", b"text/html"), (b"Content-Encoding", b"gzip"), (b"x", b"y")]
        to_client = ErrorSender(send)
        await to_client.send({"type": "http.response.start", "status": 404, "headers": headers})
        await to_client.send({"type": "http.response.body", "body": b"<" * 5000})

    asyncio.run(answer())
    start, body = sent
    assert start["headers"] == [(b"content-type", b"application/json"), (b"x", b"y")]
    assert json.loads(body["body"])["code"] == 404


def test_what_is_kept_for_clients_is_bounded() -> None:
    store = BoundedStore(3, 100)
    for name in "abcd":
        store[name] = name
    assert list(store) == ["b", "c", "d"]
    store["b"] = "again"
    store["e"] = "x" * 99
    # Alone, an entry may be of any size.
    assert list(store) == ["e"]
    store["f"] = "x" * 200
    assert dict(store) == {"f": "x" * 200}
    store["g"] = "small"
    assert list(store) == ["g"]
