"""The scheduler's Prometheus metrics: SGLang's names, and `pie_runtime:` for others.

`/metrics` merges them with those of the frontend, by files in ``PROMETHEUS_MULTIPROC_DIR``.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from typing import Any, Final, NamedTuple

from pie_driver_sglang import _core
from pie_driver_sglang.frontends.sglang_server.compat.prometheus import (
    FIGURE_PREFIX,
    SchedulerMetrics,
)
from pie_driver_sglang.observability.backoff import Backoff

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
"""Update period."""


class _Metric(NamedTuple):
    """A metric of the runtime, without its value."""

    name: str
    is_counter: bool
    text: str
    label: tuple[str, str] | None


class MetricsThread:
    """A thread that writes the runtime's metrics once a second, with backoff after failures."""

    def __init__(
        self, runtime: _core.Runtime, front: _core.SglangFrontend, metrics: SchedulerMetrics
    ) -> None:
        """Start the thread; the runtime has one replica."""
        self._runtime, self._front, self._metrics = runtime, front, metrics
        self._own: dict[str, Any] = {}
        self._seen: dict[tuple[str, Any], float] = {}
        self._gauges: dict[tuple[str, Any], _Metric] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Write the current values."""
        [metrics] = self._runtime.metrics()
        for name, is_counter, text, label, value in metrics:
            grown = max(0.0, value - self._seen.get((name, label), 0.0)) if is_counter else 0.0
            self._put(_Metric(name, is_counter, text, label), value, grown)
            # After the write: a failed increment is added by the next attempt.
            self._seen[name, label] = value
        self._metrics.observe(self._front.take_waits())
        self._metrics.put_sessions(self._front.open_sessions)

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        backoff = Backoff(PERIOD_S)
        while not self._stop.wait(backoff.wait_s):
            try:
                self.write()
            except Exception:
                # Requests are served all the same.
                if backoff.failed():
                    logger.exception(
                        "the metrics cannot be written: gauges are NaN until they can be again"
                    )
                self._drop_gauges()
            else:
                if backoff.succeeded():
                    logger.warning("the metrics are written again")

    def _put(self, figure: _Metric, value: float, grown: float) -> None:
        """Set a gauge, or increment a counter by `grown`."""
        name, label = figure.name, figure.label
        if not figure.is_counter:
            self._gauges.setdefault((name, label), figure)
        if name.startswith(FIGURE_PREFIX):
            self._metrics.put(name, label, value, grown)
            return
        metric = self._own.get(name) or self._register(figure)
        child = metric.labels(**self._metrics.labels, **dict([label] if label else ()))
        if figure.is_counter:
            child.inc(grown)
        else:
            child.set(value)

    def _drop_gauges(self) -> None:
        """Set gauges to NaN: their last values would pass for current ones."""
        for figure in self._gauges.values():
            with contextlib.suppress(Exception):
                self._put(figure, math.nan, 0.0)

    def _register(self, figure: _Metric) -> Any:
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR.
        import prometheus_client

        names = [*self._metrics.labels, *([figure.label[0]] if figure.label else ())]
        if figure.is_counter:
            metric: Any = prometheus_client.Counter(figure.name, figure.text, names)
        else:
            metric = prometheus_client.Gauge(
                figure.name, figure.text, names, multiprocess_mode="mostrecent"
            )
        self._own[figure.name] = metric
        return metric
