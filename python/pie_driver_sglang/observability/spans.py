"""Spans of requests for an OpenTelemetry collector.

Rust records the times of traced requests in a bounded buffer. A thread exports finished ones about
once a second. Nothing waits for it: while a collector is slow or gone, records are dropped, and
counted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Self

from pie_driver_sglang.errors import ConfigError, install_command, quoted
from pie_driver_sglang.observability.backoff import Backoff

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from pie_driver_sglang._core import TracedRequest

logger = logging.getLogger(__name__)

DEFAULT_ENDPOINT: Final = "localhost:4317"
EXPORT_PERIOD_S: Final = 1.0
"""Export period."""
_TIMEOUT_S: Final = 5.0
"""Timeout of the collector for the spans of `_MOST` requests."""
_CLOSE_S: Final = 2.0
"""The same at shutdown."""
_MOST: Final = 128
"""Requests per export."""
_PROTOCOL: Final = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_PROTOCOLS: Final = ("grpc", "http/protobuf")
_PACKAGES: Final = (
    "opentelemetry.sdk",
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.exporter.otlp.proto.http",
)

Take = Callable[[], "tuple[list[TracedRequest], int]"]
"""Fetches the requests that have ended since the last call, and the number of dropped ones."""


REQUIREMENTS: Final = ("opentelemetry-sdk>=1.45,<2", "opentelemetry-exporter-otlp>=1.45,<2")
"""The packages of the extra `trace`."""


def check_tracing() -> None:
    """Check that spans can be exported.

    Raises:
        ConfigError: A package is missing, or the environment names another protocol.
    """
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    if missing:
        raise ConfigError(
            f"`--enable-trace` needs OpenTelemetry, and `{missing[0]}` is not installed",
            f"run `{install_command(*REQUIREMENTS)}`",
        )
    protocol = os.environ.get(_PROTOCOL, _PROTOCOLS[0])
    if protocol not in _PROTOCOLS:
        raise ConfigError(
            f"`{_PROTOCOL}` is {quoted(protocol)}", f"expected one of {', '.join(_PROTOCOLS)}"
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class SpanThread:
    """A thread that exports spans about once a second. Use it as a context manager."""

    def __init__(
        self,
        takes: Sequence[Take],
        endpoint: str,
        *,
        service: str,
        model: str,
        attributes: Mapping[str, int | str] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            takes: Fetches the requests of each replica.
            endpoint: Of the collector: `host:port`, or a URL.
            service: The service name of the spans.
            model: The name that clients use.
            attributes: Attributes of all spans.

        Raises:
            ConfigError: See :func:`check_tracing`.
        """
        check_tracing()
        self._takes, self._endpoint = takes, endpoint
        self._attributes = {"gen_ai.response.model": model, **(attributes or {})}
        self._spans, self._tracer = _collected(service)
        self._exporter, self._reason = _exporter(endpoint), _Reason()
        self.dropped = 0
        """Requests whose spans were dropped."""
        self._is_said = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Export the rest, if the collector accepts it at once, and stop."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
        # This aborts a pending export, which is counted.
        self._exporter.shutdown()
        self._thread.join(_CLOSE_S)
        if self.dropped:
            logger.warning("%d traced requests have no spans at the collector", self.dropped)

    def __enter__(self) -> Self:
        """Return the thread."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        self.close()

    def _run(self) -> None:
        backoff = Backoff(EXPORT_PERIOD_S)
        is_last = False
        while not is_last:
            is_last = self._stop.wait(backoff.wait_s)
            try:
                self._export()
            except Exception:
                # Requests are served all the same.
                if backoff.failed():
                    logger.exception("spans of requests cannot be exported")
            else:
                backoff.succeeded()

    def _export(self) -> None:
        for take in self._takes:
            requests, lost = take()
            self._drop(lost)
            try:
                while requests and self._send(requests[:_MOST]):
                    del requests[:_MOST]
            finally:
                # No retry for each part while the collector is gone.
                self._drop(len(requests))

    def _send(self, requests: Sequence[TracedRequest]) -> bool:
        from opentelemetry.sdk.trace.export import SpanExportResult

        for request in requests:
            record_spans(self._tracer, request, self._attributes)
        spans = self._spans[:]
        self._spans.clear()
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def _drop(self, count: int) -> None:
        self.dropped += count
        if count and not self._is_said:
            self._is_said = True
            logger.warning(
                "the collector at %s does not take all spans: those of %d requests were dropped%s. "
                "Requests are served as before; the number is logged at the end",
                self._endpoint,
                count,
                self._reason.text and f" ({self._reason.text})",
            )


class _Reason(logging.Handler):
    """Keeps the error that OpenTelemetry's exporters log."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        exporters = logging.getLogger("opentelemetry.exporter")
        exporters.handlers, exporters.propagate = [self], False

    def emit(self, record: logging.LogRecord) -> None:
        if not self.text or record.levelno >= logging.ERROR:
            self.text = record.getMessage().partition("\n")[0]


