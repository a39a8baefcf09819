"""What the drivers of a server log: passed on line by line, the last lines kept."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any, Final

logger = logging.getLogger(__name__)

_KEPT: Final = 200
"""Lines that are kept."""


class DriverLog:
    """Passes lines on to the server's log; any thread may call it."""

    def __init__(self, runtime: Any) -> None:
        """No lines yet.

        Args:
            runtime: A `_core.Runtime`.
        """
        self._runtime = runtime
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self._lock = threading.Lock()

    def pass_on(self) -> None:
        """Writes what the drivers have logged since the last call."""
        with self._lock:
            for line in self._runtime.log_lines():
                logger.info("driver: %s", line)
                self._lines.append(line)

    def lines(self) -> list[str]:
        """The last lines, oldest first."""
        self.pass_on()
        with self._lock:
            return list(self._lines)
