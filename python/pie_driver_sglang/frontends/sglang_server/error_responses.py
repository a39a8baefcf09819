"""What SGLang's HTTP answers are held to: the status of a refusal, its headers, its length."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

Send = Callable[[Any], Awaitable[None]]

_MOST_TEXT: Final = 500
"""Characters of an error's text: SGLang's repeat what was sent."""
_MOST_BODY: Final = 4096
"""Bytes of an error."""


def error_body(status: int, message: str) -> bytes:
    """An error as SGLang's server words it."""
    kind = "invalid_request_error" if status < 500 else "server_overloaded"
    error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return json.dumps(error).encode()


def short(text: str) -> str:
    """A text, on one line and cut where it is long."""
    if len(text) <= _MOST_TEXT:
        return text
    # Only the beginning is looked at: a text may have megabytes.
    return " ".join(text[: 2 * _MOST_TEXT].split())[:_MOST_TEXT] + "…"


def short_error(status: int, body: bytes) -> bytes:
    """The body of an error, whose texts are cut where they are long."""
    if len(body) <= _MOST_TEXT:
        return body
    try:
        found = json.dumps(_short(json.loads(body))).encode()
    except (ValueError, RecursionError):
        found = body
    if len(found) <= _MOST_BODY:
        return found
    return error_body(status, short(body[:_MOST_BODY].decode(errors="replace")))


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return short(value)
    if isinstance(value, dict):
        return {key: _short(each) for key, each in value.items()}
    return [_short(each) for each in value] if isinstance(value, list) else value


class ClientAnswer:
    """Sends one answer of an ASGI application as clients are promised it.

    Errors are held until they are whole. The status 501 becomes 400, because what is not
    implemented is the request's choice. 429 and 503 get `Retry-After`.
    """

    def __init__(self, send: Send) -> None:
        """Wraps what sends."""
        self._send, self._start, self._body = send, dict[str, Any](), b""

    async def send(self, message: Any) -> None:
        """Sends a message of the application, or keeps it."""
        kind = message["type"]
        if kind == "http.response.start" and message["status"] >= 400:
            self._start = _promised(message)
        elif kind == "http.response.body" and self._start:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error()
        else:
            await self._send(message)

    async def _send_error(self) -> None:
        start, self._start = self._start, {}
        body = short_error(start["status"], self._body)
        written = dict[bytes, bytes | None]()
        if body != self._body:
            written = {b"content-type": b"application/json", b"content-encoding": None}
        written[b"content-length"] = b"%d" % len(body)
        headers = [
            (name, value)
            for name, old in start.get("headers", ())
            if (value := written.get(name.lower(), old)) is not None
        ]
        await self._send({**start, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _promised(start: dict[str, Any]) -> dict[str, Any]:
    status = 400 if start["status"] == 501 else start["status"]
    headers = list(start.get("headers", ()))
    if status in (429, 503) and not any(name.lower() == b"retry-after" for name, _ in headers):
        headers.append((b"retry-after", b"1"))
    return {**start, "status": status, "headers": headers}
