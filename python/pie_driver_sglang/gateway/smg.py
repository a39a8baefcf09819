"""The gateway's process: its command line, its start, its end."""

from __future__ import annotations

import os
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
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import ConfigError, StartError, quoted
from pie_driver_sglang.gateway.flags import GatewayArguments
from pie_driver_sglang.gateway.parsers import reasoning_parser, tool_parser

INSTALL: Final = "pip install 'smg>=1.13,<1.14'"
_READY_S: Final = 120.0
_DRAIN_S: Final = 30
"""How long requests that run may take after the signal to end."""
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
    words += ["--shutdown-grace-period-secs", str(_DRAIN_S)]
    words += ["--policy", "cache_aware" if len(urls) > 1 else "round_robin"]
    words += ["--worker-urls", *urls]
    words += _optional(front)
    return [*words, *arguments.words]


def _optional(front: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    readers: Mapping[str, tuple[str, Callable[[str], str]]] = {
        "api_key": ("--api-key", str),
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


class GatewayProcess:
    """The gateway, started. It ends with this process."""

    def __init__(self, words: Sequence[str], url: str) -> None:
        """Starts it.

        Args:
            words: Its command line.
            url: Where it will serve.
        """
        self._url = url
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.smg_process", str(os.getpid()), *words],
            env=os.environ if sys.stderr.isatty() else {**os.environ, "NO_COLOR": "1"},
            # Ctrl-C comes to this process alone.
            start_new_session=True,
        )

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
        """Tells it to end once its requests have."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ends it at once, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
