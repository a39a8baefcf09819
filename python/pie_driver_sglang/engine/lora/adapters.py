"""LoRA adapters by the runtime's ids: in host memory, and in the backend's slots."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from pie_driver_sglang._core import WARM_UP_ADAPTER
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.lora.files import Adapter, Source, assemble, blank, read
from pie_driver_sglang.engine.lora.loader import Loader
from pie_driver_sglang.errors import AdapterError, quoted
from pie_driver_sglang.memory.host import Budget

if TYPE_CHECKING:
    import torch

    from pie_driver_sglang.engine.backend import PassContext
    from pie_driver_sglang.engine.backend_features import AdapterCopy, LoraBackend, PreparedAdapter
    from pie_driver_sglang.engine.control_commands import UnloadAdapter
    from pie_driver_sglang.engine.folded_norms import FoldedNorms

logger = logging.getLogger(__name__)

T = TypeVar("T")

_COPY_BYTES: Final = 32 << 20
"""Of an adapter, to be copied into a slot at once: some milliseconds."""


class _Prepared(NamedTuple):
    """An adapter that was read."""

    adapter: PreparedAdapter
    embeds: bool
    """Whether it changes embeddings or the LM head."""


class _Loading(NamedTuple):
    """A load that has begun."""

    adapter_id: int
    read: Future[tuple[Source, _Prepared]]


class _Copying(NamedTuple):
    """A load that was read, and is being copied into a slot."""

    source: Source
    loaded: _Loaded
    copy: AdapterCopy


class _Loaded(NamedTuple):
    """An adapter in host memory."""

    uid: str
    """Its name for the backend, which no other load ever had."""
    embeds: bool
    """Whether it changes embeddings or the LM head."""


class Adapters:
    """The loaded adapters: at most `max_loaded` of them in host memory, some of these in slots.

    An adapter that had to leave is read from its files again when it is needed. Every rank of a
    model reads the files; all are asked for the same, and a load that fails on one of them fails on
    all, so they have the same adapters at any time.

    Loads are read on a thread. What it shares with the engine's is the model's weights, which
    stay as they are, and the ranks' threads have a group of their own to agree in.
    """

    def __init__(
        self, backend: LoraBackend, max_loaded: int, root: str | Path | None = None
    ) -> None:
        """Loads nothing yet; takes only what lies below `root`, where there is one."""
        self._backend = backend
        self._root = None if root is None else Path(root).resolve()
        self._max_loaded = max_loaded
        self._layers = backend.layers()
        self._sources: dict[int, Source] = {}
        self._resident: OrderedDict[int, _Loaded] = OrderedDict()
        """By the runtime's ids, the least recently used one first."""
        self._numbers = itertools.count()
        self._budget = Budget()
        self._loader = Loader()
        self._thread_group = process_groups.thread_group()
        self._norms: dict[str, torch.Tensor] = {}
        """``[inputs]`` on the host, by layer: weights of the norm before it, if they are folded."""
        self._loading: dict[int, _Loading] = {}
        self._copying: dict[int, _Copying] = {}

    @property
    def slots(self) -> int:
        """Different adapters of a pass, no adapter being one of them."""
        return self._backend.slots

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        return self._backend.slot_bytes

    def fold(self, norms: FoldedNorms) -> None:
        """Has adapters of layers after folded norms multiplied by these, as the layers are.

        To be called before any adapter is loaded.
        """
        slots = self._backend.adapter_slots
        if slots is None:
            raise RuntimeError(f"norms are folded, and {self._backend.library} applies adapters")
        for matrix, norm in norms.pairs():
            self._norms |= dict.fromkeys(slots.inputs_of(matrix), norm.cpu())

    def graph_slots(self) -> list[tuple[int, int]]:
        """Id and device slot of the adapters that graphs of fused layers can apply.

        Those that change embeddings or the LM head are not among them.
        """
        slots = self._backend.adapter_slots
        used = {} if slots is None else slots.used_slots()
        return [
            (number, used[one.uid])
            for number, one in self._resident.items()
            if not one.embeds and one.uid in used
        ]

    def begin_load(
        self, number: int, adapter_id: int, path: str, done: Callable[[], object]
    ) -> None:
        """Begins to read one; see `ModelExecutor.begin_load`."""
        # Named here, where all ranks do the same in the same order.
        uid = self._name(adapter_id)
        read = self._loader.submit(lambda: self._read(uid, path, group=self._thread_group), done)
        self._loading[number] = _Loading(adapter_id, read)

    def discard_load(self, number: int) -> None:
        """Forgets a load; see `ModelExecutor.discard_load`."""
        del self._loading[number]
        copying = self._copying.pop(number, None)
        if copying is not None:
            self._backend.forget(copying.loaded.uid)

    def finish_load(self, number: int) -> bool:
        """Continues a load; see `ModelExecutor.finish_load`.

        Raises:
            AdapterError: It does not fit, and nothing has changed.
        """
        adapter_id, read = self._loading[number]
        try:
            if number not in self._copying:
                source, prepared = _agreed(read.result)
                self._make_room(adapter_id)
                self._copying[number] = self._begin_copy(source, prepared)
            copying = self._copying[number]
            if not self._agreed_on(copying.loaded.uid, lambda: _copy_some(copying.copy)):
                return False
        except AdapterError:
            del self._loading[number]
            self._copying.pop(number, None)
            raise
        del self._loading[number], self._copying[number]
        former = self._resident.pop(adapter_id, None)
        if former is not None:
            self._backend.forget(former.uid)
        # Another load may have ended meanwhile.
        self._make_room(adapter_id)
        self._resident[adapter_id] = copying.loaded
        self._sources[adapter_id] = copying.source
        return True

    def unload(self, command: UnloadAdapter) -> dict[str, Any]:
        """Lets an adapter leave before all others, as soon as its memory is needed."""
        if command.adapter_id in self._resident:
            self._resident.move_to_end(command.adapter_id, last=False)
        return {}

    def fetch(self, adapter_ids: Sequence[int]) -> dict[int, str]:
        """Brings loaded adapters, no more than there are slots, into host memory.

        Returns:
            The reasons of those that are lost.
        """
        lost = {}
        for adapter_id in adapter_ids:
            if adapter_id in self._resident:
                self._resident.move_to_end(adapter_id)
        for adapter_id in adapter_ids:
            if adapter_id not in self._resident:
                source = self._sources[adapter_id]
                try:
                    uid = self._name(adapter_id)
                    _, prepared = self._read(uid, source.weights, source.digest)
                    self._resident[adapter_id] = self._register(adapter_id, prepared)
                except AdapterError as error:
                    lost[adapter_id] = f"{error.message}; {error.hint}"
        return lost

    def bind(self, context: PassContext, adapter_ids: Sequence[int]) -> None:
        """Makes the next forward pass apply the adapter of each of its requests.

        Args:
            context: The pass.
            adapter_ids: One fetched adapter for each request, -1 for none.
        """
        self._backend.bind(context, self._uids(adapter_ids))

    def bind_rows(self, adapter_ids: Sequence[int]) -> None:
        """Makes the LM head apply the adapter of each row: one fetched adapter, -1 for none."""
        self._backend.bind_rows(self._uids(adapter_ids))

    def unbind(self) -> None:
        """Makes the next forward pass one without adapters, at no cost."""
        self._backend.unbind()

    @contextlib.contextmanager
    def captured(self, most_rows: int) -> Iterator[Callable[[int], None]]:
        """Within it decodes of up to `most_rows` rows can be captured.

        From then on decodes take adapter indices from static buffers, so captured graphs stay
        valid.

        Yields:
            Binds the warm-up adapter to so many rows.
        """
        self._backend.bind_by_memory(most_rows)
        self.load_warm_up()
        try:
            yield lambda rows: self.bind_rows([WARM_UP_ADAPTER] * rows)
        finally:
            self.unbind()
            self.drop_warm_up()

    def embed(self, adapter_ids: Iterable[int]) -> bool:
        """Whether one of these fetched adapters changes the embeddings or the LM head."""
        return any(number >= 0 and self._resident[number].embeds for number in adapter_ids)

    def load_warm_up(self) -> None:
        """Makes `WARM_UP_ADAPTER` an adapter of all layers that changes nothing."""
        rank, dtype = self._backend.max_rank, self._backend.dtype
        adapter = assemble(blank(self._layers, rank), self._layers, dtype)
        prepared = self._prepared(self._name(WARM_UP_ADAPTER), adapter)
        self._resident[WARM_UP_ADAPTER] = self._register(WARM_UP_ADAPTER, prepared)

    def drop_warm_up(self) -> None:
        """Forgets `WARM_UP_ADAPTER`."""
        self._backend.forget(self._resident.pop(WARM_UP_ADAPTER).uid)

    def _uids(self, adapter_ids: Sequence[int]) -> list[str | None]:
        """The backend's names of fetched adapters; None for -1."""
        return [self._resident[number].uid if number >= 0 else None for number in adapter_ids]

    def _name(self, adapter_id: int) -> str:
        return f"{adapter_id}.{next(self._numbers)}"

    def _read(
        self, uid: str, path: str | Path, digest: bytes | None = None, group: Any = None
    ) -> tuple[Source, _Prepared]:
        """Reads the same files on all ranks; on the loader's thread in its own group."""
        backend = self._backend

        def step() -> tuple[Source, _Prepared]:
            limits = (self._layers, backend.max_rank, backend.dtype, self._budget)
            with read(path, *limits, digest, self._root) as (source, adapter):
                return source, self._prepared(uid, adapter)

        source, prepared = _agreed(step, group)
        if len(set(process_groups.gathered(source.digest, group))) > 1:
            raise AdapterError(
                f"{quoted(str(source.weights))} has changed while it was read",
                "load the adapter again",
            )
        return source, prepared

    def _begin_copy(self, source: Source, prepared: _Prepared) -> _Copying:
        """Registers an adapter, and reserves a slot for it."""
        uid = prepared.adapter.uid
        copy = self._agreed_on(uid, lambda: self._backend.begin_copy(prepared.adapter))
        return _Copying(source, _Loaded(uid, prepared.embeds), copy)

    def _register(self, adapter_id: int, prepared: _Prepared) -> _Loaded:
        """Registers an adapter and, as the proof that it fits, copies it into a slot."""
        self._make_room(adapter_id)
        uid = prepared.adapter.uid
        self._agreed_on(uid, lambda: self._backend.put(prepared.adapter))
        return _Loaded(uid, prepared.embeds)

    def _agreed_on(self, uid: str, step: Callable[[], T]) -> T:
        """Has the backend do something about an adapter on all ranks; forgets it where one fails.

        Raises:
            AdapterError: One has failed.
        """

        def taken() -> T:
            try:
                return step()
            except Exception as error:
                raise self._refused(error) from error

        try:
            return _agreed(taken)
        except AdapterError:
            self._backend.forget(uid)
            raise

    def _prepared(self, uid: str, adapter: Adapter) -> _Prepared:
        """Has the backend join the weights of fused layers; may be called on any thread."""
        try:
            tensors = self._folded(adapter.tensors)
            prepared = self._backend.prepare(uid, adapter.rank, adapter.targets, tensors)
        except Exception as error:
            raise self._refused(error) from error
        return _Prepared(prepared, adapter.embeds)

    def _folded(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Weights for rows that are normalized without the weights of their norm."""
        found = dict(tensors)
        for layer, norm in self._norms.items():
            name = f"{layer}.lora_A.weight"
            if name in found:
                down = found[name]
                found[name] = (down.float() * norm.float()).to(down.dtype)
        return found

    def _refused(self, error: Exception) -> AdapterError:
        text = f"{self._backend.library} does not take it: {error}"
        return AdapterError(text, "use an adapter of this very model")

    def _make_room(self, adapter_id: int) -> None:
        """Lets the least recently used adapters go, but not the one that is to be replaced."""
        others = [number for number in self._resident if number != adapter_id]
        for number in others[: max(0, len(others) + 1 - self._max_loaded)]:
            self._backend.forget(self._resident.pop(number).uid)


def _copy_some(copy: AdapterCopy) -> bool:
    """Copies as many layers as make a short pause for others; returns whether that was all.

    All ranks copy the same ones: they have the same files.
    """
    return copy.copy(max(1, _COPY_BYTES * copy.layers // max(1, copy.bytes)))


def _agreed(step: Callable[[], T], group: Any = None) -> T:
    """Runs a step of a load, as all ranks do; where it fails on one, it fails on all of them.

    Args:
        step: What to do.
        group: In which ranks agree; see :func:`process_groups.gathered`.

    Raises:
        AdapterError: What the first rank that failed says, the same on all ranks.
    """
    error: AdapterError | None = None
    try:
        result = step()
    except AdapterError as refusal:
        error = refusal
    except Exception as unexpected:
        logger.exception("an adapter cannot be taken", extra={"kind": "load"})
        text = f"{type(unexpected).__name__}: {unexpected}"
        error = AdapterError(text, "the traceback above says where")
    failures = process_groups.gathered(
        None if error is None else (error.message, error.hint), group
    )
    for rank, failure in enumerate(failures):
        if failure is not None:
            message, hint = failure
            raise AdapterError(f"on rank {rank}: {message}" if rank else message, hint) from error
    return result
