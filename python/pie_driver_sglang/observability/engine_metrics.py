"""Prometheus metrics of runtimes, in a process where SGLang does not export them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from pie_driver_sglang._core import Runtime
from pie_driver_sglang.observability.active import REASONS
from pie_driver_sglang.observability.collector import MetricsCollector

ACTIVE: Final = "pie_runtime:active_info"


class RuntimeExporter(MetricsCollector):
    """A `prometheus_client` collector for the metrics of runtimes. Thread-safe.

    The labels are `model_name` and `dp_rank`, the index of the replica.
    """

    def __init__(
        self,
        runtimes: Sequence[Runtime],
        model_name: str,
        active: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Collect from runtimes.

        Args:
            runtimes: Each with one or several replicas.
            model_name: The name that clients use.
            active: Returns the active components; see `observability.active`.
        """
        self._runtimes, self._model_name, self._active = runtimes, model_name, active

    def collect(self) -> Iterator[Any]:
        """The metric families, with the values of all replicas."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        replicas = [figures for runtime in self._runtimes for figures in runtime.metrics()]
        for rank, figures in enumerate(replicas):
            common = [self._model_name, str(rank)]
            for name, is_counter, text, label, value in figures:
                if name not in families:
                    kind: Any = CounterMetricFamily if is_counter else GaugeMetricFamily
                    labels = ["model_name", "dp_rank", *([label[0]] if label else ())]
                    families[name] = kind(name, text, labels=labels)
                families[name].add_metric([*common, *([label[1]] if label else ())], value)
        yield from families.values()
        parts = {name: chosen for name, chosen in self._active().items() if name != REASONS}
        info = GaugeMetricFamily(
            ACTIVE, "What serves the model, as labels; always 1.", labels=["model_name", *parts]
        )
        info.add_metric([self._model_name, *parts.values()], 1)
        yield info
