"""Drivers under test, started as the Pie runtime does it or forked from a process with SGLang.

::

    config = write_config(folder, snapshot, options={"page_size": 16})
    with spawn(config) as driver:  # or fork(config)
        driver.client().health()
    assert driver.stop() == 0
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, Protocol, Self

from pie_driver_sglang import _core

TESTS: Final = Path(__file__).resolve().parents[2]
START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 10.0
LOG_TIMEOUT_S: Final = 10.0

_RENUMBER: Final = """
import os, sys
writer = int(sys.argv[1])
os.dup2(writer, 3)
if writer != 3:
    os.close(writer)
os.execv(sys.argv[2], sys.argv[2:])
"""

_numbers = itertools.count()


class StartFailedError(Exception):
    """The driver ended, or closed the handshake, before it was ready."""

    def __init__(self, returncode: int, stderr: str) -> None:
        super().__init__(f"the driver ended with status {returncode} before it was ready\n{stderr}")
        self.returncode = returncode
        self.stderr = stderr


class Process(Protocol):
    """What the harness needs from a child process."""

    pid: int

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end and returns the status."""

    def poll(self) -> int | None:
        """The status of an ended process."""


class Driver:
    """A running driver."""

    live: ClassVar[list[Driver]] = []
    """Drivers that were not stopped yet; their stderr is shown when a test fails."""

    def __init__(self, process: Process, handshake: list[dict[str, Any]], stderr: Path) -> None:
        self.process = process
        self.handshake = handshake
        """The lines that the runtime reads."""
        self.caps: dict[str, Any] = handshake[0]["caps"]
        self.name: str = handshake[0]["shmem_name"]
        """Name of the region."""
        self.region = Path("/dev/shm") / self.name.removeprefix("/")
        self._stderr = stderr
        self._returncode: int | None = None
        Driver.live.append(self)

    def client(self, *, spin_budget_us: int = 200, timeout_s: float = 30.0) -> _core.Client:
        """A new client of the driver's region."""
        return _core.Client(self.name, spin_budget_us=spin_budget_us, timeout_s=timeout_s)

    def stderr(self) -> str:
        """What the driver has logged so far."""
        return self._stderr.read_text(errors="replace")

    def logged(self, *texts: str) -> str:
        """What the driver has logged, once all of `texts` are there: it logs after its answers."""
        end = time.monotonic() + LOG_TIMEOUT_S
        while True:
            log = self.stderr()
            missing = [text for text in texts if text not in log]
            if not missing:
                return log
            assert time.monotonic() < end, f"not logged: {missing}\n{log[-3000:]}"
            time.sleep(0.01)

    def stop(self, *, sig: int = signal.SIGTERM) -> int:
        """Ends the driver, by SIGTERM unless told otherwise, and returns its exit status.

        A second call returns the same status.
        """
        if self._returncode is None:
            if self in Driver.live:
                Driver.live.remove(self)
            if self.process.poll() is None:
                os.kill(self.process.pid, sig)
            self._returncode = _end(self.process)
        return self._returncode

    def __enter__(self) -> Self:
        """Returns the driver."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops the driver."""
        self.stop()


def new_group_id() -> int:
    """A group id that no other test run on this machine uses at the same time."""
    return (os.getpid() % 2**20) * 2**12 + next(_numbers) % 2**12


def write_config(
    folder: Path,
    snapshot: Path,
    *,
    options: Mapping[str, Any] | None = None,
    **driver: Any,
) -> Path:
    """Writes a `driver.toml` for a float32 model on the CPU and returns its path.

    Args:
        folder: Where to put it; it may hold other configurations.
        snapshot: The model.
        options: `[driver.options]`.
        driver: `[driver]`; replaces defaults of the same name. The group id is new by default.
    """
    section: dict[str, Any] = {
        "group_id": new_group_id(),
        "device": ["cpu"],
        "activation_dtype": "float32",
        "spin_budget_us": 200,
        **driver,
    }
    path = folder / f"driver-{section['group_id']}.toml"
    given = options or {}
    nested = {key: value for key, value in given.items() if isinstance(value, dict)}
    tables = {
        "model": {"name": snapshot.name, "hf_repo": snapshot.name, "snapshot_dir": str(snapshot)},
        "driver": section,
        "driver.options": {key: value for key, value in given.items() if key not in nested},
        **{f"driver.options.{key}": value for key, value in nested.items()},
    }
    path.write_text("".join(_toml_table(name, table) for name, table in tables.items()))
    return path


