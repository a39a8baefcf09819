"""A running server: keys, access levels, and hostile clients beside eight others."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from support import versions
from support.models.tiny_models import POCKET
from support.process import fork_server
from support.process.inspection import command_line
from support.servers.pie_server import START_S, refusal, running, wait_until
from support.servers.sglang_server import Server, environment, free_ports

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

USER, ADMIN = "key-of-the-users", "key-of-the-admin"
PROMPTS = [[20 + number, 7, 300 + 11 * number] for number in range(8)]


@pytest.fixture(scope="module")
def served(
    forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, psutil.Process]]:
    folder = tmp_path_factory.mktemp("edge")
    key = tmp_path_factory.mktemp("keys") / "key"
    key.write_text(f"{USER}\n")
    flags = ["--scheduler", "pie", "--api-key-file", str(key), "--admin-api-key", ADMIN]
    flags += ["--max-connections", "100", "--enable-lora", "--max-lora-rank", "8"]
    flags += ["--lora-target-modules", "all"]
    # With the command lines that a user's processes have.
    pythons = {"python": forked_python, "driver_python": forked_python}
    with running(folder, *flags, **pythons) as (server, process):
        server.key = USER
        yield server, psutil.Process(fork_server.forks(process.pid)[0])


@pytest.fixture
def server(served: tuple[Server, psutil.Process]) -> Server:
    return served[0]


def status(server: Server, path: str, key: str | None, body: Any = None, **headers: str) -> int:
    data = None if body is None else json.dumps(body).encode()
    given = {"Content-Type": "application/json", **headers}
    if key is not None:
        given["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(server.url + path, data, given)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize(
    ("path", "body", "found"),
    [
        # By nobody, by a user, by the admin.
        ("/health", None, (200, 200, 200)),
        ("/v1/models", None, (401, 200, 401)),
        ("/v1/loads", None, (401, 200, 401)),
        ("/server_info", None, (401, 200, 401)),
        ("/v1/models/nothing", None, (401, 404, 401)),
        ("/no/such/route", None, (404, 404, 404)),
        ("/flush_cache", None, (401, 401, 200)),
        ("/flush_cache%0A", None, (401, 401, 200)),
        ("/abort_request", {"rid": "nobody"}, (401, 401, 200)),
        ("/load_lora_adapter", {"lora_name": "x", "lora_path": "/none"}, (401, 401, 400)),
        ("/load_lora_adapter_from_tensors", {}, (401, 401, 400)),
        ("/start_profile", {"num_steps": -1}, (401, 401, 400)),
        ("/configure_logging", {"log_requests": 1.5}, (401, 401, 400)),
        ("/update_weights_from_disk", {"model_path": "/none"}, (401, 401, 400)),
        ("/update_weights_from_tensor", {}, (401, 401, 400)),
        ("/set_internal_state", {"server_args": {}}, (401, 401, 400)),
        ("/hicache/storage-backend", None, (401, 401, 400)),
        ("/scale_elastic_ep", {"new_ep_size": 1}, (401, 401, 404)),
    ],
)
def test_each_route_wants_its_key(
    server: Server, path: str, body: Any, found: tuple[int, int, int]
) -> None:
    assert tuple(status(server, path, key, body) for key in (None, USER, ADMIN)) == found


def test_websockets_need_the_key_too(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        b"GET /v1/realtime HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.settimeout(60)
        connection.sendall(head)
        # Without a library for WebSockets it is a request like others.
        assert connection.recv(4096).split(b" ")[1] in (b"403", b"401")


@pytest.mark.filterwarnings("ignore")
def test_every_route_of_sglang_has_its_level() -> None:
    from sglang.srt.entrypoints.http_server import app

    from pie_driver_sglang.frontends.sglang_server.access import ROUTE_LEVELS, all_paths
    from pie_driver_sglang.frontends.sglang_server.batch_endpoints import ROUTES

    own = {path for _, path, _ in ROUTES}
    known = set(ROUTE_LEVELS) - {"/metrics", "/dumper/{method}"}
    known -= versions.MISSING_ROUTES
    assert own < known
    assert set(all_paths(app.router.routes)) - own == known - own


def test_keys_are_in_no_list_of_arguments_and_no_log(
    served: tuple[Server, psutil.Process],
) -> None:
    server, process = served
    family = [process, *fork_server.family(process.pid)]
    assert len(family) >= 4
    for each in family:
        line = " ".join(command_line(each))
        assert USER not in line, each
        assert ADMIN not in line, each
    text = server.log.read_text(errors="replace") + server.fetch("/server_info")
    assert "server_args=" in text
    assert USER not in text
    assert ADMIN not in text


def answers(server: Server) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, 24)[0], PROMPTS))


def raw(server: Server, path: str, body: bytes) -> tuple[int, bytes]:
    host = server.url.removeprefix("http://")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {USER}"}
    with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
        connection.putrequest("POST", path)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            connection.putheader(name, value)
        connection.endheaders()
        with contextlib.suppress(ConnectionError):
            connection.send(body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_silent_connections_cost_others_nothing(server: Server) -> None:
    expected = answers(server)
    host, port = server.url.removeprefix("http://").split(":")
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), 60)) for _ in range(200)
        ]
        for each in silent[::2]:
            each.sendall(b"POST /generate HTTP/1.1\r\nContent-Le")
        assert answers(server) == expected
    assert answers(server) == expected


@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/responses"])
def test_hostile_bodies_are_answered_and_harm_nobody(server: Server, path: str) -> None:
    expected = answers(server)
    deep = b'{"a":' * 300 + b"1" + b"}" * 300
    bodies = {
        "80 MB": b" " * (80 << 20),
        "nested lists": b"[" * 100_000 + b"]" * 100_000,
        "nested maps": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "no end": b"[" * 100_000,
        "deeper than is followed": b'{"text":"x","custom_params":' + deep + b"}",
        "many lists": b"[" + b"[]," * (1 << 20) + b"[]]",
        "no JSON": b"\xff\xfe\x00",
        "a number": b"1e999",
        "nothing": b"",
    }
    for name, body in bodies.items():
        code, text = raw(server, path, body)
        assert code == (413 if name == "80 MB" else 400), (name, text[:200])
        assert len(text.splitlines()) <= 1 or len(text) < 2000, name
    assert answers(server) == expected


def test_a_pickle_of_an_admin_is_not_read_either(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "was-run"
    bomb = f"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(Vtouch {trace}\ntR."
    body = {
        "lora_name": "bomb",
        "config_dict": {},
        "serialized_named_tensors": [base64.b64encode(bomb.encode()).decode()],
    }
    assert status(server, "/load_lora_adapter_from_tensors", ADMIN, body) == 400
    assert not trace.exists()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/parse_function_call", {"text": "x", "tools": [], "tool_call_parser": "x"}, "parser"),
        ("/separate_reasoning", {"text": "x", "reasoning_parser": "x"}, "Unsupported model type"),
        ("/generate", {"text": []}, "`text` is a list of 0"),
        ("/generate", {"text": [[]]}, ""),
        ("/generate", {"text": "x", "sampling_params": {"sampling_seed": -(1 << 70)}}, ""),
        ("/v1/completions", {"model": "m", "prompt": []}, ""),
        ("/v1/completions", {"model": "m", "prompt": [[]]}, ""),
        ("/detokenize", {"model": "m", "tokens": [1 << 40]}, "token 1099511627776 of `tokens`"),
        ("/detokenize", {"model": "m", "tokens": [[5], [7, -1]]}, "token -1 of `tokens`"),
    ],
)
def test_what_handlers_stumble_over_is_a_400(
    server: Server, path: str, body: Any, words: str
) -> None:
    code, text = refusal(server, body, path)
    assert (code, words in text) == (400, True), text


@contextlib.contextmanager
def with_sglangs_scheduler(folder: Path, python: str) -> Iterator[Server]:
    """`pie-sglang serve --scheduler sglang`, whose processes end with it."""
    [port] = free_ports(1)
    command = [python, "-m", "pie_driver_sglang", "serve", "--scheduler", "sglang"]
    command += ["--model-path", str(POCKET), "--device", "cpu", "--port", str(port)]
    command += ["--attention-backend", "torch_native", "--disable-overlap-schedule"]
    command += ["--disable-cuda-graph", "--max-total-tokens", "8192", "--dtype", "float32"]
    log = folder / "log"
    variables = {**environment(folder, ""), "PIE_API_KEY": USER}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=variables)
    try:
        ready = lambda: b"curl" in log.read_bytes() or process.poll() is not None  # noqa: E731
        wait_until(ready, START_S, "start")
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        yield Server(f"http://127.0.0.1:{port}", log, USER)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_sglangs_own_scheduler_has_the_same_edge(tmp_path: Path, forked_python: str) -> None:
    """SGLang's adapters need a GPU; pickles are refused before anything looks at them."""
    trace = tmp_path / "was-run"
    bomb = f"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(Vtouch {trace}\ntR."
    (tmp_path / "server").mkdir()
    with with_sglangs_scheduler(tmp_path / "server", forked_python) as server:
        info = server.fetch("/server_info")
        assert "pie_edge" not in info
        active = json.loads(info)["active"]
        assert (active["scheduler"], active["layers"]) == ("sglang", "sglang")
        assert (active["attention"], active["drafts"]) == ("torch_native", "off")
        assert active["reasons"] == {"scheduler": "as `--scheduler sglang` says"}
        assert "pie-sglang: scheduler: sglang (as" in server.log.read_text(errors="replace")
        assert status(server, "/v1/models", None) == 401
        assert status(server, "/start_profile", USER, {}) == 403
        assert status(server, "/update_weights_from_tensor", USER, {}) == 403
        assert raw(server, "/generate", b" " * (80 << 20))[0] == 413
        expected = server.generate(PROMPTS[0], 8)[0]
        # Of the two texts, the second has no tokens. Since 0.5.23 it would end the scheduler.
        for text in ("", ["a", ""]):
            assert refusal(server, {"text": text})[0] == 400
        body = {
            "lora_name": "sent",
            "config_dict": {},
            "serialized_named_tensors": [base64.b64encode(bomb.encode()).decode()],
        }
        code, text = refusal(server, body, "/load_lora_adapter_from_tensors")
        assert (code, "--allow-pickled-adapters" in text) == (400, True)
        assert not trace.exists()
        assert server.generate(PROMPTS[0], 8)[0] == expected
        assert USER not in server.log.read_text(errors="replace")
