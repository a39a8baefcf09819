"""`FakeSaver`: memory of the host in the place of `torch_memory_saver` and of a GPU.

Memory that is paused has other values, so whoever reads it, or reads what is not kept, computes
something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GARBAGE = 0xFF
"""Bytes of memory that was released: NaN in every floating-point dtype."""


class Pool(NamedTuple):
    """What was allocated in the regions of a tag."""

    keeps: bool
    """Whether its values are copied to the host."""
    storages: dict[int, torch.UntypedStorage]


class FakeSaver:
    """A `MemorySaver`, and the regions of the library for SGLang.

    It fails where the library ends the process: by an AssertionError.
    """

    def __init__(self, free: int = 1 << 60) -> None:
        """Have so many bytes free."""
        self.pools: dict[str, Pool] = {}
        self.kept: dict[str, list[torch.Tensor]] = {}
        self.paused: list[str] = []
        self.calls: list[tuple[str, str]] = []
        self.free = free
        self.cached = 0
        """Bytes that torch would keep of passes that have ended."""

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        """Within it storages belong to a tag."""
        pool = self.pools.setdefault(tag, Pool(enable_cpu_backup, {}))
        assert pool.keeps == enable_cpu_backup
        with _Recorder(pool.storages):
            yield

    def pause(self, tag: str) -> None:
        assert tag not in self.paused, f"{tag} is paused already"
        assert self.calls[-1:] == [("synchronize", "")], "the device may still work"
        self.calls.append(("pause", tag))
        self.paused.append(tag)
        values = [_values(storage) for storage in self.pools[tag].storages.values()]
        if self.pools[tag].keeps:
            self.kept[tag] = [value.clone() for value in values]
        for value in values:
            value.fill_(GARBAGE)
            self.free += value.numel()

    def resume(self, tag: str) -> None:
        assert tag in self.paused, f"{tag} is not paused"
        self.calls.append(("resume", tag))
        self.paused.remove(tag)
        values = [_values(storage) for storage in self.pools[tag].storages.values()]
        self.free -= sum(value.numel() for value in values)
        assert self.free >= 0, "out of memory"
        for value, kept in zip(values, self.kept.pop(tag, ()), strict=False):
            value.copy_(kept)

    def empty_cache(self) -> int:
        freed, self.cached = self.cached, 0
        self.free += freed
        return freed

    def pool_bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        found = [pool.storages for pool in self.pools.values() if pointers & pool.storages.keys()]
        return sum(storage.nbytes() for storages in found for storage in storages.values())

    def free_bytes(self) -> int:
        return self.free

    def synchronize(self) -> None:
        self.calls.append(("synchronize", ""))


class _Recorder(TorchDispatchMode):
    """Keeps the storages of what operators return."""

    def __init__(self, storages: dict[int, torch.UntypedStorage]) -> None:
        super().__init__()
        self._storages = storages

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        # Not what it was given, as for operators in place and views.
        new = {x.data_ptr(): x for x in _storages(found) if x.data_ptr() not in given}
        self._storages.update(new)
        return found


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    """The storages of the tensors in arguments or results."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    storages = (x.untyped_storage() for x in tensors if x.device.type == "cpu")
    return [storage for storage in storages if storage.nbytes()]


def _values(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)