def spread(ranks: int) -> dict[str, Any]:
    """`[driver]` of a model on the CPU in so many processes: the runtime wants different names."""
    devices = ["cpu", *(f"cpu:{rank}" for rank in range(1, ranks))]
    return {"device": devices, "tensor_parallel_size": ranks}


TRAPPED: Final = "imported from the working directory: "


def set_traps(folder: Path) -> Path:
    """Makes a working directory whose modules end whatever imports them, and returns it.

    They are called as Python's own and some libraries are, except the few that `python -m` has
    imported from there before it runs a line of the module.
    """
    folder.mkdir()
    first = folder / "first.py"
    first.write_text("import sys; print(*sys.modules)")
    command = [sys.executable, "-m", "first"]
    before = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    libraries = {"torch", "sglang", "numpy", "msgspec", "psutil", "transformers", "triton"}
    names = (sys.stdlib_module_names | libraries) - {*sys.builtin_module_names}
    for name in names - {*before.stdout.split()}:
        text = f"{TRAPPED}{name}\n"
        trap = f"import os; os.write(2, {text.encode()!r}); os._exit(99)"
        (folder / f"{name}.py").write_text(trap)
    return folder


def spawn(
    config: Path,
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    package: str = "pie_driver_sglang",
    interpreter: str | None = None,
) -> Driver:
    """Starts a driver exactly as the Pie runtime does and waits until it is ready.

    Args:
        config: `driver.toml`.
        environment: Variables to add to the tests' own.
        folder: Working directory; None for the tests' own.
        package: What `python -m` runs.
        interpreter: Which Python; None for the tests' own.

    Raises:
        StartFailedError: It ended first.
    """
    stderr = _new_stderr(config)
    reader, writer = os.pipe()
    command = [interpreter or sys.executable, "-m", package, "--config", str(config)]
    command += ["--handshake-fd", "3"]
    # A new interpreter renumbers the descriptor and becomes the driver: same pid, same parent.
    renumber = [sys.executable, "-I", "-S", "-c", _RENUMBER, str(writer)]
    with stderr.open("wb") as log:
        process = subprocess.Popen(
            [*renumber, *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writer],
            env={**os.environ, **(environment or {})},
            cwd=folder,
        )
    os.close(writer)
    return _await_ready(process, reader, stderr)


def fork(config: Path, prepare: Callable[[], object] = int) -> Driver:
    """Starts a driver in a fork of a process that has imported SGLang: much faster than `spawn`.

    Args:
        config: `driver.toml`.
        prepare: Called in the fork first.

    Raises:
        StartFailedError: It ended first.
    """
    stderr = _new_stderr(config)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = _Forked(_drive, (str(config), sender, str(stderr), prepare))
    sender.close()
    with receiver:
        reader = os.dup(receiver.fileno())
    return _await_ready(process, reader, stderr)


@contextmanager
def running(config: Path, prepare: Callable[[], object] = int) -> Iterator[Driver]:
    """A forked driver, which must end well and leave no region."""
    with fork(config, prepare) as driver:
        yield driver
    assert driver.stop() == 0
    assert not driver.region.exists()


def start_fork_server() -> None:
    """Lets the fork server begin to import SGLang; to be called before other slow imports."""
    # `pytest` is what a child imports as its main module.
    multiprocessing.forkserver.set_forkserver_preload(["support.process.fork_preload", "pytest"])
    with _search_path():
        multiprocessing.forkserver.ensure_running()


def fork_call(function: Callable[..., None], arguments: tuple[Any, ...]) -> Process:
    """Runs a function of a module in a fork of the process that has imported SGLang."""
    return _Forked(function, arguments)


def call(function: Callable[..., None], folder: Path, *arguments: Any) -> Any:
    """What `function(*arguments, sender, stderr)` sends from a forked process, which then ends."""
    receiver, sender = multiprocessing.Pipe()
    process = fork_call(function, (*arguments, sender, str(folder / "stderr")))
    sender.close()
    with receiver:
        assert receiver.poll(60.0)
        sent = receiver.recv()
    assert process.wait(30.0) == 0
    return sent


class _Forked:
    """A child of the fork server, with the methods of `subprocess.Popen` that are used here."""

    def __init__(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        start_fork_server()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_checked, args=(function, arguments))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked driver", timeout or 0.0)
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode


