"""Requests under way: what the native runtime gives out reaches the call that waits for it."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from pie_driver_sglang import _core
from pie_driver_sglang.errors import StartError

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")

_POLL_S: Final = 0.5
"""How often the thread looks whether it should end."""


class OutputEvent(NamedTuple):
    """Something for one request of a call."""

    request: int
    """Its index among the requests of its call."""
    output: Any
    """A `_core.Output`; None where the runtime has ended."""


class NewRequest(NamedTuple):
    """A request to hand in."""

    tokens: Any
    """The prompt."""
    samples: int
    """Sequences that it ends with."""
    parameters: Mapping[str, Any]
    """Of `_core.Runtime.submit`."""


class OutputQueue:
    """The outputs of one call that it has not taken yet. The polling thread refers to this only."""

    def __init__(self) -> None:
        """Empty, and nobody is notified."""
        self.events: queue.SimpleQueue[OutputEvent] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def notify(self, wake: Callable[[], object]) -> None:
        """Call `wake` from another thread whenever there are events."""
        self._wake = wake
        wake()

    def put(self, number: int, output: Any) -> None:
        """Add an output; called by the polling thread, which no waiting call may end."""
        self.events.put(OutputEvent(number, output))
        if self._wake is None:
            return
        try:
            self._wake()
        except Exception:
            # An event loop that is closed has no waiting call.
            self._wake = None
            logger.debug("a call cannot be notified", exc_info=True)


class Call:
    """The requests of one call of the engine. As a context manager it aborts what is left.

    A call that nobody refers to any more does the same.
    """

    def __init__(self, requests: OpenRequests, *, streams: bool = False) -> None:
        """A call without requests.

        Args:
            requests: The engine's.
            streams: Outputs are wanted as they come, not once for each sequence.
        """
        self._streams = streams
        self._requests = requests
        self._open: dict[int, int] = {}
        self._count = 0
        self._inbox = OutputQueue()
        self._left: dict[int, int] = {}

    def submit(self, asked: Sequence[NewRequest]) -> None:
        """Hand requests in. They are numbered through, from 0, over all calls of this method."""

        def register(numbers: Iterable[int]) -> None:
            for number, request in zip(numbers, asked, strict=True):
                self._open[number] = self._count
                self._left[number] = request.samples
                self._count += 1

        self._requests.submit(asked, self._inbox, register, streams=self._streams)

    def events(self) -> Iterator[OutputEvent]:
        """All events until every request has ended; waits for them.

        Raises:
            StartError: The drivers are gone, or this is a fork of the engine's process.
        """
        while self._open:
            self._requests.require_own_process()
            yield self._taken(self._inbox.events.get())

    async def async_events(self) -> AsyncIterator[OutputEvent]:
        """As :meth:`events`; the running loop waits for them."""
        self._requests.require_own_process()
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._inbox.notify(lambda: loop.call_soon_threadsafe(arrived.set))
        while self._open:
            await arrived.wait()
            arrived.clear()
            for event in self._ready():
                yield event

    @property
    def is_over(self) -> bool:
        """Whether every request has ended, and its events were taken."""
        return not self._open

    def abort(self) -> None:
        """End what has not ended."""
        self._requests.forget(self._open)
        self._open.clear()

    def _ready(self) -> Iterator[OutputEvent]:
        """The events that have come by now."""
        while self._open:
            try:
                event = self._inbox.events.get_nowait()
            except queue.Empty:
                return
            yield self._taken(event)

    def _taken(self, event: OutputEvent) -> OutputEvent:
        if event.output is None:
            raise StartError(
                "the engine has ended", "make a new one; its log says why the drivers ended"
            )
        number = event.request
        index = self._open[number]
        if event.output.finish_reason is not None:
            self._left[number] -= 1
            if not self._left[number]:
                del self._open[number]
                self._requests.forget([number], abort=False)
        return OutputEvent(index, event.output)

    def __enter__(self) -> Self:
        """Return the call."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort what is left: the caller does not wait for it any more."""
        self.abort()

    def __del__(self) -> None:
        """Abort what a caller has left behind, as an iterator that was never closed."""
        if self._open and not sys.is_finalizing():
            self.abort()


