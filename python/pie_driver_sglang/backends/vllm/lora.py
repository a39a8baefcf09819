"""LoRA of a model of vLLM: which layers take adapters, and the adapters in their slots."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pie_driver_sglang.backends.vllm.compat.lora import LoraLayers, WrappedLayer, adaptable_layers
from pie_driver_sglang.engine.lora.files import Base, Linear, checkpoint_name
from pie_driver_sglang.errors import StartError
from pie_driver_sglang.memory.batch_sizes import MAX_SLOTS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from pie_driver_sglang.config.options import DriverOptions
    from pie_driver_sglang.engine.backend import PassContext

logger = logging.getLogger(__name__)


class HostAdapter(NamedTuple):
    """An adapter in host memory, with all ranks' parts."""

    uid: str
    weights: list[tuple[Any, Any] | None]
    """Of each wrapped layer lora_A and lora_B as it takes them, by part where it is fused."""
    bytes: int


class VllmLora:
    """Implements `LoraBackend`: the slots of vLLM's layers, given to who used one last."""

    library = "vLLM"
    adapter_slots = None
    """Only vLLM's layers apply adapters."""

    def __init__(self, layers: LoraLayers, device: torch.device) -> None:
        """Takes the wrapped layers of a model, with empty slots."""
        self._wrapped = layers
        self._device = device
        self._known: dict[str, HostAdapter] = {}
        self._slot_of: OrderedDict[str, int] = OrderedDict()
        """Slots of adapters, the least recently used one first."""
        self.kernels, self.slots = layers.kernels, layers.slots
        self.max_rank, self.dtype = layers.max_rank, layers.dtype

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        tensors = [tensor for layer in self._wrapped.layers for tensor in layer.slots]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def layers(self) -> dict[str, Linear]:
        """See `LoraBackend.layers`."""
        linears = [linear for layer in self._wrapped.layers for linear in _linears(layer)]
        return {checkpoint_name(linear.name): linear for linear in linears}

    def prepare(
        self, uid: str, rank: int, targets: Sequence[str], tensors: Mapping[str, torch.Tensor]
    ) -> HostAdapter:
        """Sorts the weights by layers, for a GPU in pinned memory; see `LoraBackend.prepare`."""
        pins = self._device.type == "cuda"
        # A thread starts on GPU 0.
        with torch.cuda.device(self._device) if pins else nullcontext():
            kept = {name: x.pin_memory() if pins else x for name, x in tensors.items()}
        size = sum(tensor.numel() * tensor.itemsize for tensor in kept.values())
        return HostAdapter(uid, [_of_layer(layer, kept) for layer in self._wrapped.layers], size)

    def put(self, adapter: HostAdapter) -> None:
        """See `LoraBackend.put`."""
        self._known[adapter.uid] = adapter
        self._fetch([adapter.uid])

    def begin_copy(self, adapter: HostAdapter) -> VllmSlotCopy:
        """See `LoraBackend.begin_copy`."""
        self._known[adapter.uid] = adapter
        return VllmSlotCopy(self, adapter, self._take_slot(adapter.uid, {adapter.uid}))

    def forget(self, uid: str) -> None:
        """See `LoraBackend.forget`."""
        self._known.pop(uid, None)
        self._slot_of.pop(uid, None)

    def bind(self, context: PassContext, uids: Sequence[str | None]) -> None:
        """See `LoraBackend.bind`."""
        extends = context.extends
        counts = [1] * len(uids) if extends is None else extends.seq_lens_cpu
        rows = [uid for uid, count in zip(uids, counts, strict=True) for _ in range(count)]
        self.bind_rows(rows)

    def bind_rows(self, uids: Sequence[str | None]) -> None:
        """See `LoraBackend.bind_rows`."""
        self._fetch([uid for uid in dict.fromkeys(uids) if uid is not None])
        self._wrapped.apply([None if uid is None else self._slot_of[uid] for uid in uids])

    def unbind(self) -> None:
        """See `LoraBackend.unbind`."""
        self._wrapped.stop()

    def unbound(self) -> AbstractContextManager[None]:
        """Within it nothing applies adapters."""
        return self._wrapped.stopped()

    def bind_by_memory(self, rows: int) -> None:
        """See `LoraBackend.bind_by_memory`: vLLM's kernels find their rows in the same memory."""

    def slot_of(self, uid: str) -> int | None:
        """The slot of an adapter; None where it has none."""
        return self._slot_of.get(uid)

    def copy_layers(self, adapter: HostAdapter, slot: int, layers: range) -> None:
        """Copies some layers of an adapter, by their numbers, into a slot."""
        for number in layers:
            module, weights = self._wrapped.layers[number].module, adapter.weights[number]
            if weights is None:
                module.reset_lora(slot)
            else:
                module.set_lora(slot, *weights)

    def _fetch(self, uids: Sequence[str]) -> None:
        """Has adapters, no more than there are slots, in slots."""
        for uid in uids:
            if uid in self._slot_of:
                self._slot_of.move_to_end(uid)
        for uid in uids:
            if uid not in self._slot_of:
                slot = self._take_slot(uid, set(uids))
                adapter = self._known[uid]
                self.copy_layers(adapter, slot, range(len(adapter.weights)))

    def _take_slot(self, uid: str, kept: set[str]) -> int:
        """A slot for an adapter: a free one, or that of the least recently used one of others."""
        free = set(range(self.slots)) - set(self._slot_of.values())
        if free:
            slot = min(free)
        else:
            slot = self._slot_of.pop(next(other for other in self._slot_of if other not in kept))
        self._slot_of[uid] = slot
        return slot


