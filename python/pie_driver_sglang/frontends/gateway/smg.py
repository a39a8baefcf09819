"""smg's process: its arguments, start, health check and shutdown."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import ConfigError, StartError, quoted
from pie_driver_sglang.frontends.gateway.gateway_flags import GatewayArguments
from pie_driver_sglang.frontends.gateway.parsers import reasoning_parser, tool_parser

REQUIREMENT: Final = "smg>=1.13,<1.14"
"""The package of the extra `gateway`."""
_READY_S: Final = 120.0
_DRAIN_S: Final = 30
"""How long requests that run may take after the signal to end."""
_EXIT_S: Final = 15
"""How long the gateway may take to exit after that, before it is killed."""
_GRACE_FLAG: Final = "--shutdown-grace-period-secs"
_LEVELS: Final[Mapping[str, str]] = {
    "debug": "debug",
    "info": "info",
    "warning": "warn",
    "warn": "warn",
    "error": "error",
    "critical": "error",
}


def is_installed() -> bool:
    """Whether the package smg is installed."""
    return find_spec("smg") is not None


def free_port(host: str = "127.0.0.1") -> int:
    """A free port."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def smg_arguments(
    arguments: GatewayArguments, urls: Sequence[str], model: Path, metrics_port: int
) -> list[str]:
    """The arguments of smg.

    Args:
        arguments: The parsed command line.
        urls: Of the gRPC services.
        model: The folder with the tokenizer.
        metrics_port: Port of its metrics, on the loopback.

    Raises:
        ConfigError: smg does not support a value.
    """
    front = arguments.front
    # It makes its spans where it would write lines of this level.
    default = "info" if front.get("enable_trace") else "warning"
    level = str(front.get("log_level", default))
    if level not in _LEVELS:
        raise ConfigError(
            f"`--log-level` is {quoted(level)}", f"expected one of {', '.join(_LEVELS)}"
        )
    command = ["launch", "--host", front.get("host", "127.0.0.1")]
    command += ["--port", str(front.get("port", 30000))]
    command += ["--prometheus-host", "127.0.0.1"]
    command += ["--prometheus-port", str(metrics_port)]
    command += ["--model-path", str(model), "--log-level", _LEVELS[level]]
    command += ["--worker-startup-check-interval", "1"]
    command += [_GRACE_FLAG, str(_DRAIN_S)]
    command += ["--policy", "cache_aware" if len(urls) > 1 else "round_robin"]
    command += ["--worker-urls", *urls]
    command += _limits(arguments)
    command += _optional(front)
    return [*command, *arguments.smg]


def secret_arguments(arguments: GatewayArguments) -> list[str]:
    """Arguments with keys, which are passed by a pipe: other users can read a process's own.

    Without an admin key it gets one that nobody knows, so that nobody registers workers.
    """
    admin = arguments.keys.admin or secrets.token_urlsafe(32)
    command = ["--control-plane-api-keys", f"pie:pie-sglang:admin:{admin}"]
    if arguments.keys.api is not None:
        command += ["--api-key", arguments.keys.api]
    return command


def _limits(arguments: GatewayArguments) -> list[str]:
    limits, media = arguments.http.connections, arguments.http.media
    command = ["--max-payload-size", str(limits.max_body_bytes)]
    command += ["--header-read-timeout-secs", str(math.ceil(limits.header_timeout_s))]
    command += ["--stream-body-stall-timeout-secs", str(math.ceil(limits.body_timeout_s))]
    if "keep-alive-timeout" in arguments.http.given:
        idle_s = math.ceil(limits.keep_alive_timeout_s)
        command += ["--idle-connection-timeout-secs", str(idle_s)]
    if media.allowed_domains:
        command += ["--mm-allowed-media-domains", ",".join(media.allowed_domains)]
    if media.allow_private_hosts:
        command.append("--mm-allow-private-media-hosts")
    return command


def _variables(arguments: GatewayArguments) -> dict[str, str]:
    """Environment variables with limits, unless the user has set them."""
    most = str(arguments.http.media.max_bytes)
    names = (f"SMG_{kind}_MAX_INPUT_BYTES" for kind in ("IMAGE", "AUDIO", "VIDEO"))
    return {name: os.environ.get(name, most) for name in names}


def _optional(front: Mapping[str, Any]) -> list[str]:
    command: list[str] = []
    readers: Mapping[str, tuple[str, Callable[[str], str]]] = {
        "chat_template": ("--chat-template", _template),
        "otlp_traces_endpoint": ("--otlp-traces-endpoint", str),
        "reasoning_parser": ("--reasoning-parser", reasoning_parser),
        "ssl_certfile": ("--tls-cert-path", str),
        "ssl_keyfile": ("--tls-key-path", str),
        "tool_call_parser": ("--tool-call-parser", tool_parser),
    }
    for name, (flag, reader) in readers.items():
        if name in front:
            command += [flag, reader(str(front[name]))]
    if front.get("enable_trace"):
        command.append("--enable-trace")
    return command


def _template(name: str) -> str:
    if not Path(name).is_file():
        raise ConfigError(
            f"`--chat-template` is {quoted(name)}, which is not a file",
            "the gateway reads a template from a file; SGLang's names of templates are its own",
        )
    return name


def _grace_s(command: Sequence[str]) -> float:
    """The longest grace period of a command line: the user's follows the default."""
    values = [value for flag, value in pairwise(command) if flag == _GRACE_FLAG]
    values += [each.partition("=")[2] for each in command if each.startswith(f"{_GRACE_FLAG}=")]
    # The gateway refuses one that is no number.
    return max((float(value) for value in values if value.isdecimal()), default=_DRAIN_S)


class GatewayProcess:
    """A running smg. It ends with this process."""

    def __init__(self, command: Sequence[str], arguments: GatewayArguments, url: str) -> None:
        """Start it.

        Args:
            command: Its arguments.
            arguments: The parsed command line.
            url: Where it will serve.
        """
        self._url = url
        self._drain_s = _grace_s(command)
        self._drained_at = math.inf
        variables = {**os.environ, **_variables(arguments)}
        if not sys.stderr.isatty():
            variables["NO_COLOR"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.smg_process", str(os.getpid()), *command],
            env=variables,
            stdin=subprocess.PIPE,
            # Ctrl-C comes to this process alone.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # If it has ended already, `wait_ready` raises.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(secret_arguments(arguments)).encode())

    def wait_ready(self, check: Callable[[], None]) -> None:
        """Wait until it is ready.

        Args:
            check: Called between two polls; may raise.

        Raises:
            StartError: It has ended, or takes too long.
        """
        until = time.monotonic() + _READY_S
        while not self._is_ready():
            check()
            status = self._process.poll()
            if status is not None:
                raise StartError(
                    f"the gateway ended with status {status} before it was ready",
                    "its message is above; `--log-level info` shows more",
                )
            if time.monotonic() > until:
                raise StartError(
                    f"the gateway was not ready in {_READY_S:.0f} s", "`--log-level info` says why"
                )
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            readiness = f"{self._url}/readiness"
            # The certificate is not for the loopback.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with urllib.request.urlopen(readiness, timeout=2, context=context) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self._process.poll()

    def drain(self) -> None:
        """Have it end after its requests, or after its grace period."""
        self._drained_at = time.monotonic() + self._drain_s + _EXIT_S
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def is_draining(self) -> bool:
        """Whether it runs after `drain`, and is within its grace period."""
        return self._process.poll() is None and time.monotonic() < self._drained_at

    def stop(self) -> None:
        """Kill it, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
