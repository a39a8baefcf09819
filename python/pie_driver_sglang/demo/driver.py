"""Spawning a driver exactly as the Pie runtime does, and talking to it."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pie_driver_sglang import _core
from pie_driver_sglang.config.types import NEVER_PARK
from pie_driver_sglang.demo.runtime import Limits, Pass
from pie_driver_sglang.errors import DriverError, RingError, StartError, WireError

#: Free cores that two spinning processes and the engine's threads need.
LATENCY_CORES: Final = 4

_HANDSHAKE_FD: Final = 3
_READY_TIMEOUT_S: Final = 1200.0
_CALL_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_LOG_LINES: Final = 25
_LOG_MARK: Final = " pie_driver_sglang: "


@dataclass(frozen=True)
class Profile:
    """How long both sides of the ring spin before they park."""

    name: str
    spin_budget_us: int
    reason: str


def choose_profile(cores: int, load: float) -> Profile:
    """Returns the latency profile if enough cores are free, else the balanced one.

    Args:
        cores: Cores that this process may use.
        load: Cores in use, as the load average of the last minute tells.
    """
    free = max(0.0, cores - load)
    if free >= LATENCY_CORES:
        reason = f"both sides spin between steps, since {free:.1f} of {cores} cores are free"
        return Profile("latency", NEVER_PARK, reason)
    reason = (
        f"both sides park between steps, since {free:.1f} of {cores} cores are free and latency "
        f"needs {LATENCY_CORES}"
    )
    return Profile("balanced", 1000, reason)


@dataclass(frozen=True)
class DemoSettings:
    """What the demo chooses of the driver's configuration."""

    model: Path
    device: str
    seed: int
    profile: Profile


class DriverEnded(StartError):
    """The driver ended before its time.

    Attributes:
        log: The last lines of its log.
    """

    def __init__(self, message: str, log: str) -> None:
        """Keeps the message and the log."""
        super().__init__(message)
        self.log = log


class SpawnedDriver:
    """A driver process. As a context manager it is stopped at the end, whatever happens."""

    def __init__(self, settings: DemoSettings, folder: Path) -> None:
        """Starts the process; no other thread may run yet.

        Args:
            settings: Model, device and profile.
            folder: An empty folder for the configuration, the log and the trace.
        """
        self.trace_path = folder / "trace.json"
        self._log_path = folder / "driver.log"
        self._spin_budget_us = settings.profile.spin_budget_us
        # Above every group of a Pie server on this host: those count from 0.
        self._group_id = 2**31 + os.getpid()
        config = folder / "driver.toml"
        config.write_text(_toml(settings, self._group_id, self.trace_path), encoding="utf-8")
        self._pipe, write_end = os.pipe()
        try:
            self._process = _spawn(config, self._log_path, write_end)
        finally:
            os.close(write_end)
        self._stopping = False

    def wait_ready(self, on_wait: Callable[[float, str], None]) -> Limits:
        """Reads the handshake.

        Args:
            on_wait: Called about ten times a second with the seconds so far and the last line of
                the driver's log.

        Raises:
            DriverError: The driver ended, took too long or said something else.
        """
        started = time.monotonic()
        received = b""
        while (elapsed := time.monotonic() - started) < _READY_TIMEOUT_S:
            if not select.select([self._pipe], [], [], 0.1)[0]:
                on_wait(elapsed, self._last_log_line())
                continue
            chunk = os.read(self._pipe, 1 << 16)
            received += chunk
            limits = _read_handshake(received, self._group_id)
            if limits is not None:
                return limits
            if not chunk:
                raise self._ended("before it was ready")
        raise StartError(
            f"the driver was not ready after {_READY_TIMEOUT_S:.0f} s",
            "try a smaller model, or look for what else keeps the device busy",
        )

    def connect(self) -> Channel:
        """Opens the region, and watches the driver so that its end ends every call.

        Raises:
            DriverError: The region cannot be opened.
        """
        name = f"/pie_shmem_g{self._group_id}"
        try:
            client = _core.Client(
                name, spin_budget_us=self._spin_budget_us, timeout_s=_CALL_TIMEOUT_S
            )
        except (RingError, FileNotFoundError) as error:
            raise _start_error("", error) from error
        threading.Thread(target=self._watch, args=(client,), daemon=True).start()
        return Channel(client, self._failure)

    def __enter__(self) -> Self:
        """Returns the driver itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stops the driver: SIGTERM, five seconds, SIGKILL; then removes its region."""
        self._stopping = True
        # A second Ctrl-C must not orphan the driver.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._process.terminate()
            self._wait(_STOP_TIMEOUT_S)
            self._process.kill()
            self._process.wait()
            os.close(self._pipe)
            Path(f"/dev/shm/pie_shmem_g{self._group_id}").unlink(missing_ok=True)
        finally:
            signal.signal(signal.SIGINT, interrupt)

    def _wait(self, timeout_s: float) -> int | None:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _watch(self, client: Any) -> None:
        while self._process.poll() is None:
            time.sleep(0.2)
        if not self._stopping:
            client.abort()

    def _failure(self, error: Exception) -> DriverError:
        """Returns what to raise for a call that got no answer."""
        if self._process.poll() is not None:
            return self._ended("while it served")
        return _start_error("the driver does not answer: ", error)

    def _ended(self, when: str) -> DriverEnded:
        status = self._wait(_STOP_TIMEOUT_S)
        end = "closed its pipe" if status is None else f"ended with status {status}"
        lines = self._log().splitlines()[-_LOG_LINES:]
        return DriverEnded(f"the driver {end} {when}; its log ends so:", "\n".join(lines))

    def _last_log_line(self) -> str:
        """Returns the driver's own last message; its libraries write to the log, too."""
        lines = reversed(self._log().split("\n")[:-1])
        return next((line.partition(_LOG_MARK)[2] for line in lines if _LOG_MARK in line), "")

    def _log(self) -> str:
        return self._log_path.read_text(encoding="utf-8", errors="replace")


