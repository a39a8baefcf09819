"""What the drivers of a server log: passed on line by line."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


class DriverLog:
    """Passes lines on to the server's log."""

    def __init__(self, runtime: Any) -> None:
        """No lines yet.

        Args:
            runtime: A `_core.Runtime`.
        """
        self._runtime = runtime

    def pass_on(self) -> None:
        """Writes what the drivers have logged since the last call."""
        for line in self._runtime.log_lines():
            logger.info("driver: %s", line)
