"""`pie-sglang bench --start MODEL`: seconds from a server's start to its first token over HTTP.

A server is started as a user starts it, asked for one token until it answers, and ended; so often
as asked, one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.cli.report import write_output
from pie_driver_sglang.cli.version import version_line
from pie_driver_sglang.console import CommandParser
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.frontends.common.model_location import model_folder
from pie_driver_sglang.observability.start_spans import time_line

START_FLAG: Final = "--start"
OURS: Final = "pie"
PEER: Final = "sglang"
_COLD: Final = {"XDG_CACHE_HOME": "cache", "TRITON_CACHE_DIR": "triton"}
"""Variables of the folders that compiled kernels are kept in."""
_POLL_S: Final = 0.02
_ANSWER_S: Final = 60.0
_STOP_S: Final = 20.0
_LOG_LINES: Final = 15
_MOST_LOG: Final = 1 << 20
"""Bytes of a log that are searched for notices."""
_PREFIX: Final = "pie-sglang: "


def main(arguments: Sequence[str]) -> int:
    """Run the command, without `START_FLAG`; returns its exit status."""
    arguments = list(arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    options.flags = arguments[split + 1 :]
    if options.repeats < 1:
        raise ConfigError(f"`--repeats` is {options.repeats}", "set it to 1 or more")
    model = model_folder({"model_path": options.model}, with_weights=True)
    sides = [OURS, *dict.fromkeys(options.peer)]
    starts: list[dict[str, Any]] = []
    for number in range(options.repeats):
        for side in sides:
            starts.append({"side": side, "repeat": number, **_one(side, str(model), options)})
            write_output(options.json, json.dumps(_record(options, starts), indent=2) + "\n")
            sys.stderr.write(_line(starts[-1]))
    if options.json != "-":
        for line in time_line(starts[0]["spans"]):
            sys.stdout.write(f"{line}\n")
        sys.stdout.write(_table(_record(options, starts)))
    return 0


def _one(side: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        environment = dict(os.environ)
        if options.first:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pie-start-"))
            environment |= empty_caches(Path(folder))
        port = _free_port()
        command = server_command(side, model, port, options.device, options.flags)
        with started_server(command, port, environment, options.timeout) as found:
            return found


def server_command(
    side: str, model: str, port: int, device: str | None, flags: Sequence[str] = ()
) -> list[str]:
    """The command that starts a server.

    Args:
        side: `OURS`, or `PEER` for SGLang's own server.
        model: The model's folder.
        port: Where it listens, on the loopback.
        device: `cpu` or `cuda`; None for the default.
        flags: Further ones.
    """
    module = ["pie_driver_sglang", "serve"] if side == OURS else [f"{PEER}.launch_server"]
    command = [sys.executable, "-m", *module, "--model-path", model, "--port", str(port)]
    return [*command, *(["--device", device] if device else []), *flags]


def empty_caches(folder: Path) -> dict[str, str]:
    """Environment variables by which kernels are compiled anew and kept in a folder.

    Downloaded models stay where they are.
    """
    home = os.environ.get("HF_HOME")
    if home is None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = str(Path(base).expanduser() / "huggingface")
    return {"HF_HOME": home, **{name: str(folder / part) for name, part in _COLD.items()}}


@contextlib.contextmanager
def started_server(
    command: Sequence[str], port: int, environment: Mapping[str, str], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """A server that has answered its first request; it is ended afterwards.

    Yields:
        `port_open_s` and `first_token_s`, seconds from the start of its process until its port is
        open and until the first token has arrived, `spans`, its own time line, and `notices`, the
        lines that the command has printed.

    Raises:
        StartError: It ends or is not ready in time.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as log, _sigterm_exits():
        begun = time.monotonic()
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            found: dict[str, Any] = {"port_open_s": None}
            while not _has_token(port):
                now = time.monotonic() - begun
                if found["port_open_s"] is None and _is_open(port):
                    found["port_open_s"] = round(now, 3)
                if process.poll() is not None or now > timeout_s:
                    log.seek(0)
                    tail = "".join(log.readlines()[-_LOG_LINES:])
                    raise StartError(
                        f"no token came from port {port} in {now:.0f} s, status "
                        f"{process.poll()}:\n{tail}",
                        "allow more by `--timeout`, or read the log above",
                    )
                time.sleep(_POLL_S)
            found["first_token_s"] = round(time.monotonic() - begun, 3)
            found["port_open_s"] = found["port_open_s"] or found["first_token_s"]
            found["spans"] = _spans(port)
            # The server writes by the same offset, which this leaves alone.
            printed = os.pread(log.fileno(), _MOST_LOG, 0).decode(errors="replace")
            found["notices"] = [each for each in printed.splitlines() if each.startswith(_PREFIX)]
            yield found
        finally:
            _end(process)


@contextlib.contextmanager
def _sigterm_exits() -> Iterator[None]:
    """SIGTERM unwinds this process, which ends its server first."""

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _has_token(port: int) -> bool:
    """Ask for one token; False while the server is not ready."""
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    answer = _request(port, "POST", "/generate", body)
    return bool(isinstance(answer, dict) and answer["meta_info"]["completion_tokens"])


def _spans(port: int) -> list[dict[str, Any]]:
    """The server's time line; empty for SGLang's own."""
    info = _request(port, "GET", "/server_info") or {}
    states = info.get("internal_states") or [{}]
    return list(states[0].get("start", []))


def _request(port: int, method: str, path: str, body: Any = None) -> Any:
    """The JSON that a server answers with status 200; None for any other answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    headers = {"Content-Type": "application/json"}
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        return json.loads(answer.read()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(_POLL_S)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and what is left of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _record(options: argparse.Namespace, starts: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {
        side: statistics.median(each["first_token_s"] for each in starts if each["side"] == side)
        for side in dict.fromkeys(each["side"] for each in starts)
    }
    return {
        "version": version_line(),
        "model": options.model,
        "device": options.device or "default",
        "kernel_caches": "empty" if options.first else "kept",
        "starts": starts,
        "first_token_s": medians,
    }


def _line(start: Mapping[str, Any]) -> str:
    return (
        f"{start['side']}: port open after {start['port_open_s']:.1f} s, first token after "
        f"{start['first_token_s']:.1f} s\n"
    )


def _table(record: Mapping[str, Any]) -> str:
    lines = [f"from start to first token, medians; kernel caches {record['kernel_caches']}"]
    lines += [f"{side:<8} {seconds:8.2f} s" for side, seconds in record["first_token_s"].items()]
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=f"pie-sglang bench {START_FLAG}",
        description="Measures the seconds from the start of a server's process to its first token "
        "over HTTP. A first start on a machine also compiles kernels, as with --first.",
        epilog="What follows `--` are flags of the servers.",
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a folder, a repository or `smollm2`")
    add("--device", metavar="NAME", help="cpu or cuda (default: a GPU where there is one)")
    add("--repeats", type=int, default=3, metavar="N", help="starts (default: %(default)s)")
    add("--first", action="store_true", help="each start has an empty kernel cache")
    add("--peer", choices=(PEER,), action="append", default=[], help="compare with it, alternating")
    add("--timeout", type=float, default=600.0, metavar="S", help="of a start (default: 600)")
    add("--json", metavar="FILE", help="write a record of all starts there; - for stdout")
    return parser
