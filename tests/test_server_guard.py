"""Files of killed servers, and their removal by the next one."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import psutil
import pytest

from pie_driver_sglang.server_guard import ServerGuard, Session
from support.process.inspection import is_running
from support.servers.pie_server import wait_until

SHARED: Final = Path("/dev/shm")
END_S: Final = 20.0

COMMAND: Final = """
import subprocess, sys
from pie_driver_sglang.server_guard import ServerGuard, Session
guard = ServerGuard()
child = "import multiprocessing, sys, time\\n"
child += "from multiprocessing.shared_memory import SharedMemory\\n"
child += "from pie_driver_sglang.shared_names import use_token\\n"
child += "import tempfile\\n"
child += "use_token()\\n"
child += "lock = multiprocessing.get_context('spawn').Lock()\\n"
child += "blocks = [SharedMemory(create=True, size=64) for _ in range(2)]\\n"
child += "blocks.append(SharedMemory(f'settings_{guard}', create=True, size=64))\\n"
child += "assert SharedMemory(f'settings_{guard}').size >= 64\\n"
child += "file = tempfile.NamedTemporaryFile(delete=False)\\n"
child += "print(file.name, flush=True)\\n"
child += "time.sleep(600)\\n"
child = child.replace("{guard}", "1")
process = subprocess.Popen(
    [sys.executable, "-c", child], env=guard.environment, start_new_session=True,
    stdout=subprocess.PIPE, text=True,
)
guard.watch(Session.of(process.pid))
print(guard.token, guard.folder, process.pid, process.stdout.readline().strip(), flush=True)
sys.stdin.read()
guard.remove()
"""


class Command:
    """A command with a guard, and a process of its own that has things in shared memory."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        self.token, folder, child, self.file = process.stdout.readline().split()
        self.folder = Path(folder)
        self.child = psutil.Process(int(child))

    def left(self) -> set[str]:
        return {path.name for path in SHARED.iterdir() if self.token in path.name}

    def is_gone(self) -> bool:
        return not self.left() and not self.folder.exists() and not is_running(self.child.pid)

    def guard(self) -> psutil.Process:
        """The process outside the command's family that holds the lock."""
        lock = str(SHARED / f"pie-sglang-{self.token}")
        for process in psutil.process_iter():
            if process.pid not in (self.process.pid, self.child.pid):
                for link in Path(f"/proc/{process.pid}/fd").glob("*"):
                    try:
                        if str(link.readlink()) == lock:
                            return process
                    except OSError:
                        continue
        raise AssertionError("there is no guard")


@contextmanager
def command(folder: Path) -> Iterator[Command]:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    ) as process:
        try:
            yield Command(process)
        finally:
            process.kill()


def test_a_folder_with_a_long_path_is_not_taken(tmp_path: Path) -> None:
    """A socket's path has at most 107 bytes, and SGLang's names 18 after the folder's."""
    longest = tmp_path / ("x" * 100)
    longest.mkdir()
    with command(longest) as running:
        assert running.folder.parent == Path("/tmp")
        assert running.folder.stat().st_mode & 0o777 == 0o700
        assert running.process.stdin is not None
        running.process.stdin.close()
        wait_until(running.is_gone, END_S, "its end")
    assert not list(longest.iterdir())


def test_names_hold_their_owner(tmp_path: Path) -> None:
    with command(tmp_path) as running:
        kinds = {name.replace(running.token, "").rstrip("_")[:8] for name in running.left()}
        assert {"pie-sgla", "sem.mp--", "settings"} < kinds
        assert len(running.left()) == 5
        assert Path(running.file).parent == running.folder
        assert Path(running.file).name.startswith(running.token)
        assert running.folder.stat().st_mode & 0o777 == 0o700
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert running.process.wait(END_S) == 0
        assert running.is_gone()


def test_a_command_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    with command(tmp_path) as running, command(tmp_path) as other:
        others = other.left()
        running.process.kill()
        wait_until(running.is_gone, END_S, "the guard's work")
        assert other.left() == others
        assert is_running(other.child.pid)


def test_a_command_without_its_guard_cleans_up_itself(tmp_path: Path) -> None:
    with command(tmp_path) as running:
        running.guard().kill()
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert running.process.wait(END_S) == 0
        assert running.is_gone()


