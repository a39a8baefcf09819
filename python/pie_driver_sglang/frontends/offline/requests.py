"""Open requests: delivers outputs of the native runtime to the calls that wait for them."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Self, TypeVar

from pie_driver_sglang import _core
from pie_driver_sglang.errors import ConfigError, StartError

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")

_START_S: Final = 0.1
"""Poll period of the drivers' log during the start."""
_POLL_S: Final = 0.5
"""Timeout of a poll, after which the thread checks whether it should end."""
_DRAIN_S: Final = 0.01
"""Poll period while the last requests of an adapter run."""


class OutputEvent(NamedTuple):
    """An output of one request of a call."""

    request: int
    """Its index among the requests of its call."""
    output: Any
    """A `_core.Output`; None where the runtime has ended."""


class NewRequest(NamedTuple):
    """A request to submit."""

    tokens: Any
    """The prompt."""
    samples: int
    """Number of its output sequences."""
    parameters: Mapping[str, Any]
    """Keyword arguments of `_core.Runtime.submit`, or `submit_embedding`."""
    embeds: bool = False
    """Whether it is one for an embedding."""

    @property
    def adapter(self) -> int | None:
        """The id of its LoRA adapter; None for the base model."""
        return self.parameters.get("adapter_id")


class OutputQueue:
    """The pending outputs of one call; all that the polling thread refers to."""

    def __init__(self) -> None:
        """Empty, without a callback."""
        self.events: queue.SimpleQueue[OutputEvent] = queue.SimpleQueue()
        self._wake: Callable[[], object] | None = None

    def notify(self, wake: Callable[[], object]) -> None:
        """Call `wake` from another thread whenever there are events."""
        self._wake = wake
        wake()

    def put(self, number: int, output: Any) -> None:
        """Add an output; called by the polling thread, which must not fail."""
        self.events.put(OutputEvent(number, output))
        if self._wake is None:
            return
        try:
            self._wake()
        except Exception:
            # The event loop is closed.
            self._wake = None
            logger.debug("a call cannot be notified", exc_info=True)


