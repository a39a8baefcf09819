"""The database and the folder of files: every change is one transaction.

Locking: one connection per process behind a lock, and SQLite's own locks between processes. The
write-ahead log is flushed at each commit (`synchronous = FULL`), so that a committed line survives
a loss of power as well as a kill.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import ConfigError, StartError, quoted, reason
from pie_driver_sglang.frontends.batches.batch_records import (
    OPEN_STATUSES,
    Batch,
    BatchStatus,
    LineResult,
    StoredFile,
    new_file_id,
)

DATABASE: Final = "batches.sqlite3"
FILES: Final = "files"
MAX_OPEN_BATCHES: Final = 1000
PARTIAL: Final = ".partial"
_VERSION: Final = 1
_BUSY_S: Final = 30.0
_STALE_S: Final = 3600
"""Age at which a file without a record is a leftover, and no upload."""
_SCHEMA: Final = f"""
CREATE TABLE files (
    position INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(StoredFile._fields)}, UNIQUE (id));
CREATE TABLE batches (
    position INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(Batch._fields)}, UNIQUE (id));
CREATE TABLE results (
    batch TEXT, line INTEGER, is_error INTEGER, text TEXT, PRIMARY KEY (batch, line))
    WITHOUT ROWID;
CREATE INDEX batches_by_status ON batches (status, position);
PRAGMA user_version = {_VERSION};
"""


def is_storage(folder: Path) -> bool:
    """Whether a folder has a database of this kind."""
    return (folder / DATABASE).is_file()


class StoreLimitError(ConfigError):
    """A limit of the store would be exceeded."""


class BatchStore:
    """Records of files, batches and results; its methods may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        """Open a folder, which is made if it is not there.

        Raises:
            StartError: It cannot be used.
        """
        self.folder = folder.absolute()
        self._lock = threading.RLock()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.folder / FILES).mkdir(mode=0o700, exist_ok=True)
            _create_private(self.folder / DATABASE)
            self._database = sqlite3.connect(
                self.folder / DATABASE,
                timeout=_BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._create_tables()
        except (OSError, sqlite3.Error) as error:
            raise StartError(
                f"files cannot be stored in {quoted(self.folder)}: {reason(error)}",
                "name a folder that can be written to by `--file-storage-path`",
            ) from error

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._database.close()

    # Files.

    def path_of(self, file_id: str) -> Path:
        """The path of a file's content."""
        return self.folder / FILES / file_id

    @contextlib.contextmanager
    def new_file(
        self, filename: str, purpose: str, expires_s: int | None = None, most: int | None = None
    ) -> Iterator[FileWriter]:
        """A file to be written within the context, which then has a record.

        Args:
            filename: The client's name for it.
            purpose: What it is for.
            expires_s: Seconds after which it is deleted; None for never.
            most: Bytes that all files may have together; None for any number.

        Raises:
            StoreLimitError: They have more, with files that were added meanwhile.
        """
        file_id = new_file_id()
        with FileWriter(self.path_of(file_id)) as writer:
            yield writer
            now = int(time.time())
            expires_at = None if expires_s is None else now + expires_s
            record = writer.finished(filename, purpose, now, expires_at)
        try:
            with self.transaction():
                self.require_space(record.bytes, most)
                _insert(self._database, "files", record)
        except BaseException:
            self.path_of(file_id).unlink(missing_ok=True)
            raise

    def require_space(self, added: int, most: int | None) -> None:
        """Refuse a file with which all files would have more bytes than they may.

        Raises:
            StoreLimitError: They would.
        """
        stored = self.stored_bytes()
        if most is not None and stored + added > most:
            raise StoreLimitError(
                f"the stored files have {stored} bytes, and with this one more than {most}",
                "delete some, or start the server with a larger `--max-stored-bytes`",
            )

    def find_file(self, file_id: str) -> StoredFile | None:
        """A file by its id."""
        row = self._row(f"SELECT {_FILE} FROM files WHERE id = ?", file_id)
        return StoredFile(*row) if row else None

    def list_files(
        self, purpose: str | None, after: str | None, limit: int, *, newest_first: bool = True
    ) -> list[StoredFile]:
        """Files, those after another one.

        Raises:
            ConfigError: There is no such other one.
        """
        where, values = self._after("files", after, newest_first=newest_first)
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        order = "DESC" if newest_first else "ASC"
        rows = self._rows(
            f"SELECT {_FILE} FROM files WHERE {where} ORDER BY position {order} LIMIT ?",
            *values,
            limit,
        )
        return [StoredFile(*row) for row in rows]

    def stored_bytes(self) -> int:
        """The size of all files together."""
        [found] = self._row("SELECT coalesce(sum(bytes), 0) FROM files")
        return int(found)

    def delete_file(self, file_id: str) -> bool:
        """Delete a file; False if there is none.

        Raises:
            ConfigError: A batch that has not ended reads it.
        """
        with self.transaction():
            marks = _marks(OPEN_STATUSES)
            reader = self._row(
                f"SELECT id, status FROM batches WHERE input_file_id = ? AND status IN ({marks})",
                file_id,
                *OPEN_STATUSES,
            )
            if reader:
                raise ConfigError(
                    f"the file {file_id} is the input of {reader[0]}, which is {reader[1]}",
                    "cancel the batch first",
                )
            found = self._database.execute("DELETE FROM files WHERE id = ?", (file_id,)).rowcount
        self.path_of(file_id).unlink(missing_ok=True)
        return bool(found)

    def delete_expired_files(self, now: float) -> None:
        """Delete files whose time is over, and what a killed process left in the folder."""
        expired = self._rows("SELECT id FROM files WHERE expires_at <= ?", int(now))
        for (file_id,) in expired:
            with contextlib.suppress(ConfigError):
                self.delete_file(file_id)
        with self._lock:
            known = {name for (name,) in self._rows("SELECT id FROM files")}
            marks = _marks(OPEN_STATUSES)
            keys = f"SELECT output_key, error_key FROM batches WHERE status IN ({marks})"
            for pair in self._rows(keys, *OPEN_STATUSES):
                known |= set(pair)
        for path in (self.folder / FILES).iterdir():
            with contextlib.suppress(OSError):
                if path.name not in known and path.stat().st_mtime < now - _STALE_S:
                    path.unlink()

    # Batches.

    def add_batch(self, batch: Batch) -> None:
        """Add a new batch.

        Raises:
            StoreLimitError: Too many have not ended.
        """
        with self.transaction():
            marks = _marks(OPEN_STATUSES)
            count = f"SELECT count(*) FROM batches WHERE status IN ({marks})"
            [is_open] = self._row(count, *OPEN_STATUSES)
            if is_open >= MAX_OPEN_BATCHES:
                raise StoreLimitError(
                    f"{is_open} batches have not ended, all that there may be",
                    "wait until one ends, or cancel one",
                )
            _insert(self._database, "batches", batch)

    def find_batch(self, batch_id: str) -> Batch | None:
        """A batch by its id."""
        row = self._row(f"SELECT {_BATCH} FROM batches WHERE id = ?", batch_id)
        return Batch.of_row(row) if row else None

    def batch(self, batch_id: str) -> Batch:
        """A batch that is known to be there.

        Raises:
            KeyError: It is not.
        """
        found = self.find_batch(batch_id)
        if found is None:
            raise KeyError(batch_id)
        return found

    def list_batches(self, after: str | None, limit: int) -> list[Batch]:
        """Batches, the newest first, those after another one.

        Raises:
            ConfigError: There is no such other one.
        """
        where, values = self._after("batches", after, newest_first=True)
        rows = self._rows(
            f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY position DESC LIMIT ?",
            *values,
            limit,
        )
        return [Batch.of_row(row) for row in rows]

    def open_batches(self, limit: int) -> list[str]:
        """The ids of batches that have not ended, the oldest first."""
        rows = self._rows(
            f"SELECT id FROM batches WHERE status IN ({_marks(OPEN_STATUSES)}) "
            "ORDER BY position LIMIT ?",
            *OPEN_STATUSES,
            limit,
        )
        return [batch_id for (batch_id,) in rows]

    def move(
        self, batch_id: str, before: Sequence[BatchStatus], after: BatchStatus, **columns: Any
    ) -> bool:
        """Change a batch's state, unless it is in another one than `before`.

        Args:
            batch_id: The batch.
            before: The states that it may be in.
            after: Its new state, whose time is set.
            columns: Other columns to set.
        """
        with self.transaction():
            return self._move(batch_id, before, after, columns)

    def _move(
        self,
        batch_id: str,
        before: Sequence[BatchStatus],
        after: BatchStatus,
        others: dict[str, Any],
    ) -> bool:
        columns = {"status": after, f"{after}_at": int(time.time()), **others}
        columns.pop(f"{BatchStatus.VALIDATING}_at", None)
        names = ", ".join(f"{name} = ?" for name in columns)
        done = self._database.execute(
            f"UPDATE batches SET {names} WHERE id = ? AND status IN ({_marks(before)})",
            (*columns.values(), batch_id, *before),
        )
        return bool(done.rowcount)

    def update(self, batch_id: str, **columns: Any) -> Batch:
        """Set columns of a batch; the record after that."""
        names = ", ".join(f"{name} = ?" for name in columns)
        with self.transaction():
            change = f"UPDATE batches SET {names} WHERE id = ?"
            self._database.execute(change, (*columns.values(), batch_id))
            return self.batch(batch_id)

    # Results.

    def add_results(self, batch_id: str, results: Iterable[LineResult]) -> None:
        """Commit results of lines; a line that has a result keeps it."""
        rows = [(batch_id, result.line, result.is_error, result.text) for result in results]
        with self.transaction():
            insert = "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)"
            added = [row for row in rows if self._database.execute(insert, row).rowcount]
            failed = sum(is_error for _, _, is_error, _ in added)
            self._database.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, starts = 0 "
                "WHERE id = ?",
                (len(added) - failed, failed, batch_id),
            )

    def lines_with_results(self, batch_id: str) -> set[int]:
        """The numbers of the lines whose results are committed."""
        return {line for (line,) in self._rows(_LINES, batch_id)}

    def results(self, batch_id: str, *, is_error: bool | None = None) -> Iterator[str]:
        """The lines of an output file, in the order of the input.

        Args:
            batch_id: The batch.
            is_error: Whether those of errors, or the others; None for all.
        """
        last = 0
        query = (
            "SELECT line, text FROM results WHERE batch = ? AND is_error IN (?, ?) AND line > ? "
            "ORDER BY line LIMIT 256"
        )
        kinds = (False, True) if is_error is None else (is_error, is_error)
        while rows := self._rows(query, batch_id, *kinds, last):
            yield from (text for _, text in rows)
            last = rows[-1][0]

    def finish(
        self,
        batch_id: str,
        status: BatchStatus,
        output: StoredFile | None,
        error: StoredFile | None,
    ) -> None:
        """End an open batch with its output files; its results are in them from now on."""
        files = [file for file in (output, error) if file is not None]
        columns = {"output_file_id": output and output.id, "error_file_id": error and error.id}
        with self.transaction():
            if not self._move(batch_id, OPEN_STATUSES, status, columns):
                return
            for file in files:
                _insert(self._database, "files", file)
            self._database.execute("DELETE FROM results WHERE batch = ?", (batch_id,))

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """A transaction that writes; rolled back if the context raises."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._commit()

    def _commit(self) -> None:
        try:
            self._database.execute("COMMIT")
        except BaseException:
            # As on a full disk: the transaction would stay open.
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise

    def _create_tables(self) -> None:
        with self.transaction():
            [version] = self._row("PRAGMA user_version")
            if version == 0:
                for statement in filter(None, map(str.strip, _SCHEMA.split(";"))):
                    self._database.execute(statement)
        if version not in (0, _VERSION):
            raise StartError(
                f"{quoted(self.folder / DATABASE)} has version {version}, this program reads "
                f"version {_VERSION}",
                "name another folder by `--file-storage-path`",
            )

    def _after(self, table: str, after: str | None, *, newest_first: bool) -> tuple[str, list[Any]]:
        """A condition for the rows after one in a list."""
        if after is None:
            return "1", []
        row = self._row(f"SELECT position FROM {table} WHERE id = ?", after)
        if row is None:
            raise ConfigError(
                f"`after` is {quoted(after)}, which does not exist", "list without it"
            )
        return f"position {'<' if newest_first else '>'} ?", [row[0]]

    def _row(self, query: str, *values: Any) -> Any:
        with self._lock:
            return self._database.execute(query, values).fetchone()

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._database.execute(query, values).fetchall()


class FileWriter:
    """Writes a file of the folder, which gets its name once it is complete and flushed.

    Attributes:
        bytes: What was written so far.
        record: The file's record, once it is finished.
    """

    record: StoredFile

    def __init__(self, path: Path, mode: int = 0o600) -> None:
        """Write the file of this path.

        Args:
            path: The path.
            mode: Its permissions, from which the process's mask is taken.
        """
        self._path, self._mode = path, mode
        self._partial = path.with_name(path.name + PARTIAL)
        self._digest = hashlib.sha256()
        self.bytes = 0

    def __enter__(self) -> FileWriter:
        """Open the file."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        descriptor = os.open(self._partial, flags, self._mode)
        self._file = os.fdopen(descriptor, "wb")
        return self

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)
        self._digest.update(data)
        self.bytes += len(data)

    def finished(
        self, filename: str, purpose: str, created_at: int, expires_at: int | None
    ) -> StoredFile:
        """Flush and name the file; its record."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        _flush_folder(self._path.parent)
        digest, name = self._digest.hexdigest(), self._path.name
        self.record = StoredFile(
            name, self.bytes, created_at, expires_at, filename, purpose, digest
        )
        return self.record

    def __exit__(self, *_: object) -> None:
        """Remove what is not complete."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


_FILE: Final = ", ".join(StoredFile._fields)
_BATCH: Final = ", ".join(Batch._fields)
_LINES: Final = "SELECT line FROM results WHERE batch = ?"


def _create_private(path: Path) -> None:
    """Create a database that others cannot read; SQLite's other files have its permissions."""
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _marks(values: Sequence[Any]) -> str:
    return ", ".join("?" for _ in values)


def _insert(database: sqlite3.Connection, table: str, record: Any) -> None:
    names = ", ".join(record._fields)
    database.execute(f"INSERT INTO {table} ({names}) VALUES ({_marks(record)})", tuple(record))
