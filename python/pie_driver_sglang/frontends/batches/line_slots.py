"""How many lines of batches run at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

_LOOK_S: Final = 0.05
"""How soon waiting lines notice that interactive traffic has ended."""
_SHARE: Final = 8
"""The part of the slots that is left to batches while clients wait."""


class LineSlots:
    """Slots for lines, of which an eighth is used while there are interactive requests.

    Lines that run already are not interrupted. Batches take turns: slots go to waiting lines in the
    order in which they came, and each batch has one line waiting.
    """

    def __init__(self, limit: int, interactive: Callable[[], int]) -> None:
        """Offer slots.

        Args:
            limit: Lines that may run at once.
            interactive: Returns how many requests of clients are open.
        """
        self._limit = limit
        self._interactive = interactive
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._watch: asyncio.Task[None] | None = None
        self.used = 0

    @property
    def allowed(self) -> int:
        """Lines that may run at present."""
        return max(1, self._limit // _SHARE) if self._interactive() else self._limit

    async def acquire(self) -> None:
        """Wait for a slot."""
        if not self._waiting and self.used < self.allowed:
            self.used += 1
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give a slot back."""
        self.used -= 1
        self._grant()

    def _grant(self) -> None:
        allowed = self.allowed
        while self._waiting and self.used < allowed:
            future = self._waiting.popleft()
            if not future.done():
                self.used += 1
                future.set_result(None)

    async def _look(self) -> None:
        """Grant slots again once interactive traffic has ended."""
        while self._waiting:
            await asyncio.sleep(_LOOK_S)
            self._grant()
