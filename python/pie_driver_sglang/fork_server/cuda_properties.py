"""What torch says about GPUs, read without initializing CUDA in this process.

A process that has initialized CUDA cannot be forked, and libraries ask for GPUs while they are
imported. They get the answers of a child process, which reads them by libcuda.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

_LIBRARY: Final = "libcuda.so.1"
_ATTRIBUTES: Final = {
    "major": 75,
    "minor": 76,
    "multi_processor_count": 16,
    "warp_size": 10,
    "max_threads_per_multi_processor": 39,
    "max_threads_per_block": 1,
    "shared_memory_per_block": 8,
    "shared_memory_per_block_optin": 97,
    "shared_memory_per_multiprocessor": 81,
    "regs_per_multiprocessor": 82,
    "L2_cache_size": 38,
    "is_integrated": 18,
    "is_multi_gpu_board": 84,
}
"""Fields of torch's device properties, and their numbers as `CUdevice_attribute`."""
_INITIALIZED: Final = "/dev/nvidia-uvm"
"""What libcuda opens when it is initialized, and nothing else does."""
_MOST_BYTES: Final = 1 << 20


def read_properties() -> list[dict[str, Any]]:
    """The properties of all visible GPUs, read in a fork; none if there is no driver or no GPU."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_query()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read(_MOST_BYTES)
    os.waitpid(child, 0)
    return list(json.loads(text or b"[]"))


def _query() -> list[dict[str, Any]]:
    """The properties, by libcuda, which this initializes."""
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError:
        return []
    count = ctypes.c_int()
    # Each returns 0 when it succeeds.
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_device(cuda, index) for index in range(count.value)]


def _device(cuda: ctypes.CDLL, index: int) -> dict[str, Any]:
    device, name, total = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    found: dict[str, Any] = {"name": name.value.decode(), "total_memory": total.value}
    for field, number in _ATTRIBUTES.items():
        value = ctypes.c_int()
        cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        found[field] = value.value
    return found


@contextlib.contextmanager
def answering(devices: list[dict[str, Any]]) -> Iterator[None]:
    """Within it, torch and Triton answer from these properties and leave CUDA alone.

    What libraries keep of the functions asks CUDA again after it.

    Args:
        devices: As of `read_properties`.
    """
    import torch

    found = [SimpleNamespace(**device) for device in devices]
    is_active = True

    def properties(device: Any = None) -> SimpleNamespace:
        index = torch.device(device).index if isinstance(device, str) else device
        return found[getattr(index, "index", index) or 0]

    def capability(device: Any = None) -> tuple[int, int]:
        return properties(device).major, properties(device).minor

    def until_the_end(owner: Any, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(owner, name)

        @functools.wraps(original)
        def ask(*arguments: Any, **keywords: Any) -> Any:
            return (answer if is_active else original)(*arguments, **keywords)

        return ask

    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.cuda, "is_available", lambda: bool(found)),
        (torch.cuda, "device_count", lambda: len(found)),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", capability),
        (torch.cuda, "get_device_name", lambda device=None: properties(device).name),
    ]
    if found:
        module, cuda = torch.get_device_module, torch.device("cuda")
        answers += [
            (torch, "get_device_module", lambda device=None: module(device or cuda)),
            (torch.accelerator, "current_accelerator", lambda check_available=False: cuda),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, answer in answers:
            replaced = until_the_end(owner, name, answer)
            stack.enter_context(mock.patch.object(owner, name, replaced))
        if found:
            stack.enter_context(_triton_driver(found))
        try:
            yield
        finally:
            is_active = False


@contextlib.contextmanager
def _triton_driver(found: list[SimpleNamespace]) -> Iterator[None]:
    """Within it, Triton's active driver knows these devices, and cannot launch anything."""
    try:
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver
    except ImportError:
        yield
        return
    first = found[0]
    target = GPUTarget("cuda", first.major * 10 + first.minor, first.warp_size)
    numbers = [
        {
            "max_shared_mem": each.shared_memory_per_block_optin,
            "max_num_regs": each.regs_per_multiprocessor,
            "multiprocessor_count": each.multi_processor_count,
            "warpSize": each.warp_size,
        }
        for each in found
    ]
    answers = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_device_capability=lambda _=None: (first.major, first.minor),
        utils=SimpleNamespace(get_device_properties=numbers.__getitem__),
    )
    with mock.patch.object(driver, "_active", answers):
        yield


def is_cuda_initialized() -> bool:
    """Whether libcuda is initialized in this process."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith(_INITIALIZED):
                return True
    return False
