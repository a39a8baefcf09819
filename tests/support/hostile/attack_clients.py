"""Clients that attack a server, and clients beside them that must get known answers."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Self

from support.hostile.hostile_requests import Call

ANSWER_S: Final = 60.0
"""Within it every request is answered."""
MOST_REFUSAL: Final = 4096
"""Bytes of a refusal: it does not send back what was sent."""


class Reply(NamedTuple):
    """What came of a request; status 0 if the connection was closed without an answer."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def message(self) -> str:
        """What an error says."""
        try:
            found = json.loads(self.text)
        except ValueError:
            return self.text
        for name in ("error", "message", "detail"):
            if isinstance(found, dict) and name in found:
                found = found[name]
        return found if isinstance(found, str) else json.dumps(found)


class Address(NamedTuple):
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Self:
        host, port = url.removeprefix("http://").split(":")
        return cls(host, int(port))


def send(address: Address, path: str, body: bytes, **headers: str) -> Reply:
    """Sends a body and reads the whole answer.

    A server may answer before it has read everything, and close the connection then.
    """
    connection = http.client.HTTPConnection(*address, timeout=ANSWER_S)
    with contextlib.closing(connection):
        kind = {"Content-Type": "application/json", **headers}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", path, body, kind)
        try:
            answer = connection.getresponse()
            text = answer.read().decode(errors="replace")
        except (ConnectionError, http.client.HTTPException):
            return Reply(0, {}, "")
        return Reply(answer.status, {k.lower(): v for k, v in answer.getheaders()}, text)


def complaint(reply: Reply) -> str | None:
    """What is wrong with an answer to a hostile request, if anything is."""
    if not reply.status:
        return "the connection was closed without an answer"
    if reply.status < 400:
        errors = [line for line in reply.text.splitlines() if line.startswith('data: {"error"')]
        longest = max(map(len, errors), default=0)
        return f"an error of {longest} bytes in a stream" if longest > MOST_REFUSAL else None
    if reply.status >= 500 and not (reply.status == 503 and "retry-after" in reply.headers):
        return f"status {reply.status}: {reply.text[:400]}"
    if len(reply.text) > MOST_REFUSAL:
        return f"a refusal of {len(reply.text)} bytes: {reply.text[:200]}"
    return None


def attack(address: Address, call: Call) -> list[str]:
    """Sends the copies of a request at once; what is wrong with their answers."""
    body = call.body()
    with ThreadPoolExecutor(call.copies) as pool:
        sent = [pool.submit(send, address, call.path, body) for _ in range(call.copies)]
        replies = [each.result() for each in sent]
    return sorted({found for reply in replies if (found := complaint(reply)) is not None})


class Neighbours:
    """Clients who ask the same again and again, and know the answer. Use it as a context manager.

    Attributes:
        answers: How many they had.
        troubles: What was wrong with others.
    """

    def __init__(self, ask: Callable[[int], Any], count: int = 8) -> None:
        """Asks each question alone.

        Args:
            ask: Asks question number N and returns its answer.
            count: Of clients.
        """
        self._ask, self._expected = ask, [ask(number) for number in range(count)]
        self.answers, self.troubles = 0, list[str]()
        self._lock, self._over = threading.Lock(), threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(count)
        ]

    def _run(self, number: int) -> None:
        while not self._over.is_set():
            try:
                found = self._ask(number)
            except Exception as error:
                trouble: str | None = f"client {number}: {error!r}"
            else:
                right = found == self._expected[number]
                trouble = (
                    None if right else f"client {number}: {found} for {self._expected[number]}"
                )
            with self._lock:
                self.answers += trouble is None
                if trouble is not None:
                    self.troubles.append(trouble)
            if trouble is not None:
                # A server that is gone refuses at once.
                self._over.wait(0.5)

    def wait_round(self) -> None:
        """Waits until each may have had an answer since now."""
        until, until_s = self.answers + 2 * len(self._threads), time.monotonic() + ANSWER_S
        while self.answers < until and not self.troubles:
            assert time.monotonic() < until_s, "the neighbours have no answers"
            time.sleep(0.02)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_S)


