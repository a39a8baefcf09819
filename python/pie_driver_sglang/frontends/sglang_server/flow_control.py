"""Flow control between our scheduler and SGLang's tokenizer manager, the slower one of the two.

The sockets between them hold any number of messages. A scheduler that sends the tokens of every
step would fill them, and the first token of a new request would wait for the tokens of all
others. So the tokenizer manager acknowledges each message of outputs by a byte in a pipe, and the
scheduler keeps `MOST_IN_FLIGHT` of them under way. What is computed meanwhile adds up in the
runtime: a stream gets several tokens in its next output, for about the work of one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Final

MOST_IN_FLIGHT: Final = 2
"""One that the tokenizer manager handles, and one that the detokenizer has for it meanwhile."""


class Acknowledger:
    """The tokenizer manager's side: one pipe for each scheduler."""

    def __init__(self, replicas: int) -> None:
        """Makes the pipes."""
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(replicas)]
        self.schedulers: list[Connection] = [reader for reader, _ in pipes]
        """The schedulers' ends, by replica; a process that is started may be given them."""
        self._writers = [writer for _, writer in pipes]
        for writer in self._writers:
            os.set_blocking(writer.fileno(), False)

    def handled(self, replicas: Sequence[int | None] | None) -> None:
        """Acknowledges a message of outputs.

        Args:
            replicas: Where its outputs are from, as SGLang's ``dp_ranks``; None without replicas.
        """
        replica = (replicas[0] if replicas else None) or 0
        # Only a scheduler that is about to end, or has ended, leaves its pipe full.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._writers[replica].fileno(), b"\0")


class SendWindow:
    """The scheduler's side: which messages are under way. For one thread."""

    def __init__(self, acknowledged: Connection | None) -> None:
        """Takes its end of the pipe; with None any number may be under way."""
        self._acknowledged = acknowledged
        self._poll = select.poll()
        self.in_flight = 0
        """Messages of outputs that are not acknowledged; other threads may read it."""
        if acknowledged is not None:
            os.set_blocking(acknowledged.fileno(), False)
            self._poll.register(acknowledged.fileno(), select.POLLIN)

    def sent(self, messages: int) -> None:
        """Counts messages of outputs that were sent."""
        if self._acknowledged is not None:
            self.in_flight += messages

    def wait(self, limit_s: float) -> None:
        """Waits until another message may be sent.

        Args:
            limit_s: After so many seconds what is under way no longer counts: if an acknowledgement
                is lost, outputs are late, but come.
        """
        while self.in_flight and self._take(0.0):
            pass
        until = time.monotonic() + limit_s
        while self.in_flight >= MOST_IN_FLIGHT:
            if not self._take(until - time.monotonic()):
                self.in_flight = 0

    def _take(self, limit_s: float) -> bool:
        """Counts acknowledgements; whether any came within the time."""
        if self._acknowledged is None or not self._poll.poll(max(0.0, limit_s) * 1e3):
            return False
        count = len(os.read(self._acknowledged.fileno(), 4096))
        if count == 0:
            # The tokenizer manager has ended.
            self._acknowledged, self.in_flight = None, 0
        # Messages of other threads are acknowledged, too.
        self.in_flight = max(0, self.in_flight - count)
        return True
