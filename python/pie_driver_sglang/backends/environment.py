"""What torch and an inference library find in the process while they are imported."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Final, cast

from pie_driver_sglang.checkpoint.packaged import kept_folder

_UNNEEDED: Final = ("sklearn",)
"""Optional packages of libraries, for what the driver never does.

With scikit-learn transformers measures the drafts of its own generation; it brings SciPy's
statistics and pandas along, 700 modules and 100 MB.
"""


def prepare_host(*, spins: bool, ranks: int) -> None:
    """Sets what torch reads on a CPU.

    Args:
        spins: Whether the ring thread spins without end and so keeps a core for itself.
        ranks: Processes of the model, all of them on this host.
    """
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    # Layers that are decorated with torch.compile need a C++ compiler and half a minute on every
    # start.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    if spins:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def prepare_local_ranks() -> None:
    """For ranks of one host: they listen on its loopback interface alone, without multicast."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    # Not every host can do multicast of NVLink, and one that cannot may lose its GPUs.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    prepare_nccl()


def prepare_nccl() -> None:
    """Sets what NCCL reads: no multicast of NVLink."""
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def keep_folders(folders: Mapping[str, str]) -> None:
    """Sets where libraries keep what they compile.

    Args:
        folders: Names of folders by the variables that libraries find them by.
    """
    for variable, name in folders.items():
        _keep(variable, Path("libraries", name))


def prepare_libraries(folders: Mapping[str, str]) -> None:
    """Sets what every library reads: no downloads, and where it keeps what it compiles.

    Args:
        folders: As of `keep_folders`.
    """
    keep_folders(folders)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # joblib, which scikit-learn brings, otherwise tries out named semaphores in /dev/shm.
    os.environ.setdefault("JOBLIB_MULTIPROCESSING", "0")


def _keep(variable: str, name: Path) -> None:
    # Without a home that can be written to, they stay where they are.
    with contextlib.suppress(OSError, RuntimeError):
        folder = kept_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault(variable, str(folder))


@contextlib.contextmanager
def importing(further: Iterable[str] = ()) -> Iterator[None]:
    """For a library's import: within it nothing is collected, unneeded packages are absent.

    The garbage collector no longer looks at what is alive after it: 7,000 modules live
    as long as the process, and to go through them takes most of a second, while it is serving, too.

    Args:
        further: Packages that this library can do without.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with _absent((*_UNNEEDED, *further)):
            yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def _absent(names: Iterable[str]) -> Iterator[None]:
    """Within it packages are as if they were not installed, unless they are imported already."""
    hidden = [name for name in names if name not in sys.modules]
    # Python's own sign for a module that must not be found; its type is not in the stubs.
    sys.modules.update(dict.fromkeys(hidden, cast(ModuleType, None)))
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)
