"""One Prometheus endpoint for the metrics of the runtimes and of smg."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from pie_driver_sglang.errors import StartError, reason
from pie_driver_sglang.observability.engine_metrics import RuntimeExporter

logger = logging.getLogger(__name__)

DEFAULT_METRICS_PORT: Final = 29000
"""smg's default."""
_FETCH_S: Final = 2.0
"""How long a scrape waits for the gateway; Prometheus gives up after ten seconds by default."""
_CLIENT_S: Final = 10.0
"""Timeout of a client; each connection has a thread."""
_FORMAT: Final = "text/plain; version=0.0.4; charset=utf-8"
_PATH: Final = "/metrics"


class MetricsServer:
    """Serves `/metrics` in threads. Use it as a context manager."""

    def __init__(self, exporter: RuntimeExporter, host: str, port: int) -> None:
        """Start to serve the runtimes' metrics.

        Args:
            exporter: Of the runtimes.
            host: Where to listen.
            port: 0 for any.

        Raises:
            StartError: The port is not available.
        """
        from prometheus_client import generate_latest

        registry = exporter.registry()
        self._gateway: str | None = None
        try:
            self._server = _Server(host, port, lambda: generate_latest(registry) + self._fetch())
        except (OSError, OverflowError) as error:
            raise StartError(
                f"the metrics cannot be served at {host}:{port}: {reason(error)}",
                "take another `--prometheus-port`",
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def add_gateway(self, port: int) -> None:
        """Include smg's metrics, from this port of the loopback."""
        self._gateway = f"http://127.0.0.1:{port}{_PATH}"

    def _fetch(self) -> bytes:
        """Smg's metrics; empty while it does not respond."""
        if self._gateway is None:
            return b""
        try:
            with urllib.request.urlopen(self._gateway, timeout=_FETCH_S) as answer:
                text: bytes = answer.read()
        except (OSError, http.client.HTTPException) as error:
            logger.debug("the gateway's metrics cannot be read: %s", reason(error))
            return b""
        return text if text.endswith(b"\n") else text + b"\n"

    def __enter__(self) -> MetricsServer:
        """Return the server."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    def __init__(self, host: str, port: int, text: Callable[[], bytes]) -> None:
        self.text = text
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, port), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_S

    def do_GET(self) -> None:
        if self.path.partition("?")[0].rstrip("/") != _PATH:
            self.send_error(404, f"metrics are at {_PATH}")
            return
        body = self.server.text()
        self.send_response(200)
        self.send_header("Content-Type", _FORMAT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log no scrapes."""