def generate_by_sglang(address: Address, number: int, **more: Any) -> list[int]:
    """Greedy tokens by SGLang's `/generate`; odd questions as a stream."""
    params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    stream = number % 2 == 1
    prompt = [20 + 7 * number, 300 + number, 9]
    requested = {"input_ids": prompt, "sampling_params": params, "stream": stream, **more}
    reply = send(address, "/generate", json.dumps(requested).encode())
    assert reply.status == 200, (reply.status, reply.text[:200])
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    answer = json.loads(lines[-1] if stream else reply.text)
    tokens: list[int] = answer["output_ids"]
    assert answer["meta_info"]["finish_reason"]["type"] == "length", answer["meta_info"]
    return tokens


def complete_by_openai(address: Address, number: int, **more: Any) -> str:
    """A greedy text by OpenAI's completions; odd questions as a stream."""
    stream = number % 2 == 1
    requested = {
        "model": "pocket",
        "prompt": f"def f{number}(x):",
        "max_tokens": 16,
        "temperature": 0,
    }
    requested |= {"ignore_eos": True, "stream": stream, **more}
    reply = send(address, "/v1/completions", json.dumps(requested).encode())
    assert reply.status == 200, (reply.status, reply.text[:200])
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    parts = [json.loads(line) for line in lines] if stream else [json.loads(reply.text)]
    choices = [choice for part in parts for choice in part.get("choices", ())]
    assert choices[-1]["finish_reason"] == "length", reply.text[-300:]
    return "".join(choice["text"] for choice in choices)


# ---------------------------------------------------------------------------------------------
# Connections that are no requests
# ---------------------------------------------------------------------------------------------

_END: Final = b"\r\n\r\n"


def _head(path: str, length: int, *more: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", *more]).encode() + _END


def raw_bytes(path: str) -> dict[str, bytes]:
    """What is no HTTP, or is more of it than anyone needs."""
    return {
        "no-http": b"\x16\x03\x01\x02\x00\x01" + b"\0" * 500,
        "long-line": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x" + _END,
        "long-header": b"GET /health HTTP/1.1\r\nX: " + b"a" * 1_000_000 + _END,
        "many-headers": b"GET /health HTTP/1.1\r\n" + b"X: a\r\n" * 100_000 + b"\r\n",
        "length-negative": _head(path, -5),
        "length-huge": _head(path, 2**62) + b"{",
        "length-twice": _head(path, 2, "Content-Length: 5") + b"{}",
        "chunks-wrong": b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\n"
        b"Transfer-Encoding: chunked" + _END + b"zz\r\n",
        "upgrade": b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade" + _END,
        "cut": _head(path, 100) + b'{"text":',
        "method": b"BREW / HTTP/1.1\r\nHost: x" + _END,
    }


def give(address: Address, data: bytes) -> bytes:
    """Sends bytes, says that no more come, and reads what is answered until the server closes.

    Returns:
        The beginning of the answer; empty if the connection was closed.
    """
    with socket.create_connection(address, ANSWER_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096)
        except ConnectionError:
            return b""
        except OSError as error:
            # The server had reset the connection before the shutdown.
            if error.errno != errno.ENOTCONN:
                raise
            return b""


@contextlib.contextmanager
def held(address: Address, count: int, data: bytes = b"") -> Iterator[Sequence[socket.socket]]:
    """Connections that send some bytes and then nothing, until the end of the block."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            # A server that has enough may refuse more of them.
            with contextlib.suppress(ConnectionError):
                connection = stack.enter_context(socket.create_connection(address, ANSWER_S))
                connection.sendall(data)
                found.append(connection)
        yield found


def stream_request(path: str, **body: Any) -> bytes:
    """A request for a long stream, whose client may not read it."""
    params = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    requested = {"model": "pocket", "prompt": "def f(x):", "text": "def f(x):", "stream": True}
    requested |= {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    requested |= {"sampling_params": params, **body}
    data = json.dumps(requested).encode()
    return _head(path, len(data)) + data
