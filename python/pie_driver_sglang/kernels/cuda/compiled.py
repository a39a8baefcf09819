"""Compiles CUDA C++ sources of this folder by NVRTC, and launches their kernels with PDL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import (
    Device,
    Kernel,
    LaunchConfig,
    ObjectCode,
    Program,
    ProgramOptions,
    Stream,
    TensorMapDescriptor,
)
from cuda.core import launch as launch_kernel
from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle
from cuda.core.utils import FileStreamProgramCache, StridedMemoryView

_NO_STREAM = -1
"""DLPack: no stream to synchronize with."""
_MAX_PORTABLE_CLUSTER = 8
"""Largest portable cluster size, in CTAs."""

_HEADER = "halves.cuh"
"""Prepended to every source."""
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)


def read_source(file: str) -> str:
    """A source with what it includes; compiler errors name the file's own lines."""
    return f"{_read(_HEADER)}{_read(file)}"


def _read(file: str) -> str:
    own = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")

    def included(found: re.Match[str]) -> str:
        line = own.count("\n", 0, found.end()) + 2
        return f'{_read(found[1])}#line {line} "{file}"'

    return f'#line 1 "{file}"\n{_INCLUDE.sub(included, own)}'


def compile_source(file: str, macros: Mapping[str, int], arch: str) -> ObjectCode:
    """Compiles a source of this folder to a cubin; needs no GPU.

    Args:
        file: Its name.
        macros: Its macros.
        arch: Such as ``sm_90a``.

    Raises:
        cuda.core.NVRTCError: It does not compile; the error has the compiler's log.
    """
    source = read_source(file)
    options = ProgramOptions(
        name=file, arch=arch, std="c++17", define_macro=[(k, str(v)) for k, v in macros.items()]
    )
    return Program(source, "c++", options).compile("cubin", cache=_cache())


def arch_of(device: torch.device) -> str:
    """The architecture that kernels of a GPU are compiled for."""
    major, minor = torch.cuda.get_device_capability(device)
    # WGMMA and other architecture-specific features need the suffix "a".
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def _cache() -> FileStreamProgramCache | None:
    """The cache of compiled kernels; None if the user's cache folder is not writable."""
    try:
        return FileStreamProgramCache()
    except OSError:
        return None


def tile_map(matrix: torch.Tensor, box: tuple[int, ...]) -> TensorMapDescriptor:
    """Makes a TMA descriptor with 128-byte swizzle.

    Args:
        matrix: 8- or 16-bit elements; the last dimension is contiguous.
        box: Elements of each dimension; 128 bytes of the last one.
    """
    raw = matrix.view(torch.uint16 if matrix.itemsize == 2 else torch.uint8)
    view = StridedMemoryView.from_dlpack(raw, stream_ptr=_NO_STREAM)
    made: TensorMapDescriptor = view.as_tensor_map(
        box, swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=TensorMapL2Promotion.L2_256B
    )
    return made


class CudaKernel:
    """One kernel on one GPU."""

    def __init__(
        self,
        file: str,
        macros: Mapping[str, int],
        device: torch.device,
        *,
        shared_bytes: int = 0,
        cluster: int = 1,
    ) -> None:
        """Compiles it.

        Args:
            file: The source, which has a kernel of the same name.
            macros: Its macros.
            device: Where it will run.
            shared_bytes: Dynamic shared memory of a CTA.
            cluster: CTAs of a cluster, as in the source.
        """
        self._device = Device(device.index or 0)
        self._device.set_current()
        code = compile_source(file, macros, arch_of(device))
        self._kernel: Kernel = code.get_kernel(file.removesuffix(".cu"))
        self._shared_bytes = shared_bytes
        self._cluster = cluster
        attributes = driver.CUfunction_attribute
        self._set(attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
        if cluster > _MAX_PORTABLE_CLUSTER:
            self._set(attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)

    def launch(self, grid: tuple[int, ...], threads: int, *arguments: Any) -> None:
        """Launches it with PDL on torch's current stream. Can be captured.

        Args:
            grid: CTAs in each dimension.
            threads: Of a CTA.
            *arguments: Tensors, 64-bit integers, and NumPy scalars of other types.
        """
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        config = LaunchConfig(
            grid=grid, block=threads, shmem_size=self._shared_bytes,
            programmatic_stream_serialization=True,
        )  # fmt: skip
        values = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        launch_kernel(stream, config, self._kernel, *values)

    def max_active_clusters(self, grid: tuple[int, ...], threads: int) -> int:
        """Clusters that an idle GPU runs at once."""
        occupancy: Any = self._kernel.occupancy
        stream = Stream.from_handle(torch.cuda.current_stream().cuda_stream)
        config = LaunchConfig(
            grid=(grid[0] // self._cluster, *grid[1:]), cluster=self._cluster, block=threads,
            shmem_size=self._shared_bytes,
        )  # fmt: skip
        return int(occupancy.max_active_clusters(config, stream=stream))

    def _set(self, attribute: driver.CUfunction_attribute, value: int) -> None:
        kernel, device = self._kernel.handle, driver.CUdevice(self._device.device_id)
        (status,) = driver.cuKernelSetAttribute(attribute, value, kernel, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{attribute.name} of {value} is refused: {status.name}")