class OpenRequests:
    """All requests of an engine, and the thread that fetches their outputs.

    Any method may interrupt another of the same thread: a signal handler and a finalizer may shut
    down the engine while a request is handed in.
    """

    def __init__(self, runtime: Any) -> None:
        """Start the thread.

        Args:
            runtime: A `_core.Runtime` whose drivers are ready.
        """
        self._runtime = runtime
        self._inboxes: dict[int, OutputQueue] = {}
        # Held while requests are handed in; a signal handler may hand in others.
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._stopping = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="pie-outputs", daemon=True)
        self._thread.start()

    def require_own_process(self) -> None:
        """Refuses a fork, in which neither the threads of the engine exist nor its drivers' parent.

        Raises:
            StartError: This process was forked after the engine's start.
        """
        if os.getpid() != self._process:
            raise StartError(
                f"the engine belongs to process {self._process}, and this is a fork of it, "
                f"{os.getpid()}",
                "make an engine in this process, or start the process by `spawn`",
            )

    def submit(
        self,
        asked: Sequence[NewRequest],
        inbox: OutputQueue,
        register: Callable[[Iterable[int]], None],
        *,
        streams: bool,
    ) -> None:
        """Hand requests in together. Either all are registered, or an exception leaves none.

        Args:
            asked: The requests.
            inbox: Where their outputs go.
            register: Takes their numbers, in order, before the first output can come.
            streams: Outputs are wanted as they come.

        Raises:
            StartError: The engine is shut down, or this is a fork of its process.
        """
        self.require_own_process()
        requests = _core.Requests()
        for request in asked:
            parameters = {**request.parameters, "streams": streams, "into": requests}
            self._runtime.submit(request.tokens, **parameters)
        numbers: list[list[int]] = []
        # An output may be fetched before this returns: it waits for the lock.
        with self._lock:
            outer, self._holder = self._holder, threading.get_ident()
            try:
                self._require_running()
                # A call of C: Ctrl-C interrupts before or after it, and no number is lost.
                numbers.extend(map(self._runtime.submit_all, (requests,)))
                self._inboxes.update(dict.fromkeys(numbers[0], inbox))
                register(numbers[0])
                # A signal handler may have shut down the engine in between.
                self._require_running()
            except BaseException:
                for listed in numbers:
                    self.forget(listed)
                raise
            finally:
                self._holder = outer

    def forget(self, numbers: Iterable[int], abort: bool = True) -> None:
        """Drop requests: nobody waits for their outputs any more.

        Args:
            numbers: Of the requests.
            abort: They have not ended.
        """
        aborts = abort and not self._stopping and os.getpid() == self._process
        for number in list(numbers):
            self._inboxes.pop(number, None)
            if aborts:
                self._runtime.abort(number)

    def close(self) -> None:
        """Shut the runtime down and end all calls; in a fork nothing. A second call waits, too."""
        if os.getpid() != self._process:
            return
        self._stopping = True
        self._runtime.shutdown()
        # The thread may wait for the lock, which code that this call interrupts may hold.
        this = threading.current_thread()
        if this is not self._thread and self._holder != this.ident:
            self._thread.join()

    def _require_running(self) -> None:
        if self._stopping:
            raise StartError("the engine is shut down", "make a new one")

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._deliver(self._runtime.poll(_POLL_S))
        except BaseException:
            logger.exception("the outputs of requests cannot be fetched any more: all calls end")
        finally:
            # Whoever hands requests in meanwhile looks at this afterwards.
            self._stopping = True
            for number, inbox in list(self._inboxes.items()):
                inbox.put(number, None)

    def _deliver(self, outputs: Iterable[Any]) -> None:
        """Hands outputs to their calls."""
        with self._lock:
            found = [(self._inboxes.get(output.request), output) for output in outputs]
        for inbox, output in found:
            if inbox is not None:
                inbox.put(output.request, output)


def batched_by_size(
    items: Iterable[_Item], size: Callable[[_Item], int], most: int
) -> Iterator[list[_Item]]:
    """Cut a sequence into parts of `most` together, or of one item that is larger."""
    part: list[_Item] = []
    total = 0
    for item in items:
        if part and total + size(item) > most:
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part