class VllmSlotCopy:
    """Implements `AdapterCopy`.

    Until it is over no pass may bind the adapter. A pass that needs its slot takes it; the copy
    then starts anew, in another slot, and does the rest at once.
    """

    def __init__(self, lora: VllmLora, adapter: HostAdapter, slot: int) -> None:
        """Copies nothing yet."""
        self._lora, self._adapter, self._slot = lora, adapter, slot
        self._next = 0
        self.layers = len(adapter.weights)
        self.bytes = adapter.bytes

    def copy(self, layers: int) -> bool:
        """See `AdapterCopy.copy`."""
        if self._lora.slot_of(self._adapter.uid) != self._slot:
            self._lora.put(self._adapter)
            return True
        end = min(self._next + layers, self.layers)
        self._lora.copy_layers(self._adapter, self._slot, range(self._next, end))
        self._next = end
        return end == self.layers


def wrap_layers(
    config: VllmConfig,
    model: Any,
    options: DriverOptions,
    device: torch.device,
) -> LoraLayers:
    """Has layers of a loaded model take adapters; allocates the slots.

    Args:
        config: The settings.
        model: The model.
        options: The driver's.
        device: Of the model.
    """
    rows = max(config.scheduler_config.max_num_batched_tokens, MAX_SLOTS)
    slots, rank = options.max_loras_per_batch, options.max_lora_rank
    names = choose_layers(model, options)
    return LoraLayers(config, model, names, slots, rank, rows, device)


def choose_layers(model: Any, options: DriverOptions) -> list[str]:
    """The names of the layers that adapters may change, of a model that is built.

    Raises:
        StartError: There are no adapters for the model, or for one of the layers asked for.
    """
    layers, wanted = adaptable_layers(model), set(options.lora_target_modules)
    found = {part for parts in layers.values() for part in parts}
    # Also `qkv_proj`, as vLLM calls the layer that has `q_proj`.
    names = {name: {*parts, name.rpartition(".")[2]} for name, parts in layers.items()}
    missing = wanted.difference({"all"}, *names.values())
    if missing or not found:
        named = ", ".join(sorted(missing)) or "no layer"
        raise StartError(
            f"option `lora_target_modules` asks for {named}, but adapters of "
            f"{type(model).__name__} can change {', '.join(sorted(found)) or 'nothing'}",
            hint="remove `lora_target_modules`, or `enable_lora` where nothing can be changed",
        )
    chosen = [name for name, own in names.items() if "all" in wanted or not wanted.isdisjoint(own)]
    logger.debug("adapters may change %s", ", ".join(chosen))
    return chosen


def _of_layer(layer: WrappedLayer, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any] | None:
    """The weights of a layer, which an adapter has for all parts or for none."""
    if f"{layer.parts[0]}.lora_A.weight" not in tensors:
        return None
    down, up = ([tensors[f"{part}.lora_{side}.weight"] for part in layer.parts] for side in "AB")
    return (down[0], up[0]) if len(layer.parts) == 1 else (down, up)


def _linears(layer: WrappedLayer) -> list[Linear]:
    base = None if layer.table is None else Base(*layer.table)
    fused = tuple(map(checkpoint_name, layer.parts))
    return [
        Linear(part, layer.inputs, size, fused, base)
        for part, size in zip(layer.parts, layer.outputs, strict=True)
    ]
