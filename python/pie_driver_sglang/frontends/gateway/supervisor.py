"""`pie-sglang serve --front gateway`: drivers, gRPC servers and the gateway, from start to end."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Final

from pie_driver_sglang.config.hf_config import load_hf_config
from pie_driver_sglang.console import announce_server, print_notice
from pie_driver_sglang.errors import ConfigError, StartError, install_command
from pie_driver_sglang.fork_server.starter import fork_server
from pie_driver_sglang.frontends.common.arguments import EngineArguments, parse_arguments
from pie_driver_sglang.frontends.gateway import smg
from pie_driver_sglang.frontends.gateway.gateway_flags import (
    GatewayArguments,
    parse_gateway_arguments,
)
from pie_driver_sglang.frontends.gateway.metrics_endpoint import DEFAULT_METRICS_PORT, MetricsServer
from pie_driver_sglang.frontends.gateway.replicas import Replicas, served_name
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.observability.active import active_line
from pie_driver_sglang.observability.engine_metrics import RuntimeExporter
from pie_driver_sglang.observability.spans import check_tracing
from pie_driver_sglang.server_guard import guarded_server
from pie_driver_sglang.shared_names import use_token

FLAGS: Final = f"""\
  --front NAME         sglang (default): SGLang's HTTP server; gateway: the gateway smg, which
                       takes less CPU time and has fewer features (docs/gateway.md)
with --front gateway:
  --grpc-contract NAME vllm (default) or sglang: the service that the gateway calls
  --grpc-host HOST     where the services listen; 127.0.0.1
  --grpc-allow-remote  let --grpc-host be another than the loopback: the services have no
                       authentication
  --grpc-port PORT     of the first replica's service, the others have the next ones; 0 for any
  --prometheus-port N  /metrics of the gateway and the runtime, on the same host; 0 for any.
                       --enable-metrics without it: {DEFAULT_METRICS_PORT}
  --gateway-arg WORD   passed to smg unchanged; may be given several times
  --dp-size N          replicas of the model, each with a service of its own
  --no-gateway         start the gRPC servers only, and print the command that starts smg
