"""An OpenTelemetry collector that keeps the spans it receives."""

from __future__ import annotations

import contextlib
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

from support.servers.pie_server import wait_until
from support.servers.sglang_server import Server

STAGES: Final = ("prefill_waiting", "prefill_forward", "decode_forward")


@dataclass
class KeptSpan:
    """A span. Ids are in hexadecimal, as in a `traceparent`; times in ns since 1970."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    service: str


@dataclass
class Collector(services.TraceServiceServicer):
    """Keeps spans.

    Attributes:
        endpoint: Where it listens, as `host:port`.
    """

    endpoint: str = ""
    spans: list[KeptSpan] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def Export(self, request: Any, _context: Any) -> Any:
        with self.lock:
            self.spans += spans_of(request)
        return messages.ExportTraceServiceResponse()

    def trace(self, number: int, wanted: set[str]) -> dict[str, KeptSpan]:
        """The spans under :func:`parent_of`, by their names, once all of `wanted` have come.

        What SGLang adds of the process to names is left out.
        """
        trace, _ = parent_of(number)

        def found() -> dict[str, KeptSpan]:
            with self.lock:
                return {s.name.partition("(")[0]: s for s in self.spans if s.trace == trace}

        wait_until(lambda: wanted <= found().keys(), 60, f"{wanted}")
        return found()


def parent_of(number: int) -> tuple[str, str]:
    """The trace and the span of a client of a test."""
    return f"{number + 1:032x}", f"{number + 1:016x}"


def traced_request(server: Server, number: int, path: str, body: dict[str, Any]) -> Any:
    """What a server answers to a client whose span is :func:`parent_of`."""
    trace, span = parent_of(number)
    request = server.request(path, body)
    request.add_header("traceparent", f"00-{trace}-{span}-01")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def check_stages(found: dict[str, KeptSpan], within: KeptSpan) -> None:
    """Checks that the stages of a request follow each other, inside of the caller's span."""
    whole, stages = found["Scheduler"], [found[name] for name in STAGES]
    assert whole.parent == within.id
    assert {stage.parent for stage in stages} == {whole.id}
    starts = [stage.start for stage in stages]
    assert [whole.start, *(stage.end for stage in stages)] == [*starts, whole.end]
    times = [within.start, *starts, whole.end, within.end]
    assert times == sorted(times)
    # A forward pass takes longer than this on any machine.
    assert all(stage.end - stage.start > 10_000 for stage in stages[1:])


def spans_of(request: Any) -> list[KeptSpan]:
    """What a message to a collector says."""
    return [
        KeptSpan(
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            span.status.code,
            {each.key: value_of(each.value) for each in span.attributes},
            next(
                each.value.string_value
                for each in resource.resource.attributes
                if each.key == "service.name"
            ),
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(each) for each in found.values] if kind == "array_value" else found


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on the loopback."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        collector = Collector()
        services.add_TraceServiceServicer_to_server(collector, server)
        port = server.add_insecure_port("127.0.0.1:0")
        collector.endpoint = f"127.0.0.1:{port}"
        server.start()
        try:
            yield collector
        finally:
            server.stop(None).wait()