def record_spans(
    tracer: Tracer, request: TracedRequest, attributes: Mapping[str, int | str]
) -> None:
    """Record the spans of a request: one for all of it, and one for each stage.

    Names are those of SGLang's scheduler. Attributes follow OpenTelemetry's conventions for
    generative AI; others begin with `pie.`.
    """
    from opentelemetry import trace

    whole = tracer.start_span(
        "Scheduler",
        context=trace.set_span_in_context(_parent(request)),
        start_time=request.received_ns,
        attributes={**attributes, **_request_attributes(request)},
    )
    within = trace.set_span_in_context(whole)
    for name, start, end in stages(request):
        tracer.start_span(name, context=within, start_time=start).end(end)
    if request.error is not None:
        kind, reason = request.error
        whole.set_attribute("error.type", kind)
        whole.set_status(trace.StatusCode.ERROR, reason)
    whole.end(request.ended_ns)


def stages(request: TracedRequest) -> Iterator[tuple[str, int, int]]:
    """The stages that a request reached: name, start and end in Unix nanoseconds."""
    admitted, first, ended = request.admitted_ns, request.first_token_ns, request.ended_ns
    yield "prefill_waiting", request.received_ns, ended if admitted is None else admitted
    if admitted is not None:
        yield "prefill_forward", admitted, ended if first is None else first
    if first is not None:
        yield "decode_forward", first, ended


def _request_attributes(request: TracedRequest) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "gen_ai.request.id": request.name,
        "gen_ai.response.finish_reasons": request.finish_reasons,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        "pie.cached_tokens.device": request.cached_tokens - request.loaded_tokens,
        "pie.cached_tokens.host": request.loaded_tokens,
        "pie.retractions": request.retractions,
    }
    if len(request.finish_reasons) > 1:
        attributes["gen_ai.request.choice.count"] = len(request.finish_reasons)
    if request.priority is not None:
        attributes["pie.priority"] = request.priority
    return attributes


def _parent(request: TracedRequest) -> Span:
    from opentelemetry import trace

    if request.parent is None:
        return trace.INVALID_SPAN
    trace_id, span_id = request.parent
    sampled = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    context = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=sampled)
    return trace.NonRecordingSpan(context)


def _collected(service: str) -> tuple[list[ReadableSpan], Tracer]:
    """A tracer, and the list of its ended spans."""
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON

    spans: list[ReadableSpan] = []

    class Collector(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            spans.append(span)

    provider = TracerProvider(
        # Sampling was decided before.
        sampler=ALWAYS_ON,
        resource=Resource.create({SERVICE_NAME: service}),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(Collector())
    return spans, provider.get_tracer("pie_driver_sglang")


def _exporter(endpoint: str) -> SpanExporter:
    """The span exporter, by the protocol of the environment, as in SGLang's frontend."""
    if os.environ.get(_PROTOCOL, _PROTOCOLS[0]) == _PROTOCOLS[0]:
        from opentelemetry.exporter.otlp.proto.grpc import trace_exporter

        is_secure = endpoint.startswith("https://")
        return trace_exporter.OTLPSpanExporter(
            endpoint=endpoint, insecure=not is_secure, timeout=_TIMEOUT_S
        )
    from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

    return http.OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT_S)
