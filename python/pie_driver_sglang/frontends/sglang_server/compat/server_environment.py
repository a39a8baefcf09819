"""Environment variables and import settings of SGLang's server; imports nothing of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final

from pie_driver_sglang.backends.environment import keep_folders
from pie_driver_sglang.backends.sglang.compat.process import skip_model_modules
from pie_driver_sglang.backends.sglang.environment import FOLDERS, importing_sglang
from pie_driver_sglang.config.sglang_versions import is_0517
from pie_driver_sglang.sglang_plugins import radix

_VARIABLES: Final = {
    # Messages in msgpack, which Rust can decode.
    "SGLANG_USE_PICKLE_IPC": "0",
    # After a failure SGLang would wait a minute for dumps of its own scheduler.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "JOBLIB_MULTIPROCESSING": "0",
}
_REPLACED_CACHES: Final = ("radix_cache_backend", "disaggregation_mode")
"""Flags that choose another prefix cache."""


def prepare_server(architectures: Iterable[str], *, on_cpu: bool) -> None:
    """Set the variables of this process and of its children.

    Args:
        architectures: Of the model; empty if unknown.
        on_cpu: Whether the model runs on the CPU.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    # Our scheduler supports no other encoding.
    os.environ["SGLANG_USE_PICKLE_IPC"] = _VARIABLES["SGLANG_USE_PICKLE_IPC"]
    if on_cpu:
        # torch.compile would need a C++ compiler, and delay the first request.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # The driver inherits them, and what torch would choose is removed with the server.
    keep_folders(FOLDERS)
    # Its threads would keep this process from forking the scheduler, and are of no use to it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    names = list(architectures)
    if names:
        skip_model_modules(names)


def importing_server(
    *, on_cpu: bool = False, capability: int | None = None
) -> AbstractContextManager[None]:
    """Within it, SGLang is imported.

    Args:
        on_cpu: Whether the model runs on the CPU.
        capability: The GPUs' major compute capability; None if unknown.
    """
    device = "cpu" if on_cpu else "cuda"
    return importing_sglang(device, is_driver=False, capability=capability)


def without_prefill_graphs(given: Mapping[str, Any]) -> list[str]:
    """Arguments with which SGLang's scheduler captures no prefill graphs on a CPU.

    It would where the host has some GB of free memory, and fail: its own rule against it needs
    kernels of another build (`SGLANG_USE_CPU_ENGINE`). None where a flag selects these graphs.
    """
    selected = {"cuda_graph_backend_prefill", "cuda_graph_config", "disable_prefill_cuda_graph"}
    return [] if selected & given.keys() else ["--disable-prefill-cuda-graph"]


def with_prefix_index(given: Mapping[str, Any]) -> list[str]:
    """Arguments that enable our prefix index in SGLang's scheduler; none if a flag forbids it.

    None either for versions of SGLang whose prefix caches have another interface.
    """
    if not is_0517():
        return []
    refused = {*radix.REFUSED_SETTINGS, *_REPLACED_CACHES}
    if any(given.get(name) for name in refused) or given.get("is_embedding"):
        return []
    plugins = [name for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name]
    os.environ["SGLANG_PLUGINS"] = ",".join([*plugins, radix.NAME])
    return ["--radix-cache-backend", radix.BACKEND]
