"""Compiles the kernels of a driver in parallel processes, before or while it starts.

`CompileAhead` runs this module in a process of its own beside a driver that imports SGLang and
loads weights; `pie-sglang warm` calls :func:`compile_kernels`. A kernel that is missed is compiled
when it is first launched. What was compiled for a model is noted beside Triton's cache, so that
later starts begin no process.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

import pie_driver_sglang
from pie_driver_sglang import _core
from pie_driver_sglang.backends.sglang.compile_shapes import dry_model, unknown_kernels_reason
from pie_driver_sglang.compilation.dry_model import DryModel
from pie_driver_sglang.config.switches import read_switch
from pie_driver_sglang.fork_server.cuda_properties import answering, read_properties
from pie_driver_sglang.memory.gpus import nvml, query_cuda
from pie_driver_sglang.memory.host import available_bytes
from pie_driver_sglang.observability import start_spans

if TYPE_CHECKING:
    from pie_driver_sglang.compilation.compile_pool import CompiledKernel
    from pie_driver_sglang.compilation.launch_recorder import KernelVariant
    from pie_driver_sglang.config.driver_config import DriverConfig
    from pie_driver_sglang.ranks.types import Rank

logger = logging.getLogger(__name__)

COMPILE_AHEAD: Final = "PIE_COMPILE_AHEAD"
"""The environment variable with which a driver compiles kernels in parallel processes, if `1`."""
TIMEOUT_S: Final = 600.0
"""How long a driver waits for its kernels."""
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_NICENESS: Final = 5
"""Of the processes: the driver that waits for nothing else goes first."""
_PACKAGES: Final = ("torch", "triton", "cuda-core")
_SOURCES: Final = ("kernels", "engine", "compilation")
"""Folders of the package whose content decides on what is compiled."""


class CompileRequest(msgspec.Struct, frozen=True):
    """A model and a GPU to compile for.

    Attributes:
        model: What kernels depend on.
        gpu: The name of the GPU.
        properties: Its properties, as of `read_properties`; empty for those of `device`.
        device: Its number in this machine.
    """

    model: DryModel
    gpu: str
    properties: dict[str, Any] = {}
    device: int = 0


class CompileReport(msgspec.Struct):
    """What was compiled.

    Attributes:
        kernels: How many kernels the driver launches.
        new: How many of them no cache had.
        cached: How many of them were in a cache.
        failed: Names and errors of those that do not compile.
        processes: How many compiled at once.
        spans: Name, begin and end of each part, in seconds of `time.monotonic`.
        left: How many were not compiled, because a process was killed.
    """

    kernels: int = 0
    new: int = 0
    cached: int = 0
    failed: list[tuple[str, str]] = []
    processes: int = 0
    spans: list[tuple[str, float, float]] = []
    left: int = 0


def record_kernels(request: CompileRequest) -> list[KernelVariant]:
    """The kernels that a driver launches in its steps, by a dry run. No GPU is used.

    To be called in a process that has not imported torch.
    """
    gpu = request.properties or read_properties()[request.device]
    os.environ[_VISIBLE] = ""
    import torch

    from pie_driver_sglang.compilation.dry_run import dry_run
    from pie_driver_sglang.compilation.launch_recorder import launch_utilities, recorded_launches
    from pie_driver_sglang.kernels.cuda.compiled import arch_of

    device = torch.device("cuda", 0)
    with answering([gpu]), recorded_launches(arch_of(device)) as found:
        dry_run(request.model, device)
    return [*launch_utilities(), *found.values()]


def compile_kernels(
    request: CompileRequest, tell: Callable[[CompiledKernel, int], object] = lambda *_: None
) -> CompileReport:
    """Compiles the kernels of a driver that no cache has.

    Args:
        request: What they depend on.
        tell: Is told of each kernel, and how many there are.
    """
    began = time.monotonic()
    variants = record_kernels(request)
    from pie_driver_sglang.compilation.compile_pool import compile_variants, pool_size

    recorded = time.monotonic()
    count = len(variants)
    report = CompileReport(count, processes=pool_size(available_bytes()), left=count)
    with _alone():
        for kernel in compile_variants(variants, report.processes):
            report.left -= 1
            report.new += kernel.is_new
            report.cached += not (kernel.is_new or kernel.error)
            if kernel.error:
                report.failed.append((kernel.name, kernel.error))
            tell(kernel, count)
    report.spans = [
        ("dry run", began, recorded),
        (f"compilation in {report.processes} processes", recorded, time.monotonic()),
    ]
    if not report.left:
        _note(request, report)
    return report


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Within it no other start compiles into the same cache: what it has compiled is found."""
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder.joinpath("pie-sglang.lock").open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        # Some file systems have no locks: then kernels may be compiled twice.
        logger.debug("others may compile the same kernels: %s", error)
        yield
        return
    with file:
        yield


def is_compiled(request: CompileRequest) -> bool:
    """Whether everything was compiled before by these versions, and Triton's cache is kept."""
    return _note_path(request).is_file()


