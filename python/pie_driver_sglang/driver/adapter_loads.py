"""Adapter loads in progress: read on a thread, finished on the serving thread."""

from __future__ import annotations

import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pie_driver_sglang.driver.failures import log_or_raise
from pie_driver_sglang.errors import AdapterError, quoted

if TYPE_CHECKING:
    from pie_driver_sglang._core import Load
    from pie_driver_sglang.engine.executor import ModelExecutor

logger = logging.getLogger(__name__)

STATUS_OK = 0
STATUS_FAILED = 5
MOST_LOADS: Final = 2
"""Most loads at once. The region has four slots, which forwards and copies need as well."""
CLIENT_TIMEOUT_S: Final = 60.0
"""How long the runtime waits for an answer, unless its environment sets another time."""
CLIENT_TIMEOUT_VARIABLE: Final = "PIE_SHMEM_HARD_TIMEOUT_S"


class AdapterLoads:
    """Adapter loads that are not finished yet.

    Every load is answered before its client times out: otherwise the next request in the slot would
    wait for that answer.
    """

    def __init__(self, engine: ModelExecutor, wake: Callable[[], object]) -> None:
        """Starts without loads.

        Args:
            engine: Reads adapters.
            wake: Schedules :meth:`process_finished` on the serving thread; any thread may call it.
        """
        self._engine = engine
        self._wake = wake
        self._timeout_s = _timeout_s()
        self._open: dict[int, _Open] = {}
        """In the order in which they began and are read."""
        self._numbers = itertools.count()

    def begin(self, load: Load) -> None:
        """Start a load, or reject it."""
        if len(self._open) >= MOST_LOADS:
            reading = ", ".join(quoted(one.path) for one in self._open.values())
            error = AdapterError(
                f"{len(self._open)} adapters are being read already, {reading}", "try again later"
            )
            _refuse(load, error)
            return
        opened = _Open(load, self._timeout_s, self._wake)
        number = next(self._numbers)
        self._open[number] = opened

        def done() -> None:
            opened.is_read = True
            self._wake()

        self._engine.begin_load(number, load.adapter_id, load.path, done)

    def process_finished(self) -> None:
        """Continue a load that has been read, and reject those that time out.

        A load continues in steps, between which other requests are served.
        """
        copies = True
        for number, opened in list(self._open.items()):
            if opened.is_read and copies:
                # Loads end in their order; two may be of one id.
                copies = self._finish_load(number, opened)
            elif opened.is_read:
                continue
            elif opened.load is not None and time.monotonic() >= opened.until:
                text = f"it is not read within {self._timeout_s:g} s, and its client will give up"
                _refuse(opened.load, AdapterError(text, "keep adapters on a faster disk"))
                opened.load = None

    def close(self) -> None:
        """Answer every load with a failure, when the loop ends."""
        for opened in self._open.values():
            opened.timer.cancel()
            if opened.load is not None:
                opened.load.commit(STATUS_FAILED)
        self._open.clear()

    def _finish_load(self, number: int, opened: _Open) -> bool:
        """Run the next step of a load that was read; returns whether it has ended."""
        opened.timer.cancel()
        if (load := opened.load) is None:
            del self._open[number]
            self._engine.discard_load(number)
            return True
        adapter_id, path = load.adapter_id, quoted(load.path)
        try:
            while not self._engine.finish_load(number):
                # After the deadline the rest is loaded without a pause.
                if time.monotonic() < opened.until:
                    self._wake()
                    return False
        except AdapterError as error:
            del self._open[number]
            _refuse(load, error)
        except Exception as error:
            del self._open[number]
            load.commit(STATUS_FAILED, f"{type(error).__name__}: {error}")
            text = "loading adapter %d from %s failed"
            log_or_raise(self._engine, error, "load", text, adapter_id, path)
        else:
            del self._open[number]
            logger.info("adapter %d loaded from %s", adapter_id, path, extra={"kind": "loaded"})
            load.commit(STATUS_OK)
        return True


class _Open:
    """A load that is not finished yet."""

    def __init__(self, load: Load, patience_s: float, wake: Callable[[], object]) -> None:
        self.load: Load | None = load
        """None once it is answered."""
        self.path = load.path
        self.is_read = False
        """Set by another thread."""
        self.until = time.monotonic() + patience_s
        self.timer = threading.Timer(patience_s, wake)
        self.timer.daemon = True
        self.timer.start()


def _refuse(load: Load, error: AdapterError) -> None:
    text = "adapter %d cannot be loaded from %s: %s; %s"
    arguments = (load.adapter_id, quoted(load.path), error.message, error.hint)
    logger.warning(text, *arguments, extra={"kind": "load"})
    load.commit(STATUS_FAILED, f"{error.message}\n\nhint: {error.hint}")


def _timeout_s() -> float:
    """Seconds after which an unfinished load is rejected."""
    # The runtime starts this process, so its environment is this one's.
    try:
        timeout = float(os.environ.get(CLIENT_TIMEOUT_VARIABLE, ""))
    except ValueError:
        timeout = CLIENT_TIMEOUT_S
    usable = timeout if math.isfinite(timeout) and timeout > 0 else CLIENT_TIMEOUT_S
    return min(usable * 5 / 6, threading.TIMEOUT_MAX)
