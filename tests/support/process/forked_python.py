"""Stands in for `python [-P] -m MODULE ARGUMENTS...`, run in a fork of a process with SGLang.

A script of `benches/gpu` or of `tests/support/kernels` may stand for the module. `fork_server.py`
has the other end. The fork gets what this process was given: arguments, environment, working
directory, descriptors, and its session or its process group. From then on this process stands for
it: signals are passed on, its death is the fork's, and it ends as the fork ends. Any other use of
Python is a new interpreter's. Run by ``python -IS``, which starts at once.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

WORKER = "pie_driver_sglang.ranks.worker"
FORKED = frozenset(
    {
        "pie_driver_sglang",
        "pie_driver_sglang.fork_server.server",
        "pie_driver_sglang.frontends.sglang_server",
        "pie_driver_vllm",
        "support.process.vllm_start",
        WORKER,
    }
)
_REPOSITORY = Path(__file__).parents[3]
SCRIPTS = tuple(f"{_REPOSITORY / folder}/" for folder in ("benches/gpu", "tests/support/kernels"))
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
POLL_S = 0.1


def main() -> None:
    """Has the module run, and ends as it ends."""
    path, *arguments = sys.argv[1:]
    # Nothing is imported from the working directory of a fork.
    words = arguments[1:] if arguments[:1] == ["-P"] else arguments
    if words and words[0].startswith(SCRIPTS):
        words = ["-m", *words]
    elif words[:1] != ["-m"] or words[1] not in FORKED:
        os.execv(sys.executable, [sys.executable, *arguments])
    parent = os.getppid()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    numbers = [number for number in _descriptors() if number != connection.fileno()]
    request = {
        "module": words[1],
        "arguments": words[2:],
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "numbers": numbers,
        "group": os.getpgid(0),
        "leads_session": os.getsid(0) == os.getpid(),
    }
    text = json.dumps(request).encode()
    socket.send_fds(connection, [len(text).to_bytes(4, "little")], numbers)
    connection.sendall(text)
    for number in numbers:
        # Whoever waits for their end waits for the fork's.
        os.close(number)
    fork = int.from_bytes(_received(connection), "little", signed=True)
    note = Path(f"{path}.{os.getpid()}")
    note.write_text(str(fork))
    for number in PASSED_ON:
        signal.signal(number, lambda number, _frame: _kill(fork, number))
    while not select.select([connection], [], [], POLL_S)[0]:
        if os.getppid() != parent:
            parent = os.getppid()
            # A worker ends with its leader, by no signal that it could ignore.
            _kill(fork, signal.SIGKILL if words[1] == WORKER else signal.SIGTERM)
    status = int.from_bytes(_received(connection), "little", signed=True)
    note.unlink(missing_ok=True)
    _end(status)


def _descriptors() -> list[int]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        number = int(path.name)
        # One of them is the folder's own.
        with suppress(OSError):
            os.fstat(number)
            found.append(number)
    return sorted(found)


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        os._exit(70)
    return data


def _kill(fork: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(fork, number)


def _end(status: int) -> None:
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


main()
