"""Adapters by the runtime's ids, on top of SGLang's LoRA manager."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from unittest import mock

import torch
from sglang.srt.configs.model_config import AttentionArch
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
from sglang.srt.lora.utils import (
    auto_detect_lora_target_modules,
    generate_sequence_lengths,
    get_normalized_target_modules,
)
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_lora
from torch.overrides import TorchFunctionMode

from pie_driver_sglang._core import REHEARSAL_ADAPTER
from pie_driver_sglang.errors import AdapterError, StartError, quoted
from pie_driver_sglang.memory.host import Budget
from pie_driver_sglang.srt import groups
from pie_driver_sglang.srt.adapter_files import (
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
from pie_driver_sglang.srt.adapter_loader import Loader

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from pie_driver_sglang.config.options import DriverOptions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What checkpoints call the parts of SGLang's fused layers, in their order."""


class _Prepared(NamedTuple):
    """An adapter as SGLang keeps it, but for its manager's tables."""

    ref: LoRARef
    config: LoRAConfig
    weights: LoRAAdapter
    embeds: bool
    """Whether it changes embeddings or the LM head."""

    @property
    def uid(self) -> str:
        """Its name for SGLang."""
        return str(self.ref.lora_id)


class _Loading(NamedTuple):
    """A load that has begun."""

    adapter_id: int
    read: Future[tuple[Source, _Prepared]]


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

    def __init__(self, manager: LoRAManager, max_loaded: int) -> None:
        self._manager = manager
        self._max_loaded = max_loaded
        self._layers = _layers_of(manager)
        self._sources: dict[int, Source] = {}
        self._resident: OrderedDict[int, _Loaded] = OrderedDict()
        """By the runtime's ids, the least recently used one first."""
        self._numbers = itertools.count()
        self._budget = Budget()
        self._loader = Loader()
        self._aside = groups.aside()
        self._loading: dict[int, _Loading] = {}

    @property
    def slots(self) -> int:
        """Different adapters of a pass, no adapter being one of them."""
        return int(self._manager.max_loras_per_batch)

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        pool = self._manager.memory_pool
        layers = [*pool.A_buffer.values(), *pool.B_buffer.values()]
        tensors = [tensor for buffers in layers for tensor in buffers]
        ends = (pool.embedding_A_buffer, pool.embedding_B_buffer)
        for buffers in (*ends, pool.lm_head_A_buffer, pool.lm_head_B_buffer):
            tensors += buffers.values()
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def begin_load(
        self, number: int, adapter_id: int, path: str, done: Callable[[], object]
    ) -> None:
        """Begins to read one; see :meth:`pie_driver_sglang.engine.ModelEngine.begin_load`."""
        # Named here, where all ranks do the same in the same order.
        uid = self._name(adapter_id)
        read = self._loader.submit(lambda: self._read(uid, path, group=self._aside), done)
        self._loading[number] = _Loading(adapter_id, read)

    def discard_load(self, number: int) -> None:
        """Forgets a load; see :meth:`pie_driver_sglang.engine.ModelEngine.discard_load`."""
        del self._loading[number]

    def finish_load(self, number: int) -> None:
        """Makes an adapter usable; see :meth:`pie_driver_sglang.engine.ModelEngine.finish_load`.

        Raises:
            AdapterError: It does not fit, and nothing has changed.
        """
        adapter_id, read = self._loading.pop(number)
        source, prepared = _agreed(read.result)
        loaded = self._register(adapter_id, prepared)
        former = self._resident.pop(adapter_id, None)
        if former is not None:
            self._forget(former.uid)
        self._resident[adapter_id] = loaded
        self._sources[adapter_id] = source

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
        uids = [self._resident[number].uid if number >= 0 else None for number in adapter_ids]
        batch.lora_ids = uids
        self._manager.fetch_new_loras(set(uids))
        self._manager.prepare_lora_batch(batch)

    def bind_rows(self, adapter_ids: Sequence[int]) -> None:
        """Makes the LM head apply the adapter of each row: one fetched adapter, -1 for none."""
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=len(adapter_ids),
            input_ids=None,
            req_pool_indices=None,
            seq_lens=None,
            out_cache_loc=None,
            seq_lens_sum=0,
        )
        self.bind(batch, adapter_ids)

    def unbind(self) -> None:
        """Makes the next forward pass one without adapters, at no cost."""
        self._manager.reset_lora_batch()

    @contextlib.contextmanager
    def captured(self, most_rows: int) -> Iterator[Callable[[int], None]]:
        """Within it decodes of up to `most_rows` rows can be captured.

        Gives what binds an adapter of all layers to so many rows. From then on the adapters of
        decodes are told in memory that graphs know.
        """
        self._manager.init_cuda_graph_batch_info(most_rows, num_tokens_per_req=1)
        self.load_rehearsal()
        try:
            yield lambda rows: self.bind_rows([REHEARSAL_ADAPTER] * rows)
        finally:
            self.unbind()
            self.drop_rehearsal()

    def embed(self, adapter_ids: Iterable[int]) -> bool:
        """Whether one of these fetched adapters changes the embeddings or the LM head."""
        return any(number >= 0 and self._resident[number].embeds for number in adapter_ids)

    def load_rehearsal(self) -> None:
        """Makes `REHEARSAL_ADAPTER` an adapter of all layers that changes nothing."""
        rank, dtype = self._manager.max_lora_rank, self._manager.dtype
        adapter = assemble(blank(self._layers, rank), self._layers, dtype)
        prepared = self._prepared(self._name(REHEARSAL_ADAPTER), adapter)
        self._resident[REHEARSAL_ADAPTER] = self._register(REHEARSAL_ADAPTER, prepared)

    def drop_rehearsal(self) -> None:
        """Forgets `REHEARSAL_ADAPTER`."""
        self._forget(self._resident.pop(REHEARSAL_ADAPTER).uid)

    def _name(self, adapter_id: int) -> str:
        return f"{adapter_id}.{next(self._numbers)}"

    def _read(
        self, uid: str, path: str | Path, digest: bytes | None = None, group: Any = None
    ) -> tuple[Source, _Prepared]:
        """Reads the same files on all ranks; on the loader's thread in its own group."""
        manager = self._manager

        def step() -> tuple[Source, _Prepared]:
            limits = (self._layers, manager.max_lora_rank, manager.dtype, self._budget)
            with read(path, *limits, digest) as (source, adapter):
                return source, self._prepared(uid, adapter)

        source, prepared = _agreed(step, group)
        if len(set(groups.gathered(source.digest, group))) > 1:
            raise AdapterError(
                f"{quoted(str(source.weights))} has changed while it was read",
                "load the adapter again",
            )
        return source, prepared

    def _register(self, adapter_id: int, prepared: _Prepared) -> _Loaded:
        """Puts an adapter into SGLang's tables and, as the proof that it fits, into a slot."""
        self._make_room(adapter_id)
        try:
            _agreed(lambda: self._put(prepared))
        except AdapterError:
            self._forget(prepared.uid)
            raise
        return _Loaded(prepared.uid, prepared.embeds)

    def _prepared(self, uid: str, adapter: Adapter) -> _Prepared:
        """Has SGLang join the weights of fused layers; may be called on any thread."""
        config = {
            "peft_type": "LORA",
            # Its scaling is in its weights already.
            "r": adapter.rank,
            "lora_alpha": adapter.rank,
            "target_modules": adapter.targets,
        }
        ref = LoRARef(lora_id=uid, lora_name=uid, lora_path=uid, pinned=False)
        # With tables of its own: the manager's belong to the thread that serves.
        manager = copy.copy(self._manager)
        manager.configs, manager.loras, manager.lora_refs = {}, {}, {}
        try:
            result = manager.load_lora_adapter_from_tensors(ref, adapter.tensors, config)
            if not result.success:
                raise ValueError(result.error_message)
        except Exception as error:
            raise _not_taken(error) from error
        return _Prepared(ref, manager.configs[uid], manager.loras[uid], adapter.embeds)

    def _put(self, prepared: _Prepared) -> None:
        """Gives SGLang an adapter, of which it keeps this rank's part in a slot."""
        manager, uid = self._manager, prepared.uid
        manager.configs[uid] = prepared.config
        manager.loras[uid] = prepared.weights
        manager.lora_refs[uid] = prepared.ref
        try:
            manager.fetch_new_loras({uid})
        except Exception as error:
            raise _not_taken(error) from error

    def _make_room(self, adapter_id: int) -> None:
        """Lets the least recently used adapters go, but not the one that is to be replaced."""
        others = [number for number in self._resident if number != adapter_id]
        for number in others[: max(0, len(others) + 1 - self._max_loaded)]:
            self._forget(self._resident.pop(number).uid)

    def _forget(self, uid: str) -> None:
        """Removes all that SGLang knows of an adapter, be it half registered only."""
        manager = self._manager
        manager.memory_pool.remove_lora(uid)
        manager.memory_pool.eviction_policy.remove(uid)
        for table in (manager.configs, manager.loras, manager.lora_refs):
            table.pop(uid, None)


