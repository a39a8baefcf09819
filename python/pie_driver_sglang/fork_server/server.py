"""`python -m pie_driver_sglang.fork_server.server`: imports SGLang, then forks drivers.

It forks only while it has one thread and has not initialized CUDA: a lock that another thread holds
would stay locked in the fork, and CUDA cannot be used there. Otherwise the process itself becomes
the first driver, which has its imports all the same, and later drivers start as usual.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang import _core
from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.errors import DriverError
from pie_driver_sglang.fork_server.client import ADDRESS_VARIABLE, MOST_DESCRIPTORS
from pie_driver_sglang.fork_server.cuda_properties import (
    answering,
    is_cuda_initialized,
    read_properties,
)
from pie_driver_sglang.observability import start_spans

logger = logging.getLogger(__name__)

DRIVER: Final = "pie_driver_sglang"
WORKER: Final = "pie_driver_sglang.ranks.worker"
FORKED_MODULES: Final = (DRIVER, WORKER)
"""What is run in forks."""
READ_BY_IMPORTS: Final = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "SGLANG_DISABLED_MODEL_ARCHS",
    "TORCH_COMPILE_DISABLE",
)
"""Environment variables that the imports read, and that depend on a driver's configuration."""
_THREADS: Final = Path("/proc/self/task")
_SIZE: Final = 4
_FAILED: Final = 70
_CREDENTIALS: Final = "3i"
"""Process, user and group of a connection's other end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Import, and serve until the parent ends."""
    options = _parser().parse_args(arguments)
    parent = os.pidfd_open(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        # As the driver does: about platforms and formats that are not in use.
        warnings.simplefilter("ignore")
    with socket.socket(fileno=options.socket_fd) as listener:
        server = ForkServer(listener, options, parent)
        try:
            server.preload()
        except Exception:
            # The drivers import by themselves, and report it.
            logger.debug("the fork server cannot import SGLang", exc_info=True)
            return 1
        server.serve()
    return 0


class ForkServer:
    """A process with SGLang, and its forks."""

    def __init__(self, listener: socket.socket, options: argparse.Namespace, parent: int) -> None:
        """Nothing is imported yet.

        Args:
            listener: A socket that listens.
            options: Of `_parser`.
            parent: The process with which this one ends, a descriptor.
        """
        self._listener, self._options, self._parent = listener, options, parent
        self._environment: dict[str, str | None] = {}
        """What the imports have read, by variable."""
        self._forks: dict[int, Fork] = {}
        """By connection, and by descriptor of the process."""
        self._spans: list[start_spans.StartSpan] = []
        self.pid = os.getpid()

    def preload(self) -> None:
        """Import what a driver needs. Environment variables are set as the driver sets them."""
        options = self._options
        # Threads of NumPy's, of which a driver has no use.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        environment.prepare(options.device, options.architectures, spins=False, ranks=options.ranks)
        self._environment = {name: os.environ.get(name) for name in READ_BY_IMPORTS}
        on_gpu = options.device != "cpu"
        devices = read_properties() if on_gpu else []
        answers = answering(devices) if on_gpu else contextlib.nullcontext()
        capability = max((int(each["major"]) for each in devices), default=None)
        imports = environment.importing_sglang(
            options.device, is_driver=True, capability=capability
        )
        with start_spans.span("imports (fork server)"), imports, answers:
            _import_driver(on_gpu=on_gpu)
        # It can rename forks only if it has seen the arguments and environment of this process.
        with contextlib.suppress(ImportError):
            import setproctitle

            setproctitle.getproctitle()
        gc.collect()
        gc.freeze()
        self._spans = start_spans.recorded()

    def serve(self) -> None:
        """Fork for each connection until the parent ends; drivers end with this process."""
        poll = select.poll()
        poll.register(self._listener.fileno(), select.POLLIN)
        poll.register(self._parent, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._parent:
                    return
                if descriptor == self._listener.fileno():
                    for number in self._accept():
                        poll.register(number, select.POLLIN)
                elif fork := self._forks.get(descriptor):
                    for number in (fork.connection.fileno(), fork.pidfd):
                        poll.unregister(number)
                        del self._forks[number]
                    fork.finish(killed=descriptor != fork.pidfd)

    def _accept(self) -> tuple[int, ...]:
        connection, _ = self._listener.accept()
        with contextlib.suppress(OSError, ValueError):
            descriptors: list[int] = []
            try:
                request = _receive(connection, descriptors)
                if reason := fork_refusal():
                    logger.warning("the fork server becomes the driver: %s", reason)
                    self._listener.close()
                    _become(request, descriptors, self, connection)
                pid = os.fork()
                if pid == 0:
                    _become(request, descriptors, self)
            finally:
                # Also if the proxy runs the module: others wait for the end of its pipes.
                for descriptor in descriptors:
                    os.close(descriptor)
            # Here as well: the group may be killed before the fork has joined it.
            _join(pid, request["group"])
            fork = Fork(pid, os.pidfd_open(pid), connection)
            with contextlib.suppress(OSError):
                connection.sendall(pid.to_bytes(_SIZE, "little"))
            numbers = connection.fileno(), fork.pidfd
            self._forks.update(dict.fromkeys(numbers, fork))
            return numbers
        connection.close()
        return ()

    @property
    def spans(self) -> list[start_spans.StartSpan]:
        """Of its imports."""
        return self._spans

    def differences(self, variables: Mapping[str, str]) -> list[str]:
        """The variables by which imports with this environment would be others."""
        return [name for name, value in self._environment.items() if variables.get(name) != value]

    def prepare(self, arguments: Sequence[str]) -> None:
        """Set a driver's environment as it would before it imports.

        Raises:
            DriverError: Its configuration is wrong.
        """
        from pie_driver_sglang.backends.sglang.library import LIBRARY
        from pie_driver_sglang.config.config_file import load_config
        from pie_driver_sglang.config.driver_config import NEVER_PARK

        parser = argparse.ArgumentParser()
        parser.add_argument("--config", type=Path, required=True)
        config = load_config(parser.parse_known_args(arguments)[0].config, LIBRARY.rules)
        devices = config.driver.device
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        environment.prepare(
            devices[0],
            config.model.hf_config["architectures"],
            spins=config.driver.spin_budget_us == NEVER_PARK,
            ranks=len(devices),
        )


class Fork:
    """A forked process, and the connection of its proxy, the process that was started."""

    def __init__(self, pid: int, pidfd: int, connection: socket.socket) -> None:
        """Of a child of this process."""
        self.pidfd, self.connection = pidfd, connection
        self._pid = pid

    def finish(self, *, killed: bool) -> None:
        """Tell the fork's end to its proxy; kill the fork first if that has ended."""
        if killed:
            _kill(self.pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        with contextlib.suppress(OSError):
            self.connection.sendall(status.to_bytes(_SIZE, "little", signed=True))
        self.connection.close()
        os.close(self.pidfd)


def _import_driver(*, on_gpu: bool) -> None:
    import pie_driver_sglang.backends.sglang.library
    import pie_driver_sglang.backends.sglang.load
    import pie_driver_sglang.driver.startup
    import pie_driver_sglang.ranks.worker  # noqa: F401
    from pie_driver_sglang.backends.sglang.compat.preload import preload

    preload(on_gpu=on_gpu)


def _receive(connection: socket.socket, descriptors: list[int]) -> dict[str, Any]:
    """A request.

    Args:
        connection: To the proxy.
        descriptors: Gets those that came with it.

    Raises:
        ValueError: It is of another user, incomplete, or names an unknown module.
    """
    size = struct.calcsize(_CREDENTIALS)
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    if struct.unpack(_CREDENTIALS, peer)[1] != os.getuid():
        raise ValueError("another user")
    length, received, _, _ = socket.recv_fds(connection, _SIZE, MOST_DESCRIPTORS)
    descriptors += received
    text = connection.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)
    request: dict[str, Any] = json.loads(text)
    if request["module"] not in FORKED_MODULES:
        raise ValueError("an unknown module")
    return request


def fork_refusal() -> str | None:
    """Why this process must not fork; None if it may."""
    threads = _thread_names()
    if len(threads) > 1:
        return f"it has {len(threads)} threads: {', '.join(threads)}"
    return "CUDA is initialized" if is_cuda_initialized() else None


def _thread_names() -> list[str]:
    """Of all threads, native ones included."""
    return [path.joinpath("comm").read_text().strip() for path in _THREADS.iterdir()]


def _join(pid: int, group: int) -> None:
    # It is gone, or of another session.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, group)


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _become(
    request: Mapping[str, Any],
    descriptors: list[int],
    server: ForkServer,
    connection: socket.socket | None = None,
) -> None:
    """Run the module as `python -m` does in a new process; never returns.

    Args:
        request: Of the proxy.
        descriptors: Those that came with it.
        server: Whose imports this process has.
        connection: To the proxy, if this is no fork: the fork server does not report its end.
    """
    status = _FAILED
    try:
        if connection is None:
            # From now on: the exit guard knows no parent that has ended before it is set.
            _core.die_with_parent(server.pid)
        kept = None if connection is None else connection.detach()
        moved = _take_descriptors(request["numbers"], descriptors, kept)
        if moved is not None:
            # In a new interpreter, too, it is open as long as the process runs.
            os.set_inheritable(moved, True)
            connection = socket.socket(fileno=moved)
            connection.sendall((-os.getpid()).to_bytes(_SIZE, "little", signed=True))
        _join(0, request["group"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        _forget_the_parent(request["ignored"])
        status = _run(request["module"], request["arguments"], server, request["asked_at"])
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    finally:
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(status.to_bytes(_SIZE, "little", signed=True))
        os._exit(status)


def _run(module: str, arguments: list[str], server: ForkServer, asked_at: float) -> int:
    """Run the driver or a rank of it; returns its exit status."""
    sys.argv = ["-m", *arguments]
    waited_for = [each for each in server.spans if each.end_s > asked_at]
    start_spans.restart(asked_at, waited_for)
    start_spans.add("fork", asked_at, time.monotonic())
    # What is wrong with the configuration is reported below.
    with contextlib.suppress(DriverError):
        server.prepare(arguments)
    if module == WORKER:
        # It ends with its parent, which is the fork server.
        arguments[arguments.index("--leader") + 1] = str(os.getppid())
    if different := server.differences(os.environ):
        sys.stderr.write(f"importing anew, because these differ: {', '.join(different)}\n")
        sys.stderr.flush()
        os.environ.pop(ADDRESS_VARIABLE, None)
        os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])
    _name_process(module, arguments)
    if module == WORKER:
        from pie_driver_sglang.ranks import worker

        return worker.main(arguments)
    guard = _core.ExitGuard()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from pie_driver_sglang.backends.sglang.library import LIBRARY
    from pie_driver_sglang.driver import startup

    return startup.main(LIBRARY, arguments, guard=guard)


def _take_descriptors(numbers: list[int], given: list[int], kept: int | None) -> int | None:
    """Put descriptors in place, by their numbers, and close all others but `kept`.

    Returns:
        The new number of `kept`.
    """
    above = max([*numbers, *given, kept or 0]) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in given]
    left = None if kept is None else fcntl.fcntl(kept, fcntl.F_DUPFD, max([above, *moved]) + 1)
    end = max([above, *moved, left or 0]) + 1
    os.closerange(0, above)
    for number, each in zip(numbers, moved, strict=True):
        os.dup2(each, number)
    for each in moved:
        os.close(each)
    os.closerange(max([above, *moved]) + 1, left or end)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    return left


def _forget_the_parent(ignored: Sequence[int]) -> None:
    """Signals as the proxy has them, and nothing that belongs to the fork server."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        wanted = signal.SIG_IGN if number in ignored else signal.SIG_DFL
        if signal.getsignal(number) not in (wanted, None):
            signal.signal(number, wanted)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # It depends on the environment, which is another one now.
    tempfile.tempdir = None


def _name_process(module: str, arguments: Sequence[str]) -> None:
    """Show the process in `ps` as what it is."""
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(" ".join([sys.executable, "-m", module, *arguments]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pie_driver_sglang.fork_server.server")
    parser.add_argument("--parent", type=int, required=True, help="this process ends with it")
    parser.add_argument("--socket-fd", type=int, required=True, help="a socket that listens")
    parser.add_argument("--device", required=True, help="cpu or cuda")
    parser.add_argument("--architectures", nargs="*", default=[], help="of the model")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the model")
    return parser


if __name__ == "__main__":
    os._exit(main())
