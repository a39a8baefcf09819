"""Compiles kernels in parallel processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any, Final, NamedTuple
from unittest import mock

from cuda.core.utils import FileStreamProgramCache
from triton.runtime import build

from pie_driver_sglang._core import die_with_parent
from pie_driver_sglang.compilation.launch_recorder import KernelVariant
from pie_driver_sglang.kernels.compile_times import timing_compilations

PROCESS_BYTES: Final = 700 << 20
"""Host memory that a process which compiles takes, at most."""

_variants: list[KernelVariant] = []
"""What the processes of a pool compile: they inherit it."""


class CompiledKernel(NamedTuple):
    """What became of a kernel."""

    name: str
    is_new: bool
    """Whether something was compiled: not all of it was in a cache."""
    error: str = ""
    """Why it is not compiled; empty if it is."""


def pool_size(free_bytes: int) -> int:
    """Processes that compile at once: one a core, as far as they fit into the host's memory.

    Args:
        free_bytes: Of the host.
    """
    return max(1, min(len(os.sched_getaffinity(0)), free_bytes // PROCESS_BYTES))


def compile_variants(variants: Sequence[KernelVariant], processes: int) -> Iterator[CompiledKernel]:
    """Compiles kernels into the caches of their compilers.

    The processes are forks of this one, which must not have initialized CUDA, and end with it. A
    kernel is in its cache as a whole or not at all, also if a process is killed.

    Args:
        variants: The kernels.
        processes: How many compile at once.

    Yields:
        Each kernel, in any order. Where a process was killed, those that are left are missing.
    """
    if not variants:
        return
    _variants[:] = variants
    count = min(processes, len(variants))
    with ProcessPoolExecutor(count, get_context("fork"), _begin, (os.getpid(),)) as pool:
        futures = [pool.submit(_compile, number) for number in range(len(variants))]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            return
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin(parent: int) -> None:
    """Begins a process of the pool."""
    die_with_parent(parent)
    # Ctrl-C reaches the parent, too.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _compile(number: int) -> CompiledKernel:
    variant = _variants[number]
    error = ""
    with _new_files() as new:
        try:
            variant.compile()
        except Exception as reason:
            error = f"{type(reason).__name__}: {reason}"
    return CompiledKernel(variant.name, bool(new), error)


@contextlib.contextmanager
def _new_files() -> Iterator[list[str]]:
    """Within it, notes each compilation that no cache has answered."""
    found: list[str] = []

    def noting(function: Any, name: str) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            found.append(name)
            return function(*args, **options)

        return run

    store = noting(FileStreamProgramCache.__setitem__, "NVRTC")
    with (
        timing_compilations(lambda *_: found.append("Triton")),
        mock.patch.object(build, "_build", noting(build._build, "C")),
        mock.patch.object(FileStreamProgramCache, "__setitem__", store),
    ):
        yield found
