"""The driver's end of the socket by which a frontend updates weights, and profiles.

A thread receives commands, and the serving thread runs them between steps. The frontend says at the
start what a restarted driver has to catch up with: the weights of the last update, for example.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection
from typing import TYPE_CHECKING, Any

from pie_driver_sglang.driver.failures import log_or_raise
from pie_driver_sglang.engine.control_commands import ReleaseMemory, read_command
from pie_driver_sglang.errors import DriverError, LostWeightsError, StartError, WeightsError, quoted

if TYPE_CHECKING:
    from pie_driver_sglang.engine.executor import ModelExecutor

logger = logging.getLogger(__name__)


class ControlChannel:
    """The commands of a frontend."""

    def __init__(
        self, connection: Connection, engine: ModelExecutor, wake: Callable[[], object]
    ) -> None:
        """Receive commands from now on.

        Args:
            connection: To the frontend.
            engine: Runs them.
            wake: Schedules :meth:`process` on the serving thread; any thread may call it.
        """
        self._connection, self._engine, self._wake = connection, engine, wake
        self._received: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def begin(self) -> None:
        """Start the thread that receives commands."""
        threading.Thread(target=self._receive, name="control", daemon=True).start()

    def catch_up(self, group: int) -> None:
        """Say who this is, and run what the frontend asks for before this driver serves.

        Raises:
            StartError: The frontend is gone, or a command failed.
        """
        try:
            self._send({"group": group})
            commands = json.loads(self._connection.recv_bytes())
        except (OSError, EOFError, ValueError) as error:
            raise StartError(
                f"the socket of the frontend is closed: {error}", "start the engine again"
            ) from error
        for command in commands:
            try:
                self._engine.control(read_command(command))
            except WeightsError as error:
                self._send({**_failure(error), "command": command["command"]})
                what = "the weights of the last update cannot be loaded again"
                if command["command"] == ReleaseMemory.__name__:
                    what = "memory that was released cannot be released again"
                raise StartError(f"{what}: {error.message}", error.hint) from error
        if commands:
            self._send({"success": True})

    def process(self) -> None:
        """Run the commands that were received; on the serving thread.

        Raises:
            LostWeightsError: The model is unusable.
            LostError: The device is lost.
        """
        while not self._received.empty():
            message = self._received.get()
            try:
                answer = {"success": True, **self._engine.control(read_command(message))}
            except LostWeightsError as error:
                self._send(_failure(error))
                raise
            except WeightsError as error:
                logger.warning("%s is refused: %s", message["command"], error.with_hint)
                answer = _failure(error)
            except Exception as error:
                self._send(_failure(DriverError(f"{type(error).__name__}: {error}")))
                log_or_raise(self._engine, error, "control", "%s failed", message["command"])
                continue
            self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._connection.send_bytes(json.dumps(message).encode())

    def _receive(self) -> None:
        # The end of the frontend is the end of this process, by other means.
        with contextlib.suppress(OSError, EOFError):
            while True:
                self._received.put(json.loads(self._connection.recv_bytes()))
                self._wake()


@contextlib.contextmanager
def control_channel(
    path: str | None, engine: ModelExecutor, wake: Callable[[], object], group: int
) -> Iterator[ControlChannel | None]:
    """The channel to a frontend, after what there is to catch up with; None without a socket.

    Raises:
        StartError: Nothing listens there, or the driver cannot catch up.
    """
    if path is None:
        yield None
        return
    try:
        # `@` stands for the abstract namespace, as tools of Linux show it.
        connection = Client("\0" + path[1:] if path.startswith("@") else path, "AF_UNIX")
    except OSError as error:
        raise StartError(
            f"option `control_socket`: nothing listens at {quoted(path)}: {error}", "remove it"
        ) from error
    with connection:
        channel = ControlChannel(connection, engine, wake)
        channel.catch_up(group)
        channel.begin()
        yield channel


def _failure(error: DriverError) -> dict[str, Any]:
    return {"success": False, "message": error.message, "hint": error.hint}
