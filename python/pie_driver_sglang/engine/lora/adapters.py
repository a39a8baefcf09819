"""Adapters by the runtime's ids, on top of SGLang's LoRA manager."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from pie_driver_sglang._core import WARM_UP_ADAPTER
from pie_driver_sglang.backends.sglang.compat import lora
from pie_driver_sglang.backends.sglang.compat.lora import LoRAManager, WrappedLinear, WrappedTable
from pie_driver_sglang.backends.sglang.compat.model import uses_latent_attention
from pie_driver_sglang.backends.sglang.compat.settings import lora_targets, lora_targets_changed
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.lora.files import (
    EMBEDDINGS,
    Adapter,
    Base,
    Linear,
    Source,
    assemble,
    blank,
    checkpoint_name,
    read,
)
from pie_driver_sglang.engine.lora.loader import Loader
from pie_driver_sglang.errors import AdapterError, StartError, quoted
from pie_driver_sglang.memory.host import Budget

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch
    from pie_driver_sglang.config.options import DriverOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_COPY_BYTES: Final = 32 << 20
"""Of an adapter, to be copied into a slot at once: some milliseconds."""
_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What checkpoints call the parts of SGLang's fused layers, in their order."""


class _Prepared(NamedTuple):
    """An adapter that was read."""

    adapter: lora.Prepared
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
    slot: lora.SlotCopy


class _Loaded(NamedTuple):
    """An adapter in host memory."""

    uid: str
    """Its name for SGLang, which no other load ever had."""
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
        self, manager: LoRAManager, max_loaded: int, root: str | Path | None = None
    ) -> None:
        """Loads nothing yet; takes only what lies below `root`, where there is one."""
        self._manager = manager
        self._root = None if root is None else Path(root).resolve()
        self._max_loaded = max_loaded
        self._layers = _layers_of(manager)
        self._sources: dict[int, Source] = {}
        self._resident: OrderedDict[int, _Loaded] = OrderedDict()
        """By the runtime's ids, the least recently used one first."""
        self._numbers = itertools.count()
        self._budget = Budget()
        self._loader = Loader()
        self._thread_group = process_groups.thread_group()
        self._loading: dict[int, _Loading] = {}
        self._copying: dict[int, _Copying] = {}

    @property
    def slots(self) -> int:
        """Different adapters of a pass, no adapter being one of them."""
        return int(self._manager.max_loras_per_batch)

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        tensors = lora.slot_tensors(self._manager)
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

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
            lora.forget(self._manager, copying.loaded.uid)

    def finish_load(self, number: int) -> bool:
        """Goes on with a load; see `ModelExecutor.finish_load`.

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
            if not self._agreed_on(copying.loaded.uid, lambda: _copy_some(copying.slot)):
                return False
        except AdapterError:
            del self._loading[number]
            self._copying.pop(number, None)
            raise
        del self._loading[number], self._copying[number]
        former = self._resident.pop(adapter_id, None)
        if former is not None:
            lora.forget(self._manager, former.uid)
        # Another load may have ended meanwhile.
        self._make_room(adapter_id)
        self._resident[adapter_id] = copying.loaded
        self._sources[adapter_id] = copying.source
        return True

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

    def bind(self, batch: ForwardBatch, adapter_ids: Sequence[int]) -> None:
        """Makes the next forward pass apply the adapter of each request of its batch.

        Args:
            batch: The pass.
            adapter_ids: One fetched adapter for each request, -1 for none.
        """
        lora.bind(self._manager, batch, self._uids(adapter_ids))

    def bind_rows(self, adapter_ids: Sequence[int]) -> None:
        """Makes the LM head apply the adapter of each row: one fetched adapter, -1 for none."""
        lora.bind_rows(self._manager, self._uids(adapter_ids))

    def unbind(self) -> None:
        """Makes the next forward pass one without adapters, at no cost."""
        lora.unbind(self._manager)

    @contextlib.contextmanager
    def captured(self, most_rows: int) -> Iterator[Callable[[int], None]]:
        """Within it decodes of up to `most_rows` rows can be captured.

        Gives what binds an adapter of all layers to so many rows. From then on the adapters of
        decodes get them in memory that graphs know.
        """
        lora.bind_by_memory(self._manager, most_rows)
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
        rank, dtype = self._manager.max_lora_rank, self._manager.dtype
        adapter = assemble(blank(self._layers, rank), self._layers, dtype)
        prepared = self._prepared(self._name(WARM_UP_ADAPTER), adapter)
        self._resident[WARM_UP_ADAPTER] = self._register(WARM_UP_ADAPTER, prepared)

    def drop_warm_up(self) -> None:
        """Forgets `WARM_UP_ADAPTER`."""
        lora.forget(self._manager, self._resident.pop(WARM_UP_ADAPTER).uid)

    def _uids(self, adapter_ids: Sequence[int]) -> list[str | None]:
        """SGLang's names of fetched adapters; None for -1."""
        return [self._resident[number].uid if number >= 0 else None for number in adapter_ids]

    def _name(self, adapter_id: int) -> str:
        return f"{adapter_id}.{next(self._numbers)}"

    def _read(
        self, uid: str, path: str | Path, digest: bytes | None = None, group: Any = None
    ) -> tuple[Source, _Prepared]:
        """Reads the same files on all ranks; on the loader's thread in its own group."""
        manager = self._manager

        def step() -> tuple[Source, _Prepared]:
            limits = (self._layers, manager.max_lora_rank, manager.dtype, self._budget)
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
        """Puts an adapter into SGLang's tables, and reserves a slot for it."""
        uid = prepared.adapter.uid
        slot = self._agreed_on(uid, lambda: lora.SlotCopy(self._manager, prepared.adapter))
        return _Copying(source, _Loaded(uid, prepared.embeds), slot)

    def _register(self, adapter_id: int, prepared: _Prepared) -> _Loaded:
        """Puts an adapter into SGLang's tables and, as the proof that it fits, into a slot."""
        self._make_room(adapter_id)
        uid = prepared.adapter.uid
        self._agreed_on(uid, lambda: lora.put(self._manager, prepared.adapter))
        return _Loaded(uid, prepared.embeds)

    def _agreed_on(self, uid: str, step: Callable[[], T]) -> T:
        """Has SGLang do something about an adapter on all ranks; forgets it where one fails.

        Raises:
            AdapterError: One has failed.
        """

        def taken() -> T:
            try:
                return step()
            except Exception as error:
                raise _not_taken(error) from error

        try:
            return _agreed(taken)
        except AdapterError:
            lora.forget(self._manager, uid)
            raise

    def _prepared(self, uid: str, adapter: Adapter) -> _Prepared:
        """Has SGLang join the weights of fused layers; may be called on any thread."""
        try:
            prepared = lora.prepare_adapter(
                self._manager, uid, adapter.rank, adapter.targets, adapter.tensors
            )
        except Exception as error:
            raise _not_taken(error) from error
        return _Prepared(prepared, adapter.embeds)

    def _make_room(self, adapter_id: int) -> None:
        """Lets the least recently used adapters go, but not the one that is to be replaced."""
        others = [number for number in self._resident if number != adapter_id]
        for number in others[: max(0, len(others) + 1 - self._max_loaded)]:
            lora.forget(self._manager, self._resident.pop(number).uid)


