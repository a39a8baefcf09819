"""Exponential backoff between attempts that may fail for a while, such as writes to a full disk."""

from __future__ import annotations

from typing import Final

LONGEST_S: Final = 60.0
"""Maximum time between two attempts."""


class Backoff:
    """Seconds until the next attempt: doubled after each failure in a row, up to `LONGEST_S`.

    Attributes:
        wait_s: Seconds until the next attempt.
        failures: Failures since the last success.
    """

    def __init__(self, usual_s: float) -> None:
        """Wait `usual_s` seconds between successful attempts."""
        self._usual_s = usual_s
        self.wait_s = usual_s
        self.failures = 0

    def failed(self) -> bool:
        """Note a failure, and return whether it is the first in a row."""
        self.failures += 1
        self.wait_s = max(self._usual_s, min(2 * self.wait_s, LONGEST_S))
        return self.failures == 1

    def succeeded(self) -> bool:
        """Note a success, and return whether it ends a row of failures."""
        had_failed = self.failures > 0
        self.failures, self.wait_s = 0, self._usual_s
        return had_failed
