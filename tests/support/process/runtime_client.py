"""The runtime's side of the protocol: contexts, hand-made frames, slot words, raw processes."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import itertools
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from support.process import drivers

PAGE: Final = 16
"""Tokens of a page, the driver's default."""
HEADER: Final = 64
ABORT_STATUS: Final = -1
NEVER_PARK: Final = "18446744073709551615"

_ROOT: Final = 296
_FIELDS: Final = (
    "token_ids",
    "position_ids",
    "kv_page_indices",
    "kv_page_indptr",
    "kv_last_page_lens",
    "qo_indptr",
    "rs_slot_ids",
    "rs_slot_flags",
    "masks",
    "mask_indptr",
    "logit_masks",
    "logit_mask_indptr",
    "sampling_indices",
    "sampling_indptr",
    "samplers",
    "sampler_indptr",
    "adapter_bindings",
    "spec_token_ids",
    "spec_position_ids",
    "spec_indptr",
    "output_spec_flags",
    "context_ids",
)
VECTORS: Final[Mapping[str, int]] = {name: 12 + 8 * index for index, name in enumerate(_FIELDS)}
"""Offset of each array's pointer in the root of a forward frame."""
SAMPLER_BYTES: Final = 16


# --- answers ------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """A decoded answer."""

    driver_id: int
    aborted: bool
    status: int | None
    """None for a forward answer."""
    tokens: list[list[int]]


def decode(answer: bytes) -> Answer:
    """Decodes an answer by the offsets of the protocol."""
    if answer[:8] == b"PIETFWD1":
        driver_id, requests, count = struct.unpack_from("<III", answer, 8)
        assert count == requests
        assert len(answer) == 20 + 4 * count
        singles = struct.unpack_from(f"<{count}I", answer, 20)
        return Answer(driver_id, False, None, [[token] for token in singles])
    root = len(answer) - 176
    driver_id, aborted, tag = struct.unpack_from("<IB3xB", answer, root)
    if tag == 1:
        (status,) = struct.unpack_from("<i", answer, root + 12)
        return Answer(driver_id, bool(aborted), status, [])
    assert tag == 0
    (requests,) = struct.unpack_from("<I", answer, root + 12)
    indptr, tokens = _u32s(answer, root + 16), _u32s(answer, root + 24)
    assert len(indptr) == (requests + 1 if requests else 0)
    ranges = [tokens[start:end] for start, end in itertools.pairwise(indptr)]
    return Answer(driver_id, bool(aborted), None, ranges)


def _u32s(frame: bytes, at: int) -> list[int]:
    offset, count = struct.unpack_from("<iI", frame, at)
    return list(struct.unpack_from(f"<{count}I", frame, at + offset))


# --- frames -------------------------------------------------------------------------------------


def health_frame(driver_id: int = 0) -> bytes:
    """A Health request."""
    return struct.pack("<I4xB", driver_id, 3).ljust(_ROOT, b"\0")