@contextmanager
def _search_path() -> Iterator[None]:
    """The fork server finds its preloaded modules by PYTHONPATH alone."""
    former = os.environ.get("PYTHONPATH")
    package = str(Path(_core.__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), package, former]))
    try:
        yield
    finally:
        if former is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = former


def _checked(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Runs in the fork. The fork server itself is silent when it cannot preload a module."""
    if "support.process.fork_preload" not in sys.modules:
        raise RuntimeError("the fork server has not preloaded SGLang")
    function(*arguments)


def _drive(config: str, sender: Any, stderr: str, prepare: Callable[[], object]) -> None:
    """Runs in the fork: the driver's own main function, with its descriptors in place."""
    from pie_driver_sglang.backends.sglang.library import LIBRARY
    from pie_driver_sglang.driver import startup

    prepare()
    redirect_output(stderr)
    with sender:
        handshake = os.dup(sender.fileno())
    watch_handshake(handshake)
    arguments = ["--config", config, "--handshake-fd", str(handshake)]
    start_worker = functools.partial(ForkedWorker, handshake, list)
    sys.exit(startup.main(LIBRARY, arguments, start_worker=start_worker))


CLOSED_EARLY: Final = "the handshake was closed before this was printed"


class _Watched:
    """stderr that notes when a failure is printed after the handshake's end.

    The runtime ends a driver that closes the handshake, so what it prints then may be lost.
    """

    def __init__(self, stream: Any, handshake: int) -> None:
        self._stream = stream
        self._handshake = handshake
        self._file = os.fstat(handshake).st_ino

    def write(self, text: str) -> int:
        if text.lstrip().startswith("pie_driver_sglang: ") and not self._is_open():
            self._stream.write(f"\n{CLOSED_EARLY}:\n")
        return int(self._stream.write(text))

    def _is_open(self) -> bool:
        with suppress(OSError):
            return os.fstat(self._handshake).st_ino == self._file
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def watch_handshake(handshake: int) -> None:
    """From now on :data:`CLOSED_EARLY` is above each failure printed with the handshake closed."""
    sys.stderr = _Watched(sys.stderr, handshake)  # type: ignore[assignment]


class ForkedWorker:
    """A rank of a forked driver, forked from it before it has loaded anything."""

    def __init__(
        self,
        handshake: int,
        change: Callable[[Sequence[str]], Sequence[str]],
        arguments: Sequence[str],
        _descriptors: Sequence[int],
    ) -> None:
        """Starts it.

        Args:
            handshake: The driver's, which it must not keep.
            change: Called in the worker: what its arguments become.
            arguments: As the driver gives them.
        """
        from pie_driver_sglang.ranks import worker

        self._pid = os.fork()
        if self._pid == 0:
            try:
                # The runtime waits for its end.
                os.close(handshake)
                os._exit(worker.main(change(arguments)))
            finally:
                os._exit(70)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)


def redirect_output(path: str) -> None:
    """Sends everything that this process and its libraries print to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    # Line by line: the driver leaves by `_exit`, without a flush.
    sys.stderr = sys.stdout = os.fdopen(2, "w", buffering=1, closefd=False)


def _await_ready(process: Process, reader: int, stderr: Path) -> Driver:
    """Reads the handshake to its end, like the runtime."""
    timer = threading.Timer(START_TIMEOUT_S, os.kill, (process.pid, signal.SIGABRT))
    timer.daemon = True
    timer.start()
    try:
        with os.fdopen(reader, "rb") as pipe:
            lines = [json.loads(line) for line in pipe.read().splitlines() if line.strip()]
    finally:
        timer.cancel()
    if not any("ready" in line for line in lines):
        # As it is now: the runtime ends the driver at once.
        log = stderr.read_text(errors="replace")
        raise StartFailedError(_end(process), log)
    return Driver(process, lines, stderr)


def _end(process: Process) -> int:
    """Waits for a process that is about to end; kills it if it does not."""
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        return process.wait(STOP_TIMEOUT_S)


def _new_stderr(config: Path) -> Path:
    handle, path = tempfile.mkstemp(suffix=".stderr", prefix=f"{config.stem}-", dir=config.parent)
    os.close(handle)
    return Path(path)


def _toml_table(name: str, table: Mapping[str, Any]) -> str:
    # JSON's strings, numbers, booleans and arrays of them are TOML's as well.
    lines = (f"{key} = {json.dumps(value)}\n" for key, value in table.items())
    return f"[{name}]\n{''.join(lines)}\n"
