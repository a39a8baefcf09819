"""Which tensors of a checkpoint a library reads while it loads a model, and what it writes.

Loaders of SGLang and vLLM skip what they do not know and cut what is too large. So every operation
of torch in a load is watched. The memory of its arguments shows which tensor of the checkpoint it
reads, in whole or in part, and which parameter it fills.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pie_driver_sglang.checkpoint.regions import is_covered, region_of
from pie_driver_sglang.checkpoint.tensors import Region

_FEW: Final = 64
"""Names that what is made of several tensors keeps."""
_PADDING: Final = frozenset({"aten::cat", "aten::constant_pad_nd"})
_TO_NUMBER: Final = "aten::_local_scalar_dense"
"""`Tensor.item`, by which libraries load tensors of one element."""
_FROM_NUMBER: Final = "aten::fill_"
_EMPTY: Final = re.compile(r"aten::(new_)?empty")


class TensorSource:
    """A tensor of the checkpoint, or one that was made of such tensors."""

    def __init__(self, names: tuple[str, ...], tensor: torch.Tensor) -> None:
        """Notes where it is."""
        self.names = names
        """Of the checkpoint's tensors that are in it."""
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype
        self.whole = find_region(tensor)
        self.reads: list[Read] = []
        """What was read of it; parts that were only looked at as a view do not count."""


class Read(NamedTuple):
    """A part of a source."""

    region: Region
    shape: tuple[int, ...]


class Reads(NamedTuple):
    """What was read of a tensor of the checkpoint, or of a copy of it."""

    whole: Region
    shape: tuple[int, ...]
    parts: frozenset[Read]

    @property
    def is_complete(self) -> bool:
        """Whether it was all."""
        return is_covered(self.whole, (part.region for part in self.parts))

    @property
    def taken(self) -> str:
        """Its size, where it differs in one direction only."""
        shapes = {part.shape for part in self.parts}
        sizes = [list(shape) for shape in shapes if len(shape) == len(self.shape)]
        if len(sizes) != 1:
            return "a part"
        [size] = sizes
        cut = [at for at, length in enumerate(size) if length != self.shape[at]]
        if len(cut) == 1:
            size[cut[0]] *= len(self.parts)
        return str(tuple(size))


PartialReads = dict[tuple[str, int], Reads]
"""Tensors that were not read to the end by name and 0, and copies of them by their number."""


class Write(NamedTuple):
    """Something that was written into a parameter's memory."""

    region: Region
    names: tuple[str, ...]
    """Tensors of the checkpoint that it came from."""


class Mixed(NamedTuple):
    """Integers that were taken for floating-point numbers, or the reverse."""

    name: str
    stored: torch.dtype
    loaded: torch.dtype


class Padded(NamedTuple):
    """A tensor that was made larger, to fit."""

    name: str
    shape: tuple[int, ...]


