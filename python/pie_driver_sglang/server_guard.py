"""What a server leaves when it ends, and a process that removes it when the server cannot.

A server has a token (`shared_names`), a folder for its temporary files and a lock file in
``/dev/shm``, both named by the token. A forked process, the guard, holds the lock as well. When the
command has ended, however it did, the guard ends what is left of the server's processes and removes
its files. If both were killed, as at the end of a container whose ``/dev/shm`` is the host's, the
next server finds the lock free and removes the files of the one before.
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
"""Bytes: the path of a socket has at most 107, and SGLang's names take up to 24 after the token."""
_DONE: Final = b"done"
"""Tells the guard that the command has removed everything."""
_END_S: Final = 10.0
"""How long killed processes may take to be gone; those that use a GPU need some time."""
_LAST_LOOK_S: Final = 2.0
"""Processes outside the session end with their parent, within this time."""


class Session(NamedTuple):
    """A session of processes, by its leader.

    Attributes:
        leader: The process id, which is the session's, too.
        started: When the leader was started: another process with its number has another time.
    """

    leader: int
    started: int

    @classmethod
    def of(cls, leader: int) -> Session:
        """The session that a process leads, or is about to."""
        found = _status(leader)
        return cls(leader, found.started if found is not None else 0)

    def end(self) -> None:
        """Kills every process of it, and waits until none is left."""
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
                # Its number was free, so the session was over.
                return []
            if not status.is_over:
                found.append(pid)
        return found

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            process = os.pidfd_open(pid)
            try:
                # Looked at again, now that the number cannot become another process's.
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
        # The name of the program, in parentheses, may have anything in it.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return _Status(int(words[3]), int(words[19]), words[0] in (b"Z", b"X"))


def _parent() -> str:
    """The temporary folder, or `/tmp` where the paths of sockets in that would be too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _LONGEST_PARENT else "/tmp"


class ServerGuard:
    """The files of one server. Make it before other threads: it forks."""

    def __init__(self) -> None:
        """Removes what dead servers have left, and makes the folder and the lock.

        Raises:
            OSError: There is no room, or no right, to make them.
        """
        _sweep()
        self.token, self.lock = _make_lock()
        self.folder = Path(_parent(), f"{_PREFIX}{self.token}")
        self._session: Session | None = None
        self._told = -1
        try:
            self.folder.mkdir(mode=0o700)
            self._told = self._fork()
        except BaseException:
            self.remove()
            raise

    @property
    def environment(self) -> dict[str, str]:
        """The variables of this process, for one of the server's."""
        return {**os.environ, "TMPDIR": str(self.folder), TOKEN_VARIABLE: self.token}

    def watch(self, session: Session) -> None:
        """Has the processes of a session end with this one."""
        self._session = session
        self._tell(b"%d %d\n" % session)

    def remove(self) -> None:
        """Ends what is left of the server, and removes its files."""
        if self._session is not None:
            self._session.end()
        _remove(self.token, self.folder)
        self._tell(_DONE)
        for descriptor in (self._told, self.lock):
            if descriptor >= 0:
                os.close(descriptor)

    def _tell(self, message: bytes) -> None:
        # Without a guard this process does it alone.
        with contextlib.suppress(OSError):
            os.write(self._told, message)

    def _fork(self) -> int:
        """Starts the guard, and returns the pipe that tells it what to watch."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _become_guard(self, reader)
        os.close(reader)
        os.waitpid(child, 0)
        return writer


@contextlib.contextmanager
def guarded_server() -> Iterator[ServerGuard]:
    """Within it a server may run; after it nothing is left of the server.

    Raises:
        StartError: Its files cannot be made.
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
    """Runs in the fork, which never returns; it is nobody's child, and of no terminal's group."""
    try:
        os.setsid()
        if os.fork() != 0:
            return
        # Signals to the command, by its name for example, are not for this process.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        os.chdir("/")
        _close_all_but(reader, guard.lock)
        heard = _heard(reader)
        if heard.endswith(_DONE):
            return
        words = heard.split()
        if words:
            Session(int(words[0]), int(words[1])).end()
            _remove(guard.token, guard.folder)
            return
        _remove(guard.token, guard.folder)
        time.sleep(_LAST_LOOK_S)
        _remove(guard.token, guard.folder)
    finally:
        os._exit(0)


def _close_all_but(*kept: int) -> None:
    """Closes all other descriptors: who reads a pipe of the command must not wait for the guard."""
    first = 0
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, max(os.sysconf("SC_OPEN_MAX"), 1 << 16))


def _heard(reader: int) -> bytes:
    """All that the command says until it has ended."""
    heard = b""
    while chunk := os.read(reader, 64):
        heard += chunk
    return heard


def _make_lock() -> tuple[str, int]:
    """A token, and the lock file that is named after it, locked."""
    flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        token = make_token()
        path = _SHARED_MEMORY / f"{_PREFIX}{token}"
        descriptor = os.open(path, flags, 0o600)
        try:
            # The folder, for a server that finds the lock free.
            os.write(descriptor, os.fsencode(_parent()))
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Before that another server may have taken it for one of a dead server.
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
    """Removes the files of a server; of its lock, which comes last, the name."""
    lock = f"{_PREFIX}{token}"
    for path in sorted(_SHARED_MEMORY.iterdir(), key=lambda path: path.name == lock):
        if token in path.name:
            with contextlib.suppress(OSError):
                path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Removes what servers of this user have left whose processes are all dead."""
    for path, descriptor in _free_locks():
        folder = Path(os.fsdecode(os.read(descriptor, 4096)), path.name)
        if _leads_to(path, descriptor):
            _remove(path.name.removeprefix(_PREFIX), folder)


def _free_locks() -> Iterator[tuple[Path, int]]:
    """The lock files of dead servers, each locked meanwhile."""
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
