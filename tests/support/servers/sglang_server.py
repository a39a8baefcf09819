"""SGLang's server in a process of its own, with the plugin, and requests to it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from pie_driver_sglang.backends.sglang.compat.process import other_model_modules
from support import REPOSITORY

START_S: Final = 200.0


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface on which nothing listens.

    They are below those that the system gives out, so that no other process gets one of them before
    it is bound.
    """
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as each, contextlib.suppress(OSError):
            each.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


def environment(folder: Path, plugins: str) -> dict[str, str]:
    """As a user's, with threads that leave the machine to others, and litter in one folder."""
    others = other_model_modules(frozenset(["Qwen3ForCausalLM"]))
    return {
        **os.environ,
        # More than 200 modules that each of its processes would import.
        "SGLANG_DISABLED_MODEL_ARCHS": ",".join(others),
        "TMPDIR": str(folder),
        "SGLANG_PLUGINS": plugins,
        "OMP_NUM_THREADS": "1",
        # A process with other threads forks none.
        "OPENBLAS_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def event(line: bytes) -> dict[str, Any] | None:
    """What a line of a stream says; None for an empty one and for the one that ends it."""
    text = line.decode().strip().removeprefix("data: ")
    if not text or text == "[DONE]":
        return None
    found: dict[str, Any] = json.loads(text)
    return found


class Server:
    """A running server.

    Attributes:
        url: Where it listens.
        log: The file with its output.
        key: What requests show; None for nothing.
    """

    def __init__(self, url: str, log: Path, key: str | None = None) -> None:
        self.url, self.log, self.key = url, log, key

    def request(self, path: str, body: dict[str, Any] | None = None) -> urllib.request.Request:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        return urllib.request.Request(self.url + path, data, headers)

    def fetch(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What it answers."""
        try:
            with urllib.request.urlopen(self.request(path, body), timeout=60) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            # An error whose body is not read keeps its connection open.
            with error:
                text = io.BytesIO(error.read())
            raise urllib.error.HTTPError(
                error.url, error.code, error.msg, error.headers, text
            ) from None

    def body(self, prompt: Sequence[int], tokens: int, **more: Any) -> dict[str, Any]:
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        return {"input_ids": list(prompt), "sampling_params": params, **more}

    def generate(self, prompt: Sequence[int], tokens: int, **more: Any) -> tuple[list[int], int]:
        """The tokens after a prompt, and how many of the prompt's were cached."""
        answer = json.loads(self.fetch("/generate", self.body(prompt, tokens, **more)))
        return answer["output_ids"], answer["meta_info"]["cached_tokens"]

    def stream(self, prompt: Sequence[int], tokens: int, **more: Any) -> Iterator[list[int]]:
        """The tokens so far, as often as there are more."""
        body = self.body(prompt, tokens, stream=True, **more)
        with urllib.request.urlopen(self.request("/generate", body), timeout=400) as lines:
            for line in lines:
                if found := event(line):
                    yield found["output_ids"]

    def flush(self) -> None:
        """Empties the cache; SGLang refuses while a step runs, as after a request's last token."""
        until = time.monotonic() + 20
        while True:
            try:
                self.fetch("/flush_cache", {})
                return
            except urllib.error.HTTPError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", self.fetch("/metrics"), re.MULTILINE)
        return sum(float(line) for line in lines)


@contextlib.contextmanager
def serve(*arguments: str, plugins: str = "pie_radix") -> Iterator[Server]:
    """A server with these flags; it ends with all of its processes."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        [port] = free_ports(1)
        script = str(Path(__file__).with_name("launch_sglang.py"))
        command = [sys.executable, script, "--port", str(port), *arguments]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=environment(Path(folder), plugins),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        server = Server(f"http://127.0.0.1:{port}", log)
        try:
            _wait(server, process)
            yield server
        except BaseException:
            sys.stderr.write(log.read_text(errors="replace")[-6000:])
            raise
        finally:
            _end(process)


def _wait(server: Server, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            server.fetch("/model_info")
            return
        time.sleep(0.2)
    raise TimeoutError("the server did not start")


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family, 10)
    process.wait()
