"""Records launches of GPU kernels in place of running them, to compile the kernels ahead of time.

Launch code runs as it is, with fake tensors (`torch._subclasses.FakeTensorMode`) and without a GPU:
`JITFunction.run` specializes a Triton kernel for its arguments as in a launch, and `CudaKernel`
takes its macros.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime import build
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from pie_driver_sglang.kernels.cuda import compiled

UTILITIES: Final = "cuda_utils"
"""Triton's name of the module that launches kernels."""
_NO_DEVICE: Final = -1
"""The device number of recorded launches: kernels of real ones are kept by theirs."""


class KernelVariant(NamedTuple):
    """A kernel, specialized for arguments and options."""

    name: str
    key: str
    """A hash of everything that its binary depends on besides compiler and GPU."""
    compile: Callable[[], object]
    """Compiles it into the cache of its compiler; needs no GPU."""


@contextlib.contextmanager
def recorded_launches(arch: str) -> Iterator[dict[str, KernelVariant]]:
    """Within it, kernels are recorded and nothing is launched. Triton's driver must know a target.

    Args:
        arch: Of kernels in CUDA C++, such as ``sm_90a``.

    Yields:
        What was launched so far, by :attr:`KernelVariant.key`.
    """
    recorder = _Recorder(arch)
    run = JITFunction.run

    def warm_up(kernel: JITFunction[Any], *args: Any, **options: Any) -> object:
        return run(kernel, *args, **{**options, "warmup": True})

    def specialized(kernel: JITFunction[Any], *args: Any) -> object:
        return recorder.add_triton(kernel, *args)

    replaced: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", warm_up),
        (JITFunction, "_do_compile", specialized),
        (driver.active, "get_current_device", lambda: _NO_DEVICE),
        (driver.active, "get_current_stream", lambda _: 0),
        (FakeTensor, "data_ptr", _offset_bytes),
        (compiled, "CudaKernel", recorder.add_cuda),
        (compiled, "tile_map", lambda *_: None),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        try:
            yield recorder.found
        finally:
            recorder.forget()


class _Recorder:
    """The kernels of launches so far."""

    def __init__(self, arch: str) -> None:
        self.found: dict[str, KernelVariant] = {}
        self._arch = arch
        self._touched: set[JITFunction[Any]] = set()

    def add_triton(
        self,
        kernel: JITFunction[Any],
        key: Any,
        signature: Any,
        device: int,
        constants: Any,
        options: Any,
        attributes: Any,
        *_: Any,
    ) -> object:
        """Takes the place of Triton's ``JITFunction._do_compile``; returns a stand-in."""
        kernels, _, target, *_ = kernel.device_caches[device]
        source = ASTSource(kernel, signature, constants, attributes)
        identity = f"{source.hash()}{options.hash()}"
        compile_source = functools.partial(_compile_triton, source, target, options.__dict__)
        self.found.setdefault(identity, KernelVariant(source.name, identity, compile_source))
        self._touched.add(kernel)
        # A second launch of the same finds it.
        kernels[key] = self
        return self

    def add_cuda(
        self, file: str, macros: Mapping[str, int], *_: object, **__: object
    ) -> _UnlaunchedKernel:
        """Takes the place of :class:`CudaKernel`."""
        text = json.dumps([compiled.read_source(file), sorted(macros.items()), self._arch])
        identity = hashlib.sha256(text.encode()).hexdigest()
        compile_file = functools.partial(compiled.compile_source, file, dict(macros), self._arch)
        self.found.setdefault(identity, KernelVariant(file, identity, compile_file))
        return _UnlaunchedKernel()

    def forget(self) -> None:
        """Removes the stand-ins, which are of one target."""
        for kernel in self._touched:
            kernel.device_caches.pop(_NO_DEVICE, None)


class _UnlaunchedKernel:
    """Stands in for a :class:`CudaKernel`."""

    def launch(self, *_: object) -> None:
        """Does nothing."""

    def max_active_clusters(self, *_: object) -> int:
        """As if all fitted."""
        return sys.maxsize


def _compile_triton(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> None:
    """Compiles a kernel, and the C function that launches it, where it has one of its own."""
    kernel = triton.compile(source, target=target, options=options)
    # Triton 3.8 launches all kernels by one function of its utilities.
    if hasattr(nvidia, "make_launcher"):
        with _unloaded_modules():
            nvidia.CudaLauncher(kernel.src, kernel.metadata)


def launch_utilities() -> list[KernelVariant]:
    """What every launch of Triton needs besides its kernel: the C functions that call CUDA.

    Triton 3.8 has the folders of NVIDIA's driver in the key of its cache, so a host without that
    driver could only compile them in vain: there the list is empty.
    """
    by_file = hasattr(nvidia, "compile_module_from_file")
    if by_file and not _has_cuda_driver():
        return []
    return [KernelVariant(UTILITIES, UTILITIES, _compile_utilities)]


def _compile_utilities() -> None:
    source = Path(nvidia.dirname, "driver.c")
    with _unloaded_modules():
        links = (nvidia.library_dirs(), nvidia.include_dirs, nvidia.libraries)
        if hasattr(nvidia, "compile_module_from_file"):
            build.compile_module_from_file(str(source), UTILITIES, *links)
        else:
            text = source.read_text(encoding="utf-8")
            build.compile_module_from_src(text, UTILITIES, *links)


def _has_cuda_driver() -> bool:
    """Whether NVIDIA's driver is installed, to link against."""
    try:
        nvidia.library_dirs()
    except (AssertionError, OSError, subprocess.CalledProcessError):
        return False
    return True


@contextlib.contextmanager
def _unloaded_modules() -> Iterator[None]:
    """Within it Triton compiles C modules and does not load them; a host without a GPU can link."""
    unloaded = SimpleNamespace(launch=None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(build, "_load_module_from_path", lambda *_: unloaded))
        if not _has_cuda_driver():
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            _link_stub(Path(folder, "libcuda.so.1"))
            libraries = [nvidia.libdevice_dir, folder]
            stack.enter_context(mock.patch.object(nvidia, "library_dirs", lambda: libraries))
        yield


def _link_stub(path: Path) -> None:
    """Makes an empty library to link against, where NVIDIA's driver is not installed."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or "clang"
    subprocess.check_call(
        [compiler, "-shared", f"-Wl,-soname,{path.name}", "-x", "c", os.devnull, "-o", path]
    )


def _offset_bytes(tensor: torch.Tensor) -> int:
    """The address of a fake tensor whose storage begins at 0: allocations are aligned."""
    return int(tensor.storage_offset()) * tensor.element_size()