def _not_taken(error: Exception) -> AdapterError:
    return AdapterError(f"SGLang does not take it: {error}", "use an adapter of this very model")


def _agreed(step: Callable[[], T], group: Any = None) -> T:
    """Runs a step of a load, as all ranks do; where it fails on one, it fails on all of them.

    Args:
        step: What to do.
        group: In which ranks agree; see :func:`groups.gathered`.

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
    told = groups.gathered(None if error is None else (error.message, error.hint), group)
    for rank, failure in enumerate(told):
        if failure is not None:
            message, hint = failure
            raise AdapterError(f"on rank {rank}: {message}" if rank else message, hint) from error
    return result


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
    targets = _targets(runner, get_lora().lora_target_modules)
    logger.debug("adapters may change %s", ", ".join(sorted(targets)))
    on_the_host = _on_the_host() if runner.device == "cpu" else contextlib.nullcontext()
    with get_lora().override(lora_target_modules=targets), on_the_host:
        yield


@contextlib.contextmanager
def _on_the_host() -> Iterator[None]:
    """Within it SGLang's LoRA manager can be made without a GPU.

    Its layers pin a tensor of offsets each when they are made, which fails without a GPU's driver;
    its backend pins some for every batch. The former are left where they are, on this thread alone;
    the latter is replaced by `HostLoRABackend`, for managers that are made within it.
    """
    backends = {"torch_native": lambda: HostLoRABackend}
    with _Unpinned(), mock.patch.dict(LORA_SUPPORTED_BACKENDS, backends):
        yield


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


def _targets(runner: ModelRunner, wanted: Iterable[str]) -> set[str]:
    """SGLang's names of the layers to wrap."""
    architecture = type(runner.model).__name__
    if runner.model_config.attention_arch == AttentionArch.MLA:
        raise StartError(
            f"{architecture} uses multi-head latent attention, for which there are no adapters yet",
            hint="remove `enable_lora`",
        )
    modules = dict(runner.model.named_modules())
    found = auto_detect_lora_target_modules(runner.model) - set(EMBEDDINGS)
    if any(isinstance(module, FusedMoE) for module in modules.values()):
        # SGLang would wrap the experts, which checkpoints spell in many ways.
        found -= {"gate_up_proj", "down_proj"}
    own_head = isinstance(getattr(runner.model, "lm_head", None), VocabParallelEmbedding)
    if own_head and isinstance(modules.get("model.embed_tokens"), VocabParallelEmbedding):
        found |= set(EMBEDDINGS)
    targets: set[str] = found if "all" in wanted else get_normalized_target_modules(wanted)
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
    wrapped = [item for layer in manager.lora_modules for item in layer.items()]
    linears = [linear for name, module in wrapped for linear in _linears(name, module)]
    if (table := manager.embed_tokens_module) is not None:
        sizes = (table.vocab_size, table.embed_dim)
        linears.append(Linear("embed_tokens", *sizes, ("embed_tokens",), _base_of(table)))
    if (head := manager.lm_head_module) is not None:
        sizes = (head.embed_dim, head.vocab_size)
        linears.append(Linear("lm_head", *sizes, ("lm_head",), _base_of(head)))
    return {checkpoint_name(linear.name): linear for linear in linears}


