"""NVIDIA GPUs by NVML, without creating a CUDA context."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import StartError

_CUDA_LIBRARY: Final = "libcuda.so.1"
_NVML_LIBRARY: Final = "libnvidia-ml.so.1"
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


def visible_gpus(cuda: Cuda) -> int | None:
    """The most GPUs that this process can use; None if only CUDA itself knows.

    Args:
        cuda: What NVML reports.
    """
    lacks_nvml = cuda.has_hardware or not _loads(_NVML_LIBRARY)
    if not cuda.driver and lacks_nvml and _loads(_CUDA_LIBRARY):
        # As in a container that has CUDA without NVML, or may not ask it about a MIG slice's GPU.
        return None
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return len(cuda.gpus)
    names = listed.split(",") if listed else []
    # CUDA ignores what follows an invalid index.
    return min(len(cuda.gpus), names.index("-1") if "-1" in names else len(names))


def prefers_cpu() -> bool:
    """Whether the environment names the CPU as the device where no setting does, as for SGLang."""
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def has_gpu() -> bool:
    """Whether this process may have an NVIDIA GPU: NVML knows one, or only CUDA knows."""
    return visible_gpus(query_cuda(nvml())) != 0


def check_gpus(devices: Sequence[str]) -> None:
    """Check that GPUs exist, before torch is imported or a model is read.

    Args:
        devices: `cpu`, `cpu:N` or `cuda:N` of each rank.

    Raises:
        StartError: This process has no such GPU.
    """
    largest = max((int(name[5:]) for name in devices if name.startswith("cuda:")), default=-1)
    if largest < 0:
        return
    cuda = query_cuda(nvml())
    count = visible_gpus(cuda)
    if count is None or largest < count:
        return
    if count:
        raise StartError(
            f"device cuda:{largest} does not exist: {count} CUDA devices are visible",
            "lower `tp_size`, `dp_size` or `base_gpu_id`, or change `CUDA_VISIBLE_DEVICES`",
        )
    hidden = "`CUDA_VISIBLE_DEVICES` hides them" if cuda.gpus else cuda.problem
    raise StartError(
        f"device cuda:{largest} does not exist: no CUDA device is visible ({hidden})",
        "run on the CPU with the device `cpu`, or `pie-sglang doctor` to see what is missing",
    )


def _loads(library: str) -> bool:
    """Whether a library of NVIDIA's driver is installed."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


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
