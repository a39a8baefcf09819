"""A run of `pie-sglang batch`: a batch with a store of its own, which a second run continues.

The store is a folder beside the output (`OUTPUT.progress`), which only the user can read. It is
removed once the output is there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pie_driver_sglang.errors import ConfigError, StartError, quoted, reason
from pie_driver_sglang.frontends.batches.batch_records import (
    OPEN_STATUSES,
    Batch,
    BatchStatus,
    new_batch,
)
from pie_driver_sglang.frontends.batches.batch_store import BatchStore, FileWriter, is_storage
from pie_driver_sglang.frontends.batches.input_lines import validate
from pie_driver_sglang.frontends.batches.output_files import Lines, add_missing
from pie_driver_sglang.frontends.batches.storage_lock import LockState, StorageLock

_CHUNK: Final = 1 << 20
_WINDOW_S: Final = 100 * 365 * 24 * 3600
"""A run does not expire."""
_SHOWN_ERRORS: Final = 10
_MODE: Final = 0o666


class OfflineJob(NamedTuple):
    """What a run does.

    Attributes:
        input: The file with the requests.
        output: The file for the results; it does not exist before the end.
        model: The model, as the command line names it.
    """

    input: Path
    output: Path
    model: str

    @property
    def folder(self) -> Path:
        """The folder of its store."""
        return self.output.with_name(f"{self.output.name}.progress")


class OfflineRun:
    """An open run. Use it as a context manager.

    Attributes:
        store: Its store.
        batch: Its only batch.
    """

    def __init__(self, job: OfflineJob) -> None:
        """Begin a run, or open one that was begun.

        Raises:
            ConfigError: The input is wrong or was changed, or the output exists.
            StartError: Another process runs it, or a file cannot be read or written.
        """
        self._job = job
        try:
            if not is_storage(job.folder):
                self._require_no_output()
            with job.input.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self._require_output_folder()
            self.store = BatchStore(job.folder)
        except OSError as error:
            raise StartError(
                f"{quoted(error.filename)} cannot be opened: {reason(error)}",
                "name an existing JSONL file, and an `--output` in a folder that can be written",
            ) from error
        self._lock = StorageLock(job.folder, "")
        try:
            if self._lock.acquire() is not LockState.RUNS:
                raise StartError(
                    f"process {self._lock.holder} writes {quoted(job.output)}",
                    "wait until it ends, or name another `--output`",
                )
            with one_line_errors(job):
                found = self._find(digest)
                # An output beside a store is of a run that was killed after its last step but one.
                if found is None or not _is_ending(found):
                    self._require_no_output()
                self.batch = found or self._add()
        except BaseException:
            if self._lock.is_held and not self._has_batch():
                shutil.rmtree(job.folder, ignore_errors=True)
            self.close()
            raise

    def _require_output_folder(self) -> None:
        # The store is beside the output, and would create the folder of a misspelt path.
        if not (folder := self._job.output.parent).is_dir():
            raise ConfigError(
                f"the folder {quoted(folder)} of the output does not exist",
                "create it, or name an `--output` in a folder that exists",
            )

    def _require_no_output(self) -> None:
        if self._job.output.exists():
            raise ConfigError(
                f"the output {quoted(self._job.output)} exists",
                "name another `--output`, or delete the file",
            )

    def _has_batch(self) -> bool:
        """Whether a run was begun in the store; yes if that cannot be read."""
        try:
            return self._begun() is not None
        except sqlite3.Error:
            return True

    def _begun(self) -> Batch | None:
        """The batch of the store, unless it was given up."""
        found = next(iter(self.store.list_batches(None, 1)), None)
        return None if found is None or found.status is BatchStatus.CANCELLED else found

    def _find(self, digest: str) -> Batch | None:
        """The batch of a run that was begun with this input and model."""
        found = self._begun()
        if found is None:
            return None
        file = self.store.find_file(found.input_file_id)
        before = json.loads(found.metadata or "{}").get("model")
        is_same = file is not None and file.sha256 == digest and before == self._job.model
        if not is_same and found.is_open and found.completed + found.failed == 0:
            # No result would be lost, for example after a flag that was refused.
            self.store.move(found.id, OPEN_STATUSES, BatchStatus.CANCELLED)
            self.store.delete_file(found.input_file_id)
            return None
        hint = f"remove {quoted(self._job.folder)} to run all lines again, or name another output"
        if file is None or file.sha256 != digest:
            raise ConfigError(
                f"{quoted(self._job.input)} has changed since {found.completed + found.failed} of "
                f"its lines were run",
                hint,
            )
        if not found.is_open and not self._job.output.exists():
            raise ConfigError(
                f"the output {quoted(self._job.output)} is gone, of a run that ended", hint
            )
        if before != self._job.model:
            raise ConfigError(
                f"the model is {quoted(self._job.model)}, and the lines so far were run with "
                f"{quoted(before)}",
                hint,
            )
        return found

    def _add(self) -> Batch:
        """A new batch, with a copy of the input."""
        job = self._job
        found = validate(job.input, None, None)
        if found.errors or found.endpoint is None:
            shown = [error.message for error in found.errors[:_SHOWN_ERRORS]]
            more = len(found.errors) - len(shown)
            text = "; ".join([*shown, *([f"and {more} more"] if more > 0 else [])])
            raise ConfigError(f"{quoted(job.input)} is no batch: {text}", "correct these lines")
        with job.input.open("rb") as file, self.store.new_file("in.jsonl", "batch") as writer:
            while data := file.read(_CHUNK):
                writer.write(data)
        metadata = json.dumps({"model": job.model})
        batch = new_batch(writer.record.id, found.endpoint, "", _WINDOW_S, metadata=metadata)
        self.store.add_batch(batch)
        return batch

    def end_batch(self, store: BatchStore, batch_id: str, lines: Lines) -> Batch:
        """Write the output, of lines with and without errors in the order of the input."""
        batch = store.batch(batch_id)
        if not batch.is_open:
            return batch
        final = BatchStatus.COMPLETED if batch.errors is None else BatchStatus.FAILED
        if final is BatchStatus.FAILED:
            add_missing(store, batch_id, final, lines)
        with FileWriter(self._job.output, _MODE) as writer:
            for line in store.results(batch_id):
                writer.write(f"{line}\n".encode())
            writer.finished("", "", 0, None)
        store.finish(batch_id, final, None, None)
        return store.batch(batch_id)

    def remove(self) -> None:
        """Remove the store of a run that has ended."""
        # Still locked, so that no other process begins a run in it.
        shutil.rmtree(self._job.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Close the store; the run can be opened again."""
        self.store.close()
        self._lock.release()

    def __enter__(self) -> OfflineRun:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()


@contextlib.contextmanager
def one_line_errors(job: OfflineJob) -> Iterator[None]:
    """Errors of files and of the database as errors of one line.

    Raises:
        StartError: A file cannot be read or written.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StartError(
            f"the run of {quoted(job.input)} cannot be stored in {quoted(job.folder)}: "
            f"{reason(error)}",
            "make room there, or name another `--output`; then run the command again",
        ) from error


def _is_ending(batch: Batch) -> bool:
    """Whether no more lines are run: the output is to be written, or was."""
    running = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
    return batch.status not in running or batch.errors is not None


def error_messages(batch: Batch) -> list[str]:
    """Why a batch failed; empty if it did not."""
    return [error["message"] for error in json.loads(batch.errors or "[]")]