def _base_of(module: Any) -> Base:
    """This rank's part of the weight of an embedding or an LM head, without its padding."""
    shard = module.base_layer.shard_indices
    weight = module.weight[: shard.num_org_elements]
    return Base(weight, shard.org_vocab_start_index, module.vocab_size)


def _linears(name: str, module: Any) -> list[Linear]:
    """The parts of a wrapped layer, in the sizes that all ranks have together.

    None of a kind that this driver has no adapters for.
    """
    base = module.base_layer
    parent, _, last = name.rpartition(".")
    if type(module) is QKVParallelLinearWithLoRA:
        queries, *others = base.output_sizes
        # Ranks that share a head of keys and values count it once each.
        shared = [size // base.num_kv_head_replicas for size in others]
        parts, sizes = _FUSED.get(last, ()), [queries, *shared]
    elif type(module) is MergedColumnParallelLinearWithLoRA:
        parts, sizes = _FUSED.get(last, ()), base.output_sizes
    elif type(module) in (ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA):
        parts, sizes = (last,), [base.output_size]
    else:
        return []
    if len(parts) != len(sizes):
        return []
    names = [f"{parent}.{part}" for part in parts]
    fused = tuple(checkpoint_name(part) for part in names)
    return [
        Linear(part, base.input_size, size, fused) for part, size in zip(names, sizes, strict=True)
    ]
