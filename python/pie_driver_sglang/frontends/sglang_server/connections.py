"""HTTP connections with limits, which uvicorn leaves to a reverse proxy.

uvicorn has no timeouts for headers and bodies, and no limits on their size and on connections. Here
a client beyond a limit (`ConnectionLimits`) is answered 408, 413, 431 or 503 and disconnected; idle
connections are closed to admit new ones.
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
"""How long a rejected client may continue sending: a reset would discard its response."""
_BODY_STEP: Final = 64 << 10
UPLOAD_PATH: Final = b"/v1/files"
_RETRY_S: Final = 1


class ServerUsage:
    """Totals over the connections of a server.

    Attributes:
        body_bytes: Bytes of bodies whose requests have no complete response.
        upload_bytes: The same of uploads, which are on disk.
        waiting: Idle connections, the longest idle one first.
    """

    def __init__(self) -> None:
        """No connections."""
        self.body_bytes = self.upload_bytes = 0
        self.waiting: dict[LimitedProtocol, None] = {}


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with limits."""

    def __init__(
        self, *arguments: Any, limits: ConnectionLimits, usage: ServerUsage, **keywords: Any
    ) -> None:
        """As uvicorn's, with the limits of the server."""
        super().__init__(*arguments, **keywords)
        self._limits, self._usage = limits, usage
        self._head_bytes = 0
        self._body_bytes = 0
        self._held_bytes = self._held_upload_bytes = 0
        self._reads_head = True
        self._reads_body = False
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Accept a connection; beyond the limit, close the longest idle one."""
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
        """Release the connection's resources."""
        self._release()
        self._cancel_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data, unless the connection is rejected."""
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
        """Start a request whose headers are complete, if their sizes are within the limits."""
        if self._is_refused:
            return
        self._reads_head, self._body_bytes = False, 0
        self._usage.waiting.pop(self, None)
        self._cancel_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if size > self._limits.max_header_bytes:
            self._refuse_head()
        elif int(declared) > self._most_body_bytes:
            self._refuse_body()
        else:
            super().on_headers_complete()
            self._reads_body = True
            self._watch_body(0)

    def on_body(self, body: bytes) -> None:
        """Read a part of a body, within the limits of the request and of the server."""
        if self._is_refused:
            return
        self._body_bytes += len(body)
        if not self.cycle.response_complete:
            self._hold_body(len(body))
        # One upload of any allowed size is admitted.
        limits = self._limits
        most_uploads = max(limits.max_buffered_bytes, limits.max_file_bytes)
        if self._body_bytes > self._most_body_bytes:
            self._refuse_body()
        elif not self._is_upload and self._usage.body_bytes > limits.max_buffered_bytes:
            most = limits.max_buffered_bytes
            self._refuse(503, f"the bodies of open requests have {most} bytes, all that they may")
        elif self._is_upload and self._usage.upload_bytes > most_uploads:
            self._refuse(
                503,
                f"the open uploads have {most_uploads} bytes, all that they may: upload again "
                "later, or start the server with a larger `--max-buffered-bytes`",
            )
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request's body; other headers follow."""
        if self._is_refused:
            return
        self._cancel_timer()
        self._reads_head, self._reads_body, self._head_bytes = True, False, 0
        super().on_message_complete()
        self._mark_idle()

    def on_response_complete(self) -> None:
        """Release a request's body; the connection becomes idle."""
        super().on_response_complete()
        self._mark_idle()

    def _mark_idle(self) -> None:
        """Count the connection as idle, if it is."""
        if self.cycle is None or not self.cycle.response_complete or self.pipeline:
            return
        self._free_body()
        if self._reads_head and not self._is_refused and not self.transport.is_closing():
            self._usage.waiting[self] = None

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to uvicorn's WebSocket protocol."""
        self._release()
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        """Start the timeout of a client that does not read."""
        super().pause_writing()
        if self._write_timer is None:
            limit = self._limits.write_timeout_s
            self._write_timer = self.loop.call_later(limit, self.drop)

    def resume_writing(self) -> None:
        """Stop that timeout."""
        super().resume_writing()
        self._cancel_write_timer()

    def _watch_body(self, before: int) -> None:
        """Require `_BODY_STEP` bytes of the body in each timeout."""

        def look() -> None:
            # Reading is paused where the server is slow.
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

    @property
    def _is_upload(self) -> bool:
        """Whether the body is a file, which goes to disk."""
        return bool(self.url.partition(b"?")[0] == UPLOAD_PATH)

    @property
    def _most_body_bytes(self) -> int:
        return self._limits.max_file_bytes if self._is_upload else self._limits.max_body_bytes

    def _refuse_body(self) -> None:
        flag = "--max-file-bytes" if self._is_upload else "--max-body-bytes"
        self._refuse(
            413,
            f"the body has more than {self._most_body_bytes} bytes: send less, or start the server "
            f"with a larger `{flag}`",
        )

    def _refuse(self, status: int, message: str) -> None:
        """Respond with an error, stop reading, and close the connection."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        self._release()
        if (cycle := self.cycle) is not None and (self._reads_body or not cycle.response_complete):
            if cycle.response_started or self.pipeline:
                # Another response has begun.
                self.transport.abort()
                return
            # The handler sees a disconnect.
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
        """Abort the connection."""
        self._release()
        if not self.transport.is_closing():
            self.transport.abort()

    def _release(self) -> None:
        """Release the connection's share of `ServerUsage`, and its timer."""
        self._usage.waiting.pop(self, None)
        self._free_body()
        self._cancel_timer()

    def _hold_body(self, size: int) -> None:
        if self._is_upload:
            self._held_upload_bytes += size
            self._usage.upload_bytes += size
        else:
            self._held_bytes += size
            self._usage.body_bytes += size

    def _free_body(self) -> None:
        self._usage.body_bytes -= self._held_bytes
        self._usage.upload_bytes -= self._held_upload_bytes
        self._held_bytes = self._held_upload_bytes = 0

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
