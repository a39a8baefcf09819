"""What SGLang finds in the process while it is imported, besides what every library does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Final

from pie_driver_sglang.backends.deferred_imports import deferred_compiler
from pie_driver_sglang.backends.environment import (
    importing,
    prepare_host,
    prepare_libraries,
    prepare_local_ranks,
    prepare_nccl,
)
from pie_driver_sglang.backends.sglang.compat import process

FOLDERS: Final = {
    "CUDA_TILE_TEMP_DIR": "cuda-tile",
    "CUTE_DSL_CACHE_DIR": "cutlass",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Folders that libraries make while they are imported, in TMPDIR if nothing else is said.

A driver that is killed would leave them there. What is compiled is worth keeping.
"""


_UNUSED: Final[tuple[str, ...]] = ("mistral_common", "pandas", "scipy", "torchao", "torchaudio")
"""Optional packages, of which transformers uses parts that a driver does not."""
_UNUSED_ON_CPUS: Final = ("cutlass", "flashinfer")
_UNUSED_ON_HOPPER: Final = ("cutlass",)
"""CuTe DSL initializes CUDA in its import; what SGLang imports of it early is for Blackwell."""
_BLACKWELL: Final = 10


@contextlib.contextmanager
def importing_sglang(
    device: str, *, is_driver: bool, capability: int | None = None
) -> Iterator[None]:
    """For the import of SGLang: leaves out what this process has no use for.

    Args:
        device: `cpu` or `cuda`, with an index or without.
        is_driver: Whether a model will run in the process; a server reads texts and media.
        capability: The GPUs' major compute capability; None if unknown.
    """
    unused = _UNUSED if is_driver else ()
    if device == "cpu":
        unused += _UNUSED_ON_CPUS
        # It has selected the device; SGLang would also import kernels of another build of its own.
        os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
    elif capability is not None and capability < _BLACKWELL:
        unused += _UNUSED_ON_HOPPER
    with importing(unused), deferred_compiler():
        yield


def prepare(device: str, architectures: Iterable[str], *, spins: bool, ranks: int = 1) -> None:
    """Sets what must be set before the first ``import torch``.

    Args:
        device: ``cpu`` or ``cuda:N``.
        architectures: class names from the model's ``config.json``.
        spins: whether the ring thread spins without end and so keeps a core for itself.
        ranks: processes of the model, all of them on this host.
    """
    if ranks > 1:
        prepare_local_ranks()
        process.prepare_ranks(ranks)
    if device == "cpu":
        prepare_host(spins=spins, ranks=ranks)
    else:
        prepare_nccl()
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "8")
        os.environ.setdefault("CUDA_MODULE_LOADING", "AUTO")
    prepare_libraries(FOLDERS)
    process.skip_model_modules(architectures)
