"""Adapters: SGLang's LoRA manager, its tables, its wrapped layers, and its kernels on a CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.lora.backend.lora_registry import LORA_SUPPORTED_BACKENDS
from sglang.srt.lora.backend.torch_backend import (
    TorchNativeLoRABackend,
    TorchNativeLoRABatchInfo,
)
from sglang.srt.lora.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.mem_pool import LoRAMemoryPool
from sglang.srt.lora.utils import (
    auto_detect_lora_target_modules,
    generate_sequence_lengths,
    get_normalized_target_modules,
    get_target_module_name,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from torch.overrides import TorchFunctionMode

from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch, make_row_batch
from pie_driver_sglang.backends.sglang.compat.settings import Resolved
from pie_driver_sglang.engine.layers.weights import LayerAdapters
from pie_driver_sglang.kernels.gemm.lora import LoraWeights

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import PassContext


_FUSED_TARGETS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""SGLang's names of the matrices of `Layer`, in their order."""


class _OwnPart(NamedTuple):
    """What SGLang asks a wrapped layer for while it copies weights into a slot, known before."""

    down: torch.Tensor | None
    up: torch.Tensor | None

    def slice_lora_a_weights(self, _: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of ``[rank, inputs]``."""
        return self.down

    def slice_lora_b_weights(self, _: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of ``[outputs, rank]``."""
        return self.up


class Prepared(NamedTuple):
    """An adapter as SGLang keeps it, without its manager's tables."""

    ref: LoRARef
    config: LoRAConfig
    weights: LoRAAdapter
    parts: list[dict[str, _OwnPart]]
    """Of each layer this rank's part of the weights, by the names of the wrapped layers."""

    @property
    def uid(self) -> str:
        """Its name for SGLang."""
        return str(self.ref.lora_id)


class WrappedLinear(NamedTuple):
    """A linear layer that applies adapters, in the sizes that all ranks have together."""

    name: str
    inputs: int
    outputs: list[int]
    """Of each of its parts, of which a layer that is not fused has one."""
    is_fused: bool
    weight: torch.Tensor
    """``[outputs, inputs]``: this rank's part of the layer's own."""


class WrappedTable(NamedTuple):
    """An embedding or an LM head that applies adapters."""

    inputs: int
    outputs: int
    weight: torch.Tensor
    """``[rows, hidden]``: the rows of this rank, without padding."""
    first: int
    """Which row of the vocabulary is the first of them."""
    vocabulary: int


class LoraSlots:
    """SGLang's LoRA manager, as `LoraBackend` wants it."""

    library = "SGLang"

    def __init__(self, runner: ModelRunner) -> None:
        self.manager: LoRAManager = runner.lora_manager
        self.slots = int(self.manager.max_loras_per_batch)
        self.max_rank = int(self.manager.max_lora_rank)
        self.dtype: torch.dtype = self.manager.dtype
        self.kernels = Resolved(runner.server_args).lora_backend
        self.slot_ranks = torch.zeros(self.slots, dtype=torch.int32, device=self.manager.device)
        self._known_ranks = [0] * self.slots

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(tensor.numel() * tensor.itemsize for tensor in slot_tensors(self.manager))

    def prepare(
        self, uid: str, rank: int, targets: Sequence[str], tensors: Mapping[str, torch.Tensor]
    ) -> Prepared:
        """Has SGLang join the weights of fused layers, in tables of a copy of the manager.

        It also takes this rank's part of them, which SGLang would copy while steps wait. For a GPU
        all are moved into pinned memory. See `LoraBackend.prepare`.
        """
        manager = self.manager
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
        ref = LoRARef(lora_id=uid, lora_name=uid, lora_path=uid, pinned=False)
        own = copy.copy(manager)
        own.configs, own.loras, own.lora_refs = {}, {}, {}
        result = own.load_lora_adapter_from_tensors(ref, tensors, config)
        if not result.success:
            raise ValueError(result.error_message)
        weights = own.loras[uid]
        pins = manager.device.type == "cuda"
        # SGLang would pin with each copy into a slot, while steps wait. A thread starts on GPU 0.
        with torch.cuda.device(manager.device) if pins else nullcontext():
            if pins:
                weights.pin_weights_in_cpu()
            parts = _own_parts(manager, weights, pins)
        return Prepared(ref, own.configs[uid], weights, parts)

    def put(self, adapter: Prepared) -> None:
        """Registers an adapter, and keeps this rank's part in a slot."""
        _register(self.manager, adapter)
        self.manager.fetch_new_loras({adapter.uid})

    def begin_copy(self, adapter: Prepared) -> SlotCopy:
        """As :meth:`put`, in steps."""
        return SlotCopy(self.manager, adapter)

    def forget(self, uid: str) -> None:
        """Removes all that the manager knows of an adapter, be it half registered only."""
        pool: LoRAMemoryPool = self.manager.memory_pool
        pool.remove_lora(uid)
        pool.eviction_policy.remove(uid)
        for table in (self.manager.configs, self.manager.loras, self.manager.lora_refs):
            table.pop(uid, None)

    def bind(self, context: PassContext, uids: Sequence[str | None]) -> None:
        """Has the next pass apply the adapter of each request, None for none."""
        self._bind(context.native, list(uids))

    def bind_rows(self, uids: Sequence[str | None]) -> None:
        """Has the LM head, or a captured decode, apply the adapter of each row, None for none."""
        self._bind(make_row_batch(len(uids)), list(uids))

    def _bind(self, batch: ForwardBatch, uids: list[str | None]) -> None:
        batch.lora_ids = uids
        self.manager.fetch_new_loras(set(uids))
        self.manager.prepare_lora_batch(batch)

    def unbind(self) -> None:
        """Makes the next pass one without adapters."""
        self.manager.reset_lora_batch()

    def used_slots(self) -> dict[str, int]:
        """The slot of each adapter in one; see `AdapterSlots.used_slots`."""
        slots = {
            uid: slot
            for uid, slot in self.manager.memory_pool.uid_to_buffer_id.items()
            if uid is not None
        }
        ranks = [0] * self.slots
        for uid, slot in slots.items():
            ranks[slot] = int(self.manager.configs[uid].r)
        if ranks != self._known_ranks:
            self._known_ranks = ranks
            self.slot_ranks.copy_(torch.tensor(ranks, dtype=torch.int32))
        return slots

    def layer_adapters(self) -> list[LayerAdapters]:
        """The slots of each layer; see `AdapterSlots.layer_adapters`."""
        pool: LoRAMemoryPool = self.manager.memory_pool
        found = []
        for number, modules in enumerate(self.manager.lora_modules):
            by_target: dict[str, LoraWeights] = {}
            for name, module in modules.items():
                target = name.rpartition(".")[2]
                base = module.base_layer
                parts = getattr(base, "output_partition_sizes", None) or [base.output_size]
                down, up = pool.A_buffer[target][number], pool.B_buffer[target][number]
                by_target[target] = LoraWeights(down, up, tuple(parts))
            found.append(LayerAdapters(*(by_target.get(target) for target in _FUSED_TARGETS)))
        return found

    def bind_by_memory(self, rows: int) -> None:
        """Keeps decodes' adapters where captured graphs read them."""
        selection.lora().bind_by_memory(self.manager, rows)


def slot_tensors(manager: LoRAManager) -> list[torch.Tensor]:
    """The memory of all slots of a manager: `memory_pool` keeps it in six tables."""
    pool: LoRAMemoryPool = manager.memory_pool
    layers = [*pool.A_buffer.values(), *pool.B_buffer.values()]
    tensors = [tensor for buffers in layers for tensor in buffers]
    ends = (pool.embedding_A_buffer, pool.embedding_B_buffer)
    for buffers in (*ends, pool.lm_head_A_buffer, pool.lm_head_B_buffer):
        tensors += buffers.values()
    return tensors


def _own_parts(manager: LoRAManager, weights: LoRAAdapter, pins: bool) -> list[dict[str, _OwnPart]]:
    """This rank's part of each layer's weights; the weights themselves where it has all."""
    targets = manager.memory_pool.target_modules

    def part(whole: torch.Tensor | None, take: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        if whole is None:
            return None
        own = take(whole)
        if own.shape == whole.shape:
            return whole
        return own.pin_memory() if pins else own

    parts = []
    for layer, modules in zip(weights.layers, manager.lora_modules, strict=True):
        found = {
            (get_target_module_name(name, target_modules=targets), "lora_A" in name): weight
            for name, weight in layer.weights.items()
        }
        own = {}
        for name, module in modules.items():
            target = get_target_module_name(name, target_modules=targets)
            down = part(found.get((target, True)), module.slice_lora_a_weights)
            up = part(found.get((target, False)), module.slice_lora_b_weights)
            own[name] = _OwnPart(down, up)
        parts.append(own)
    return parts


def _register(manager: LoRAManager, prepared: Prepared) -> None:
    uid = prepared.uid
    manager.configs[uid] = prepared.config
    manager.loras[uid] = prepared.weights
    manager.lora_refs[uid] = prepared.ref


class SlotCopy:
    """As `LoraSlots.put`, but a few layers at a time, so that passes may run in between.

    Until it is over no pass may bind the adapter. A pass that needs its slot takes it; the copy
    then starts anew, in another slot, and does the rest at once.
    """

    def __init__(self, manager: LoRAManager, prepared: Prepared) -> None:
        """Reserves a slot, and copies nothing yet."""
        self._manager = manager
        self._prepared = prepared
        self._pool: LoRAMemoryPool = manager.memory_pool
        self._next = 0
        _register(manager, prepared)
        with mock.patch.object(self._pool, "load_lora_weight_to_buffer"):
            manager.fetch_new_loras({prepared.uid})
        self._slot: int = self._pool.uid_to_buffer_id[prepared.uid]

    @property
    def layers(self) -> int:
        """Layers of the adapter, the ends of the model (embeddings, LM head) being one."""
        return int(self._pool.num_layer) + 1

    @property
    def bytes(self) -> int:
        """Host memory of the adapter, with all ranks' parts."""
        weights = self._prepared.weights
        tensors = [tensor for layer in weights.layers for tensor in layer.weights.values()]
        tensors += weights.embedding_layers.values()
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def copy(self, layers: int) -> bool:
        """Copies the next layers; returns whether that was all."""
        if self._pool.uid_to_buffer_id.get(self._prepared.uid) != self._slot:
            self._manager.fetch_new_loras({self._prepared.uid})
            return True
        end = min(self._next + layers, self.layers)
        for layer in range(self._next, end):
            self._copy(layer)
        self._next = end
        return end == self.layers

    def _copy(self, layer: int) -> None:
        """Has SGLang copy one layer, in a pool that has no others over the same memory."""
        pool, weights = copy.copy(self._pool), copy.copy(self._prepared.weights)
        ends = layer == pool.num_layer
        modules = [] if ends else [self._prepared.parts[layer]]
        weights.__dict__["layers"] = [] if ends else [weights.layers[layer]]
        pool.num_layer = len(modules)
        if not ends:
            pool.A_buffer = {name: [one[layer]] for name, one in pool.A_buffer.items()}
            pool.B_buffer = {name: [one[layer]] for name, one in pool.B_buffer.items()}
            pool.embedding_A_buffer, pool.embedding_B_buffer = {}, {}
            pool.lm_head_A_buffer, pool.lm_head_B_buffer = {}, {}
            pool.lora_added_tokens_size = 0
            weights.embedding_layers = {}
        manager, uid = self._manager, self._prepared.uid
        tables = (manager.embed_tokens_module, manager.lm_head_module)
        pool.load_lora_weight_to_buffer(uid, self._slot, weights, modules, *tables)


def detect_targets(model: torch.nn.Module) -> set[str]:
    """The names that SGLang has for the layers of a model that it can wrap."""
    found: set[str] = auto_detect_lora_target_modules(model)
    return found


def normalized_targets(names: Iterable[str]) -> set[str]:
    """SGLang's names of layers, some of which it has fused, for those of checkpoints."""
    found: set[str] = get_normalized_target_modules(names)
    return found


def has_experts(model: torch.nn.Module) -> bool:
    """Whether a model has fused experts, which SGLang would wrap by the names of an MLP."""
    return any(isinstance(module, FusedMoE) for module in model.modules())


def has_tables(model: torch.nn.Module) -> bool:
    """Whether embeddings and LM head are what SGLang wraps, under the names that it looks for."""
    embeddings = dict(model.named_modules()).get("model.embed_tokens")
    ends = (embeddings, getattr(model, "lm_head", None))
    return all(isinstance(end, VocabParallelEmbedding) for end in ends)


def wrapped_linears(manager: LoRAManager) -> Iterator[WrappedLinear]:
    """The linear layers that a manager has wrapped; of an unknown kind none."""
    for layer in manager.lora_modules:
        for name, module in layer.items():
            base = module.base_layer
            if type(module) is QKVParallelLinearWithLoRA:
                queries, *others = base.output_sizes
                # Ranks that share a head of keys and values count it once each.
                shared = [size // base.num_kv_head_replicas for size in others]
                yield WrappedLinear(name, base.input_size, [queries, *shared], True, base.weight)
            elif type(module) is MergedColumnParallelLinearWithLoRA:
                yield WrappedLinear(name, base.input_size, base.output_sizes, True, base.weight)
            elif type(module) in (ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA):
                yield WrappedLinear(name, base.input_size, [base.output_size], False, base.weight)


def wrapped_tables(manager: LoRAManager) -> Iterator[tuple[str, WrappedTable]]:
    """The embedding and the LM head, by these names, where a manager has wrapped them."""
    if (table := manager.embed_tokens_module) is not None:
        yield "embed_tokens", _table(table, table.vocab_size, table.embed_dim)
    if (head := manager.lm_head_module) is not None:
        yield "lm_head", _table(head, head.embed_dim, head.vocab_size)


def _table(module: Any, inputs: int, outputs: int) -> WrappedTable:
    shard = module.base_layer.shard_indices
    weight = module.weight[: shard.num_org_elements]
    return WrappedTable(inputs, outputs, weight, shard.org_vocab_start_index, module.vocab_size)


@contextmanager
def on_the_host() -> Iterator[None]:
    """Within it a manager can be made without a GPU, by a patch of `LORA_SUPPORTED_BACKENDS`.

    SGLang's layers pin a tensor of offsets each when they are made, which fails without a GPU's
    driver; its backend pins some for every batch. The former are left where they are, on this
    thread alone; the latter is replaced by `HostLoRABackend`, for managers made within it.
    """
    backends = {"torch_native": lambda: HostLoRABackend}
    with _Unpinned(), mock.patch.dict(LORA_SUPPORTED_BACKENDS, backends):
        yield


class HostLoRABackend(TorchNativeLoRABackend):
    """SGLang's kernels for the CPU, fed without pinned memory, which only a GPU's driver gives."""

    def prepare_lora_batch(
        self,
        forward_batch: ForwardBatch,
        weight_indices: list[int],
        lora_ranks: list[int],
        scalings: list[float],
        use_cuda_graph: bool,
        use_prefill_cuda_graph: bool = False,
    ) -> None:
        """Takes the slot of each request, and the rank and the factor of each slot."""
        lengths = generate_sequence_lengths(forward_batch, device=torch.device("cpu"))
        offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        slots = torch.tensor(weight_indices, dtype=torch.int32)
        ranks = torch.tensor(lora_ranks, dtype=torch.int32)
        factors = torch.tensor(scalings, dtype=torch.float)
        self.batch_info = TorchNativeLoRABatchInfo(
            use_cuda_graph=False,
            bs=len(lengths),
            num_segments=len(lengths),
            max_len=int(lengths.max()),
            seg_lens=lengths,
            seg_lens_cpu=lengths,
            seg_indptr=offsets,
            seg_indptr_cpu=offsets,
            weight_indices=slots,
            weight_indices_cpu=slots,
            lora_ranks=ranks,
            lora_ranks_cpu=ranks,
            scalings=factors,
            scalings_cpu=factors,
            permutation=None,
        )


class _Unpinned(TorchFunctionMode):
    """Within it this thread's calls of torch pin no memory."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Makes a call without what pins."""
        if func is torch.Tensor.pin_memory:
            return args[0]
        options = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **options)
