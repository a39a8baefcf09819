"""What a driver process has open, leaves behind and prints."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import psutil

from support.process import drivers

END_S = 5.0
"""The runtime kills a driver that has not ended 5 s after SIGTERM."""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def command_line(process: psutil.Process) -> list[str]:
    """The arguments of a process; none if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


def leftover_regions() -> set[str]:
    """Regions of drivers that this test run has started and that are not running any more."""
    running = {driver.region.name for driver in drivers.Driver.live}
    names = {path.name for path in Path("/dev/shm").glob("pie_shmem_g*")}
    return {name for name in names - running if is_of_this_run(name)}


def socket_inodes(pid: int) -> set[str]:
    inodes: set[str] = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            match = re.fullmatch(r"socket:\[(\d+)\]", str(path.readlink()))
            inodes.update(match.groups() if match else ())
    return inodes


def network_inodes(pid: int) -> set[str]:
    """Inodes of the TCP and UDP sockets of a process's network namespace."""
    inodes: set[str] = set()
    for name in ("tcp", "tcp6", "udp", "udp6"):
        with contextlib.suppress(FileNotFoundError):
            rows = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
            inodes.update(row.split()[9] for row in rows)
    return inodes


def is_of_this_run(name: str) -> bool:
    return int(name.removeprefix("pie_shmem_g")) >> 12 == os.getpid() % 2**20


def failure_line(stderr: str) -> str:
    """The one line that says what went wrong, which a hint must follow."""
    lines = stderr.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("pie_driver_sglang: ")]
    hints = [line for line in lines[at + 1 :] if line.startswith("hint: ")]
    assert len(hints) == 1, stderr
    assert len(hints[0]) > len("hint: ") + 5
    assert "Traceback" not in stderr
    assert drivers.CLOSED_EARLY not in stderr
    return lines[at]


def hf_config(snapshot: Path, **changed: Any) -> None:
    path = snapshot / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def error_line(log: str) -> str:
    """The line that says what went wrong: the last one but for its hint."""
    *_, line, empty, hint = log.rstrip().splitlines()
    assert line.startswith("pie_driver_sglang: ")
    assert empty == ""
    assert hint.startswith("hint: ")
    return line
