"""Has a module run in a fork of the fork server, and stands for that fork until it ends.

Imports nothing but Python's own library: it runs before everything else in a driver's process.
"""

import array
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress

ADDRESS_VARIABLE = "PIE_FORK_SERVER"
"""The environment variable with the path of the fork server's socket; empty for none."""
MOST_DESCRIPTORS = 64
DECLINED = 0
"""In place of a process id: the process shall run the module itself."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SIZE = 4
_STDERR = 2


def run_in_fork(
    module: str, arguments: list[str], when_orphaned: int = signal.SIGTERM
) -> int | None:
    """Run ``python -m MODULE ARGUMENTS...`` in a fork of the fork server, if there is one.

    The fork has this process's environment, working directory, process group, ignored signals and
    descriptors, which are closed here, except for standard error. Signals are passed on to it. It
    is killed when this process ends. If it is killed by a signal, so is this process.

    Args:
        module: One that the fork server knows.
        arguments: Of the module.
        when_orphaned: The signal that ends the fork when this process's parent has ended.

    Returns:
        The exit status of the fork; None if this process shall run the module.
    """
    address = os.environ.pop(ADDRESS_VARIABLE, "")
    if not address:
        return None
    os.environ[ADDRESS_VARIABLE] = address
    parent = os.pidfd_open(os.getppid())
    connection = socket.socket(socket.AF_UNIX)
    numbers = [n for n in _descriptors() if n not in (parent, connection.fileno())]
    try:
        connection.connect(address)
        _send(connection, module, arguments, numbers)
        pid = _receive(connection)
    except OSError:
        pid = DECLINED
    if pid == DECLINED:
        connection.close()
        os.close(parent)
        return None
    for number in numbers:
        # A reader that waits for the end of a pipe waits for the fork's. What this process prints
        # belongs to the log.
        if number != _STDERR:
            os.close(number)
    return _stand_for(pid, connection, parent, when_orphaned)


def _send(connection: socket.socket, module: str, arguments: list[str], numbers: list[int]) -> None:
    request = {
        "module": module,
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109 - pathlib would be imported for this alone
        "numbers": numbers,
        "group": os.getpgid(0),
        "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN],
        "asked_at": time.monotonic(),
    }
    text = json.dumps(request).encode(errors="surrogateescape")
    sent = array.array("i", numbers)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)]
    connection.sendmsg([len(text).to_bytes(_SIZE, "little")], ancillary)
    connection.sendall(text)


def _stand_for(pid: int, connection: socket.socket, parent: int, when_orphaned: int) -> int:
    """Wait for a process's end, and end as it does; it is told to end with this one's parent.

    Args:
        pid: Of the fork; negative if the fork server itself runs the module.
        connection: To the fork server.
        parent: The parent's process, a descriptor.
        when_orphaned: The signal for the process when the parent has ended.
    """
    passed_on = False
    try:
        process = os.pidfd_open(abs(pid))
    except ProcessLookupError:
        # It has ended already.
        process = -1

    def pass_on(number: int, _frame: object) -> None:
        nonlocal passed_on
        # These two end no driver.
        passed_on = passed_on or number not in (signal.SIGUSR1, signal.SIGUSR2)
        with suppress(OSError):
            signal.pidfd_send_signal(process, number)

    for number in _PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, pass_on)
    ready, _, _ = select.select([parent, connection.fileno()], [], [])
    if connection.fileno() not in ready:
        pass_on(when_orphaned, None)
    try:
        status = _receive(connection)
    except OSError:
        # Where the fork server was the driver itself, a signal may have ended it natively.
        if pid < 0:
            return 0 if passed_on else 1
        if not passed_on:
            sys.stderr.write("the fork server has ended, and this driver with it\n")
            sys.stderr.flush()
        return 1
    if status < 0:
        _die_by(-status)
    return status


def _descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        # One of them is the folder's own.
        with suppress(OSError):
            os.fstat(int(name))
            found.append(int(name))
    return sorted(found)[:MOST_DESCRIPTORS]


def _receive(connection: socket.socket) -> int:
    data = connection.recv(_SIZE, socket.MSG_WAITALL)
    if len(data) < _SIZE:
        raise ConnectionResetError
    return int.from_bytes(data, "little", signed=True)


def _die_by(number: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    # A signal that is ignored by default.
    sys.exit(128 + number)
