"""The counts that `/v1/loads` and data-parallel routing read, in SGLang's shared memory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from sglang.srt.managers.load_snapshot import LoadSnapshot, create_load_snapshot_writer


class LoadBoard:
    """Publishes how busy the scheduler is."""

    def __init__(self, settings: Any, ports: Any, replica: int | None) -> None:
        """Opens the file.

        Args:
            settings: ``ServerArgs``.
            ports: The names of the sockets, which name the file.
            replica: Of data parallelism; None without.
        """
        self._rank = replica or 0
        self._writer = create_load_snapshot_writer(settings, ports, settings.dp_size, self._rank)

    def write(self, counts: dict[str, Any]) -> None:
        """Publishes counts, by the names of SGLang's ``LoadSnapshot``."""
        self._writer.write(LoadSnapshot(timestamp=time.time(), dp_rank=self._rank, **counts))

    def close(self) -> None:
        """Removes the file, which SGLang leaves."""
        path = getattr(self._writer, "path", None)
        self._writer.close()
        if path is not None:
            with contextlib.suppress(OSError):
                Path(path).unlink()
