"""What a driver imports of SGLang later than the adapter itself: the model, attention, groups."""

from __future__ import annotations

import contextlib
from importlib import import_module
from typing import Final

_FOR_ALL: Final = (
    # The model's module, by `SGLANG_DISABLED_MODEL_ARCHS`.
    "sglang.srt.models.registry",
    "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "sglang.srt.distributed.device_communicators.pynccl",
)
_FOR_GPUS: Final = (
    "sglang.srt.layers.attention.flashattention_backend",
    "sglang.srt.layers.attention.triton_backend",
)
_FOR_CPUS: Final = ("sglang.srt.layers.attention.torch_native_backend",)


def preload(*, on_gpu: bool) -> None:
    """Import it now. What this version or machine does not have is reported where it is used."""
    for name in (*_FOR_ALL, *(_FOR_GPUS if on_gpu else _FOR_CPUS)):
        with contextlib.suppress(Exception):
            import_module(name)
