"""Sends the request of a line to the server's application, again after transient errors."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import reason
from pie_driver_sglang.frontends.batches.batch_records import LineResult, result_line
from pie_driver_sglang.frontends.batches.input_lines import InputLine

logger = logging.getLogger(__name__)

_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_OVERLOADED: Final = (429, 503)
_MOST_OVERLOADS: Final = 60
"""Attempts at a line while the server is overloaded: about 25 minutes."""
_MOST_FAILURES: Final = 3
"""Attempts at a line that the server fails at."""
_TOO_LONG: Final = b"running timeout"
"""In a response with 503: a second attempt would take as long."""


class LineResponse(NamedTuple):
    """A response of the application: status and body."""

    status: int
    body: bytes


class Application(NamedTuple):
    """The application that serves the lines.

    Attributes:
        send: Sends a request, by URL and body.
        abort: Aborts the request with an id; ignores unknown ids.
    """

    send: Callable[[str, dict[str, Any]], Awaitable[LineResponse]]
    abort: Callable[[str], None]


async def run_line(
    app: Application, line: InputLine, begin: Callable[[str], None], ended: asyncio.Event
) -> LineResult | None:
    """The result of a line; None if the batch ended before it.

    Args:
        app: Serves it.
        line: The line.
        begin: Called with the id of each attempt, by which it can be aborted.
        ended: Set when the batch is cancelled, expired or stopped; a response that comes after
            that may be of an aborted request, and is dropped.
    """
    attempt = 0
    while not ended.is_set():
        attempt += 1
        name = uuid.uuid4().hex
        begin(name)
        response = await _send(app, line, name)
        if ended.is_set():
            return None
        if not _is_transient(response, attempt):
            return _result(line, name, response)
        wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2 ** min(attempt - 1, 10))
        try:
            await asyncio.wait_for(ended.wait(), wait_s)
        except TimeoutError:
            continue
    return None


async def _send(app: Application, line: InputLine, name: str) -> LineResponse:
    try:
        return await app.send(line.url, {**line.body, "rid": name})
    except Exception as error:
        # One line must not hold up the others.
        text = f"the request failed: {type(error).__name__}: {reason(error)}"
        logger.warning("line %d (%s): %s", line.number, line.custom_id, text)
        return LineResponse(500, text.encode(errors="replace"))


def _is_transient(response: LineResponse, attempt: int) -> bool:
    if response.status in _OVERLOADED:
        return attempt < _MOST_OVERLOADS and _TOO_LONG not in response.body
    return response.status >= 500 and attempt < _MOST_FAILURES


def _result(line: InputLine, name: str, response: LineResponse) -> LineResult:
    try:
        body = json.loads(response.body)
    except (ValueError, RecursionError):
        text = response.body.decode(errors="replace")
        body = {"object": "error", "message": text, "code": response.status}
    text = result_line(line.custom_id, name, response.status, body, None)
    return LineResult(line.number, response.status != 200, text)
