"""A thread that reads adapters while the engine serves."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Loader:
    """Takes its steps one after the other, in their order, on a thread of its own.

    The thread starts with the first step, and nothing waits for it when the process ends: a file
    system may keep it for ever.
    """

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._steps: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, step: Callable[[], T], done: Callable[[], object]) -> Future[T]:
        """Has a step taken.

        Args:
            step: What to do on the thread.
            done: Called there once the result is in the future, or the exception.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(step())
            except BaseException as error:
                future.set_exception(error)
            done()

        self._steps.put(run)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while True:
            step = self._steps.get()
            step()
            # Its result may be large, and the next step may be long in coming.
            del step
