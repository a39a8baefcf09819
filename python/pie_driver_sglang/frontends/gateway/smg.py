"""The gateway's process: its command line, its start, its end."""

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
    """Whether the gateway's package is there."""
    return find_spec("smg") is not None


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nothing listens at."""
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def smg_words(
    arguments: GatewayArguments, urls: Sequence[str], model: Path, metrics_port: int
) -> list[str]:
    """The gateway's command line, after its name.

    Args:
        arguments: This command's.
        urls: Of the services.
        model: The folder with the tokenizer.
        metrics_port: Of its own metrics, on the loopback.

    Raises:
        ConfigError: A value is none that the gateway takes.
    """
    front = arguments.front
    # It makes its spans where it would write lines of this level.
    default = "info" if front.get("enable_trace") else "warning"
    level = str(front.get("log_level", default))
    if level not in _LEVELS:
        raise ConfigError(
            f"`--log-level` is {quoted(level)}", f"expected one of {', '.join(_LEVELS)}"
        )
    words = ["launch", "--host", front.get("host", "127.0.0.1")]
    words += ["--port", str(front.get("port", 30000))]
    words += ["--prometheus-host", "127.0.0.1"]
    words += ["--prometheus-port", str(metrics_port)]
    words += ["--model-path", str(model), "--log-level", _LEVELS[level]]
    words += ["--worker-startup-check-interval", "1"]
    words += [_GRACE_FLAG, str(_DRAIN_S)]
    words += ["--policy", "cache_aware" if len(urls) > 1 else "round_robin"]
    words += ["--worker-urls", *urls]
    words += _limits(arguments)
    words += _optional(front)
    return [*words, *arguments.words]


def secret_words(arguments: GatewayArguments) -> list[str]:
    """Words with keys, for the gateway alone: they are in no list of arguments.

    Without an admin key it gets one that nobody knows, so that nobody registers workers.
    """
    admin = arguments.keys.admin or secrets.token_urlsafe(32)
    words = ["--control-plane-api-keys", f"pie:pie-sglang:admin:{admin}"]
    if arguments.keys.api is not None:
        words += ["--api-key", arguments.keys.api]
    return words


def _limits(arguments: GatewayArguments) -> list[str]:
    limits, media = arguments.edge.connections, arguments.edge.media
    words = ["--max-payload-size", str(limits.max_body_bytes)]
    words += ["--header-read-timeout-secs", str(math.ceil(limits.header_timeout_s))]
    words += ["--stream-body-stall-timeout-secs", str(math.ceil(limits.body_timeout_s))]
    if "keep-alive-timeout" in arguments.edge.given:
        idle_s = math.ceil(limits.keep_alive_timeout_s)
        words += ["--idle-connection-timeout-secs", str(idle_s)]
    if media.allowed_domains:
        words += ["--mm-allowed-media-domains", ",".join(media.allowed_domains)]
    if media.allow_private_hosts:
        words.append("--mm-allow-private-media-hosts")
    return words


def _variables(arguments: GatewayArguments) -> dict[str, str]:
    """Limits that the gateway reads from its environment, unless the user has set them there."""
    most = str(arguments.edge.media.max_bytes)
    names = (f"SMG_{kind}_MAX_INPUT_BYTES" for kind in ("IMAGE", "AUDIO", "VIDEO"))
    return {name: os.environ.get(name, most) for name in names}


def _optional(front: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
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
            words += [flag, reader(str(front[name]))]
    if front.get("enable_trace"):
        words.append("--enable-trace")
    return words


def _template(name: str) -> str:
    if not Path(name).is_file():
        raise ConfigError(
            f"`--chat-template` is {quoted(name)}, which is not a file",
            "the gateway reads a template from a file; SGLang's names of templates are its own",
        )
    return name


def _grace_s(words: Sequence[str]) -> float:
    """The longest grace period of a command line: a word of the user comes after the default."""
    values = [value for flag, value in pairwise(words) if flag == _GRACE_FLAG]
    values += [word.partition("=")[2] for word in words if word.startswith(f"{_GRACE_FLAG}=")]
    # The gateway refuses one that is no number.
    return max((float(value) for value in values if value.isdecimal()), default=_DRAIN_S)


class GatewayProcess:
    """The gateway, started. It ends with this process."""

    def __init__(self, words: Sequence[str], arguments: GatewayArguments, url: str) -> None:
        """Starts it.

        Args:
            words: Its command line.
            arguments: This command's.
            url: Where it will serve.
        """
        self._url = url
        self._drain_s = _grace_s(words)
        self._drained_at = math.inf
        variables = {**os.environ, **_variables(arguments)}
        if not sys.stderr.isatty():
            variables["NO_COLOR"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.smg_process", str(os.getpid()), *words],
            env=variables,
            stdin=subprocess.PIPE,
            # Ctrl-C comes to this process alone.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        # One that has ended already says so to `wait_ready`.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(secret_words(arguments)).encode())

    def wait_ready(self, looks: Callable[[], None]) -> None:
        """Waits until it serves.

        Args:
            looks: Called between two looks; may raise.

        Raises:
            StartError: It has ended, or takes too long.
        """
        until = time.monotonic() + _READY_S
        while not self._is_ready():
            looks()
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
        """Tells it to end once its requests have, or once its grace period is over."""
        self._drained_at = time.monotonic() + self._drain_s + _EXIT_S
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def is_draining(self) -> bool:
        """Whether it still runs after `drain`, and may. One that is stuck never ends by itself."""
        return self._process.poll() is None and time.monotonic() < self._drained_at

    def stop(self) -> None:
        """Ends it at once, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
