"""`CudaMemory`: releases the memory of a GPU under tensors that keep their addresses.

SGLang allocates weights and KV pools within regions of `torch_memory_saver`, a memory pool of torch
for each tag. CUDA's virtual memory management unmaps such a pool and maps other memory at the same
addresses later, so captured graphs, block tables and everything else that has them stay valid.

The library is used by its hook mode `torch`, an allocator of the pools alone: the other one,
`preload`, would have to be in `LD_PRELOAD` before a driver starts. It ends the process when CUDA
fails, so free memory is checked before it is called.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch

from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.engine.control_commands import KV_CACHE_TAG, WEIGHTS_TAG
from pie_driver_sglang.engine.sleep import DeviceMemory, TaggedTensors
from pie_driver_sglang.errors import StartError, WeightsError
from pie_driver_sglang.memory.host import available_bytes, exclusive
from pie_driver_sglang.memory.units import GIB

logger = logging.getLogger(__name__)

_EXPANDABLE: Final = "expandable_segments:True"
_ALLOCATOR_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_MARGIN_BYTES: Final = 64 << 20
"""Left free by a resume, for CUDA's page tables."""


class MemorySaver(Protocol):
    """Memory pools that are released by tag, on one GPU."""

    def pause(self, tag: str) -> None:
        """Unmaps a tag's pool, after its values were copied to the host if the pool keeps them."""

    def resume(self, tag: str) -> None:
        """Maps a pool that is paused, at the addresses that it had, with the values it keeps."""

    def empty_cache(self) -> int:
        """Gives back what torch keeps of passes that have ended; returns its bytes."""

    def pool_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of the pools that tensors are in; 0 where all are in torch's own memory."""

    def free_bytes(self) -> int:
        """Bytes of the GPU that are free, of all processes."""

    def synchronize(self) -> None:
        """Waits until the GPU is idle."""


def saves_memory(device_type: str, options: DriverOptions) -> bool:
    """Whether a model is loaded so that its memory can be released; on the CPU it always can."""
    return device_type == "cuda" and options.enable_memory_saver


def choose_hook_mode() -> None:
    """Has `torch_memory_saver` work without `LD_PRELOAD`, before its first region.

    Raises:
        StartError: torch is set to allocate by expandable segments, which its pools cannot have.
    """
    for name in _ALLOCATOR_SETTINGS:
        if _EXPANDABLE in os.environ.get(name, ""):
            raise StartError(
                f"{name} has `{_EXPANDABLE}`, with which `enable_memory_saver` does not work",
                f"remove it from {name}, or the option",
            )
    _library().hook_mode = "torch"


def _library() -> Any:
    from torch_memory_saver import torch_memory_saver

    return torch_memory_saver