def _copy_some(slot: lora.SlotCopy) -> bool:
    """Copies as many layers as make a short pause for others; returns whether that was all.

    All ranks copy the same ones: they have the same files.
    """
    return slot.copy(max(1, _COPY_BYTES * slot.layers // max(1, slot.bytes)))


def _not_taken(error: Exception) -> AdapterError:
    return AdapterError(f"SGLang does not take it: {error}", "use an adapter of this very model")


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


def server_args(options: DriverOptions) -> dict[str, Any]:
    """The fields of `ServerArgs` about adapters."""
    if not options.enable_lora:
        return {}
    return {
        "enable_lora": True,
        "max_lora_rank": options.max_lora_rank,
        "lora_target_modules": list(options.lora_target_modules),
        "max_loras_per_batch": options.max_loras_per_batch,
        "max_loaded_loras": options.max_loaded_loras,
        "lora_backend": options.lora_backend,
    }


@contextlib.contextmanager
def fitting(runner: ModelRunner) -> Iterator[None]:
    """Within it the runner, which has loaded its model, can make its LoRA manager.

    Raises:
        StartError: There are no adapters for the model, or for one of the layers asked for.
    """
    targets = _targets(runner, lora_targets())
    logger.debug("adapters may change %s", ", ".join(sorted(targets)))
    on_the_host = lora.on_the_host() if runner.device == "cpu" else contextlib.nullcontext()
    with lora_targets_changed(targets), on_the_host:
        yield


def _targets(runner: ModelRunner, wanted: Iterable[str]) -> set[str]:
    """SGLang's names of the layers to wrap."""
    architecture = type(runner.model).__name__
    if uses_latent_attention(runner.model_config):
        raise StartError(
            f"{architecture} uses multi-head latent attention, for which there are no adapters yet",
            hint="remove `enable_lora`",
        )
    found = lora.detect_targets(runner.model) - set(EMBEDDINGS)
    if lora.has_experts(runner.model):
        # SGLang would wrap the experts, which checkpoints spell in many ways.
        found -= {"gate_up_proj", "down_proj"}
    if lora.has_tables(runner.model):
        found |= set(EMBEDDINGS)
    targets = found if "all" in wanted else lora.normalized_targets(wanted)
    if not targets or targets - found:
        named = ", ".join(sorted(targets - found)) or "no layer"
        raise StartError(
            f"option `lora_target_modules` asks for {named}, "
            f"but adapters of {architecture} can change {', '.join(sorted(found)) or 'nothing'}",
            hint="remove `lora_target_modules`, or `enable_lora` where nothing can be changed",
        )
    return targets


def _layers_of(manager: LoRAManager) -> dict[str, Linear]:
    """The layers that take adapters, by the names that checkpoints have for them."""
    linears = [linear for layer in lora.wrapped_linears(manager) for linear in _linears(layer)]
    linears += [_table(name, table) for name, table in lora.wrapped_tables(manager)]
    return {checkpoint_name(linear.name): linear for linear in linears}


def _table(name: str, table: WrappedTable) -> Linear:
    base = Base(table.weight, table.first, table.vocabulary)
    return Linear(name, table.inputs, table.outputs, (name,), base)


def _linears(layer: WrappedLinear) -> list[Linear]:
    """The parts of a wrapped layer; none of a kind that this driver has no adapters for."""
    parent, _, last = layer.name.rpartition(".")
    parts = _FUSED.get(last, ()) if layer.is_fused else (last,)
    if len(parts) != len(layer.outputs):
        return []
    names = [f"{parent}.{part}" for part in parts]
    fused = tuple(checkpoint_name(part) for part in names)
    return [
        Linear(part, layer.inputs, size, fused)
        for part, size in zip(names, layer.outputs, strict=True)
    ]
