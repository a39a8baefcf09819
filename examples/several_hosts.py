"""Several hosts behind one gateway: here two workers on the loopback, and one of them is lost.

    python examples/several_hosts.py

Each worker is what would run on a host of its own: a driver, a scheduler and a gRPC service. On
hosts that are apart add `--grpc-host ADDRESS --grpc-allow-remote` in a network that you trust: the
services have no authentication.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_S = 300


def free_port() -> int:
    """A port of the loopback on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `python -m`, ended at the end."""
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", *words], **silent)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(done: Callable[[], Any]) -> None:
    """Returns once a call succeeds."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return done()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def answer(url: str, model: str, question: str) -> str:
    """The beginning of an answer."""
    messages = [{"role": "user", "content": question}]
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        text: str = json.load(reply)["choices"][0]["message"]["content"]
        return text


def main() -> None:
    """Runs both workers and the gateway."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    ports, port, metrics = [free_port(), free_port()], free_port(), free_port()
    worker = ["pie_driver_sglang", "serve", options.model, "--served-model-name", "chat"]
    worker += ["--device", options.device, "--front", "gateway", "--no-gateway", "--grpc-port"]
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(running(*worker, str(each))) for each in ports]
        for each in ports:
            wait_for(lambda each=each: socket.create_connection(("127.0.0.1", each)).close())
        urls = [f"grpc://127.0.0.1:{each}" for each in ports]
        gateway = ["smg", "launch", "--policy", "cache_aware", "--worker-urls", *urls]
        gateway += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
        gateway += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
        gateway += ["--worker-startup-check-interval", "1"]
        stack.enter_context(running(*gateway))
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: urllib.request.urlopen(f"{url}/readiness", timeout=5).close())
        print(f"two workers: {answer(url, 'chat', 'Hello')!r}")
        workers[0].terminate()
        workers[0].wait()
        # Until the gateway has noticed, it may send a request to the one that is lost.
        with contextlib.suppress(OSError):
            answer(url, "chat", "Are you there?")
        wait_for(lambda: print(f"one worker: {answer(url, 'chat', 'Hello')!r}"))


if __name__ == "__main__":
    main()
