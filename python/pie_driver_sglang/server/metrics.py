"""The scheduler's metrics for Prometheus: SGLang's names, and `pie_runtime:` for what it has not.

The front end's `/metrics` merges them with its own, by files in ``PROMETHEUS_MULTIPROC_DIR``.
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from pie_driver_sglang import _core
from pie_driver_sglang.server.seams.metrics import FIGURE_PREFIX, SchedulerMetrics

logger = logging.getLogger(__name__)

PERIOD_S: Final = 1.0
"""How old metrics may be."""


class MetricsThread:
    """Writes the figures of the runtime once a second, in a thread that nothing waits for."""

    def __init__(
        self, runtime: _core.Runtime, front: _core.Front, metrics: SchedulerMetrics
    ) -> None:
        """Starts.

        Args:
            runtime: Its figures are written; it has one replica.
            front: Its requests' waits are written.
            metrics: SGLang's.
        """
        self._runtime, self._front, self._metrics = runtime, front, metrics
        self._own: dict[str, Any] = {}
        self._seen: dict[tuple[str, Any], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def write(self) -> None:
        """Writes how things stand now."""
        [figures] = self._runtime.figures()
        for name, is_counter, text, label, value in figures:
            grown = max(0.0, value - self._seen.get((name, label), 0.0)) if is_counter else 0.0
            self._seen[name, label] = value
            if name.startswith(FIGURE_PREFIX):
                self._metrics.put(name, label, value, grown)
                continue
            metric = self._own.get(name) or self._register(name, is_counter, text, label)
            child = metric.labels(**self._metrics.labels, **dict([label] if label else ()))
            if is_counter:
                child.inc(grown)
            else:
                child.set(value)
        self._metrics.observe(self._front.take_waits())
        self._metrics.put_sessions(self._front.open_sessions)

    def close(self) -> None:
        """Writes for the last time."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                self.write()
            except Exception:
                # Requests are served all the same.
                logger.exception("the metrics cannot be written")
                return

    def _register(
        self, name: str, is_counter: bool, text: str, label: tuple[str, str] | None
    ) -> Any:
        # Not before SGLang has said where its files are.
        import prometheus_client

        names = [*self._metrics.labels, *([label[0]] if label else ())]
        if is_counter:
            metric: Any = prometheus_client.Counter(name, text, names)
        else:
            metric = prometheus_client.Gauge(name, text, names, multiprocess_mode="mostrecent")
        self._own[name] = metric
        return metric