"""
_POLL_S: Final = 0.2


def main(command_line: Sequence[str]) -> int:
    """Serve until a signal, or until a process fails."""
    # First, because it forks: there are no threads yet.
    with _guarded():
        _run(command_line)
    return 0


def _run(command_line: Sequence[str]) -> None:
    arguments = parse_gateway_arguments(command_line)
    engine = {**arguments.engine}
    # As in SGLang, models with images accept them with the flag and without it.
    engine.pop("enable_multimodal", None)
    if "preferred_sampling_params" in arguments.front:
        engine["preferred_sampling_params"] = arguments.front["preferred_sampling_params"]
    # Checks the flags of smg before a model is downloaded or loaded.
    smg.smg_arguments(arguments, (), Path(), 0)
    if arguments.front.get("enable_trace"):
        check_tracing()
    plan = parse_arguments(engine)
    plan.check_devices()
    if plan.returns_embeddings:
        raise ConfigError(
            "the gateway's services return text, and the model returns embeddings",
            "start `pie-sglang serve` without `--front gateway`",
        )
    start_spans.rest("settings")
    with _signals() as (ending, at_once):
        try:
            with (
                _forking_drivers(plan),
                Replicas(plan, arguments) as replicas,
                _metrics(arguments, replicas) as metrics,
            ):
                with start_spans.span("drivers"):
                    loaded = _wait_loaded(replicas, ending)
                if loaded:
                    _serve(plan, arguments, replicas, metrics, (ending, at_once))
        except OSError as error:
            raise StartError(str(error).split("\n")[0], "take another `--grpc-port`") from error


def _forking_drivers(plan: EngineArguments) -> contextlib.AbstractContextManager[None]:
    """Within it, drivers are forks of a process with SGLang."""
    if plan.engine != "sglang":
        return contextlib.nullcontext()
    runtime = plan.runtime
    return fork_server(
        runtime["devices"][0],
        load_hf_config(plan.model).get("architectures") or (),
        ranks=runtime["tensor_parallel_size"],
    )


@contextlib.contextmanager
def _guarded() -> Iterator[None]:
    """Within it, temporary files of this command and of the drivers are removed at the end."""
    with guarded_server() as guard:
        os.environ.update(guard.environment)
        tempfile.tempdir = None
        use_token()
        yield


def _metrics(
    arguments: GatewayArguments, replicas: Replicas
) -> contextlib.AbstractContextManager[MetricsServer | None]:
    """The Prometheus endpoint, if enabled; it serves while models are loaded."""
    port = arguments.prometheus_port
    if port is None:
        if not arguments.front.get("enable_metrics"):
            return contextlib.nullcontext()
        port = DEFAULT_METRICS_PORT
    exporter = RuntimeExporter(replicas.runtimes, served_name(arguments), lambda: replicas.active)
    return MetricsServer(exporter, arguments.front.get("host", "127.0.0.1"), port)


def _wait_loaded(replicas: Replicas, ending: Event) -> bool:
    """Wait until all drivers are ready; False if a signal came first."""
    while not replicas.wait_ready(_POLL_S):
        _forward_log(replicas)
        if ending.is_set():
            return False
    return True


def _serve(
    plan: EngineArguments,
    arguments: GatewayArguments,
    replicas: Replicas,
    metrics: MetricsServer | None,
    signals: tuple[Event, Event],
) -> None:
    ending, at_once = signals
    urls = replicas.open()
    print_notice(active_line(replicas.active))
    assert plan.tokenizer is not None
    metrics_port = smg.free_port()
    command = smg.smg_arguments(arguments, urls, plan.tokenizer, metrics_port)
    if metrics is not None:
        metrics.add_gateway(metrics_port)
        print_notice(f"metrics at {_url(arguments, 'http', metrics.port)}/metrics")
    if not arguments.starts_gateway or not smg.is_installed():
        _explain(arguments, command)
        while not ending.wait(_POLL_S):
            _check(replicas)
        return
    start_spans.rest("services")
    print_notice(
        start_spans.summary(start_spans.recorded(), start_spans.process_start(), time.monotonic())
    )
    scheme = "https" if "ssl_certfile" in arguments.front else "http"
    url = _url(arguments, scheme, arguments.front.get("port", 30000))
    gateway = smg.GatewayProcess(command, arguments, url)
    try:
        gateway.wait_ready(lambda: _check(replicas, ending))
        has_key = arguments.keys.api is not None
        announce_server(url, served_name(arguments), has_key=has_key)
        while not ending.wait(_POLL_S):
            _check(replicas)
            if (status := gateway.poll()) is not None:
                raise StartError(f"the gateway ended with status {status}", "its log says why")
        gateway.drain()
        while gateway.is_draining() and not at_once.wait(_POLL_S):
            _forward_log(replicas)
    except _Ended:
        pass
    finally:
        gateway.stop()


class _Ended(Exception):
    """A signal came before the gateway was ready."""


def _check(replicas: Replicas, ending: Event | None = None) -> None:
    """Forward the drivers' log, and raise if one has failed."""
    _forward_log(replicas)
    replicas.wait_ready(0.0)
    if ending is not None and ending.is_set():
        raise _Ended


def _forward_log(replicas: Replicas) -> None:
    for line in replicas.log_lines():
        sys.stderr.write(f"{line}\n")


def _url(arguments: GatewayArguments, scheme: str, port: int) -> str:
    """The URL of a port, as seen from this machine."""
    host = arguments.front.get("host", "127.0.0.1")
    reached = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"{scheme}://{f'[{reached}]' if ':' in reached else reached}:{port}"


def _explain(arguments: GatewayArguments, command: Sequence[str]) -> None:
    why = "`--no-gateway` was given"
    if arguments.starts_gateway:
        why = f"the gateway is not installed (`{install_command(smg.REQUIREMENT)}`)"
    keys = "" if arguments.keys.api is None else " --api-key ***"
    print_notice(
        f"the services are open; {why}. Start it by\n\n  smg {shlex.join(command)}{keys}\n"
    )


@contextlib.contextmanager
def _signals() -> Iterator[tuple[Event, Event]]:
    """Events that the first and the second SIGTERM or Ctrl-C set."""
    ending, at_once = Event(), Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        (at_once if ending.is_set() else ending).set()

    previous = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield ending, at_once
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
