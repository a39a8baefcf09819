"""OpenTelemetry spans of requests, and slow or lost collectors."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

from pie_driver_sglang.errors import ConfigError, install_command
from pie_driver_sglang.frontends.gateway import supervisor as gateway
from pie_driver_sglang.frontends.sglang_server import server_process
from pie_driver_sglang.observability import spans
from pie_driver_sglang.observability.spans import SpanThread, Take
from support.models.tiny_models import POCKET
from support.servers.otel_collector import Collector, KeptSpan, collecting, spans_of
from support.servers.sglang_server import free_ports

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0xF067AA0BA902B7
S = 10**9


@dataclass
class Request:
    """What `_core` says of a request, set by hand."""

    name: str = "a"
    parent: tuple[int, int] | None = (TRACE, PARENT)
    priority: int | None = None
    prompt_tokens: int = 9
    cached_tokens: int = 4
    loaded_tokens: int = 1
    output_tokens: int = 5
    retractions: int = 2
    finish_reasons: list[str] = field(default_factory=lambda: ["stop"])
    error: tuple[str, str] | None = None
    received_ns: int = 10 * S
    admitted_ns: int | None = 11 * S
    first_token_ns: int | None = 13 * S
    ended_ns: int = 20 * S


def once(*requests: Any, lost: int = 0) -> Take:
    """Gives these requests to the first call."""
    left = [(list(requests), lost)]
    return lambda: left.pop() if left else ([], 0)


def exported(*requests: Any, endpoint: str = "", **more: Any) -> list[KeptSpan]:
    with collecting() as collector:
        endpoint = endpoint or collector.endpoint
        with SpanThread([once(*requests)], endpoint, service="s", model="m", **more) as thread:
            pass
        assert thread.dropped == 0
        return sorted(
            collector.spans, key=lambda span: (span.start, -span.end, span.name != "Scheduler")
        )


def test_a_request_is_a_span_with_its_stages() -> None:
    whole, *stages = exported(Request(priority=3), attributes={"dp_rank": 1})
    assert (whole.name, whole.service, whole.status) == ("Scheduler", "s", 0)
    assert (int(whole.trace, 16), int(whole.parent, 16)) == (TRACE, PARENT)
    assert (whole.start, whole.end) == (10 * S, 20 * S)
    assert whole.attributes == {
        "dp_rank": 1,
        "gen_ai.request.id": "a",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.model": "m",
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.input_tokens": 9,
        "gen_ai.usage.output_tokens": 5,
        "pie.cached_tokens.device": 3,
        "pie.cached_tokens.host": 1,
        "pie.priority": 3,
        "pie.retractions": 2,
    }
    assert [(span.name, span.start, span.end) for span in stages] == [
        ("prefill_waiting", 10 * S, 11 * S),
        ("prefill_forward", 11 * S, 13 * S),
        ("decode_forward", 13 * S, 20 * S),
    ]
    assert {span.parent for span in stages} == {whole.id}
    assert {span.trace for span in stages} == {whole.trace}


def test_a_request_without_a_parent_begins_a_trace() -> None:
    found = exported(
        Request(parent=None, finish_reasons=["stop", "length"]), Request("b", parent=None)
    )
    roots = [span for span in found if not span.parent]
    assert [span.attributes["gen_ai.request.id"] for span in roots] == ["a", "b"]
    assert [span.attributes.get("gen_ai.request.choice.count") for span in roots] == [2, None]
    assert len({span.trace for span in found}) == 2
    assert len({span.id for span in found}) == len(found) == 8


@pytest.mark.parametrize(
    ("changed", "stages"),
    [
        ({"admitted_ns": None, "first_token_ns": None}, ["prefill_waiting"]),
        ({"first_token_ns": None}, ["prefill_waiting", "prefill_forward"]),
    ],
)
def test_a_request_that_failed_has_the_stages_that_it_came_to(
    changed: dict[str, Any], stages: list[str]
) -> None:
    failed = Request(error=("deadline", "its time was over"), **changed)
    whole, *others = exported(failed)
    assert (whole.status, whole.attributes["error.type"]) == (2, "deadline")
    assert [span.name for span in others] == stages
    assert others[-1].end == whole.end


def test_many_requests_go_in_several_messages() -> None:
    assert len(exported(*(Request(str(number)) for number in range(300)))) == 1200


def test_a_collector_that_is_down_costs_nothing_and_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "EXPORT_PERIOD_S", 0.01)
    [port] = free_ports(1)
    requested = threading.Event()

    def take() -> tuple[list[Any], int]:
        requested.set()
        return [Request()] * 200, 0

    with caplog.at_level(logging.WARNING):
        thread = SpanThread([take], f"127.0.0.1:{port}", service="s", model="m")
        assert requested.wait(10)
        began = time.monotonic()
        thread.close()
        assert time.monotonic() - began < 10
    texts = [record.message for record in caplog.records]
    [said] = [text for text in texts if f"127.0.0.1:{port} does not take all spans" in text]
    assert "UNAVAILABLE" in said
    assert thread.dropped in (200, 400)
    assert texts[-1] == f"{thread.dropped} traced requests have no spans at the collector"
    assert len(texts) == 2


def test_dropped_spans_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with collecting() as collector, caplog.at_level(logging.WARNING):
        take = once(Request(), lost=3)
        with SpanThread([take], collector.endpoint, service="s", model="m") as thread:
            pass
        assert (thread.dropped, len(collector.spans)) == (3, 4)
    assert "those of 3 requests were dropped" in caplog.text


def test_spans_are_sent_by_http_if_the_environment_sets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            kept.spans += spans_of(messages.ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        with SpanThread([once(Request())], url, service="s", model="m"):
            pass
        server.shutdown()
        serving.join()
    assert len(kept.spans) == 4


def test_another_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="http/json"):
        spans.check_tracing()


def test_without_the_packages_a_start_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    words = ["--model-path", str(POCKET), "--device", "cpu", "--enable-trace"]
    own = server_process.split_arguments(words)
    given = {"model_path": str(POCKET), "device": "cpu", "enable_trace": True}
    for start in (lambda: gateway.main(words), lambda: server_process.choose_scheduler(own, given)):
        with pytest.raises(ConfigError, match=r"and `opentelemetry\.sdk` is not") as error:
            start()
        assert error.value.hint == f"run `{install_command(*spans.REQUIREMENTS)}`"
    monkeypatch.undo()
    assert server_process.choose_scheduler(own, given)[0] is not None
