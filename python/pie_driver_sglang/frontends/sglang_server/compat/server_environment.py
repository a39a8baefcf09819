"""What SGLang reads of the server's processes while it is imported. Imports nothing of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pie_driver_sglang.backends.sglang import environment as adapter
from pie_driver_sglang.backends.sglang.compat.process import skip_model_modules
from pie_driver_sglang.sglang_plugins import radix

_VARIABLES: Final = {
    # Messages in msgpack, which needs no Python to read.
    "SGLANG_USE_PICKLE_IPC": "0",
    # After a failure SGLang waits a minute for files that only help with its own scheduler.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "JOBLIB_MULTIPROCESSING": "0",
}
_REPLACED_CACHES: Final = ("radix_cache_backend", "disaggregation_mode")
"""Flags that choose a prefix cache, or do without one of ours."""


def prepare_server(architectures: Iterable[str], *, on_cpu: bool) -> None:
    """Sets the variables of this process and of those that it starts.

    Args:
        architectures: Of the model; none if they are not known.
        on_cpu: Whether the model runs there.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    # Ours is the only encoding that our scheduler reads.
    os.environ["SGLANG_USE_PICKLE_IPC"] = _VARIABLES["SGLANG_USE_PICKLE_IPC"]
    if on_cpu:
        # What SGLang compiles would ask for a C++ compiler, and hold up the first request.
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    names = list(architectures)
    if names:
        skip_model_modules(names)


@contextmanager
def importing_server() -> Iterator[None]:
    """For the imports of SGLang, as the driver makes them."""
    with adapter.importing():
        yield


def with_prefix_index(given: Mapping[str, Any]) -> list[str]:
    """The words that give SGLang's scheduler our prefix index; none if a flag is against it.

    Args:
        given: The flags that the user set.
    """
    refused = {*radix.REFUSED_SETTINGS, *_REPLACED_CACHES}
    if any(given.get(name) for name in refused) or given.get("is_embedding"):
        return []
    plugins = [name for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name]
    os.environ["SGLANG_PLUGINS"] = ",".join([*plugins, radix.NAME])
    return ["--radix-cache-backend", radix.BACKEND]
