"""OpenRequests under way: what the native runtime gives out reaches the call that waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from pie_driver_sglang.errors import StartError

_POLL_S: Final = 0.5
"""How often the thread looks whether it should end."""


class Event(NamedTuple):
    """Something for one request of a call."""

    request: int
    """Its place among the requests of its call."""
    output: Any
    """A `_core.Output`; None where the runtime has ended."""


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
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._left: dict[int, int] = {}

    def submit(self, index: int, tokens: Any, samples: int, parameters: Mapping[str, Any]) -> None:
        """Hand in a request.

        Args:
            index: What its events are to be called.
            tokens: The prompt.
            samples: Sequences that it ends with.
            parameters: Of `_core.Runtime.submit`.
        """
        given = {**parameters, "streams": self._streams}
        number = self._requests.submit(self, tokens, given)
        self._open[number] = index
        self._left[number] = samples

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

    def submit(self, call: Call, tokens: Any, parameters: Mapping[str, Any]) -> int:
        """Hand a request in and return its number; its outputs go to `call`."""
        # An output may be fetched before this returns: it waits for the lock.
        with self._lock:
            if self._stopping:
                raise StartError("the engine is shut down", "make a new one")
            number: int = self._runtime.submit(tokens, **parameters)
            self._calls[number] = call
        return number

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
