"""`ControlSocket`: the frontend's end of the connections to its drivers, besides the ring.

Each driver of the runtime connects when it has loaded its model, before it serves. One that was
restarted is told what the drivers were told before: to load the weights of the last update, and to
release memory again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Final

from pie_driver_sglang.errors import DriverError, WeightsError

logger = logging.getLogger(__name__)

_CREDENTIALS: Final = struct.Struct("3i")
"""Linux's `struct ucred`: process, user, group."""
_OPTION: Final = "control_socket"
_FIRST_S: Final = 5.0
"""How long the first message of a driver may take; others wait meanwhile."""
_NO_COMMANDS: Final[Mapping[str, str]] = {
    "vllm": "the driver on vLLM keeps the weights and the memory of its start"
}
"""Why drivers take no commands, by their library."""
_LOAD_S: Final = 1200.0
"""Default of `ready_timeout_s`: how long a driver may take to load weights."""
_TRAINER_S: Final = 600.0
"""How long a driver waits for a trainer besides, in a new process group or for a tensor."""
_MOST_S: Final = 7 * 86400.0
"""What `poll` can count."""
_GONE: Final = "the driver ended meanwhile, and is started again"
_LATE_HINT: Final = "try again later, or restart the server; `ready_timeout_s` raises the limit"


class OwnedLock:
    """A lock that raises in a signal handler of its owner, which would wait forever."""

    def __init__(self) -> None:
        """Nothing holds it."""
        self._lock = threading.Lock()
        self._owner: int | None = None

    def refuse_owner(self) -> None:
        """Raise in the thread that holds it.

        Raises:
            WeightsError: This thread does.
        """
        if self._owner == threading.get_ident():
            raise WeightsError(
                "this thread controls the model, and a signal handler has interrupted it",
                "call the engine from another thread",
            )

    def __enter__(self) -> None:
        """Wait for it."""
        self.refuse_owner()
        self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._owner = None
        self._lock.release()