def test_the_next_server_removes_what_the_dead_have_left(tmp_path: Path) -> None:
    """As after the end of a container whose /dev/shm is the host's."""
    with command(tmp_path) as dead, command(tmp_path) as alive:
        killed = (dead.guard(), dead.child, dead.process)
        for process in killed:
            process.kill()
        dead.process.wait()
        # The lock is free once the guard, no child of this process, has ended as well.
        for process in killed[:2]:
            pid = process.pid
            wait_until(lambda pid=pid: not is_running(pid), END_S, "the end of a process")
        others = alive.left()
        assert dead.left()
        guard = ServerGuard()
        try:
            assert dead.is_gone()
            assert alive.left() == others
        finally:
            guard.remove()
        assert not guard.folder.exists()


def test_a_session_is_known_by_its_leaders_start() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as leader:
        found = Session.of(leader.pid)
        Session(leader.pid, found.started - 1).end()
        assert leader.poll() is None
        found.end()
        assert leader.wait(END_S) == -signal.SIGKILL


def test_a_lock_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text(str(tmp_path))
    link = SHARED / "pie-sglang-0123456789"
    link.symlink_to(target)
    try:
        ServerGuard().remove()
        assert target.read_text() == str(tmp_path)
        assert link.is_symlink()
    finally:
        link.unlink()


@pytest.mark.parametrize("target", ["shm", "folder"])
def test_an_unusable_folder_is_named(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pie_driver_sglang import server_guard
    from pie_driver_sglang.errors import StartError

    # Of a folder with a long path the server would take another.
    monkeypatch.setattr(tempfile, "tempdir", "/proc/missing")
    if target == "shm":
        monkeypatch.setattr(server_guard, "_SHARED_MEMORY", tmp_path / "no-shm")
    with pytest.raises(StartError, match="cannot make the server's files"):
        server_guard.guarded_server().__enter__()
    assert not list(tmp_path.iterdir())


def unshared(*arguments: str) -> list[str]:
    """A command line with namespaces of its own, if this user may have them."""
    command = ["unshare", "--map-root-user", *arguments]
    try:
        may = subprocess.run([*command, "true"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        may = False
    if not may:
        pytest.skip("no namespaces")
    return command


def test_containers_with_equal_process_ids_do_not_meet(tmp_path: Path) -> None:
    """Each is process 1 of its container, and `/dev/shm` is the host's: `--ipc=host`."""
    container = unshared("--pid", "--fork", "--kill-child", "--mount-proc")
    script = f"import os\nassert os.getpid() == 1\n{COMMAND}"
    commands = []
    with ExitStack() as stack:
        for name in ("first", "second"):
            folder = tmp_path / name
            folder.mkdir()
            process = subprocess.Popen(
                [*container, sys.executable, "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": str(folder)},
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None
            token = process.stdout.readline().split()[0]
            commands.append((process, token))
        (first, one), (second, other) = commands
        names = shared_names(other)
        assert len(names) == len(shared_names(one)) == 5
        # The whole container, its guard as well.
        first.kill()
        first.wait()
        wait_until(lambda: is_free(SHARED / f"pie-sglang-{one}"), END_S, "the container's end")
        ServerGuard().remove()
        assert not shared_names(one)
        assert shared_names(other) == names
        assert second.stdin is not None
        second.stdin.close()
        assert second.wait(END_S) == 0
        assert not shared_names(other)


def shared_names(token: str) -> set[str]:
    return {path.name for path in SHARED.iterdir() if token in path.name}


def is_free(lock: Path) -> bool:
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


FULL: Final = """
import os, sys
from multiprocessing.shared_memory import SharedMemory
from pie_driver_sglang.shared_names import TOKEN_VARIABLE, use_token
os.environ[TOKEN_VARIABLE] = "0123456789"
use_token()
SharedMemory(create=True, size=4096).unlink()
try:
    SharedMemory(create=True, size=1 << 20)
except OSError as error:
    print(error)
assert not os.listdir("/dev/shm")
"""


def test_a_full_shm_is_an_error_with_the_size() -> None:
    """Not a SIGBUS at the first write."""
    command = [*unshared("--mount"), "sh", "-c"]
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "
    if subprocess.run([*command, f"{mount} true"], check=False).returncode != 0:
        pytest.skip("no mounts")
    shell = f'{mount} {sys.executable} "$@"'
    found = subprocess.run(
        [*command, shell, "sh", "-c", FULL], check=True, capture_output=True, text=True
    )
    assert "no room for 1048576 bytes of shared memory" in found.stdout
