"""Shared-memory regions that cannot be created: one line with the reason."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.models import tiny_models
from support.process import drivers


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a driver that gets as far as its region within a second."""
    return drivers.write_config(tmp_path, tiny_models.POCKET)


@pytest.fixture
def region(config: Path) -> Iterator[Path]:
    path = Path("/dev/shm") / f"pie_shmem_g{config.stem.removeprefix('driver-')}"
    yield path
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link(path: Path) -> None:
    path.symlink_to(path)


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def anothers(path: Path) -> None:
    path.touch(0o000)


UNPRIVILEGED = "os.setuid(65534) if os.getuid() == 0 else None"
TAKEN = {
    "a folder": (a_folder, "", "remove it"),
    "a link": (a_link, "", "remove it"),
    "a socket": (a_socket, "", "remove it"),
    "another user's": (anothers, UNPRIVILEGED, "belongs to another user"),
}
LIMITED = {
    "address space": ("resource.setrlimit(resource.RLIMIT_AS, (2**20, 2**20))", "`ulimit -v`"),
    "descriptors": ("resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", "`ulimit -n`"),
}
MOUNTS = {
    "read-only": ("mount -t tmpfs -o ro t /dev/shm", "make /dev/shm writable"),
    "without inodes": ("mount -t tmpfs -o nr_inodes=1 t /dev/shm", "delete stale files"),
    "small": ("mount -t tmpfs -o size=1m t /dev/shm", "enlarge /dev/shm"),
    "missing": ("mount -t tmpfs t /dev", "mount a tmpfs there"),
}
OPENING = """
import os, resource, sys
from pathlib import Path
from pie_driver_sglang import _core
from pie_driver_sglang.driver import startup
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.errors import DriverError
config, guard = load_config(Path(sys.argv[1])), _core.ExitGuard.inert()
exec(sys.argv[2])
try:
    startup._open_region(config, guard)
except DriverError as error:
    os.write(2, startup.format_failure(error).encode())
"""
NAMESPACE = ["unshare", "--mount"] if os.getuid() == 0 else ["unshare", "-r", "--mount"]
HAS_NAMESPACES = not subprocess.run([*NAMESPACE, "true"], stderr=subprocess.DEVNULL).returncode


class TestRegionErrors:
    """Each has a remedy of its own."""

    @staticmethod
    def open(config: Path, limit: str, *before: str) -> str:
        command = [*before, sys.executable, "-c", OPENING, str(config), limit]
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr

    @staticmethod
    def check(stderr: str, config: Path, expected: str) -> None:
        line, empty, hint = stderr.splitlines()
        assert line.startswith("pie_driver_sglang: ")
        assert f"pie_shmem_g{config.stem.removeprefix('driver-')}" in line
        assert not empty
        assert hint.startswith("hint: ")
        assert expected in hint
        assert "context_length" not in hint

    @pytest.mark.parametrize("name", TAKEN)
    def test_the_name_is_taken(self, name: str, config: Path, region: Path) -> None:
        make, change, expected = TAKEN[name]
        make(region)
        self.check(self.open(config, change), config, expected)

    @pytest.mark.parametrize("name", LIMITED)
    def test_a_limit_of_the_process(self, name: str, config: Path) -> None:
        limit, expected = LIMITED[name]
        self.check(self.open(config, limit), config, expected)

    @pytest.mark.skipif(not HAS_NAMESPACES, reason="mount namespaces are not allowed here")
    @pytest.mark.parametrize("name", MOUNTS)
    def test_dev_shm_is_not_as_it_should_be(self, name: str, config: Path) -> None:
        mount, expected = MOUNTS[name]
        shell = ["sh", "-c", f'{mount} && exec "$@"', "sh"]
        self.check(self.open(config, "", *NAMESPACE, *shell), config, expected)

    def test_another_server_has_it(self, config: Path, region: Path) -> None:
        with region.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.check(self.open(config, ""), config, "one Pie server per host, or per container")