class ControlSocket:
    """The connections to the drivers of a runtime."""

    def __init__(self, engine: str = "sglang") -> None:
        """Listen; no driver is connected.

        Args:
            engine: The library of the drivers. Those on vLLM take no commands, and do not connect.
        """
        self._refusal = _NO_COMMANDS.get(engine, "")
        # In the abstract namespace, where a process that is killed leaves nothing behind.
        self._name = f"pie-control-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen()
        self._drivers: list[Connection] = []
        self._ended = 0
        """Drivers that have ended, and were not replaced yet."""
        self._limit_s = _LOAD_S + _TRAINER_S
        """How long a driver may take for a command."""
        self._unanswered: dict[Connection, str] = {}
        """The commands that drivers have not answered in time."""
        self._lock = threading.Lock()
        self._calls = OwnedLock()
        """Held while a command runs: a connection has one question and one answer at a time."""
        self._change = threading.Lock()
        """Held while what restarted drivers are told changes."""
        self._catch_up: Callable[[], list[dict[str, Any]]] = list
        self._on_restart: Callable[[], object] = lambda: None
        self._on_failure: Callable[[str], object] = lambda _: None
        self._finalizer = weakref.finalize(self, _close, self._listener, os.getpid())
        threading.Thread(
            target=_accept,
            args=(self._listener, weakref.ref(self)),
            name="control-accept",
            daemon=True,
        ).start()

    def runtime(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a `_core.Runtime`, with this socket if its drivers take commands."""
        if self._refusal:
            return dict(keywords)
        load_s = keywords.get("ready_timeout_s")
        if isinstance(load_s, int | float):
            self._limit_s = min(load_s + _TRAINER_S, _MOST_S)
        options = {**keywords["options"], _OPTION: f"@{self._name}"}
        return {**keywords, "options": options}

    def on_restart(
        self,
        catch_up: Callable[[], list[dict[str, Any]]],
        notify: Callable[[], object],
        failed: Callable[[str], object],
    ) -> None:
        """Set what restarted drivers are told, and who is told of them.

        Args:
            catch_up: Returns the commands for a driver, in order.
            notify: Called for each driver that replaces one, before it serves.
            failed: Called with the reason if one of the commands fails that bring weights. That
                driver ends, as one does that cannot release its memory.
        """
        self._catch_up, self._on_restart, self._on_failure = catch_up, notify, failed

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Within it no driver is added, which would miss the command that runs."""
        with self._change:
            yield

    def require_open(self) -> None:
        """Check that the socket is not closed.

        Raises:
            WeightsError: It is, as the engine is shut down; or the drivers take no commands.
        """
        if self._refusal:
            raise WeightsError(self._refusal, 'use `engine="sglang"`')
        if not self._finalizer.alive:
            raise WeightsError("the engine is shut down", "make a new one")

    def call(self, command: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Have every driver run a command, all at once; blocks until they have.

        Returns:
            What each answered, with `success`, and a `message` and a `hint` for a failure. One that
            has not answered in time has `timed_out`; what it has done of the command is unknown.
            One that has ended has `gone`: it is started again, and catches up.

        Raises:
            WeightsError: No driver is connected, or the engine is shut down.
        """
        self.require_open()
        with self._lock:
            self._remove_ended()
            drivers = list(self._drivers)
        if not drivers:
            raise WeightsError("no driver serves at the moment", "try again later")
        with self._calls, ThreadPoolExecutor(len(drivers)) as pool:
            return list(pool.map(lambda driver: self._ask(driver, command), drivers))

    def close(self) -> None:
        """Close the socket and all connections."""
        self._finalizer()
        with self._lock:
            for driver in self._drivers:
                driver.close()
            self._drivers.clear()

    def welcome(self, connection: Connection) -> None:
        """Add a driver that has connected."""
        if not connection.poll(_FIRST_S):
            raise TimeoutError("it says nothing")
        connection.recv_bytes()
        with self._change:
            self._add(connection)

    def _ask(self, driver: Connection, command: Mapping[str, Any]) -> dict[str, Any]:
        name = str(command.get("command"))
        try:
            if (late := self._unanswered.get(driver)) is not None:
                if not driver.poll():
                    return _failure(f"the driver has not ended `{late}` yet", _LATE_HINT)
                # The answer that came too late.
                driver.recv_bytes()
                del self._unanswered[driver]
            driver.send_bytes(json.dumps(command).encode())
            if not driver.poll(self._limit_s):
                self._unanswered[driver] = name
                text = f"a driver has not answered `{name}` within {self._limit_s:g} s"
                return {**_failure(text, _LATE_HINT), "timed_out": True}
            answer: dict[str, Any] = json.loads(driver.recv_bytes())
        except (OSError, EOFError, ValueError):
            return {**_failure(_GONE, "try again later"), "gone": True}
        return answer

    def _add(self, connection: Connection) -> None:
        with self._lock:
            # A driver is started again after the end of the one before.
            self._remove_ended()
            replaces = self._ended > 0
        if replaces:
            self._on_restart()
        commands = self._catch_up()
        connection.send_bytes(json.dumps(commands).encode())
        if commands:
            if not connection.poll(self._limit_s):
                text = f"a restarted driver has not caught up within {self._limit_s:g} s"
                self._on_failure(text)
                raise WeightsError(text, _LATE_HINT)
            answer = json.loads(connection.recv_bytes())
            if not answer["success"]:
                # The weights of a driver that cannot release its memory again are not lost.
                if answer.get("command") != "ReleaseMemory":
                    self._on_failure(answer["message"])
                raise WeightsError(answer["message"], answer["hint"])
        with self._lock:
            self._ended -= replaces
            self._drivers.append(connection)

    def _remove_ended(self) -> None:
        """Remove connections that the other end has closed."""
        for driver in list(self._drivers):
            if _has_ended(driver):
                driver.close()
                self._drivers.remove(driver)
                self._unanswered.pop(driver, None)
                self._ended += 1


def _has_ended(driver: Connection) -> bool:
    """Whether the other end of a connection is closed; what it has sent stays where it is."""
    if driver.closed:
        return True
    with socket.socket(fileno=os.dup(driver.fileno())) as own:
        try:
            return not own.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def _failure(message: str, hint: str) -> dict[str, Any]:
    return {"success": False, "message": message, "hint": hint}


def _accept(listener: socket.socket, owner: weakref.ref[ControlSocket]) -> None:
    while True:
        try:
            accepted, _ = listener.accept()
        except OSError:
            return
        connection = Connection(accepted.detach())
        owner_socket = owner()
        if owner_socket is None:
            connection.close()
            return
        try:
            _require_own_user(connection)
            owner_socket.welcome(connection)
        except (OSError, EOFError, ValueError, DriverError) as error:
            logger.debug("a driver has not come up: %s", error)
            connection.close()
        del owner_socket


def _require_own_user(connection: Connection) -> None:
    """Raise for a process of another user, which can connect as well."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.getuid():
        raise PermissionError(f"user {user} has connected")


def _close(listener: socket.socket, process: int) -> None:
    # A fork has the same socket.
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            # Ends the thread, which a mere close would not.
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
