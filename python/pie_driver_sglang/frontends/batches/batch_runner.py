"""Runs one batch from its present state to its end, or until the process stops.

The state is in the database alone: a runner that is started again, in this process or in another
one, continues with the lines that have no result.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

from pie_driver_sglang.errors import reason
from pie_driver_sglang.frontends.batches.batch_records import Batch, BatchStatus, LineResult
from pie_driver_sglang.frontends.batches.batch_store import BatchStore
from pie_driver_sglang.frontends.batches.input_lines import (
    InputError,
    InputLine,
    Validation,
    read_lines,
    validate,
)
from pie_driver_sglang.frontends.batches.line_requests import Application, run_line
from pie_driver_sglang.frontends.batches.line_slots import LineSlots
from pie_driver_sglang.frontends.batches.output_files import Lines, end_with_files

logger = logging.getLogger(__name__)

MAX_STARTS: Final = 8
"""How often a batch is started without a new result before it fails: one of its lines may end the
server each time."""
_READ_AHEAD: Final = 64
_LOOK_S: Final = 0.25
_RETRY_S: Final = 5.0
_VALIDATING: Final = (BatchStatus.VALIDATING,)
_STARTED: Final = (BatchStatus.IN_PROGRESS,)
_Found = TypeVar("_Found")


class End(enum.Enum):
    """Why no more lines of a batch are run."""

    DONE = "all lines have results"
    CANCELLED = "a client cancelled it"
    EXPIRED = "its completion window is over"
    STOPPED = "the process ends; the next one continues"


class BatchRunner:
    """Runs a batch; its progress may be read meanwhile."""

    def __init__(
        self,
        store: BatchStore,
        batch: Batch,
        app: Application,
        slots: LineSlots,
        max_lines: int | None = None,
        on_results: Callable[[list[LineResult]], None] = lambda _: None,
        end_batch: Callable[[BatchStore, str, Lines], Batch] = end_with_files,
    ) -> None:
        """Do not run it yet.

        Args:
            store: The database.
            batch: The batch.
            app: Serves its lines.
            slots: How many of them run at once, shared by all batches.
            max_lines: The most lines; None for any number.
            on_results: Called with results that were committed.
            end_batch: Writes the output, and sets the final state.
        """
        self._store, self._batch, self._app, self._slots = store, batch, app, slots
        self._max_lines, self._on_results = max_lines, on_results
        self._end_batch = end_batch
        self._path = store.path_of(batch.input_file_id)
        self._end = End.DONE
        self._ended = asyncio.Event()
        self._has_failed = False
        self._open: dict[int, str] = {}
        self._finished: list[LineResult] = []
        self._has_finished = asyncio.Event()

    def stop(self) -> None:
        """Run no more lines, because the process ends."""
        self._end_lines(End.STOPPED)

    async def run(self) -> Batch:
        """Run it to its end; returns the record, which is still open after `stop`."""
        batch = await self._count_start()
        watch = asyncio.create_task(self._watch())
        try:
            if batch.status is BatchStatus.VALIDATING and batch.errors is None:
                batch = await self._validate()
            if batch.status is BatchStatus.IN_PROGRESS and batch.errors is None:
                await self._run_lines()
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        return await self._finish()

    async def _count_start(self) -> Batch:
        """Count this start; a batch with too many of them gets an error, by which it fails."""
        batch = await self._read()
        columns: dict[str, Any] = {"starts": batch.starts + 1}
        if batch.starts >= MAX_STARTS and batch.status in (*_VALIDATING, *_STARTED):
            text = (
                f"the server ended {MAX_STARTS} times while it ran this batch, without a new "
                "result: look for the line that ends it in its log"
            )
            columns["errors"] = _errors_text([InputError("server_error", text)])
        return await self._stored(self._store.update, batch.id, **columns)

    async def _validate(self) -> Batch:
        batch_id = self._batch.id
        try:
            found: Validation = await asyncio.to_thread(
                validate, self._path, self._batch.endpoint, self._max_lines
            )
        except OSError as error:
            text = f"the input file cannot be read: {reason(error)}"
            found = Validation(0, None, None, [InputError("invalid_file", text)])
        after, columns = BatchStatus.IN_PROGRESS, dict[str, Any](total=found.total)
        if found.errors:
            after, columns = BatchStatus.FAILED, {"errors": _errors_text(found.errors)}
        columns["model"] = found.model
        await self._stored(self._store.move, batch_id, _VALIDATING, after, **columns)
        return await self._read()

    async def _run_lines(self) -> None:
        """Run the lines without results, and commit those as they come."""
        known = await self._stored(self._store.lines_with_results, self._batch.id)
        lines = (line for line in read_lines(self._path) if line.number not in known)
        committer = asyncio.create_task(self._commit_results())
        tasks: set[asyncio.Task[None]] = set()
        try:
            while group := await asyncio.to_thread(_take, lines):
                for line in group:
                    if not await self._acquire():
                        return
                    task = asyncio.create_task(self._run_line(line))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
        finally:
            while tasks:
                await asyncio.wait(tasks, timeout=_LOOK_S)
                if self._ended.is_set():
                    # Those that had not reached the scheduler at the first call.
                    self._abort_open()
            self._finished.append(_LAST)
            self._has_finished.set()
            await committer

    async def _acquire(self) -> bool:
        """Wait for a slot; False if no more lines are to be run."""
        if self._ended.is_set():
            return False
        slot = asyncio.ensure_future(self._slots.acquire())
        ended = asyncio.ensure_future(self._ended.wait())
        await asyncio.wait((slot, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not self._ended.is_set():
            return True
        if slot.done():
            self._slots.release()
        slot.cancel()
        return False

    async def _run_line(self, line: InputLine) -> None:
        def begin(name: str) -> None:
            self._open[line.number] = name

        result = None
        try:
            result = await run_line(self._app, line, begin, self._ended)
        except Exception:
            # It has no result, so that the batch stays open; the next start runs it again.
            logger.exception("line %d of %s failed", line.number, self._batch.id)
            self._has_failed = True
            self._end_lines(End.STOPPED)
        finally:
            self._open.pop(line.number, None)
            if result is None:
                self._slots.release()
        if result is not None:
            self._finished.append(result)
            self._has_finished.set()

    async def _commit_results(self) -> None:
        """Commit finished lines, all that there are at a time; then their slots are free."""
        is_last = False
        while not is_last:
            await self._has_finished.wait()
            self._has_finished.clear()
            group, self._finished = self._finished, []
            is_last = bool(group) and group[-1] is _LAST
            results = [result for result in group if result is not _LAST]
            if results:
                await self._stored(self._store.add_results, self._batch.id, results)
                self._on_results(results)
            for _ in results:
                self._slots.release()

    async def _watch(self) -> None:
        """End the lines of a batch that is cancelled or too late."""
        while not self._ended.is_set():
            with contextlib.suppress(sqlite3.Error):
                batch = await asyncio.to_thread(self._store.batch, self._batch.id)
                if batch.status is BatchStatus.CANCELLING:
                    self._end_lines(End.CANCELLED)
                elif time.time() >= batch.expires_at:
                    self._end_lines(End.EXPIRED)
            await asyncio.sleep(_LOOK_S)

    def _end_lines(self, end: End) -> None:
        if not self._ended.is_set():
            self._end = end
            self._ended.set()
            self._abort_open()

    def _abort_open(self) -> None:
        for name in list(self._open.values()):
            self._app.abort(name)

    async def _finish(self) -> Batch:
        """Bring a batch without running lines to its final state, unless it was stopped."""
        batch = await self._read()
        if self._end is End.STOPPED and not self._has_failed:
            # This process ends of itself: no line is to blame.
            return await self._stored(self._store.update, batch.id, starts=0)
        if not batch.is_open or self._end is End.STOPPED:
            return batch
        # The last results may have come as the window ended.
        is_done = self._end is End.DONE or batch.completed + batch.failed == batch.total
        if is_done and batch.errors is None and batch.status is BatchStatus.IN_PROGRESS:
            await self._stored(self._store.move, batch.id, _STARTED, BatchStatus.FINALIZING)
        # An input that was not validated may have any content.
        lines: Lines = tuple if batch.in_progress_at is None else partial(read_lines, self._path)
        return await self._stored(self._end_batch, self._store, batch.id, lines)

    async def _read(self) -> Batch:
        return await self._stored(self._store.batch, self._batch.id)

    async def _stored(self, call: Callable[..., _Found], *arguments: Any, **given: Any) -> _Found:
        """Call the database in a thread, again while it fails, for example on a full disk."""
        while True:
            try:
                return await asyncio.to_thread(call, *arguments, **given)
            except (OSError, sqlite3.Error) as error:
                logger.error(
                    "%s cannot be stored, tried again in %g s: %s",
                    self._batch.id,
                    _RETRY_S,
                    reason(error),
                )
                if self._end is End.STOPPED:
                    raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped(), _RETRY_S)

    async def _stopped(self) -> None:
        """Wait until `stop`."""
        while self._end is not End.STOPPED:
            await asyncio.sleep(_LOOK_S)


_LAST: Final = LineResult(0, False, "")
"""Ends the committer."""


def _errors_text(errors: list[InputError]) -> str:
    return json.dumps([error._asdict() for error in errors])


def _take(lines: Iterator[InputLine]) -> list[InputLine]:
    return list(islice(lines, _READ_AHEAD))
