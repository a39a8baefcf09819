"""Requests under way: what the native runtime gives out reaches the call that waits for it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

from pie_driver_sglang import _core
from pie_driver_sglang.errors import StartError

_Item = TypeVar("_Item")

_POLL_S: Final = 0.5
"""How often the thread looks whether it should end."""


class Event(NamedTuple):
    """Something for one request of a call."""

    request: int
    """Its place among the requests of its call."""
    output: Any
    """A `_core.Output`; None where the runtime has ended."""


class Asked(NamedTuple):
    """A request to hand in."""

    tokens: Any
    """The prompt."""
    samples: int
    """Sequences that it ends with."""
    parameters: Mapping[str, Any]
    """Of `_core.Runtime.submit`."""


class Call:
    """The requests of one call of the engine. As a context manager it aborts what is left."""

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
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._left: dict[int, int] = {}

    def submit(self, asked: Sequence[Asked]) -> None:
        """Hand requests in. They are numbered through, from 0, over all calls of this method."""
        numbers = self._requests.submit(self, asked, streams=self._streams)
        for number, request in zip(numbers, asked, strict=True):
            self._open[number] = self._count
            self._left[number] = request.samples
            self._count += 1

    def events(self) -> Iterator[Event]:
        """All events until every request has ended; waits for them.

        Raises:
            StartError: The drivers are gone.
        """
        while self._open:
            yield self._taken(self._events.get())

    def ready(self) -> Iterator[Event]:
        """The events that have come by now."""
        while self._open:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            yield self._taken(event)

    @property
    def is_over(self) -> bool:
        """Whether every request has ended, and its events were taken."""
        return not self._open

    def notify(self, wake: Callable[[], None]) -> None:
        """Call `wake` from another thread whenever there are events."""
        self._wake = wake
        wake()

    def put(self, number: int, output: Any) -> None:
        """Take an output; called by the thread that polls."""
        self._events.put(Event(number, output))
        if self._wake is not None:
            self._wake()

    def abort(self) -> None:
        """End what has not ended."""
        self._requests.forget(self._open)
        self._open.clear()

    def _taken(self, event: Event) -> Event:
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
        return Event(index, event.output)

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


class OpenRequests:
    """All requests of an engine, and the thread that fetches their outputs."""

    def __init__(self, runtime: Any) -> None:
        """Start the thread.

        Args:
            runtime: A `_core.Runtime` whose drivers are ready.
        """
        self._runtime = runtime
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="pie-outputs", daemon=True)
        self._thread.start()

    def submit(self, call: Call, asked: Iterable[Asked], *, streams: bool) -> list[int]:
        """Hand requests in together and return their numbers; their outputs go to `call`."""
        requests = _core.Requests()
        for request in asked:
            parameters = {**request.parameters, "streams": streams, "into": requests}
            self._runtime.submit(request.tokens, **parameters)
        # An output may be fetched before this returns: it waits for the lock.
        with self._lock:
            if self._stopping:
                raise StartError("the engine is shut down", "make a new one")
            numbers: list[int] = self._runtime.submit_all(requests)
            self._calls.update(dict.fromkeys(numbers, call))
        return numbers

    def forget(self, numbers: Iterable[int], abort: bool = True) -> None:
        """Drop requests: their outputs are for nothing any more.

        Args:
            numbers: Of the requests.
            abort: They have not ended.
        """
        with self._lock:
            for number in numbers:
                self._calls.pop(number, None)
                if abort and not self._stopping:
                    self._runtime.abort(number)

    def close(self) -> None:
        """Shut the runtime down and end all calls."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        self._runtime.shutdown()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._deliver(self._runtime.poll(_POLL_S))
        finally:
            with self._lock:
                self._stopping = True
                calls = list(self._calls.items())
            for number, call in calls:
                call.put(number, None)

    def _deliver(self, outputs: Iterable[Any]) -> None:
        """Hands outputs to their calls."""
        with self._lock:
            found = [(self._calls.get(output.request), output) for output in outputs]
        for call, output in found:
            if call is not None:
                call.put(output.request, output)


async def async_events(call: Call) -> AsyncIterator[Event]:
    """Yield the events of a call; the running loop waits for them."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        # A loop that is closed waits for nothing any more.
        if not loop.is_closed():
            loop.call_soon_threadsafe(arrived.set)

    call.notify(wake)
    while not call.is_over:
        await arrived.wait()
        arrived.clear()
        for event in call.ready():
            yield event


def in_parts(
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
