"""The metrics of a driver, each defined once, and their Prometheus export.

:data:`METRICS` needs no library: the check of the documentation imports it. A metric with the
meaning of one of SGLang's has its name after the colon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from pie_driver_sglang._core import Counts
from pie_driver_sglang.errors import ConfigError, reason
from pie_driver_sglang.observability.collector import MetricsCollector
from pie_driver_sglang.observability.served_model import ServedModel

PREFIX: Final = "pie_driver:"

Value = float | Mapping[str, float]
"""A number, or one for each value of the metric's label."""


class Metric(NamedTuple):
    """A metric of a driver."""

    word: str
    """The name after the prefix. A counter's ends with `_total`."""
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    """Its help text."""
    read: Callable[[Counts, ServedModel], Value] | None
    """Reads the value; None for a histogram."""
    label: str = ""
    """The label of a mapping's keys; empty for a single value."""
    sglang: str = ""
    """The equivalent metric of SGLang."""
    histogram: str = ""

    @property
    def name(self) -> str:
        """The whole name."""
        return PREFIX + self.word


METRICS: Final[tuple[Metric, ...]] = (
    Metric(
        "steps_total",
        "counter",
        "Batches that the model ran, by the path that they took.",
        lambda counts, _: {"graph": counts.graph_steps, "python": counts.python_steps},
        label="path",
    ),
    Metric(
        "batch_requests_total",
        "counter",
        "Requests of these batches. A context that generates 100 tokens counts 100 times.",
        lambda counts, _: counts.requests,
    ),
    Metric(
        "computed_tokens_total",
        "counter",
        "Rows that the model computed: prompts, decodes and drafts.",
        lambda counts, _: counts.computed_tokens,
    ),
    Metric(
        "prompt_tokens_total",
        "counter",
        "Input tokens of requests that bring more than one.",
        lambda counts, _: counts.prompt_tokens,
        sglang="sglang:prompt_tokens_total",
    ),
    Metric(
        "generation_tokens_total",
        "counter",
        "Tokens returned to the runtime, accepted drafts included.",
        lambda counts, _: counts.generated_tokens,
        sglang="sglang:generation_tokens_total",
    ),
    Metric(
        "draft_tokens_total",
        "counter",
        "Draft tokens that were verified.",
        lambda counts, _: counts.drafts,
    ),
    Metric(
        "accepted_draft_tokens_total",
        "counter",
        "Draft tokens that were accepted.",
        lambda counts, _: counts.accepted_drafts,
    ),
    Metric(
        "copied_pages_total",
        "counter",
        "KV pages copied, by direction: D2H swaps out, H2D swaps in, D2D forks.",
        lambda counts, _: counts.copied_pages,
        label="direction",
    ),
    Metric(
        "copied_states_total",
        "counter",
        "Slots of recurrent state copied.",
        lambda counts, _: counts.copied_states,
    ),
    Metric(
        "refused_total",
        "counter",
        "Requests and frames that were refused, by the kind of fault that the log names.",
        lambda counts, _: counts.refused,
        label="reason",
    ),
    Metric(
        "aborted_batches_total",
        "counter",
        "Batches that failed and were answered by an abort.",
        lambda counts, _: counts.aborted_batches,
    ),
    Metric(
        "abandoned_answers_total",
        "counter",
        "Answers that came after the runtime had given up on them.",
        lambda counts, _: counts.abandoned,
    ),
    Metric(
        "num_running_reqs",
        "gauge",
        "Requests of the last batch.",
        lambda counts, _: counts.last_requests,
        sglang="sglang:num_running_reqs",
    ),
    Metric(
        "num_used_tokens",
        "gauge",
        "KV slots of the pages that the requests of a recent batch name; a shared page once.",
        lambda counts, model: counts.used_pages * model.page_size,
        sglang="sglang:num_used_tokens",
    ),
    Metric(
        "token_usage",
        "gauge",
        "The same as a share of the pool, from 0 to 1.",
        lambda counts, model: counts.used_pages / max(1, model.total_pages),
        sglang="sglang:token_usage",
    ),
    Metric(
        "max_total_num_tokens",
        "gauge",
        "KV slots of the pool.",
        lambda _, model: model.total_pages * model.page_size,
        sglang="sglang:max_total_num_tokens",
    ),
    Metric(
        "host_seconds",
        "histogram",
        "Host time of a batch in which the device has nothing to do: read, plan, stage, answer.",
        None,
        histogram="host",
    ),
    Metric(
        "step_seconds",
        "histogram",
        "From the arrival of a batch to its answer.",
        None,
        histogram="step",
    ),
)

READY: Final = PREFIX + "ready"
"""A gauge: 0 while the model is loaded, 1 while the driver serves."""


class Exporter(MetricsCollector):
    """A `prometheus_client` collector for the metrics of one driver. Thread-safe."""

    def __init__(self, group: int) -> None:
        """Label all values with the group."""
        self._group = str(group)
        self._read: Callable[[], Counts] | None = None
        self._model = ServedModel("", 0, 0)

    def begin(self, read: Callable[[], Counts], model: ServedModel) -> None:
        """Export the counts from now on."""
        self._model = model
        self._read = read

    def collect(self) -> Iterator[Any]:
        """The metric families, for the registry."""
        from prometheus_client.core import GaugeMetricFamily

        read = self._read
        text = "0 while the model is loaded, 1 while the driver serves."
        ready = GaugeMetricFamily(READY, text, labels=["group"])
        ready.add_metric([self._group], float(read is not None))
        yield ready
        if read is not None:
            counts = read()
            yield from (self._family(metric, counts) for metric in METRICS)

    def _family(self, metric: Metric, counts: Counts) -> Any:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        common = [self._group, self._model.name]
        labels = ["group", "model_name", *([metric.label] if metric.label else [])]
        if metric.read is None:
            name = metric.histogram
            family = HistogramMetricFamily(metric.name, metric.text, labels=labels)
            buckets = [(_bound(bound), count) for bound, count in counts.below(name)]
            family.add_metric(common, buckets, counts.sum_s(name))
            return family
        kinds: dict[str, Any] = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        family = kinds[metric.kind](metric.name, metric.text, labels=labels)
        value = metric.read(counts, self._model)
        if isinstance(value, Mapping):
            for key, number in value.items():
                family.add_metric([*common, key], float(number))
        else:
            family.add_metric(common, float(value))
        return family


def serve_metrics(exporter: Exporter, port: int) -> Callable[[], None]:
    """Serve the metrics on the loopback interface, and return a function that stops it.

    Raises:
        ConfigError: The port is not available.
    """
    from prometheus_client import start_http_server

    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=exporter.registry())
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"option `metrics_port`: cannot listen on 127.0.0.1:{port}: {reason(error)}",
            "choose a free port; the driver of group N takes `metrics_port` plus N",
        ) from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def write_metrics(exporter: Exporter, path: str) -> None:
    """Replace the file by the current metrics.

    Raises:
        OSError: It cannot be written.
    """
    from prometheus_client import write_to_textfile

    write_to_textfile(path, exporter.registry())


def _bound(seconds: float) -> str:
    return "+Inf" if seconds == float("inf") else f"{seconds:.9g}"