class Call:
    """The requests of one call of the engine.

    Leaving it as a context manager, or its garbage collection, aborts unfinished requests.
    """

    def __init__(self, requests: OpenRequests, *, streams: bool = False) -> None:
        """A call without requests.

        Args:
            requests: The engine's.
            streams: Whether outputs come per step, instead of once per sequence.
        """
        self._streams = streams
        self._requests = requests
        self._open: dict[int, int] = {}
        self._count = 0
        self._outputs = OutputQueue()
        self._left: dict[int, int] = {}

    def submit(self, asked: Sequence[NewRequest]) -> None:
        """Submit requests, which are numbered from 0 over all calls of this method."""

        def register(numbers: Iterable[int]) -> None:
            for number, request in zip(numbers, asked, strict=True):
                self._open[number] = self._count
                self._left[number] = request.samples
                self._count += 1

        self._requests.submit(asked, self._outputs, register, streams=self._streams)

    def events(self) -> Iterator[OutputEvent]:
        """Yield events until every request has ended.

        Raises:
            StartError: The drivers are gone, or this is a fork of the engine's process.
        """
        while self._open:
            self._requests.require_own_process()
            yield self._taken(self._outputs.events.get())

    async def async_events(self) -> AsyncIterator[OutputEvent]:
        """As :meth:`events`, without blocking the loop."""
        self._requests.require_own_process()
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._outputs.notify(lambda: loop.call_soon_threadsafe(arrived.set))
        while self._open:
            await arrived.wait()
            arrived.clear()
            for event in self._ready():
                yield event

    @property
    def is_over(self) -> bool:
        """Whether every request has ended, and its events were yielded."""
        return not self._open

    def abort(self) -> None:
        """Abort unfinished requests."""
        self._requests.forget(self._open)
        self._open.clear()

    def _ready(self) -> Iterator[OutputEvent]:
        """The events that are available."""
        while self._open:
            try:
                event = self._outputs.events.get_nowait()
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

    def __exit__(self, *_: object) -> None:
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
        self._queues: dict[int, OutputQueue] = {}
        self._adapters: dict[int, int | None] = {}
        self._unloaded: set[int] = set()
        # Held while requests are submitted; reentrant, because a signal handler may submit others.
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._stopping = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="pie-outputs", daemon=True)
        self._thread.start()

    def require_own_process(self) -> None:
        """Raise in a forked process, which has neither the engine's threads nor its drivers.

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
        requests: Sequence[NewRequest],
        outputs: OutputQueue,
        register: Callable[[Iterable[int]], None],
        *,
        streams: bool,
    ) -> None:
        """Submit requests together: all of them, or none after an exception.

        Args:
            requests: The requests.
            outputs: The queue of their outputs.
            register: Called with their ids, in order, before the first output.
            streams: Whether outputs come per step.

        Raises:
            ConfigError: The LoRA adapter of one was unloaded.
            StartError: The engine is shut down, or this is a fork of its process.
        """
        self.require_own_process()
        batch = _core.Requests()
        for request in requests:
            parameters = {**request.parameters, "into": batch}
            if request.embeds:
                self._runtime.submit_embedding(request.tokens, **parameters)
            else:
                self._runtime.submit(request.tokens, **parameters, streams=streams)
        numbers: list[list[int]] = []
        # An output that arrives before this returns waits for the lock.
        with self._lock:
            outer, self._holder = self._holder, threading.get_ident()
            try:
                self._require_running()
                adapters = [request.adapter for request in requests]
                if not self._unloaded.isdisjoint(adapters):
                    raise ConfigError(
                        "the LoRA adapter was unloaded", "load it again by `load_lora_adapter`"
                    )
                # One C call: Ctrl-C comes before or after it, so no id is lost.
                numbers.extend(map(self._runtime.submit_all, (batch,)))
                self._queues.update(dict.fromkeys(numbers[0], outputs))
                self._adapters.update(zip(numbers[0], adapters, strict=True))
                register(numbers[0])
                # A signal handler may have shut the engine down.
                self._require_running()
            except BaseException:
                for listed in numbers:
                    self.forget(listed)
                raise
            finally:
                self._holder = outer

    @contextmanager
    def without_adapter(self, adapter_id: int) -> Iterator[None]:
        """Wait until no request uses an adapter; from now on requests with it are refused.

        Raises:
            StartError: The engine is shut down.
        """
        with self._lock:
            self._unloaded.add(adapter_id)
        try:
            while adapter_id in [*self._adapters.values()]:
                self._require_running()
                time.sleep(_DRAIN_S)
        except BaseException:
            # It stays loaded, as after Ctrl-C.
            self._unloaded.discard(adapter_id)
            raise
        yield

    def refuse(self, reason: str | None) -> None:
        """Abort all requests where none can be served any more, for a reason."""
        if reason is not None:
            for number in list(self._queues):
                self._runtime.abort(number)

    def forget(self, numbers: Iterable[int], abort: bool = True) -> None:
        """Drop requests, and abort them unless they have ended."""
        aborts = abort and not self._stopping and os.getpid() == self._process
        for number in list(numbers):
            self._queues.pop(number, None)
            self._adapters.pop(number, None)
            if aborts:
                self._runtime.abort(number)

    def close(self) -> None:
        """Shut the runtime down and end all calls; does nothing in a forked process."""
        if os.getpid() != self._process:
            return
        self._stopping = True
        self._runtime.shutdown()
        # The thread may wait for the lock of a caller that this one interrupts.
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
            # `submit` checks this afterwards.
            self._stopping = True
            for number, outputs in list(self._queues.items()):
                outputs.put(number, None)

    def _deliver(self, outputs: Iterable[Any]) -> None:
        """Put outputs into the queues of their calls."""
        with self._lock:
            found = [(self._queues.get(output.request), output) for output in outputs]
        for target, output in found:
            if target is not None:
                target.put(output.request, output)


def batched_by_size(
    items: Iterable[_Item], size: Callable[[_Item], int], most: int
) -> Iterator[list[_Item]]:
    """Split into batches of at most `most` in total size, or of one larger item."""
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


def wait_ready(runtime: Any, on_start: Callable[[float, str], None] | None, started: float) -> None:
    """Wait until the drivers are ready, and forward their log."""
    while not runtime.wait_ready(_START_S):
        for line in runtime.log_lines() or [""]:
            if line:
                logger.info("%s", line)
            if on_start is not None:
                on_start(time.monotonic() - started, line)
