"""What vLLM reads of a process before it is imported. Imports nothing of it."""

from __future__ import annotations

import os
from typing import Final

VLLM_FOLDERS: Final = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
"""Folders that vLLM and torch keep files in."""

UNNEEDED: Final = ("pandas", "pyarrow")
"""Optional packages: vLLM tunes kernels for AMD with pandas, and pyarrow begins a thread."""

_SETTINGS: Final = {
    # Entry points of other packages are not run.
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The driver's log is configured already; vLLM would put a handler of its own beside it.
    "VLLM_CONFIGURE_LOGGING": "0",
}


def set_variables() -> None:
    """Sets the variables that vLLM reads when it is imported; those of the user stay."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def disable_multicast() -> None:
    """Has ranks reduce without multicast of NVLink."""
    for name in (
        "VLLM_ALLREDUCE_USE_FLASHINFER",
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "VLLM_USE_NCCL_SYMM_MEM",
    ):
        os.environ[name] = "0"
