"""The thread that logs statistics and writes the metrics file."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Self

from pie_driver_sglang._core import Counts
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.errors import ConfigError, quoted, reason
from pie_driver_sglang.observability.backoff import Backoff
from pie_driver_sglang.observability.driver_metrics import Exporter, serve_metrics, write_metrics
from pie_driver_sglang.observability.log_line import line, log_fields
from pie_driver_sglang.observability.served_model import ServedModel, for_group

logger = logging.getLogger(__name__)

TICK_S: Final = 1.0
"""Sampling period: the resolution of idle time."""
_PARTS: Final = 10
"""Minimum samples of an interval."""


class _Window(NamedTuple):
    """The interval of the next log line."""

    counts: Counts
    began: float
    worked_s: float


class IntervalLog:
    """Logs statistics after each interval with work; an idle driver logs none.

    Rates refer to the busy time, to the second.
    """

    def __init__(self, interval_s: float, model: ServedModel, counts: Counts, now: float) -> None:
        """Start an interval.

        Args:
            interval_s: Seconds from the first work to the log line.
            model: The served model.
            counts: The server's current counts.
            now: A monotonic time in seconds.
        """
        self._interval_s = interval_s
        self._model = model
        self._last = counts
        self._last_at = now
        self._window: _Window | None = None

    def take(self, counts: Counts, now: float) -> None:
        """Log a line if one is due."""
        if _work(counts) != _work(self._last):
            window = self._window or _Window(self._last, self._last_at, 0.0)
            worked_s = window.worked_s + now - self._last_at
            self._window = window._replace(worked_s=worked_s)
        self._last, self._last_at = counts, now
        window_now = self._window
        if window_now is None or now - window_now.began < self._interval_s:
            return
        self._window = None
        fresh = counts.since(window_now.counts)
        values = log_fields(fresh, window_now.worked_s, self._model)
        logger.info("%s", line(values), extra={"kind": None, "fields": {"figures": values}})


class MetricsFile:
    """The metrics file, replaced whenever the counts have changed.

    After a failed write it is removed, because its values would pass for current ones, and written
    again with backoff.
    """

    def __init__(self, exporter: Exporter, path: str) -> None:
        """Write nothing yet."""
        self._exporter, self._path = exporter, path
        self._written: tuple[int, ...] | None = None
        self._backoff, self._next_at = Backoff(TICK_S), 0.0

    def begin(self) -> None:
        """Write it for the first time.

        Raises:
            ConfigError: It cannot be written.
        """
        try:
            write_metrics(self._exporter, self._path)
        except OSError as error:
            raise ConfigError(
                f"option `metrics_file`: cannot write {quoted(self._path)}: {reason(error)}",
                "name a file in a folder that exists and is writable",
            ) from error

    def update(self, counts: Counts, now: float) -> None:
        """Write it, if the counts have changed and the backoff is over."""
        state = _state(counts)
        if state == self._written or (self._backoff.failures and now < self._next_at):
            return
        try:
            write_metrics(self._exporter, self._path)
        except OSError as error:
            if self._backoff.failed():
                logger.warning(
                    "the file of metrics cannot be written, and is removed until it can be again: "
                    "%s",
                    reason(error),
                )
            self._written, self._next_at = None, now + self._backoff.wait_s
            with contextlib.suppress(OSError):
                Path(self._path).unlink()
        else:
            self._written = state
            if self._backoff.succeeded():
                logger.info("the file of metrics is written again")


class Reporter:
    """Reports the counts of a server, within its context.

    Metrics are served while the model is loaded: the driver is then not ready.
    """

    def __init__(self, group: int, options: DriverOptions) -> None:
        """Store the options; entering the context starts it."""
        self._interval_s = options.log_interval_s
        self._port = None if options.metrics_port is None else options.metrics_port + group
        self._exporter = Exporter(group)
        path = for_group(options.metrics_file, group)
        self._file = None if path is None else MetricsFile(self._exporter, path)
        self._stop_server: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, read: Callable[[], Counts], model: ServedModel) -> None:
        """Start to report; `read` is called by other threads."""
        self._exporter.begin(read, model)
        if self._interval_s or self._file is not None:
            arguments = (read, model)
            thread = threading.Thread(
                target=self._run, args=arguments, name="pie-reporter", daemon=True
            )
            thread.start()
            self._thread = thread

    def __enter__(self) -> Self:
        """Open the port and write the file once.

        Raises:
            ConfigError: The port or the file is not available.
        """
        if self._file is not None:
            self._file.begin()
        if self._port is not None:
            self._stop_server = serve_metrics(self._exporter, self._port)
            logger.info("metrics at http://127.0.0.1:%d/metrics", self._port)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the thread and close the port."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._stop_server is not None:
            self._stop_server()

    def _run(self, read: Callable[[], Counts], model: ServedModel) -> None:
        tick_s = min(TICK_S, self._interval_s / _PARTS) if self._interval_s else TICK_S
        log = None
        if self._interval_s:
            log = IntervalLog(self._interval_s, model, read(), time.monotonic())
        while not self._ended.wait(tick_s):
            try:
                counts, now = read(), time.monotonic()
                if log is not None:
                    log.take(counts, now)
                if self._file is not None:
                    self._file.update(counts, now)
            except Exception:
                # The next attempt may succeed.
                logger.exception("the counts cannot be reported")


def _work(counts: Counts) -> tuple[int, ...]:
    """The counts that only work changes."""
    copied = sum(counts.copied_pages.values()) + counts.copied_states
    return counts.steps, copied, sum(counts.refused.values()), counts.aborted_batches


def _state(counts: Counts) -> tuple[int, ...]:
    return (*_work(counts), counts.abandoned, counts.used_pages)
