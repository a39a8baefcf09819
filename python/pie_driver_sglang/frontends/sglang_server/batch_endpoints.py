"""OpenAI's endpoints of files and batches."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import sqlite3
from collections.abc import Callable, Mapping
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, JSONResponse
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect

from pie_driver_sglang.errors import ConfigError, DriverError, invalid_value, quoted, reason
from pie_driver_sglang.frontends.batches.batch_records import (
    Batch,
    BatchStatus,
    StoredFile,
    is_text,
    new_batch,
)
from pie_driver_sglang.frontends.batches.batch_store import BatchStore, StoreLimitError
from pie_driver_sglang.frontends.batches.input_lines import ENDPOINTS
from pie_driver_sglang.frontends.sglang_server.batch_service import BatchService, require_store

logger = logging.getLogger(__name__)

SERVICE: Final = "pie_batches"
"""The attribute of `app.state` with the `BatchService`."""
PURPOSES: Final = ("batch", "assistants", "evals", "fine-tune", "user_data", "vision")
_CHUNK: Final = 1 << 20
_MOST_NAME: Final = 256
_MOST_FILES: Final = 10_000
_MOST_BATCHES: Final = 100
_WINDOW: Final = re.compile(r"(\d{1,9})([smhd])")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_MOST_WINDOW_S: Final = 30 * _UNITS["d"]
_EXPIRES_S: Final = range(_UNITS["h"], _MOST_WINDOW_S + 1)
_BATCH_FIELDS: Final = {
    "completion_window",
    "endpoint",
    "input_file_id",
    "metadata",
    "output_expires_after",
}
_ENDED: Final = "it is {}, only a batch that is validating or in_progress can be cancelled"
_CANCELLABLE: Final = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


async def create_file(request: Request) -> JSONResponse:
    """Store an uploaded file."""
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise _bad("the body is not multipart/form-data: send a form with `file` and `purpose`")
    try:
        form = await request.form(max_files=1, max_fields=16)
    except StarletteHTTPException as error:
        raise _bad(f"the form cannot be read: {error.detail}") from error
    except ClientDisconnect as error:
        raise _bad("the client disconnected before the file was complete") from error
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            raise _bad("the form has no `file`: send one as multipart/form-data")
        if purpose not in PURPOSES:
            raise _bad(f"`purpose` is {quoted(purpose)}, expected one of {', '.join(PURPOSES)}")
        after = {
            name: form.get(f"expires_after[{name}]")
            for name in ("anchor", "seconds")
            if f"expires_after[{name}]" in form
        }
        expires_s = _expires_s("expires_after", after or None)
        store = require_store(await _store(request, create=True))
        name = (file.filename or "upload")[:_MOST_NAME]
        if not is_text(name):
            raise _bad(f"the file's name is {quoted(name)}, expected Unicode text")
        most = _service(request).limits.max_stored_bytes
        record = await asyncio.to_thread(_write, store, file, name, str(purpose), expires_s, most)
    finally:
        await form.close()
    return JSONResponse(record.as_object())


def _write(
    store: BatchStore,
    file: UploadFile,
    name: str,
    purpose: str,
    expires_s: int | None,
    most: int,
) -> StoredFile:
    """Copy an upload from its temporary file into the folder, within the limit of stored bytes."""
    try:
        store.require_space(file.size or 0, most)
        with store.new_file(name, purpose, expires_s, most) as writer:
            while data := file.file.read(_CHUNK):
                writer.write(data)
    except StoreLimitError as error:
        raise HTTPException(507, error.with_hint) from error
    return writer.record


async def list_files(request: Request) -> JSONResponse:
    """List files."""
    query = request.query_params
    limit = _limit(query, _MOST_FILES, _MOST_FILES)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _bad(f"`order` is {quoted(order)}, expected asc or desc")
    found: list[StoredFile] = []
    if (store := await _store(request)) is not None:
        found = await asyncio.to_thread(
            store.list_files,
            query.get("purpose"),
            query.get("after"),
            limit + 1,
            newest_first=order == "desc",
        )
    return _page(found, limit)


async def retrieve_file(request: Request, file_id: str) -> JSONResponse:
    """Describe a file."""
    _, record = await _file(request, file_id)
    return JSONResponse(record.as_object())


async def file_content(request: Request, file_id: str) -> FileResponse:
    """Send the content of a file."""
    store, record = await _file(request, file_id)
    media_type = "application/octet-stream"
    return FileResponse(store.path_of(file_id), media_type=media_type, filename=record.filename)


async def delete_file(request: Request, file_id: str) -> JSONResponse:
    """Delete a file, unless a batch reads it."""
    store, _ = await _file(request, file_id)
    try:
        await asyncio.to_thread(store.delete_file, file_id)
    except ConfigError as error:
        raise HTTPException(409, error.with_hint) from error
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})


async def create_batch(request: Request) -> JSONResponse:
    """Begin a batch; its input is validated afterwards."""
    service = _service(request)
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise _bad(f"the body is not JSON: {reason(error)}") from error
    if not isinstance(body, dict):
        raise _bad(f"the body is {quoted(body)}, expected an object")
    for name in sorted(body.keys() - _BATCH_FIELDS):
        raise _bad(f"`{quoted(name)[1:-1]}` is not a parameter of a batch: remove it")
    endpoint, file_id = body.get("endpoint"), body.get("input_file_id")
    if endpoint not in ENDPOINTS:
        raise _bad(f"`endpoint` is {quoted(endpoint)}, expected one of {', '.join(ENDPOINTS)}")
    if endpoint not in service.endpoints:
        raise _bad(f"`endpoint` is {endpoint}, this model serves {', '.join(service.endpoints)}")
    window, window_s = _window(body.get("completion_window"))
    metadata = _metadata(body.get("metadata"))
    expires_s = _expires_s("output_expires_after", body.get("output_expires_after"))
    if not isinstance(file_id, str) or not is_text(file_id):
        raise _bad(f"`input_file_id` is {quoted(file_id)}, expected the id of an uploaded file")
    store, file = await _file(request, file_id, 400)
    if file.purpose != "batch":
        raise _bad(
            f"the file {file_id} has the purpose {quoted(file.purpose)}: upload it with 'batch'"
        )
    batch = new_batch(
        file_id, endpoint, window, window_s, metadata=metadata, output_expires_s=expires_s
    )
    try:
        await asyncio.to_thread(store.add_batch, batch)
    except StoreLimitError as error:
        raise HTTPException(429, error.with_hint) from error
    service.wake()
    return JSONResponse(batch.as_object())


async def list_batches(request: Request) -> JSONResponse:
    """List batches, the newest first."""
    limit = _limit(request.query_params, 20, _MOST_BATCHES)
    found: list[Batch] = []
    if (store := await _store(request)) is not None:
        after = request.query_params.get("after")
        found = await asyncio.to_thread(store.list_batches, after, limit + 1)
    return _page(found, limit)


async def retrieve_batch(request: Request, batch_id: str) -> JSONResponse:
    """Describe a batch."""
    _, batch = await _batch(request, batch_id)
    return JSONResponse(batch.as_object())


async def cancel_batch(request: Request, batch_id: str) -> JSONResponse:
    """Cancel a batch; the results that are there stay."""
    store, _ = await _batch(request, batch_id)
    cancelling = BatchStatus.CANCELLING
    is_moved = await asyncio.to_thread(store.move, batch_id, _CANCELLABLE, cancelling)
    batch = await asyncio.to_thread(store.batch, batch_id)
    if not is_moved and batch.status not in (cancelling, BatchStatus.CANCELLED):
        raise HTTPException(409, f"{batch_id} is not cancelled: {_ENDED.format(batch.status)}")
    _service(request).wake()
    return JSONResponse(batch.as_object())


ROUTES: Final[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
    ("POST", "/v1/files", create_file),
    ("GET", "/v1/files", list_files),
    ("GET", "/v1/files/{file_id}", retrieve_file),
    ("GET", "/v1/files/{file_id}/content", file_content),
    ("DELETE", "/v1/files/{file_id}", delete_file),
    ("POST", "/v1/batches", create_batch),
    ("GET", "/v1/batches", list_batches),
    ("GET", "/v1/batches/{batch_id}", retrieve_batch),
    ("POST", "/v1/batches/{batch_id}/cancel", cancel_batch),
)
"""Method, path and handler."""


def add_routes(app: FastAPI) -> None:
    """Add the endpoints to an application."""
    for method, path, handler in ROUTES:
        app.add_api_route(path, _with_errors(handler), methods=[method], response_model=None)


def _with_errors(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that answers errors of the store in one line."""

    @functools.wraps(handler)
    async def handle(*arguments: Any, **given: Any) -> Any:
        try:
            return await handler(*arguments, **given)
        except ConfigError as error:
            raise _bad(error.with_hint) from error
        except (DriverError, OSError, sqlite3.Error) as error:
            logger.warning("%s failed: %s", handler.__name__, error)
            text = error.with_hint if isinstance(error, DriverError) else reason(error)
            raise HTTPException(503, f"files cannot be read or stored: {text}") from error

    return handle


