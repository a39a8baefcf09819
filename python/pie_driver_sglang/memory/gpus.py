"""NVIDIA GPUs by NVML, without creating a CUDA context."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

_NVIDIA: Final = "0x10de"
_DISPLAY_CLASS: Final = "0x03"


class Gpu(NamedTuple):
    """A GPU, by NVML."""

    number: int
    """N of `cuda:N` without `CUDA_VISIBLE_DEVICES`."""
    name: str
    total: int
    """Bytes."""
    free: int
    """Bytes."""
    capability: tuple[int, int]


class Cuda(NamedTuple):
    """NVIDIA's driver and its GPUs."""

    driver: str = ""
    """Its version, e.g. `580.65.06`; empty where there is none."""
    newest: tuple[int, int] = (0, 0)
    """The newest CUDA version that it supports."""
    gpus: tuple[Gpu, ...] = ()
    problem: str = ""
    """NVML's error; empty without one."""
    has_hardware: bool = False
    """Whether a GPU of NVIDIA is on the PCI bus."""


def query_cuda(nvml: Any, pci: Path = Path("/sys/bus/pci/devices")) -> Cuda:
    """Query NVML, which creates no CUDA context.

    Args:
        nvml: The module `pynvml`; None where it is not installed.
        pci: The folder of PCI devices.
    """
    has_hardware = _has_nvidia(pci)
    if nvml is None:
        problem = "the package nvidia-ml-py is missing"
        return Cuda(problem=problem, has_hardware=has_hardware)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Cuda(problem=str(error), has_hardware=has_hardware)
    try:
        return _query(nvml)
    except nvml.NVMLError as error:
        return Cuda(problem=str(error), has_hardware=True)
    finally:
        nvml.nvmlShutdown()


def _query(nvml: Any) -> Cuda:
    number = nvml.nvmlSystemGetCudaDriverVersion()
    gpus = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
        name = _text(nvml.nvmlDeviceGetName(handle))
        gpus.append(Gpu(index, name, memory.total, memory.free, (major, minor)))
    return Cuda(
        driver=_text(nvml.nvmlSystemGetDriverVersion()),
        newest=(number // 1000, number % 1000 // 10),
        gpus=tuple(gpus),
        problem="" if gpus else "the driver shows no GPU",
        has_hardware=True,
    )


def _text(value: str | bytes) -> str:
    # Older versions of the package return bytes.
    return value.decode() if isinstance(value, bytes) else value


def nvml() -> Any:
    """The module of NVML; None where it is not installed."""
    try:
        return import_module("pynvml")
    except ImportError:
        return None


def _has_nvidia(pci: Path) -> bool:
    try:
        devices = list(pci.iterdir())
    except OSError:
        return False
    return any(
        _text_of(device / "vendor") == _NVIDIA
        and _text_of(device / "class").startswith(_DISPLAY_CLASS)
        for device in devices
    )


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
