"""Assembles the output files of a batch from its committed results, and ends it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Final

from pie_driver_sglang.frontends.batches.batch_records import (
    Batch,
    BatchStatus,
    LineResult,
    StoredFile,
    result_line,
)
from pie_driver_sglang.frontends.batches.batch_store import BatchStore, FileWriter
from pie_driver_sglang.frontends.batches.input_lines import InputLine

Lines = Callable[[], Iterable[InputLine]]
"""Reads the input, from its first line at each call."""

_GROUP: Final = 1024
"""Lines of a transaction."""
_NOT_RUN: Final = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.CANCELLED: (
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
    BatchStatus.FAILED: (
        "batch_failed",
        "This request was not executed because the batch failed.",
    ),
}
"""Code and message of the lines without a result, by the final state."""


def end_with_files(store: BatchStore, batch_id: str, lines: Lines) -> Batch:
    """Write the output files of a batch, and set its final state.

    A kill at any moment leaves the batch as it was, or ended: the files' ids are chosen before they
    are written, so that a second attempt replaces them, and their records are committed with the
    final state. A batch that has ended stays as it is.

    Args:
        store: The database.
        batch_id: A batch whose lines have all ended, are cancelled or are too late.
        lines: Its input, of which lines without results are reported as not executed.
    """
    batch = store.batch(batch_id)
    if not batch.is_open:
        return batch
    final = _final_status(batch)
    if final in _NOT_RUN:
        add_missing(store, batch_id, final, lines)
    output = _write(store, batch, batch.output_key, "output", is_error=False)
    error = _write(store, batch, batch.error_key, "errors", is_error=True)
    store.finish(batch_id, final, output, error)
    return store.batch(batch_id)


def _final_status(batch: Batch) -> BatchStatus:
    if batch.errors is not None:
        return BatchStatus.FAILED
    if batch.status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    if batch.status is BatchStatus.FINALIZING:
        return BatchStatus.COMPLETED
    # Neither cancelled nor all done: its time is over.
    return BatchStatus.EXPIRED


def add_missing(store: BatchStore, batch_id: str, final: BatchStatus, lines: Lines) -> None:
    """Add an error for each line without a result; `final` is expired, cancelled or failed."""
    code, message = _NOT_RUN[final]
    known = store.lines_with_results(batch_id)
    group: list[LineResult] = []
    for line in lines():
        if line.number in known:
            continue
        name = f"{batch_id.removeprefix('batch_')}_{line.number}"
        text = result_line(line.custom_id, name, None, None, {"code": code, "message": message})
        group.append(LineResult(line.number, True, text))
        if len(group) == _GROUP:
            store.add_results(batch_id, group)
            group = []
    store.add_results(batch_id, group)


def _write(
    store: BatchStore, batch: Batch, key: str, kind: str, *, is_error: bool
) -> StoredFile | None:
    """Write one of the files; None if it has no lines."""
    path = store.path_of(key)
    lines = store.results(batch.id, is_error=is_error)
    first = next(lines, None)
    if first is None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return None
    now = int(time.time())
    expires_at = None if batch.output_expires_s is None else now + batch.output_expires_s
    with FileWriter(path) as writer:
        writer.write(f"{first}\n".encode())
        for line in lines:
            writer.write(f"{line}\n".encode())
        return writer.finished(f"{batch.id}_{kind}.jsonl", "batch_output", now, expires_at)