class CompileAhead:
    """The process that compiles kernels beside a driver's start."""

    def __init__(self, process: subprocess.Popen[bytes] | None) -> None:
        """Takes the process; None where there is nothing to compile."""
        self._process = process

    @classmethod
    def begin(cls, config: DriverConfig, rank: Rank) -> Self:
        """Begins to compile what a driver's steps launch, unless it was compiled before.

        Raises:
            ConfigError: :data:`COMPILE_AHEAD` has a wrong value.
        """
        if config.driver.device[rank.number] == "cpu" or not compiles_ahead():
            return cls(None)
        try:
            request = _request(config, rank)
            if request is None or is_compiled(request):
                return cls(None)
            return cls(_start(request))
        except Exception as error:
            # The start compiles what is missing.
            logger.debug("kernels are not compiled ahead: %s", error, exc_info=True)
            return cls(None)

    def wait(self) -> None:
        """Waits until it has ended, before kernels are launched; logs what it has compiled."""
        if self._process is None:
            return
        with start_spans.span("wait for kernels"):
            try:
                text, _ = self._process.communicate(timeout=TIMEOUT_S)
                report = msgspec.json.decode(text, type=CompileReport)
            except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
                self.close()
                logger.info("each kernel is compiled when it is first launched: %s", error)
                return
        self._process = None
        for name, begin, end in report.spans:
            start_spans.add(f"kernels: {name}", begin, end)
        for name, error_text in report.failed:
            logger.debug("%s does not compile ahead: %s", name, error_text)
        logger.info(
            "kernels: %d compiled, %d in the cache, by %d processes",
            report.new, report.cached, report.processes,
        )  # fmt: skip
        if report.left:
            logger.info("a process was killed: %d kernels compile at their launch", report.left)

    def close(self) -> None:
        """Ends the process and those that it has started."""
        if self._process is not None:
            self._process.kill()
            with self._process:
                self._process = None

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        self.close()


def _request(config: DriverConfig, rank: Rank) -> CompileRequest | None:
    """What the kernels of a rank depend on; None where they are not known."""
    hf_config, options = config.model.hf_config, config.driver.options
    if (why := unknown_kernels_reason(hf_config, options)) is not None:
        logger.debug("kernels are not compiled ahead: %s", why)
        return None
    gpus = query_cuda(nvml()).gpus
    if len({gpu.name for gpu in gpus}) != 1:
        # Which one CUDA takes is not known without CUDA.
        return None
    [gpu, *_] = gpus
    model = dry_model(
        hf_config, options, config.driver.activation_dtype,
        major=gpu.capability[0], memory=gpu.total, ranks=rank.size,
    )  # fmt: skip
    device = int(config.driver.device[rank.number].removeprefix("cuda:"))
    return CompileRequest(model, gpu.name, device=device)


def compiles_ahead() -> bool:
    """Whether drivers compile kernels ahead.

    Raises:
        ConfigError: The variable is neither `0` nor `1`.
    """
    return read_switch(COMPILE_AHEAD)


def _start(request: CompileRequest) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        # -P: nothing is imported from the working directory.
        [sys.executable, "-P", "-m", __name__, msgspec.json.encode(request).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=functools.partial(_core.die_with_parent, os.getpid()),
    )


def _cache_folder() -> Path:
    """The folder of Triton's cache."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")


def _note_path(request: CompileRequest) -> Path:
    """Where it is noted that a request was compiled: it goes with Triton's cache."""
    digest = hashlib.sha256(msgspec.json.encode([request.gpu, request.model]))
    for package in _PACKAGES:
        digest.update(metadata.version(package).encode())
    digest.update(_sources_version().encode())
    return _cache_folder() / f"pie-sglang-{digest.hexdigest()[:32]}.json"


def _note(request: CompileRequest, report: CompileReport) -> None:
    path = _note_path(request)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"kernels": report.kernels, "failed": report.failed}))
        part.replace(path)
    except OSError as error:
        logger.debug("compiled kernels are not noted: %s", error)


@functools.cache
def _sources_version() -> str:
    """A hash of the sources that decide on what is compiled."""
    digest = hashlib.sha256()
    root = resources.files(pie_driver_sglang)
    for folder in _SOURCES:
        for file in _source_files(root.joinpath(folder)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _source_files(folder: Traversable) -> list[Traversable]:
    found: list[Traversable] = []
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        if entry.is_dir():
            found += _source_files(entry)
        elif entry.name.endswith((".py", ".cu", ".cuh", ".json")):
            found.append(entry)
    return found


def main() -> int:
    """Compiles what the argument requests; prints the report."""
    os.nice(_NICENESS)
    # Libraries print; the report stands alone.
    report_file = os.dup(1)
    os.dup2(2, 1)
    request = msgspec.json.decode(sys.argv[1], type=CompileRequest)
    try:
        report = compile_kernels(request)
    except Exception as error:
        report = CompileReport(failed=[("the dry run", f"{type(error).__name__}: {error}")])
    with os.fdopen(report_file, "wb") as file:
        file.write(msgspec.json.encode(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
