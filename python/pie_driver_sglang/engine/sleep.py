"""`DeviceMemory`: releases the memory of weights and KV while no request runs, and takes it again.

Tensors keep their identity: their storages are emptied, and later filled again, so all views of
them stay valid. On the CPU the values wait in a temporary file.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Final

import torch

from pie_driver_sglang.engine.control_commands import CUDA_GRAPH_TAG, WEIGHTS_TAG
from pie_driver_sglang.errors import WeightsError

NEEDS_CPU: Final = (
    "the memory of a GPU cannot be released: captured graphs have addresses that would change"
)


class DeviceMemory:
    """The memory of a model's weights and KV pages."""

    def __init__(
        self, device: torch.device, tensors: Mapping[str, Callable[[], Iterable[torch.Tensor]]]
    ) -> None:
        """All of it is there.

        Args:
            device: Where it is.
            tensors: The tensors of `weights` and of `kv_cache`.
        """
        self._device = device
        self._tensors = tensors
        self._kept: dict[str, IO[bytes]] = {}
        self._sizes: dict[str, list[tuple[torch.UntypedStorage, int]]] = {}

    def is_awake(self, tag: str) -> bool:
        """Whether memory is there."""
        return tag not in self._sizes

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
            WeightsError: The device cannot, or there is too little space for the weights.
        """
        if self._device.type != "cpu":
            raise WeightsError(NEEDS_CPU, "stop the server, and start it again")
        named = [tag for tag in tags if tag in self._tensors and tag not in self._sizes]
        storages = {tag: self._storages(tag) for tag in named}
        if WEIGHTS_TAG in storages:
            self._kept[WEIGHTS_TAG] = _stored(storages[WEIGHTS_TAG])
        for tag, found in storages.items():
            self._empty(tag, found)

    def resume(self, tags: Sequence[str]) -> None:
        """Take memory again, with the weights that were there; KV is zeros.

        Raises:
            WeightsError: There is too little memory; nothing has changed.
        """
        for tag in (tag for tag in tags if tag != CUDA_GRAPH_TAG and tag in self._sizes):
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
        unique = {storage.data_ptr(): storage for storage in found if storage.nbytes()}
        if not all(storage.resizable() for storage in unique.values()):
            raise WeightsError(f"the memory of `{tag}` is not torch's own")
        return list(unique.values())

    def _empty(self, tag: str, storages: Sequence[torch.UntypedStorage]) -> None:
        self._sizes[tag] = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)


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