class LoadTrace:
    """What happens to a checkpoint's tensors within :meth:`running`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watches the memory of parameters."""
        self.stored: dict[str, TensorSource] = {}
        """The checkpoint's tensors that the library has taken out of it, by name."""
        self.made: dict[str, list[TensorSource]] = {}
        """What was made of them without a change in the number of elements, by the first name."""
        self.failed: tuple[Exception | None, tuple[str, ...]] = (None, ())
        """The last operation's error, and the tensors of the checkpoint that it was about."""
        self.mixed: list[Mixed] = []
        self.padded: list[Padded] = []
        self._sources: dict[int, dict[int, TensorSource]] = {}
        self._writes: dict[int, list[Write]] = {}
        self._number = threading.local()
        """Of a thread, the tensors whose element was last read as a number of Python."""
        # A storage that is referred to has its address for itself, also when its memory is freed.
        self._references: list[Any] = []
        for parameter in parameters:
            self._writes.setdefault(self._key(parameter), [])

    def writes(self, tensor: torch.Tensor) -> list[Write] | None:
        """What was written to a tensor's memory; None if it was no parameter's at the beginning."""
        return self._writes.get(storage_of(tensor))

    def take(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Passes on what is read from the checkpoint."""
        for name, tensor in weights:
            if isinstance(tensor, torch.Tensor):
                source = TensorSource((name,), tensor)
                former = self._source(tensor)
                if former is not None and former.whole == source.whole:
                    # Two names of one piece of memory, of which either may be read.
                    source.reads = former.reads
                self.stored[name] = self._add(source, tensor)
            yield name, tensor

    def partial_reads(self) -> PartialReads:
        """What was read in part; a tensor that was not read at all is not among it."""
        copies = [
            (name, number, source)
            for name, sources in self.made.items()
            for number, source in enumerate(sources, 1)
        ]
        originals = [(name, 0, source) for name, source in self.stored.items()]
        return {
            (name, number): reads
            for name, number, source in (*originals, *copies)
            if source.whole
            and source.reads
            and not (
                reads := Reads(source.whole, source.shape, frozenset(source.reads))
            ).is_complete
        }

    def names(self, tensor: torch.Tensor) -> tuple[str, ...]:
        """The tensors of the checkpoint that a tensor is a part or a copy of."""
        source = self._source(tensor)
        return source.names if source else ()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within it operations are looked at, also those of threads that are started."""
        submit = ThreadPoolExecutor.submit

        def submit_watched(
            executor: ThreadPoolExecutor, call: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Future[Any]:
            return submit(executor, self._watched, call, *args, **kwargs)

        with mock.patch.object(ThreadPoolExecutor, "submit", submit_watched), _Mode(self):
            yield

    def _watched(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with _Mode(self):
            return call(*args, **kwargs)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes what an operation has read and written."""
        if _makes_views(func):
            return
        written = _written(func)
        tensors: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for key, value in (*enumerate(args), *kwargs.items()):
            (targets if key in written else tensors).extend(_tensors(value))
        read = [(tensor, source) for tensor in tensors if (source := self._source(tensor))]
        operation = func._schema.name
        number = getattr(self._number, "names", ()) if operation == _FROM_NUMBER else ()
        for target in targets:
            self._note_write(target, read, number)
        if not read:
            return
        if operation == _TO_NUMBER:
            self._number.names = _names(read)
        storages = {storage_of(tensor) for tensor in (*tensors, *targets)}
        outputs = _tensors(result)
        new = [out for out in outputs if storage_of(out) not in storages]
        if outputs and not new and not targets:
            return
        for tensor, source in read:
            if region := find_region(tensor):
                source.reads.append(Read(region, tuple(tensor.shape)))
        for output in new:
            self._add_made(output, read)
            if operation in _PADDING and len(read) == 1:
                [(tensor, source)] = read
                if output.numel() > tensor.numel():
                    self.padded.append(Padded(source.names[0], tuple(output.shape)))

    def _note_write(
        self,
        target: torch.Tensor,
        read: list[tuple[torch.Tensor, TensorSource]],
        number: tuple[str, ...],
    ) -> None:
        writes = self._writes.get(storage_of(target))
        if writes is None:
            if read and self._source(target) is None:
                self._add(TensorSource(_names(read), target), target)
            return
        if region := find_region(target):
            writes.append(Write(region, _names(read) or number))
        for tensor, source in read:
            if tensor.dtype.is_floating_point != target.dtype.is_floating_point:
                self.mixed.append(Mixed(source.names[0], tensor.dtype, target.dtype))

    def _add_made(
        self, output: torch.Tensor, read: list[tuple[torch.Tensor, TensorSource]]
    ) -> None:
        source = self._add(TensorSource(_names(read), output), output)
        self.mixed += [
            Mixed(other.names[0], tensor.dtype, output.dtype)
            for tensor, other in read
            if output.is_floating_point() and not tensor.is_floating_point()
        ]
        if output.numel() == sum(tensor.numel() for tensor, _ in read):
            self.made.setdefault(source.names[0], []).append(source)

    def _add(self, source: TensorSource, tensor: torch.Tensor) -> TensorSource:
        start = tensor.storage_offset() * tensor.itemsize
        self._sources.setdefault(self._key(tensor), {})[int(start)] = source
        return source

    def _source(self, tensor: torch.Tensor) -> TensorSource | None:
        sources = self._sources.get(storage_of(tensor))
        if not sources:
            return None
        start = int(tensor.storage_offset() * tensor.itemsize)
        if len(sources) == 1 or start in sources:
            return sources.get(start) or next(iter(sources.values()))
        # The part of a tensor that shares its memory with others.
        return sources[max((x for x in sources if x < start), default=min(sources))]

    def _key(self, tensor: torch.Tensor) -> int:
        self._references.append(_refer(tensor))
        return storage_of(tensor)


def unread_parts(ranks: Sequence[PartialReads]) -> Iterator[tuple[str, Reads]]:
    """Tensors that all ranks together have not read to the end, with what they have read."""
    for key in ranks[0]:
        if all(key in found for found in ranks):
            [one, *_] = reads = [found[key] for found in ranks]
            merged = one._replace(parts=frozenset().union(*(x.parts for x in reads)))
            if not merged.is_complete:
                yield key[0], merged


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells a trace of every operation of a thread."""

    def __init__(self, trace: LoadTrace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            tensors = (tensor for value in args for tensor in _tensors(value))
            names = dict.fromkeys(name for x in tensors for name in self._trace.names(x))
            self._trace.failed = (error, tuple(names))
            raise
        self._trace.note(func, args, kwargs, result)
        return result


class Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it is recorded which memory is made without a value, and has got none yet."""

    def __init__(self) -> None:
        """Knows of none."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: dict[int, Any] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory was such when the context ended."""
        return storage_of(tensor) in self._found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation."""
        result = func(*args, **(kwargs or {}))
        if _EMPTY.match(func._schema.name):
            self._found[storage_of(result)] = _refer(result)
        elif args and 0 in _written(func) and isinstance(args[0], torch.Tensor):
            storage = args[0].untyped_storage()
            if args[0].numel() * args[0].itemsize >= storage.nbytes():
                self._found.pop(storage_of(args[0]), None)
        return result


def _refer(tensor: torch.Tensor) -> Any:
    """Keeps the address of a tensor's storage from being given to another one, not its memory."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def storage_of(tensor: torch.Tensor) -> int:
    """Which piece of memory a tensor is a view of."""
    return int(tensor.untyped_storage()._cdata)


def find_region(tensor: torch.Tensor) -> Region | None:
    """The memory of a tensor within its storage."""
    return region_of(int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.itemsize)


def _names(read: list[tuple[torch.Tensor, TensorSource]]) -> tuple[str, ...]:
    names = dict.fromkeys(name for _, source in read for name in source.names)
    return tuple(names)[:_FEW]


def _tensors(value: Any) -> list[torch.Tensor]:
    """Those of an argument or a result."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [item for item in value if isinstance(item, torch.Tensor)]
    return []


@functools.cache
def _makes_views(func: Any) -> bool:
    """Whether all that an operation does is to view memory differently."""
    returned = [value.alias_info for value in func._schema.returns]
    return bool(returned) and all(info and not info.is_write for info in returned)


@functools.cache
def _written(func: Any) -> frozenset[int | str]:
    """The arguments that an operation writes to, by index and by name."""
    arguments = func._schema.arguments
    return frozenset(
        key
        for index, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for key in (index, argument.name)
    )
