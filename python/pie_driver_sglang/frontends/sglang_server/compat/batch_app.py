"""Batches in SGLang's HTTP application: their endpoints, and what runs them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import httpx
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import ServerStatus

from pie_driver_sglang.frontends.batches.input_lines import ENDPOINTS
from pie_driver_sglang.frontends.batches.line_requests import Application, LineResponse
from pie_driver_sglang.frontends.batches.line_slots import LineSlots
from pie_driver_sglang.frontends.sglang_server.access import App
from pie_driver_sglang.frontends.sglang_server.batch_endpoints import SERVICE, add_routes
from pie_driver_sglang.frontends.sglang_server.batch_service import (
    BatchService,
    InteractiveRequests,
    lowest_priority,
)
from pie_driver_sglang.shared_names import TOKEN_VARIABLE

_EMBEDDINGS: Final = "/v1/embeddings"
_STORAGE: Final = "sglang_storage"
"""The folder of files where `--file-storage-path` names none: the default of SGLang 0.5.17."""
STOPPED: Final = "pie_stopped"
"""Attribute of the application's state: a `Future` that is done when it stops serving."""


def with_batches(app: Any, guarded: App, config: Callable[[], Any]) -> App:
    """Add the endpoints of files and batches, and run batches while the application serves.

    Args:
        app: SGLang's application.
        guarded: The same with authentication.
        config: Returns the server's `HttpConfig`, once it has started.
    """
    add_routes(app)
    counter = InteractiveRequests(guarded)
    lifespan = app.router.lifespan_context
    stopped = Future[None]()
    setattr(app.state, STOPPED, stopped)

    @contextlib.asynccontextmanager
    async def run(started: Any) -> AsyncIterator[Any]:
        async with lifespan(started) as state, _resolving(stopped):
            manager = http_server.get_global_state().tokenizer_manager
            settings = manager.server_args
            limits = config().settings.batches
            slots = LineSlots(limits.batch_concurrency, lambda: counter.count)
            service = BatchService(
                Path(settings.file_storage_path or _STORAGE),
                os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(8),
                limits,
                application(guarded, manager, config().keys.warm_up),
                slots,
                served_endpoints(manager),
                lambda: manager.server_status is ServerStatus.Up,
            )
            setattr(app.state, SERVICE, service)
            manager.before_exit = service.stop
            service.start()
            try:
                yield state
            finally:
                await service.stop()

    app.router.lifespan_context = run
    return counter


@contextlib.asynccontextmanager
async def _resolving(stopped: Future[None]) -> AsyncIterator[None]:
    """Ends the warm-up, for which SGLang's shutdown waits, also if the application fails."""
    try:
        yield
    finally:
        stopped.set_result(None)


def served_endpoints(manager: Any) -> tuple[str, ...]:
    """The endpoints of batches that a model serves."""
    return tuple(each for each in ENDPOINTS if (each != _EMBEDDINGS) == manager.is_generation)


def application(app: App, manager: Any, token: str) -> Application:
    """Sends requests to the application in this process, as a client with its key would.

    Args:
        app: The application with authentication.
        manager: SGLang's tokenizer manager.
        token: A key that the application accepts.
    """
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://batch")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    priority = lowest_priority(manager.server_args)

    async def send(url: str, body: dict[str, Any]) -> LineResponse:
        request = {name: value for name, value in body.items() if name != "priority"}
        if priority is not None:
            request["priority"] = priority
        response = await client.post(url, content=json.dumps(request), headers=headers)
        return LineResponse(response.status_code, response.content)

    return Application(send, manager.abort_request)