class TorchMemorySaver:
    """Implements `MemorySaver` by the library that SGLang allocates with."""

    def __init__(self, device: torch.device) -> None:
        """Use it for a GPU, once a model is loaded."""
        self._device = device
        self._saver = _library()
        # Page-locking and unlocking memory takes longer than copying it, and would be part of each
        # sleep and wake.
        self._saver.retain_cpu_backup = True

    def pause(self, tag: str) -> None:
        """See `MemorySaver.pause`."""
        self._saver.pause(tag)

    def resume(self, tag: str) -> None:
        """See `MemorySaver.resume`."""
        self._saver.resume(tag)

    def empty_cache(self) -> int:
        """See `MemorySaver.empty_cache`."""
        before = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self._device)

    def pool_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        """See `MemorySaver.pool_bytes`."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        pointers = [tensor.data_ptr() for tensor in tensors if tensor.device == self._device]
        return private_pool_bytes(segments, pointers)

    def free_bytes(self) -> int:
        """See `MemorySaver.free_bytes`."""
        return int(torch.cuda.mem_get_info(self._device)[0])

    def synchronize(self) -> None:
        """See `MemorySaver.synchronize`."""
        torch.cuda.synchronize(self._device)


def private_pool_bytes(segments: Sequence[Mapping[str, Any]], pointers: Iterable[int]) -> int:
    """Bytes of the private memory pools that pointers lead to.

    Args:
        segments: As `torch.cuda.memory_snapshot` gives them.
        pointers: Addresses of the device.
    """
    found = sorted(pointers)
    pools = set()
    for segment in segments:
        start = segment["address"]
        first = bisect_left(found, start)
        if first < len(found) and found[first] < start + segment["total_size"]:
            pools.add(tuple(segment["segment_pool_id"]))
    pools.discard((0, 0))
    return sum(x["total_size"] for x in segments if tuple(x["segment_pool_id"]) in pools)


class CudaMemory(DeviceMemory):
    """Memory of a GPU, by the pools of a `MemorySaver`; weights wait in page-locked host memory.

    That host memory is kept after the first release, for the next one.
    """

    def __init__(self, tensors: TaggedTensors, saver: MemorySaver) -> None:
        """All of it is there.

        Args:
            tensors: See `DeviceMemory`. Other tensors in their pools are released with them.
            saver: What releases it.
        """
        super().__init__(tensors)
        self._saver = saver
        self._bytes = {tag: saver.pool_bytes(found()) for tag, found in tensors.items()}
        self._has_backup = False
        self._cache_bytes = 0
        """Of torch's cache, given back with what is released; the next passes need it again."""
        sizes = (f"`{tag}` {_gib(size)}" for tag, size in self._bytes.items())
        logger.info("memory that can be released: %s", ", ".join(sizes))

    def release(self, tags: Sequence[str]) -> None:
        """See `DeviceMemory.release`."""
        # Other ranks and replicas keep their weights on this host, too.
        takes_host_memory = WEIGHTS_TAG in tags and not self._has_backup
        with exclusive() if takes_host_memory else contextlib.nullcontext():
            super().release(tags)

    def _check_release(self, tags: Sequence[str]) -> None:
        for tag in tags:
            if not self._bytes[tag]:
                raise WeightsError(
                    f"the memory of `{tag}` is in no pool that can be released",
                    "release other tags, or stop the server",
                )
        if WEIGHTS_TAG in tags and not self._has_backup:
            needed, free = self._bytes[WEIGHTS_TAG], available_bytes()
            if needed > free:
                raise WeightsError(
                    f"the weights need {_gib(needed)} of host memory while they are released, and "
                    f"{_gib(free)} are available",
                    "free host memory, or release `kv_cache` alone",
                )

    def _release(self, tag: str) -> None:
        begun = time.monotonic()
        self._saver.synchronize()
        self._saver.pause(tag)
        self._has_backup |= tag == WEIGHTS_TAG
        self._cache_bytes += self._saver.empty_cache()
        self._log("released", tag, begun)

    def _check_resume(self, tags: Sequence[str]) -> None:
        if not tags:
            return
        # An update of resumed weights has used some, which `_cache_bytes` would count twice.
        self._saver.empty_cache()
        needed = sum(self._bytes[tag] for tag in tags) + _MARGIN_BYTES
        if self._released <= set(tags):
            needed += self._cache_bytes
        free = self._saver.free_bytes()
        if needed > free:
            named = " and ".join(f"`{tag}`" for tag in tags)
            raise WeightsError(
                f"{named} cannot be resumed: {_gib(needed)} of the GPU's memory are needed, and "
                f"{_gib(free)} are free",
                "free memory of the GPU, then call `/resume_memory_occupation` again",
            )

    def _resume(self, tag: str) -> None:
        begun = time.monotonic()
        self._saver.resume(tag)
        if tag == KV_CACHE_TAG:
            # What is there now is anyone's: attention multiplies masked values by zero, and a NaN
            # stays one.
            for tensor in self._tensors[tag]():
                tensor.zero_()
        self._saver.synchronize()
        if self._released == {tag}:
            self._cache_bytes = 0
        self._log("resumed", tag, begun)

    def _log(self, what: str, tag: str, begun: float) -> None:
        seconds = time.monotonic() - begun
        logger.info("%s `%s`: %s in %.2f s", what, tag, _gib(self._bytes[tag]), seconds)


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
