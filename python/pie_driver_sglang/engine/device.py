"""The configured device: its context, begun early, and whether it is there at all."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

from pie_driver_sglang.errors import StartError

if TYPE_CHECKING:
    import torch

_LIBRARY = "libcuda.so.1"


def begin_context(device: str) -> threading.Thread | None:
    """Begins to make a GPU's context in a thread, while this one imports libraries.

    It is the primary context, which torch takes, too, and which waits for nothing of Python's. What
    fails here fails again where it is needed, and is reported there.

    Args:
        device: `cpu` or `cuda:N`.

    Returns:
        The thread, which needs no waiting for; None for the CPU.
    """
    if device == "cpu":
        return None
    thread = threading.Thread(target=_retain_context, args=(_index(device),), daemon=True)
    thread.start()
    return thread


def _retain_context(index: int) -> None:
    try:
        cuda = ctypes.CDLL(_LIBRARY)
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    # Each returns 0 when it succeeds. Foreign calls let go of Python's lock.
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def check_device(device: str) -> None:
    """Refuses a GPU that this process cannot see.

    Args:
        device: `cpu` or `cuda:N`.

    Raises:
        StartError: There is no such GPU.
    """
    if device == "cpu":
        return
    index, count = _index(device), 0
    # Without it there is no need to import torch first, which takes seconds.
    if _has_driver():
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        found = f"{count} CUDA devices are visible" if count else "no CUDA device is visible"
        raise StartError(
            f"device {device} does not exist: {found}",
            'set `device = ["cpu"]` or make the GPU visible',
        )


def find_loss(device: str) -> str | None:
    """Asks a device, after something on it has failed, whether it can run anything any more.

    An error that a kernel has caused (an illegal access, an assertion, ECC) is sticky: every later
    call reports it, until the process ends. Memory that runs out is not such an error.

    Args:
        device: `cpu` or `cuda:N`.

    Returns:
        What the device says; None if it works.
    """
    if device == "cpu":
        return None
    import torch

    try:
        torch.cuda.synchronize(_index(device))
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"{device} can run nothing any more: {lines[0]}"
    return None


def free_bytes(device: torch.device) -> int | None:
    """What a GPU has left for passes; None for a host, where that is others' too."""
    if device.type == "cpu":
        return None
    import torch

    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def _has_driver() -> bool:
    """Whether this machine has NVIDIA's driver."""
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def _index(device: str) -> int:
    return int(device.removeprefix("cuda:"))
