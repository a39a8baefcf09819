"""`tools/within`, which ends commands that hang."""

from __future__ import annotations

import subprocess

import pytest

from support import REPOSITORY
from support.process.inspection import is_running
from support.process.runtime_client import eventually


def within(seconds: int, program: str) -> subprocess.CompletedProcess[str]:
    command = [REPOSITORY / "tools" / "within", str(seconds), "bash", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_in_time_keeps_its_status() -> None:
    ended = within(30, "echo said; exit 3")
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "said\n", "")


@pytest.mark.parametrize("ignored", ["", "trap '' TERM; "])
def test_a_command_that_hangs_is_named_and_ended_with_its_children(ignored: str) -> None:
    ended = within(1, f"{ignored}echo $$; sleep 50 & echo $!; wait; sleep 50")
    assert ended.returncode == 124
    assert "has run for 1 s" in ended.stderr
    for pid in ended.stdout.split():
        assert f"\n{pid} " in ended.stderr
        # A signal takes effect once the process is scheduled.
        eventually(lambda pid=pid: not is_running(int(pid)), f"the end of {pid}")
