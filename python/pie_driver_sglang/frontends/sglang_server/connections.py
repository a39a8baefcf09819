"""HTTP connections with limits: what uvicorn's protocol leaves to a proxy in front of it.

uvicorn waits for headers and bodies without a limit, keeps what it is sent, and lets connections
add up. Here a client that is slow, silent or greedy is answered 408, 413, 431 or 503 and closed, or
makes room for the next one; see `ConnectionLimits` for each limit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pie_driver_sglang.config.http_limits import ConnectionLimits
from pie_driver_sglang.frontends.sglang_server.error_responses import error_body

logger = logging.getLogger(__name__)

_LINGER_S: Final = 5.0
"""How long a refused client may go on sending: a reset would take its answer from it."""
_BODY_STEP: Final = 64 << 10
_RETRY_S: Final = 1


class ServerUsage:
    """What the connections of a server hold together.

    Attributes:
        body_bytes: Bytes of bodies whose requests have no complete response.
        waiting: Connections that have no request, the one that waits longest first.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self.body_bytes = 0
        self.waiting: dict[LimitedProtocol, None] = {}


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with limits."""

    def __init__(
        self, *arguments: Any, limits: ConnectionLimits, usage: ServerUsage, **keywords: Any
    ) -> None:
        """Takes what uvicorn's takes, and the limits of the server."""
        super().__init__(*arguments, **keywords)
        self._limits, self._usage = limits, usage
        self._head_bytes = 0
        self._body_bytes = 0
        self._held_bytes = 0
        self._reads_head = True
        self._reads_body = False
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Takes a connection: where there are too many, that of an idle one."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            oldest = next(iter(self._usage.waiting), None)
            if oldest is None:
                most = self._limits.max_connections
                self._refuse(503, f"{most} connections are in use, all that this server allows")
                return
            oldest.drop()
        self._usage.waiting[self] = None
        self._arm(self._limits.header_timeout_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Gives up what the connection holds."""
        self._release()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Reads what has come, unless the connection is refused already."""
        if self._is_refused:
            return
        if self._reads_head:
            if self._timer is None and (self.cycle is None or self.cycle.response_complete):
                # The first bytes of another request on this connection.
                self._arm(self._limits.header_timeout_s, self._head_is_late)
            self._head_bytes += len(data)
        super().data_received(data)
        if self._reads_head and self._head_bytes > self._limits.max_header_bytes:
            self._refuse_head()

    def on_headers_complete(self) -> None:
        """Starts a request whose head is complete, if its body may come."""
        if self._is_refused:
            return
        self._reads_head, self._body_bytes = False, 0
        self._usage.waiting.pop(self, None)
        self._cancel_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if size > self._limits.max_header_bytes:
            self._refuse_head()
        elif int(declared) > self._limits.max_body_bytes:
            self._refuse_body()
        else:
            super().on_headers_complete()
            self._reads_body = True
            self._watch_body(0)

    def on_body(self, body: bytes) -> None:
        """Takes a part of a body, within the limits of the request and of the server."""
        if self._is_refused:
            return
        self._body_bytes += len(body)
        if not self.cycle.response_complete:
            self._held_bytes += len(body)
            self._usage.body_bytes += len(body)
        if self._body_bytes > self._limits.max_body_bytes:
            self._refuse_body()
        elif self._usage.body_bytes > self._limits.max_buffered_bytes:
            most = self._limits.max_buffered_bytes
            self._refuse(503, f"the bodies of open requests have {most} bytes, all that they may")
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Ends a request's body; the next bytes are another head."""
        if self._is_refused:
            return
        self._cancel_timer()
        self._reads_head, self._reads_body, self._head_bytes = True, False, 0
        super().on_message_complete()
        self._rest()

    def on_response_complete(self) -> None:
        """Frees what a request held; the connection waits for the next one."""
        super().on_response_complete()
        self._rest()

    def _rest(self) -> None:
        """Has the connection count as idle, if it is."""
        if self.cycle is None or not self.cycle.response_complete or self.pipeline:
            return
        self._free_body()
        if self._reads_head and not self._is_refused and not self.transport.is_closing():
            self._usage.waiting[self] = None

    def handle_websocket_upgrade(self) -> None:
        """Hands the connection over to uvicorn's protocol for WebSockets."""
        self._release()
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        """Called when the client does not read: it may do so for some time."""
        super().pause_writing()
        if self._write_timer is None:
            limit = self._limits.write_timeout_s
            self._write_timer = self.loop.call_later(limit, self.drop)

    def resume_writing(self) -> None:
        """Called when the client has read."""
        super().resume_writing()
        self._cancel_write_timer()

    def _watch_body(self, before: int) -> None:
        """Has the rest of a body come in time, a step at least in each span."""

        def look() -> None:
            # Reading is paused where the server is the one that is slow.
            if not self.flow.read_paused and self._body_bytes - before < _BODY_STEP:
                limit = self._limits.body_timeout_s
                self._refuse(408, f"less than 64 KiB of the body came in {limit:g} s")
            else:
                self._watch_body(self._body_bytes)

        self._arm(self._limits.body_timeout_s, look)

    def _head_is_late(self) -> None:
        limit = self._limits.header_timeout_s
        self._refuse(408, f"the request's headers did not come in {limit:g} s")

    def _refuse_head(self) -> None:
        most = self._limits.max_header_bytes
        self._refuse(
            431,
            f"the headers have more than {most} bytes: send less, or start the server with a "
            "larger `--max-header-bytes`",
        )

    def _refuse_body(self) -> None:
        most = self._limits.max_body_bytes
        self._refuse(
            413,
            f"the body has more than {most} bytes: send less, or start the server with a larger "
            "`--max-body-bytes`",
        )

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error, reads no more, and closes the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._release()
        if (cycle := self.cycle) is not None and (self._reads_body or not cycle.response_complete):
            if cycle.response_started or self.pipeline:
                # There is no place for an answer among the others.
                self.transport.abort()
                return
            # Its handler learns that the client is gone.
            cycle.disconnected = True
            cycle.message_event.set()
        body = error_body(status, message)
        retry = b"retry-after: %d\r\n" % _RETRY_S if status == 503 else b""
        self.flow.resume_reading()
        self.transport.write(
            STATUS_LINE[status]
            + retry
            + b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
            % len(body)
            + body
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._arm(_LINGER_S, self.drop)
        logger.debug("a connection is answered %d: %s", status, message)

    def drop(self) -> None:
        """Closes the connection, and frees what its request has taken."""
        self._release()
        if not self.transport.is_closing():
            self.transport.abort()

    def _release(self) -> None:
        """Gives up what the connection has of the server's."""
        self._usage.waiting.pop(self, None)
        self._free_body()
        self._cancel_timer()

    def _free_body(self) -> None:
        self._usage.body_bytes -= self._held_bytes
        self._held_bytes = 0

    def _arm(self, seconds: float, action: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, action)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
