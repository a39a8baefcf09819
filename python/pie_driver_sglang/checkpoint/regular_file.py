"""Reads untrusted files: regular ones only, and never more than their size when opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

CHUNK_BYTES: Final = 4 << 20


class RegularFile:
    """A regular file, open for reading.

    Pipes and devices have no end. Files of `/proc` may block although they are regular; their size
    is 0, so empty files are rejected.
    """

    def __init__(self, path: Path) -> None:
        """Open the file; follows links.

        Raises:
            OSError: It is missing, empty or not a regular file.
        """
        self.name = path.name
        # First, because opening a device may have side effects.
        self._status = self._checked(path.stat)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._status = self._checked(lambda: os.fstat(self._descriptor))
        except OSError:
            os.close(self._descriptor)
            raise

    @property
    def size(self) -> int:
        """Bytes of the file when it was opened."""
        return self._status.st_size

    def chunks(self) -> Iterator[memoryview]:
        """Read the file once, in chunks that are valid until the next one.

        Raises:
            OSError: It was changed while it was read.
        """
        buffer = memoryview(bytearray(min(CHUNK_BYTES, self.size)))
        left = self.size
        while left:
            count = os.readv(self._descriptor, [buffer[:left]])
            if not count:
                raise OSError(f"{self.name} ends {left} bytes before its size of {self.size}")
            left -= count
            yield buffer[:count]
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise OSError(f"{self.name} has changed while it was read")

    def __enter__(self) -> Self:
        """Returns the file."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes it."""
        os.close(self._descriptor)

    def _checked(self, ask: Callable[[], os.stat_result]) -> os.stat_result:
        try:
            status = ask()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.name} is missing") from error
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{self.name} is not a regular file")
        if not status.st_size:
            raise OSError(f"{self.name} is empty")
        return status
