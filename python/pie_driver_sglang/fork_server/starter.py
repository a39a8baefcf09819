"""Starts the fork server of a frontend."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from pie_driver_sglang.config.switches import read_switch
from pie_driver_sglang.fork_server.client import ADDRESS_VARIABLE

ENABLED: Final = "PIE_ENABLE_FORK_SERVER"
"""The environment variable that enables fork servers by `1`, and disables them by `0`."""
_END_S: Final = 5.0
_BACKLOG: Final = 64


def is_enabled(device: str) -> bool:
    """Whether drivers of a device are forked: by default on the CPU only.

    Args:
        device: `cpu` or `cuda`, with an index or without.

    Raises:
        ConfigError: The variable is neither `0` nor `1`.
    """
    return read_switch(ENABLED, default=device == "cpu")


def _has_pidfds() -> bool:
    """Whether processes can be watched by descriptors; old kernels and some sandboxes cannot."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def fork_server(device: str, architectures: Sequence[str], *, ranks: int = 1) -> Iterator[None]:
    """Within it, drivers of this process and its children are forks of a process with SGLang.

    It returns at once, and that process imports meanwhile. At its end the fork server is killed,
    with the drivers that are left. Without an effect where this process is such a child already, or
    where `is_enabled` says no.

    Args:
        device: `cpu` or `cuda`, with an index or without.
        architectures: Class names from the model's `config.json`.
        ranks: Processes of a driver.
    """
    if os.environ.get(ADDRESS_VARIABLE) or not is_enabled(device) or not _has_pidfds():
        yield
        return
    # Only this user may reach the socket: it runs programs.
    with tempfile.TemporaryDirectory(prefix="fork-") as folder:
        address = str(Path(folder, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(_BACKLOG)
            command = [sys.executable, "-P", "-m", "pie_driver_sglang.fork_server.server"]
            command += ["--parent", str(os.getpid()), "--socket-fd", str(listener.fileno())]
            command += ["--device", device, "--ranks", str(ranks)]
            process = subprocess.Popen(
                [*command, "--architectures", *architectures],
                stdin=subprocess.DEVNULL,
                # Output of imports is no output of the command.
                stdout=2,
                pass_fds=[listener.fileno()],
            )
        os.environ[ADDRESS_VARIABLE] = address
        try:
            yield
        finally:
            os.environ.pop(ADDRESS_VARIABLE, None)
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
