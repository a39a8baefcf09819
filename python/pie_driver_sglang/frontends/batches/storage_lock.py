"""One server runs the batches of a storage folder; its workers agree on one of them."""

from __future__ import annotations

import enum
import fcntl
import os
import socket
from pathlib import Path
from typing import Final

from pie_driver_sglang.errors import StartError, quoted, reason

LOCK: Final = "lock"


class LockState(enum.Enum):
    """What a process may do with a storage folder."""

    RUNS = "it holds the lock, and runs the batches"
    SHARES = "another worker of its server runs them"
    REFUSED = "another server uses the folder"


class StorageLock:
    """A lock file, held until the process ends, however it ends.

    The kernel releases `flock` with the last descriptor of the file. The server's processes are
    forked before it is taken, so that no child keeps it.
    """

    def __init__(self, folder: Path, owner: str) -> None:
        """Do not lock yet.

        Args:
            folder: The storage folder, which exists.
            owner: The same in all workers of one server, and in no other server.
        """
        self._path = folder / LOCK
        self._owner = owner
        self._descriptor: int | None = None
        self.holder = ""

    @property
    def is_held(self) -> bool:
        """Whether this process has it."""
        return self._descriptor is not None

    def acquire(self) -> LockState:
        """Take the lock if it is free; `holder` names who has it otherwise.

        Raises:
            StartError: The file cannot be opened.
        """
        if self._descriptor is not None:
            return LockState.RUNS
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path, flags, 0o600)
        except OSError as error:
            raise StartError(
                f"the lock {quoted(self._path)} cannot be opened: {reason(error)}",
                "name a folder that can be written to by `--file-storage-path`",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner, _, self.holder = os.pread(descriptor, 1024, 0).decode().partition("\n")
            os.close(descriptor)
            return LockState.SHARES if owner == self._owner else LockState.REFUSED
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{self._owner}\n{os.getpid()} of {socket.gethostname()}".encode(), 0)
        self._descriptor = descriptor
        return LockState.RUNS

    def release(self) -> None:
        """Let another process take it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