def _service(request: Request) -> BatchService:
    found: BatchService = getattr(request.app.state, SERVICE)
    return found


async def _store(request: Request, *, create: bool = False) -> BatchStore | None:
    return await _service(request).open_store(create=create)


async def _file(request: Request, file_id: str, status: int = 404) -> tuple[BatchStore, StoredFile]:
    store = await _store(request)
    found = None if store is None else await asyncio.to_thread(store.find_file, file_id)
    if store is None or found is None:
        raise HTTPException(
            status, f"there is no file {quoted(file_id)}: `GET /v1/files` lists them"
        )
    return store, found


async def _batch(request: Request, batch_id: str) -> tuple[BatchStore, Batch]:
    store = await _store(request)
    found = None if store is None else await asyncio.to_thread(store.find_batch, batch_id)
    if store is None or found is None:
        text = f"there is no batch {quoted(batch_id)}: `GET /v1/batches` lists them"
        raise HTTPException(404, text)
    return store, found


def _bad(text: str) -> HTTPException:
    return HTTPException(400, text)


def _page(found: list[Any], limit: int) -> JSONResponse:
    """A page of a list, of which one more than `limit` was read."""
    data = [each.as_object() for each in found[:limit]]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else None,
            "last_id": data[-1]["id"] if data else None,
            "has_more": len(found) > limit,
        }
    )


