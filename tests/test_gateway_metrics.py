"""The endpoint of the metrics by itself: who is asked, and what is refused."""

from __future__ import annotations

import contextlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from pie_driver_sglang.errors import StartError
from pie_driver_sglang.frontends.gateway.metrics_endpoint import MetricsServer
from pie_driver_sglang.observability.engine_metrics import RuntimeExporter
from sglang_server import free_ports


class FewFigures:
    """Stands for a runtime with two replicas; `tests/test_gateway.py` has real ones."""

    def metrics(self) -> list[list[tuple[str, bool, str, tuple[str, str] | None, float]]]:
        return [
            [
                ("sglang:num_running_reqs", False, "Running.", None, 3.0 + rank),
                ("pie_runtime:steps_total", True, "Steps.", ("kind", "prompt"), 5.0),
                ("pie_runtime:steps_total", True, "Steps.", ("kind", "decode"), 7.0),
            ]
            for rank in range(2)
        ]


OURS = """\
# HELP sglang:num_running_reqs Running.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",model_name="m"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="m"} 4.0
# HELP pie_runtime:steps_total Steps.
# TYPE pie_runtime:steps_total counter
pie_runtime:steps_total{dp_rank="0",kind="prompt",model_name="m"} 5.0
pie_runtime:steps_total{dp_rank="0",kind="decode",model_name="m"} 7.0
pie_runtime:steps_total{dp_rank="1",kind="prompt",model_name="m"} 5.0
pie_runtime:steps_total{dp_rank="1",kind="decode",model_name="m"} 7.0
# HELP pie_runtime:active_info What serves the model, as labels; always 1.
# TYPE pie_runtime:active_info gauge
pie_runtime:active_info{layers="fused",model_name="m",scheduler="pie"} 1.0
"""


ACTIVE: dict[str, Any] = {"scheduler": "pie", "layers": "fused", "reasons": {}}


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    runtime: Any = FewFigures()
    with MetricsServer(RuntimeExporter([runtime], "m", lambda: ACTIVE), "127.0.0.1", 0) as server:
        yield server


def ask(server: MetricsServer, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(answer.read().decode())


@contextlib.contextmanager
def other(text: bytes) -> Iterator[int]:
    """An endpoint with this text; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_replicas_are_told_apart(server: MetricsServer) -> None:
    assert ask(server) == OURS
    assert ask(server, "/metrics/?name[]=x") == OURS


def test_the_gateways_follow_as_they_are(server: MetricsServer) -> None:
    with other(b"# TYPE smg_x counter\nsmg_x 1") as port:
        server.add_gateway(port)
        assert ask(server) == OURS + "# TYPE smg_x counter\nsmg_x 1\n"


def test_a_gateway_that_does_not_answer_hides_nothing(server: MetricsServer) -> None:
    server.add_gateway(free_ports(1)[0])
    assert ask(server) == OURS


def test_nothing_else_is_there(server: MetricsServer) -> None:
    with pytest.raises(urllib.error.HTTPError) as error:
        ask(server, "/")
    with error.value:
        assert error.value.code == 404


def test_a_port_that_is_taken_is_named(server: MetricsServer) -> None:
    with pytest.raises(StartError, match=f"127.0.0.1:{server.port}: Address already in use"):
        MetricsServer(RuntimeExporter([], "m", dict), "127.0.0.1", server.port)
