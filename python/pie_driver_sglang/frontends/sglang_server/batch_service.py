"""Runs the batches of a storage folder beside the requests of clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.config.http_limits import BatchLimits
from pie_driver_sglang.errors import DriverError, StartError, quoted
from pie_driver_sglang.frontends.batches.batch_runner import BatchRunner
from pie_driver_sglang.frontends.batches.batch_store import BatchStore, is_storage
from pie_driver_sglang.frontends.batches.line_requests import Application
from pie_driver_sglang.frontends.batches.line_slots import LineSlots
from pie_driver_sglang.frontends.batches.storage_lock import LockState, StorageLock
from pie_driver_sglang.frontends.sglang_server.access import App, Receive
from pie_driver_sglang.frontends.sglang_server.error_responses import Send

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_CLEAN_S: Final = 600.0
_RETRY_S: Final = 5.0
_STOP_S: Final = 10.0
_MOST_RUNNERS: Final = 8
"""Batches that run at once, the oldest first; they share the slots."""
_LOWEST: Final = -(1 << 31)
"""The lowest priority that our scheduler accepts."""
_OWN_PATHS: Final = ("/v1/files", "/v1/batches")


class InteractiveRequests:
    """ASGI middleware that counts the open requests of clients."""

    def __init__(self, app: App) -> None:
        """Wrap an application."""
        self._app = app
        self.count = 0

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        """Handle one request."""
        is_counted = (
            scope["type"] == "http"
            and scope["method"] == "POST"
            and not scope["path"].startswith(_OWN_PATHS)
        )
        self.count += is_counted
        try:
            await self._app(scope, receive, send)
        finally:
            self.count -= is_counted


class BatchService:
    """Opens the storage folder when it is needed, and runs its batches.

    Attributes:
        limits: Limits of batches.
        endpoints: The endpoints that the model serves.
    """

    def __init__(
        self,
        folder: Path,
        owner: str,
        limits: BatchLimits,
        app: Application,
        slots: LineSlots,
        endpoints: tuple[str, ...],
        is_up: Callable[[], bool],
    ) -> None:
        """Do nothing yet: the folder is made by the first upload.

        Args:
            folder: The storage folder.
            owner: The same in all workers of this server.
            limits: Limits of batches.
            app: Serves the lines.
            slots: How many lines run at once.
            endpoints: The endpoints that the model serves.
            is_up: Whether the server has answered its first request.
        """
        self.limits, self.endpoints = limits, endpoints
        self._folder, self._app, self._slots, self._is_up = folder, app, slots, is_up
        self._lock = StorageLock(folder, owner)
        self._opening = threading.Lock()
        self._store: BatchStore | None = None
        self._runners: dict[str, BatchRunner] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._cleaned = 0.0
        self._has_warned = self._is_stopping = False

    async def open_store(self, *, create: bool) -> BatchStore | None:
        """The store; None if nothing is stored, unless it is to be created.

        Raises:
            StartError: The folder cannot be used.
            DriverError: Another server uses it.
        """
        return await asyncio.to_thread(self._open, create)

    def _open(self, create: bool) -> BatchStore | None:
        with self._opening:
            if self._store is None:
                if not create and not is_storage(self._folder):
                    return None
                self._store = BatchStore(self._folder)
            if self._lock.acquire() is LockState.REFUSED:
                raise DriverError(
                    f"the files in {quoted(self._folder)} belong to another server, process "
                    f"{self._lock.holder}",
                    "start this server with another `--file-storage-path`",
                )
            return self._store

    def start(self) -> None:
        """Begin to run batches."""
        self._loop_task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Look for new batches at once."""
        self._wake.set()

    async def stop(self) -> None:
        """Abort running lines, which the next start runs again, and release the folder.

        While a batch still writes, the folder stays locked until the process ends.
        """
        self._is_stopping = True
        if self._loop_task is not None:
            self._loop_task.cancel()
        for runner in self._runners.values():
            runner.stop()
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_STOP_S)
        if not self._tasks:
            self._lock.release()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK_S)
            self._wake.clear()
            try:
                if self._is_up():
                    await self._start_runners()
            except Exception as error:
                if not self._has_warned:
                    logger.warning("batches do not run: %s", error)
                    self._has_warned = True

    async def _start_runners(self) -> None:
        store = await self.open_store(create=False)
        if store is None or self._lock.acquire() is not LockState.RUNS:
            return
        now = time.time()
        if now - self._cleaned > _CLEAN_S:
            await asyncio.to_thread(store.delete_expired_files, now)
            self._cleaned = now
        if len(self._runners) >= _MOST_RUNNERS:
            return
        # Those that wait before another start are passed over.
        most = _MOST_RUNNERS + len(self._not_before)
        for batch_id in await asyncio.to_thread(store.open_batches, most):
            if batch_id in self._runners or self._not_before.get(batch_id, 0.0) > now:
                continue
            batch = await asyncio.to_thread(store.batch, batch_id)
            if self._is_stopping or len(self._runners) >= _MOST_RUNNERS:
                break
            lines = self.limits.max_batch_lines
            runner = BatchRunner(store, batch, self._app, self._slots, lines)
            self._runners[batch_id] = runner
            self._tasks[batch_id] = asyncio.create_task(self._run_batch(batch_id, runner))

    async def _run_batch(self, batch_id: str, runner: BatchRunner) -> None:
        try:
            batch = await runner.run()
            counts = f"{batch.completed} completed, {batch.failed} failed of {batch.total}"
            logger.info("%s is %s: %s", batch_id, batch.status, counts)
            is_open = batch.is_open
        except Exception:
            logger.exception("%s stopped, and starts again", batch_id)
            is_open = True
        finally:
            del self._runners[batch_id], self._tasks[batch_id]
        self._not_before.pop(batch_id, None)
        if is_open:
            self._not_before[batch_id] = time.time() + _RETRY_S
        self.wake()


def lowest_priority(settings: Any) -> int | None:
    """The priority of lines; None where requests without one come last, or are all alike.

    Args:
        settings: ``ServerArgs``.
    """
    if not settings.enable_priority_scheduling or settings.default_priority_value is None:
        return None
    return -_LOWEST - 1 if settings.schedule_low_priority_values_first else _LOWEST


def require_store(store: BatchStore | None) -> BatchStore:
    """The store that was created if it was not there.

    Raises:
        StartError: It was not.
    """
    if store is None:
        raise StartError("nothing is stored")
    return store