def _limit(query: Mapping[str, str], default: int, most: int) -> int:
    text = query.get("limit", str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise _bad(f"`limit` is {quoted(text)}, expected 1 to {most}")
    return int(text)


def _window(value: Any) -> tuple[str, int]:
    found = _WINDOW.fullmatch(value) if isinstance(value, str) else None
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= _MOST_WINDOW_S:
        raise _bad(
            f"`completion_window` is {quoted(value)}, expected a number with s, m, h or d, up to "
            "30d, as 24h"
        )
    return str(value), seconds


def _metadata(value: Any) -> str | None:
    """The JSON of metadata within OpenAI's limits."""
    if value is None:
        return None
    is_valid = (
        isinstance(value, dict)
        and len(value) <= 16
        and all(len(name) <= 64 for name in value)
        and all(isinstance(each, str) and len(each) <= 512 for each in value.values())
        and all(map(is_text, (*value, *value.values())))
    )
    if not is_valid:
        raise _bad(
            f"`metadata` is {quoted(value)}, expected up to 16 names of 64 characters with "
            "Unicode texts of 512"
        )
    return json.dumps(value)


def _expires_s(name: str, value: Any) -> int | None:
    """The seconds after which a file is deleted; None for never."""
    if value is None:
        return None
    seconds = value.get("seconds") if isinstance(value, Mapping) else None
    anchor = value.get("anchor") if isinstance(value, Mapping) else None
    if isinstance(seconds, str) and re.fullmatch(r"[0-9]{1,9}", seconds):
        # From a form.
        seconds = int(seconds)
    is_number = isinstance(seconds, int) and not isinstance(seconds, bool)
    if anchor != "created_at" or not is_number or seconds not in _EXPIRES_S:
        expected = f"anchor 'created_at' and {_EXPIRES_S.start} to {_EXPIRES_S.stop - 1} seconds"
        raise _bad(str(invalid_value(f"`{name}`", value, expected)))
    return seconds
