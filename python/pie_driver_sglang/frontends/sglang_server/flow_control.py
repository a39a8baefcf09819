"""Backpressure between our scheduler and SGLang's tokenizer manager, the slower of the two.

The sockets between them are unbounded. A scheduler that sent the tokens of every step would fill
them, and the first token of a new request would queue behind all others. So the tokenizer manager
acknowledges each message of outputs by a byte in a pipe, and the scheduler keeps at most
`MOST_IN_FLIGHT` unacknowledged. Meanwhile outputs accumulate in the runtime: a stream gets several
tokens in its next output.
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
"""One in the tokenizer manager, and one in the detokenizer."""


class Acknowledger:
    """The tokenizer manager's side: one pipe for each scheduler."""

    def __init__(self, replicas: int) -> None:
        """Create the pipes."""
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(replicas)]
        self.schedulers: list[Connection] = [reader for reader, _ in pipes]
        """The schedulers' ends, by replica; they can be passed to a child process."""
        self._writers = [writer for _, writer in pipes]
        for writer in self._writers:
            os.set_blocking(writer.fileno(), False)

    def handled(self, replicas: Sequence[int | None] | None) -> None:
        """Acknowledge a message of outputs.

        Args:
            replicas: SGLang's ``dp_ranks`` of its outputs; None without replicas.
        """
        replica = (replicas[0] if replicas else None) or 0
        # Only a scheduler that ends leaves its pipe full.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._writers[replica].fileno(), b"\0")


class SendWindow:
    """The scheduler's side: counts unacknowledged messages. For one thread."""

    def __init__(self, acknowledged: Connection | None) -> None:
        """Use this end of the pipe; None disables flow control."""
        self._acknowledged = acknowledged
        self._poll = select.poll()
        self.in_flight = 0
        """Unacknowledged messages; other threads may read it."""
        if acknowledged is not None:
            os.set_blocking(acknowledged.fileno(), False)
            self._poll.register(acknowledged.fileno(), select.POLLIN)

    def sent(self, messages: int) -> None:
        """Count messages that were sent."""
        if self._acknowledged is not None:
            self.in_flight += messages

    def wait(self, limit_s: float) -> None:
        """Wait until another message may be sent; a lost acknowledgement delays it by `limit_s`."""
        while self.in_flight and self._receive(0.0):
            pass
        until = time.monotonic() + limit_s
        while self.in_flight >= MOST_IN_FLIGHT:
            if not self._receive(until - time.monotonic()):
                self.in_flight = 0

    def _receive(self, limit_s: float) -> bool:
        """Count acknowledgements; returns whether any came in time."""
        if self._acknowledged is None or not self._poll.poll(max(0.0, limit_s) * 1e3):
            return False
        count = len(os.read(self._acknowledged.fileno(), 4096))
        if count == 0:
            # The tokenizer manager has ended.
            self._acknowledged, self.in_flight = None, 0
        # Messages of other threads are acknowledged as well.
        self.in_flight = max(0, self.in_flight - count)
        return True