def adapter_frame(operation: int, path: str, *, adapter_id: int = 1) -> bytes:
    """An Adapter request: 0 Load, 1 Save, 2 ZoInit, 3 ZoUpdate, 4 GenerateAudio."""
    text = path.encode()
    if len(text) <= 8:
        data, inline = b"", text.ljust(8, b"\xff")
    else:
        data = text.ljust(-(-len(text) // 8) * 8, b"\0")
        length = (len(text) & 0x3F) | 0x80 | ((len(text) & ~0x3F) << 2)
        inline = struct.pack("<Ii", length, -(len(data) + 32))
    root = struct.pack("<I4xB7xB7xQ", 0, 2, operation, adapter_id) + inline
    return data + root.ljust(_ROOT, b"\0")


def copy_frame(
    direction: int, sources: Sequence[int], targets: Sequence[int], *, resource: int = 0
) -> bytes:
    """A Copy request: 0 D2H, 1 H2D, 2 D2D, 3 H2H; resource 0 for KV, 1 for recurrent state."""
    data = struct.pack(f"<{len(sources) + len(targets)}I", *sources, *targets)
    data = data.ljust(-(-len(data) // 8) * 8, b"\0")
    root = len(data)
    first = struct.pack("<iI", -(root + 16), len(sources))
    second = struct.pack("<iI", 4 * len(sources) - (root + 24), len(targets))
    body = struct.pack("<B3x", direction) + first + second + struct.pack("<B", resource)
    return data + (struct.pack("<I4xB3x", 3, 1) + body).ljust(_ROOT, b"\0")


def vector(frame: bytes, name: str) -> tuple[int, int]:
    """Where an array of a forward frame starts, and how many elements it has."""
    at = len(frame) - _ROOT + VECTORS[name]
    offset, count = struct.unpack_from("<iI", frame, at)
    return at + offset, count


def with_length(frame: bytes, name: str, count: int) -> bytes:
    """The frame with another number of elements in one array."""
    edited = bytearray(frame)
    struct.pack_into("<I", edited, len(frame) - _ROOT + VECTORS[name] + 4, count)
    return bytes(edited)


def with_u32(frame: bytes, name: str, index: int, value: int) -> bytes:
    """The frame with another element in an array of u32."""
    start, count = vector(frame, name)
    assert index < count
    edited = bytearray(frame)
    struct.pack_into("<I", edited, start + 4 * index, value)
    return bytes(edited)


def with_sampler(frame: bytes, index: int, tag: int, *fields: float | int) -> bytes:
    """The frame with another sampler; floats become f32, integers u32."""
    start, count = vector(frame, "samplers")
    assert index < count
    kinds = "".join("f" if isinstance(value, float) else "I" for value in fields)
    sampler = struct.pack(f"<B3x{kinds}", tag, *fields).ljust(SAMPLER_BYTES, b"\0")
    at = start + SAMPLER_BYTES * index
    return frame[:at] + sampler + frame[at + SAMPLER_BYTES :]


# --- contexts -----------------------------------------------------------------------------------


@dataclass
class Context:
    """The tokens of one sequence and the pages that hold them."""

    tokens: list[int]
    pages: list[int]
    stored: int = 0
    context_id: int = 1
    samplers: Sequence[Sampler] = field(default_factory=lambda: [Sampler.greedy()])

    def request(self, *samplers: Sampler, **changed: Any) -> Request:
        """The pass over the tokens that are not stored yet, sampling after the last one."""
        new = self.tokens[self.stored :]
        end = len(self.tokens)
        fields: dict[str, Any] = {
            "tokens": new,
            "positions": list(range(self.stored, end)),
            "pages": self.pages[: -(-end // PAGE)],
            "last_page_len": (end - 1) % PAGE + 1,
            "samplers": [(len(new) - 1, sampler) for sampler in samplers or self.samplers],
            "context_id": self.context_id,
        }
        return Request(**(fields | changed))

    def take(self, token: int) -> None:
        """Appends the sampled token to what is stored now."""
        self.stored = len(self.tokens)
        self.tokens.append(token)


def greedy_tokens(client: _core.Client, prompt: Sequence[int], page: int, count: int) -> list[int]:
    """Continues a prompt by arg-max, in pages from `page` on."""
    context = Context(list(prompt), list(range(page, page + 8)))
    for _ in range(count):
        reply = client.forward([context.request()])
        assert reply.status is None
        context.take(reply.tokens[0][0])
    return context.tokens[len(prompt) :]


# --- the region ---------------------------------------------------------------------------------


class Region:
    """The words of a region, seen from outside of driver and client."""

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        flags = os.O_RDWR if writable else os.O_RDONLY
        handle = os.open(path, flags)
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(handle, 0, access=access)
        os.close(handle)
        fields = struct.unpack_from("<IIIIII8sI", self._map, 0)
        self.magic, self.version, self.slots, self.stride = fields[:4]
        self.request_bytes, self.response_bytes, self.schema_hash, self.wakes = fields[4:]

    def in_flight(self) -> int:
        """How many requests wait for their answers."""
        return sum(self._sequence(slot, 0) != self._sequence(slot, 8) for slot in self._all())

    def sent(self) -> int:
        """How many requests were ever sent."""
        return sum(self._sequence(slot, 0) for slot in self._all())

    def answered(self, slot: int) -> bool:
        """Whether the last request of a slot has its answer."""
        return self._sequence(slot, 0) == self._sequence(slot, 8)

    def send(self, slot: int, payload: bytes, *, length: int | None = None) -> None:
        """Puts a request into a slot without waking the driver."""
        base = HEADER + slot * self.stride
        self._map[base + 64 : base + 64 + len(payload)] = payload
        struct.pack_into("<I", self._map, base + 24, len(payload) if length is None else length)
        struct.pack_into("<Q", self._map, base, self._sequence(slot, 0) + 1)

    def answer(self, slot: int) -> bytes:
        """The answer that lies in a slot."""
        base = HEADER + slot * self.stride
        (length,) = struct.unpack_from("<I", self._map, base + 28)
        start = base + 64 + self.request_bytes
        return self._map[start : start + length]

    def close(self) -> None:
        """Unmaps it."""
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _all(self) -> range:
        return range(self.slots)

    def _sequence(self, slot: int, offset: int) -> int:
        (value,) = struct.unpack_from("<Q", self._map, HEADER + slot * self.stride + offset)
        return int(value)


def eventually(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Waits until a condition holds.

    Raises:
        AssertionError: It does not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.005)


# --- processes ----------------------------------------------------------------------------------


def children(pid: int) -> list[int]:
    """The processes that a process has started, and that live."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may have ended.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, path.read_text().split())
    return found


@dataclass
class Start:
    """A driver whose start is still under way, or failed."""

    process: drivers.Process
    region: Path
    handshake: Path
    stdout: Path
    stderr: Path

    def log(self) -> str:
        """What it has logged so far."""
        return self.stderr.read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """The handshake lines so far."""
        return [json.loads(line) for line in self.handshake.read_text().splitlines()]

    def wait_for_log(self, text: str) -> None:
        """Waits for a line of the log."""
        eventually(lambda: text in self.log(), f"the log line {text!r}", 60.0)

    def wait_until_ready(self) -> None:
        """Waits for the handshake."""
        eventually(lambda: len(self.lines()) == 2, "the handshake", drivers.START_TIMEOUT_S)

    def client(self) -> _core.Client:
        """A client of the region."""
        return _core.Client(f"/{self.region.name}", spin_budget_us=200, timeout_s=30.0)

    def stop(self, timeout_s: float = 10.0) -> int:
        """Sends SIGTERM and returns the exit status."""
        os.kill(self.process.pid, signal.SIGTERM)
        return self.process.wait(timeout_s)


def group_id(config: Path) -> int:
    """The group id of a configuration that `drivers.write_config` wrote."""
    return int(config.stem.removeprefix("driver-"))


def start_files(config: Path) -> dict[str, Path]:
    """The region, and new files for what a driver prints, by the fields of `Start`."""
    files = {}
    for name in ("handshake", "stdout", "stderr"):
        files[name] = config.with_suffix(f".{time.monotonic_ns()}.{name}")
        files[name].touch()
    files["region"] = Path(f"/dev/shm/pie_shmem_g{group_id(config)}")
    return files


def command(config: Path, handshake: Path) -> list[str]:
    """The runtime's command line, with a file for the pipe of the handshake."""
    shell = ["/bin/sh", "-c", f'exec "$@" 3>"{handshake}"', "sh"]
    driver = [sys.executable, "-m", "pie_driver_sglang", "--config", str(config)]
    return [*shell, *driver, "--handshake-fd", "3"]


@contextlib.contextmanager
def started(config: Path, **environment: str) -> Iterator[Start]:
    """Starts a driver as the runtime does, without waiting for it; kills it in the end."""
    files = start_files(config)
    with files["stdout"].open("wb") as out, files["stderr"].open("wb") as err:
        process = subprocess.Popen(
            command(config, files["handshake"]),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, **environment},
        )
    with killed(process, files["region"]):
        yield Start(process, **files)


@contextlib.contextmanager
def forked(
    config: Path,
    change: Callable[[str, Sequence[str]], list[str]] | None = None,
    by: str = "",
    runs: Callable[..., None] | None = None,
) -> Iterator[Start]:
    """Starts a driver in a fork of a process with SGLang, without waiting for it.

    Args:
        config: `driver.toml`.
        change: Called in its workers with `by` and their arguments, which it may change.
        by: For `change`.
        runs: What the fork runs with the arguments of :func:`drive`, without those of `change`.
    """
    files = start_files(config)
    names = [str(files[name]) for name in ("handshake", "stdout", "stderr")]
    workers = () if runs else (change, by)
    process = drivers.fork_call(runs or drive, (str(config), *names, *workers))
    with killed(process, files["region"]):
        yield Start(process, **files)


@contextlib.contextmanager
def killed(process: drivers.Process, region: Path) -> Iterator[None]:
    """Kills a driver in the end, and removes its region."""
    try:
        yield
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        process.wait(10.0)
        region.unlink(missing_ok=True)


def drive(
    config: str,
    handshake: str,
    stdout: str,
    stderr: str,
    change: Callable[[str, Sequence[str]], list[str]] | None = None,
    by: str = "",
    library: str = "pie_driver_sglang.backends.sglang.library",
) -> None:
    """Runs in the fork: the driver's main function, with stdout and stderr apart."""
    from pie_driver_sglang.driver import startup

    drivers.redirect_output(stderr)
    out = os.open(stdout, os.O_WRONLY)
    os.dup2(out, 1)
    os.close(out)
    writer = os.open(handshake, os.O_WRONLY)
    drivers.watch_handshake(writer)
    changed = list if change is None else functools.partial(change, by)
    start_worker = functools.partial(drivers.ForkedWorker, writer, changed)
    arguments = ["--config", config, "--handshake-fd", str(writer)]
    found = importlib.import_module(library).LIBRARY
    sys.exit(startup.main(found, arguments, start_worker=start_worker))


def drive_in_child(config: str, handshake: str, stdout: str, stderr: str, pid_file: str) -> None:
    """Runs in the fork: a parent that starts the driver as its own child and does nothing else."""
    pid = os.fork()
    if pid == 0:
        try:
            drive(config, handshake, stdout, stderr)
        finally:
            os._exit(70)
    Path(pid_file).write_text(str(pid))
    os.waitpid(pid, 0)


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes this process the parent of its orphaned descendants, so that it can wait for them."""
    libc = ctypes.CDLL(None, use_errno=True)
    set_child_subreaper = 36
    assert libc.prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        libc.prctl(set_child_subreaper, 0, 0, 0, 0)


def orphan_status(pid: int, timeout_s: float) -> int:
    """Exit status of an adopted process that is about to end, as `subprocess` writes it."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(ChildProcessError):  # Not adopted yet.
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
        assert time.monotonic() < deadline, f"process {pid} did not end within {timeout_s} s"
        time.sleep(0.01)


@contextlib.contextmanager
def background(call: Callable[[], object]) -> Iterator[list[object]]:
    """Runs a call in a thread; the list receives its result or its exception."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield results
    thread.join(60.0)
    assert not thread.is_alive()


def resident_bytes(pid: int) -> int:
    """Private resident memory of a process; the shared region does not count."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def reaper(pid: int) -> int:
    """The process that watches a driver, by the descriptor that it does so with."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.joinpath("comm").read_text() != "pie-reaper\n":
                continue
            for descriptor in process.joinpath("fdinfo").iterdir():
                if f"Pid:\t{pid}\n" in descriptor.read_text():
                    return int(process.name)
    raise AssertionError(f"nobody watches {pid}")
