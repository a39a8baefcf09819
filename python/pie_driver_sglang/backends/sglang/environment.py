"""What SGLang and torch find in the process while they are imported. Imports neither."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Final, cast

from pie_driver_sglang.backends.sglang.compat import process
from pie_driver_sglang.checkpoint.packaged import kept_folder

_UNNEEDED: Final = ("sklearn",)
"""Optional packages of libraries, for what the driver never does.

With scikit-learn transformers measures the drafts of its own generation; it brings SciPy's
statistics and pandas along, 700 modules and 100 MB.
"""

_FOLDERS: Final = {
    "CUDA_TILE_TEMP_DIR": "cuda-tile",
    "CUTE_DSL_CACHE_DIR": "cutlass",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Folders that libraries make while they are imported, in TMPDIR if nothing else is said.

A driver that is killed would leave them there. What is compiled is worth keeping.
"""


def prepare(device: str, architectures: Iterable[str], *, spins: bool, ranks: int = 1) -> None:
    """Sets what must be set before the first ``import torch``.

    Args:
        device: ``cpu`` or ``cuda:N``.
        architectures: class names from the model's ``config.json``.
        spins: whether the ring thread spins without end and so keeps a core for itself.
        ranks: processes of the model, all of them on this host.
    """
    if ranks > 1:
        _prepare_ranks(ranks)
    if device == "cpu":
        threads = max(1, (len(os.sched_getaffinity(0)) - 1) // ranks)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        # Some SGLang layers are decorated with torch.compile, which needs a C++ compiler and half a
        # minute on every start.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
        if spins:
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    else:
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        os.environ.setdefault("CUDA_MODULE_LOADING", "AUTO")
    for variable, name in _FOLDERS.items():
        _keep(variable, Path("libraries", name))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # joblib, which scikit-learn brings, otherwise tries out named semaphores in /dev/shm.
    os.environ.setdefault("JOBLIB_MULTIPROCESSING", "0")
    process.skip_model_modules(architectures)


def _keep(variable: str, name: Path) -> None:
    # Without a home that can be written to, they stay where they are.
    with contextlib.suppress(OSError, RuntimeError):
        folder = kept_folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ.setdefault(variable, str(folder))


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For the import of SGLang: within it nothing is collected, and unneeded packages are absent.

    The garbage collector no longer looks at what is alive after it: 7,000 modules live
    as long as the process, and to go through them takes most of a second, while it is serving, too.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with _absent(_UNNEEDED):
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


def _prepare_ranks(ranks: int) -> None:
    """For ranks of one host: nothing listens on its other interfaces, and nothing gets a name."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    # As `NCCL_NVLS_ENABLE`: not every host can do it, and one that cannot may lose its GPUs.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    process.prepare_ranks(ranks)
