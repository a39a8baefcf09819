"""Error responses of the HTTP server: status, headers and length."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final

Send = Callable[[Any], Awaitable[None]]

_MOST_TEXT: Final = 500
"""Characters of an error's text: SGLang repeats the request in it."""
_MOST_BODY: Final = 4096
"""Bytes of an error body."""


def error_body(status: int, message: str) -> bytes:
    """An error in the format of SGLang's server."""
    kind = "invalid_request_error" if status < 500 else "server_overloaded"
    error = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return json.dumps(error).encode()


def short(text: str) -> str:
    """A text, truncated and on one line where it is long."""
    if len(text) <= _MOST_TEXT:
        return text
    # Only the beginning is read: a text may have megabytes.
    return " ".join(text[: 2 * _MOST_TEXT].split())[:_MOST_TEXT] + "…"


def short_error(status: int, body: bytes) -> bytes:
    """The body of an error with long texts truncated."""
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


class ErrorSender:
    """Sends one response of an ASGI application, and rewrites errors.

    Long texts are truncated. The status 501 becomes 400, because the request asked for what is not
    implemented. 429 and 503 get `Retry-After`.
    """

    def __init__(self, send: Send) -> None:
        """Wrap an ASGI `send`."""
        self._send, self._start, self._body = send, dict[str, Any](), b""

    async def send(self, message: Any) -> None:
        """Send a message, or buffer it if it belongs to an error."""
        kind = message["type"]
        if kind == "http.response.start" and message["status"] >= 400:
            self._start = _error_start(message)
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


def _error_start(start: dict[str, Any]) -> dict[str, Any]:
    status = 400 if start["status"] == 501 else start["status"]
    headers = list(start.get("headers", ()))
    if status in (429, 503) and not any(name.lower() == b"retry-after" for name, _ in headers):
        headers.append((b"retry-after", b"1"))
    return {**start, "status": status, "headers": headers}