class Channel:
    """Sends batches over the ring and takes the time of every round trip.

    Attributes:
        round_trips_ns: Nanoseconds of each batch, in order.
    """

    def __init__(self, client: Any, failure: Callable[[Exception], DriverError]) -> None:
        """Sends with `client`, a `_core.Client`, and raises what `failure` makes of its errors."""
        self.round_trips_ns: list[int] = []
        self._client = client
        self._failure = failure

    def forward(self, passes: Sequence[Pass]) -> list[int]:
        """Runs one batch and returns the token of each pass.

        Raises:
            DriverError: The batch failed.
        """
        requests = [_request(item) for item in passes]
        started = time.perf_counter_ns()
        try:
            reply = self._client.forward(requests)
        except (RingError, WireError, TimeoutError) as error:
            raise self._failure(error) from error
        self.round_trips_ns.append(time.perf_counter_ns() - started)
        tokens = [token for row in reply.tokens for token in row]
        if reply.aborted or reply.status is not None or len(tokens) != len(passes):
            raise self._failure(RuntimeError(_refusal(reply)))
        return tokens


def _start_error(head: str, error: Exception) -> StartError:
    """Returns an error of the ring as one of the start; the ring's may bring a hint."""
    message, _, hint = str(error).partition("\n\nhint: ")
    return StartError(head + message, hint or "run it again; if it persists, report this as a bug")


def _request(item: Pass) -> Any:
    make = getattr(_core.Sampler, item.sampling.method)
    samplers = [(len(item.tokens) - 1, make(*item.sampling.arguments))]
    pages = list(item.pages)
    return _core.Request(
        list(item.tokens),
        list(item.positions),
        pages,
        item.last_page_len,
        samplers,
        context_id=item.context_id,
    )


def _refusal(reply: Any) -> str:
    if reply.aborted:
        return "it gave the batch up"
    return f"status {reply.status}, tokens {reply.tokens}"


def _spawn(config: Path, log: Path, write_end: int) -> subprocess.Popen[bytes]:
    """Starts the driver with the handshake on descriptor 3, bound to this process's life."""
    prctl = ctypes.CDLL(None).prctl
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

    def in_child() -> None:
        os.dup2(write_end, _HANDSHAKE_FD)
        os.set_inheritable(_HANDSHAKE_FD, True)
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)

    command = [sys.executable, "-m", "pie_driver_sglang", "--config", str(config)]
    with log.open("wb") as log_file:
        return subprocess.Popen(
            [*command, "--handshake-fd", str(_HANDSHAKE_FD)],
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            env={**os.environ, "PATH": path},
            # Python's descriptors are close-on-exec; closing all others would take number 3, too.
            close_fds=False,
            preexec_fn=in_child,
        )


def _toml(settings: DemoSettings, group_id: int, trace_path: Path) -> str:
    """Returns the configuration with every key that the runtime writes."""

    def text(value: object) -> str:
        return json.dumps(str(value), ensure_ascii=False)

    model = settings.model.resolve()
    spin = settings.profile.spin_budget_us
    # Half precision is emulated on most CPUs.
    dtype = "float32" if settings.device.startswith("cpu") else "bfloat16"
    devices = settings.device.split(",")
    return f"""\
[model]
name = {text(model.name)}
hf_repo = {text(settings.model)}
snapshot_dir = {text(model)}

[driver]
group_id = {group_id}
device = [{", ".join(map(text, devices))}]
tensor_parallel_size = {len(devices)}
activation_dtype = "{dtype}"
random_seed = {settings.seed}
master_port = {29500 + os.getpid() % 1000}
ready_timeout_s = {_READY_TIMEOUT_S}
spin_budget_us = {spin if spin < 2**63 else text(spin)}

[driver.options]
trace_file = {text(trace_path)}
"""


def _read_handshake(received: bytes, group_id: int) -> Limits | None:
    """Returns what the driver can do once all its lines are there.

    Raises:
        StartError: A line does not follow the protocol.
    """
    limits = None
    for line in received.split(b"\n")[:-1]:
        try:
            message = json.loads(line)
            if "ready" in message:
                return limits
            if message["group_id"] == group_id:
                limits = Limits.of(message["caps"])
        except (ValueError, LookupError, TypeError) as error:
            raise StartError(
                f"the driver's handshake has the line {line[:80]!r}: {error}",
                "report this as a bug",
            ) from error
    return None
