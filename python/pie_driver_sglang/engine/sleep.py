"""`DeviceMemory`: releases the memory of weights and KV while no request runs, and takes it again.

`HostMemory` does so on the CPU, `CudaMemory` (`engine/memory_saver.py`) on a GPU.
"""

from __future__ import annotations

import ctypes
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Final

import torch

from pie_driver_sglang.engine.control_commands import WEIGHTS_TAG
from pie_driver_sglang.errors import WeightsError

TaggedTensors = Mapping[str, Callable[[], Iterable[torch.Tensor]]]
"""The tensors of `weights` and of `kv_cache`; other tags release nothing."""
NEEDS_SAVER: Final = (
    "the memory of a GPU is released only with the option `enable_memory_saver`, which is off"
)


class DeviceMemory(ABC):
    """The memory of a model's weights and KV pages, which is released and taken again by tag."""

    def __init__(self, tensors: TaggedTensors) -> None:
        """All of it is there."""
        self._tensors = tensors
        self._released: set[str] = set()

    def is_awake(self, tag: str) -> bool:
        """Whether memory is there."""
        return tag not in self._released

    def require_awake(self, tag: str) -> None:
        """Check that memory is there.

        Raises:
            WeightsError: It is released.
        """
        if not self.is_awake(tag):
            raise WeightsError(
                f"the memory of `{tag}` is released", "call `/resume_memory_occupation` before"
            )

    def release(self, tags: Sequence[str]) -> None:
        """Give memory back; what is released already stays so.

        Raises:
            WeightsError: The device cannot, or there is too little space for the weights. Tags
                before that of the failure are released.
        """
        awake = [tag for tag in tags if tag in self._tensors and self.is_awake(tag)]
        self._check_release(awake)
        for tag in awake:
            self._release(tag)
            self._released.add(tag)

    def resume(self, tags: Sequence[str]) -> None:
        """Take memory again, with the weights that were there; KV is zeros.

        Raises:
            WeightsError: There is too little memory. Tags before that of the failure are resumed.
        """
        asleep = [tag for tag in tags if not self.is_awake(tag)]
        self._check_resume(asleep)
        for tag in asleep:
            self._resume(tag)
            self._released.discard(tag)

    @abstractmethod
    def _check_release(self, tags: Sequence[str]) -> None:
        """Raise a WeightsError if the memory of these tags, which is there, cannot be released."""

    @abstractmethod
    def _release(self, tag: str) -> None: ...

    @abstractmethod
    def _check_resume(self, tags: Sequence[str]) -> None:
        """Raise a WeightsError if these tags, which are released, do not fit the free memory."""

    @abstractmethod
    def _resume(self, tag: str) -> None: ...


class FixedMemory(DeviceMemory):
    """Memory of a GPU that cannot be released, as the allocator of torch has it."""

    def _check_release(self, tags: Sequence[str]) -> None:
        raise WeightsError(NEEDS_SAVER, "start with the option `enable_memory_saver=true`")

    def _release(self, tag: str) -> None:
        """Is not called: the check before it raises."""

    def _check_resume(self, tags: Sequence[str]) -> None:
        """Nothing is released."""

    def _resume(self, tag: str) -> None:
        """Is not called: nothing is released."""


class HostMemory(DeviceMemory):
    """Memory of the CPU: the values of the weights wait in a temporary file.

    Tensors keep their identity: their storages are emptied, and later filled again, so all views
    of them stay valid. Their addresses change.
    """

    def __init__(self, tensors: TaggedTensors) -> None:
        """All of it is there."""
        super().__init__(tensors)
        self._kept: dict[str, IO[bytes]] = {}
        self._sizes: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def _check_release(self, tags: Sequence[str]) -> None:
        for tag in tags:
            if not all(storage.resizable() for storage in self._storages(tag)):
                raise WeightsError(f"the memory of `{tag}` is not torch's own")

    def _release(self, tag: str) -> None:
        storages = self._storages(tag)
        if tag == WEIGHTS_TAG:
            self._kept[tag] = _stored(storages)
        self._sizes[tag] = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)

    def _check_resume(self, tags: Sequence[str]) -> None:
        """The system says so when it is taken."""

    def _resume(self, tag: str) -> None:
        sizes = self._sizes[tag]
        grown = []
        try:
            for storage, size in sizes:
                storage.resize_(size)
                grown.append(storage)
                ctypes.memset(storage.data_ptr(), 0, size)
            if tag in self._kept:
                _fill(self._kept[tag], [storage for storage, _ in sizes])
        except (RuntimeError, OSError) as error:
            for storage in grown:
                storage.resize_(0)
            raise WeightsError(f"`{tag}` cannot be resumed: {error}", "free memory") from error
        del self._sizes[tag]
        if (kept := self._kept.pop(tag, None)) is not None:
            kept.close()

    def _storages(self, tag: str) -> list[torch.UntypedStorage]:
        """The storages of a tag's tensors, once each."""
        found = (tensor.untyped_storage() for tensor in self._tensors[tag]())
        return list({storage.data_ptr(): storage for storage in found if storage.nbytes()}.values())


def _bytes(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage of the host.

    Not by numpy, with which torch would make the storage one of a fixed size.
    """
    return memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


def _stored(storages: Sequence[torch.UntypedStorage]) -> IO[bytes]:
    """A file without a name that has the bytes of storages."""
    # Closed when they are filled again, or with the process.
    file = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        for storage in storages:
            file.write(_bytes(storage))
        file.flush()
    except OSError as error:
        file.close()
        raise WeightsError(
            f"the weights cannot be kept in {tempfile.gettempdir()}: {error}",
            "set TMPDIR to a folder with more free space",
        ) from error
    return file


def _fill(file: IO[bytes], storages: Sequence[torch.UntypedStorage]) -> None:
    file.seek(0)
    for storage in storages:
        view = _bytes(storage)
        while view:
            count = file.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise OSError("the file of the weights is too short")
            view = view[count:]
