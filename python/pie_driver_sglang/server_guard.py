"""Cleans up after a server: its processes, temporary files and shared memory.

A server has a token (`shared_names`), a temporary folder and a lock file in ``/dev/shm``, both
named by the token. A forked process, the guard, holds the lock as well. When the command has ended
in any way, the guard kills the remaining processes and removes the files. If both were killed, the
next server finds the lock free and removes the files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pie_driver_sglang.errors import StartError
from pie_driver_sglang.shared_names import TOKEN_LENGTH, TOKEN_VARIABLE, make_token

_SHARED_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "pie-sglang-"
_LONGEST_PARENT: Final = 107 - len(f"/{_PREFIX}/") - 2 * TOKEN_LENGTH - 24
"""Bytes: a socket path has at most 107, of which SGLang's names take 24 after the token."""
_DONE: Final = b"done"
"""The message that the command has removed everything."""
_END_S: Final = 10.0
"""Timeout of killed processes, of which those with a GPU need some time."""
_LAST_LOOK_S: Final = 2.0
"""Time in which processes outside the session end with their parent."""


class Session(NamedTuple):
    """A session of processes.

    Attributes:
        leader: Process id of its leader, and id of the session.
        started: Start time of the leader, in case its process id is used again.
    """

    leader: int
    started: int

    @classmethod
    def of(cls, leader: int) -> Session:
        """The session of a leader."""
        found = _status(leader)
        return cls(leader, found.started if found is not None else 0)

    def end(self) -> None:
        """Kill all of its processes, and wait for their end."""
        until = time.monotonic() + _END_S
        while (members := self._members()) and time.monotonic() < until:
            for pid in members:
                self._kill(pid)
            time.sleep(0.01)

    def _members(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            pid = int(folder.name)
            status = _status(pid)
            if status is None or status.session != self.leader:
                continue
            if pid == self.leader and status.started != self.started:
                # The id was used again, so the session has ended.
                return []
            if not status.is_over:
                found.append(pid)
        return found

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            try:
                # Checked again: the pidfd pins the process.
                status = _status(pid)
                if status is not None and status.session == self.leader:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)


class _Status(NamedTuple):
    session: int
    started: int
    is_over: bool


def _status(pid: int) -> _Status | None:
    try:
        # The program's name, in parentheses, may have any characters.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Status(int(words[3]), int(words[19]), words[0] in (b"Z", b"X"))


def _parent() -> str:
    """The temporary folder, or `/tmp` where socket paths would be too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _LONGEST_PARENT else "/tmp"


class ServerGuard:
    """The files of one server. It forks, so create it before other threads."""

    def __init__(self) -> None:
        """Remove leftovers of dead servers, and create folder, lock and guard.

        Raises:
            OSError: They cannot be created.
        """
        _sweep()
        self.token, self.lock = _make_lock()
        self.folder = Path(_parent(), f"{_PREFIX}{self.token}")
        self._session: Session | None = None
        self._pipe = -1
        try:
            self.folder.mkdir(mode=0o700)
            self._pipe = self._fork()
        except BaseException:
            self.remove()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """The environment of the server's processes."""
        return {**os.environ, "TMPDIR": str(self.folder), TOKEN_VARIABLE: self.token}

    def watch(self, session: Session) -> None:
        """End the processes of a session with this one."""
        self._session = session
        self._send(b"%d %d\n" % session)

    def remove(self) -> None:
        """Kill what is left of the server, and remove its files."""
        if self._session is not None:
            self._session.end()
        _remove(self.token, self.folder)
        self._send(_DONE)
        for descriptor in (self._pipe, self.lock):
            if descriptor >= 0:
                os.close(descriptor)

    def _send(self, message: bytes) -> None:
        # The guard may be gone.
        with contextlib.suppress(OSError):
            os.write(self._pipe, message)

    def _fork(self) -> int:
        """Start the guard, and return the pipe to it."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _become_guard(self, reader)
        os.close(reader)
        os.waitpid(child, 0)
        return writer


@contextlib.contextmanager
def guarded_server() -> Iterator[ServerGuard]:
    """Within it a server may run; at its end the server is cleaned up.

    Raises:
        StartError: Its files cannot be created.
    """
    try:
        guard = ServerGuard()
    except OSError as error:
        raise StartError(
            f"cannot make the server's files: {error}",
            f"make room in {_SHARED_MEMORY} and {_parent()}, and let this user write there",
        ) from error
    try:
        yield guard
    finally:
        guard.remove()


def _become_guard(guard: ServerGuard, reader: int) -> None:
    """Run the guard in the fork, as a daemon; never returns."""
    try:
        os.setsid()
        if os.fork() != 0:
            return
        # Signals to the command by its name are not for the guard.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.chdir("/")
        _close_all_but(reader, guard.lock)
        received = _read_all(reader)
        if received.endswith(_DONE):
            return
        if session := received.split():
            Session(*map(int, session[:2])).end()
            _remove(guard.token, guard.folder)
            return
        _remove(guard.token, guard.folder)
        time.sleep(_LAST_LOOK_S)
        _remove(guard.token, guard.folder)
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    """Close all other descriptors: the guard must keep no pipe of the command open."""
    first = 0
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))


def _read_all(reader: int) -> bytes:
    """All messages of the command until it has ended."""
    with open(reader, "rb", closefd=False) as pipe:
        return pipe.read()


def _make_lock() -> tuple[str, int]:
    """A token, and the locked lock file of its name."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        token = make_token()
        path = _SHARED_MEMORY / f"{_PREFIX}{token}"
        descriptor = os.open(path, flags, 0o600)
        try:
            # The folder, for the server that cleans up.
            os.write(descriptor, os.fsencode(_parent()))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Before the lock another server may have removed it.
            if _leads_to(path, descriptor):
                return token, descriptor
        except BlockingIOError:
            pass
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        os.close(descriptor)


def _leads_to(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(token: str, folder: Path) -> None:
    """Remove the files of a server, its lock file last."""
    lock = f"{_PREFIX}{token}"
    for path in sorted(_SHARED_MEMORY.iterdir(), key=lambda path: path.name == lock):
        if token in path.name:
            with contextlib.suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove the files of this user's dead servers."""
    for path, descriptor in _free_locks():
        folder = Path(os.fsdecode(os.read(descriptor, 4096)), path.name)
        if _leads_to(path, descriptor):
            _remove(path.name.removeprefix(_PREFIX), folder)


def _free_locks() -> Iterator[tuple[Path, int]]:
    """Yield the lock files of dead servers, locked meanwhile."""
    for path in _SHARED_MEMORY.glob(f"{_PREFIX}{'[a-z0-9]' * TOKEN_LENGTH}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
                if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield path, descriptor
            finally:
                os.close(descriptor)
