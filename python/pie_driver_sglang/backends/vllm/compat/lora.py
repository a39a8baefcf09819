"""LoRA: vLLM's layers that apply adapters, the slots of their weights, and which rows use which."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    LogitsProcessorWithLoRA,
    LoRAMapping,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
    VocabParallelEmbeddingWithLoRA,
)
from vllm.lora.model_manager import LoRAModelManager, create_lora_manager
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.utils import replace_submodule
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_lora
from vllm.model_executor.utils import get_packed_modules_mapping

MOST_VOCABULARY = 258_048
"""Of an LM head that vLLM applies adapters to."""

_ENDS = ("embed_tokens", "lm_head")
_WHOLE = (ColumnParallelLinearWithLoRA, RowParallelLinearWithLoRA, ReplicatedLinearWithLoRA)
"""Wrappers of layers that a checkpoint has as they are."""
_QKV = (MergedQKVParallelLinearWithLoRA, QKVParallelLinearWithLoRA)
_LINEAR = (*_WHOLE, *_QKV, MergedColumnParallelLinearWithLoRA)
"""Wrappers of linear layers whose parts are known."""


class VocabularyTable(NamedTuple):
    """The weight of an embedding or an LM head, as `Base`."""

    weight: torch.Tensor
    first: int
    rows: int


class WrappedLayer(NamedTuple):
    """A layer that applies adapters, in the sizes that all ranks have together."""

    module: Any
    parts: tuple[str, ...]
    """The layers of a checkpoint that it is made of, under vLLM's names."""
    inputs: int
    outputs: tuple[int, ...]
    """Of each part."""
    table: VocabularyTable | None = None

    @property
    def slots(self) -> list[torch.Tensor]:
        """The memory of its slots: ``[slots, ...]`` of lora_A and of lora_B of each part."""
        stacks = (self.module.lora_a_stacked, self.module.lora_b_stacked)
        return [x for each in stacks for x in (each if isinstance(each, tuple) else (each,))]


def adaptable_layers(model: Any) -> dict[str, tuple[str, ...]]:
    """The layers of a model that vLLM can wrap, with the last names of their parts in checkpoints.

    Not those of a block with experts: adapters of experts are files of another kind. None where
    vLLM has no adapters for the model's class.
    """
    if not supports_lora(model):
        return {}
    packed, settings = get_packed_modules_mapping(model), LoRAConfig()
    modules = dict(model.named_modules())
    mixtures = {name.rpartition(".")[0] for name, x in modules.items() if isinstance(x, MoERunner)}
    found = {}
    for name, module in modules.items():
        inside = any(name.startswith(f"{block}.") for block in mixtures)
        if isinstance(module, LinearBase) and not inside:
            last = name.rpartition(".")[2]
            parts = packed.get(last, [])
            given: dict[str, Any] = {"source_layer": module, "packed_modules_list": parts}
            given |= {"lora_config": settings, "model_config": model.config}
            if any(kind.can_replace_layer(**given) for kind in _LINEAR):
                found[name] = tuple(parts) or (last,)
    return found | {name: (name.rpartition(".")[2],) for name in _ends(model)}


def adapts_tables(config: VllmConfig) -> bool:
    """Whether vLLM can wrap the embedding and the LM head of a model that is not built yet."""
    model_class: Any = get_model_cls(config.model_config)
    vocabulary = config.model_config.get_vocab_size()
    return _has_tables(model_class) and vocabulary <= MOST_VOCABULARY


def splits_inputs(config: VllmConfig) -> bool:
    """Whether the parts of a fused projection of a model have a lora_A each.

    Not where checkpoints have fused them (Phi-3).
    """
    model_class: Any = get_model_cls(config.model_config)
    packed = getattr(model_class, "packed_modules_mapping", {})
    return all(parts != [name] for name, parts in packed.items())


def _has_tables(model: Any) -> bool:
    return supports_lora(model) and set(_ENDS) <= set(model.embedding_modules)


def _ends(model: Any) -> list[str]:
    """The embedding and the LM head, where vLLM wraps both; a tied head has its own name, too."""
    modules = dict(model.named_modules(remove_duplicate=False))
    names = [name for end in _ENDS for name in modules if name.rpartition(".")[2] == end]
    if [name.rpartition(".")[2] for name in names] != list(_ENDS):
        return []
    processor = modules.get(names[-1].removesuffix("lm_head") + "logits_processor")
    plain = (
        _has_tables(model)
        and all(isinstance(modules[name], VocabParallelEmbedding) for name in names)
        and isinstance(processor, LogitsProcessor)
        and processor.vocab_size <= MOST_VOCABULARY
    )
    return names if plain else []


class LoraLayers:
    """The wrapped layers of a model, and which rows of a pass apply which slot.

    Without adapters, a wrapped layer is the layer that it wraps: graphs and passes run nothing
    more than they did before.
    """

    def __init__(
        self,
        config: VllmConfig,
        model: Any,
        names: Sequence[str],
        slots: int,
        rank: int,
        rows: int,
        device: torch.device,
    ) -> None:
        """Wraps layers of a model whose weights are loaded.

        Args:
            config: The settings, in which adapters are off: the base model is as without them.
            model: The model.
            names: Of :func:`adaptable_layers`.
            slots: Adapters on the device.
            rank: Largest rank; one of vLLM's.
            rows: Most rows of a pass, or of logits.
            device: Of the model.
        """
        settings: dict[str, Any] = {"max_lora_rank": rank, "target_modules": list(names)}
        lora_config = LoRAConfig(max_loras=slots, max_cpu_loras=slots, **settings)
        lora_config.verify_with_model_config(config.model_config)
        vocabulary = config.model_config.get_vocab_size()
        with set_current_vllm_config(config):
            manager: LoRAModelManager = create_lora_manager(
                model, rows, rows, vocabulary, lora_config, config, device
            )
        [punica] = manager.punica_wrapper_mapping.values()
        if device.type == "cpu":
            punica = HostPunica(rows, rows, device)
        self.slots, self.max_rank = slots, rank
        dtype: Any = lora_config.lora_dtype
        self.dtype: torch.dtype = dtype
        self.kernels = type(punica).__name__
        self._punica: Any = punica
        self._vocabulary = vocabulary
        self._applies = False
        for name, module in manager.modules.items():
            module.set_mapping(punica)
            self._make_optional(module)
            if isinstance(module, LogitsProcessorWithLoRA):
                # The head itself is not wrapped by more than its processor.
                head = model.get_submodule(name)
                replace_submodule(model, name, getattr(head, "base_layer", head))
        self.layers = [
            layer
            for name, module in manager.modules.items()
            if (layer := _wrapped(model, name, module, manager.packed_modules)) is not None
        ]

    def apply(self, slots: Sequence[int | None]) -> None:
        """From now on rows apply the adapter of their slot, ``[rows]``; None for none."""
        ids = tuple(0 if slot is None else slot + 1 for slot in slots)
        mapping = LoRAMapping(ids, ids, is_prefill=True)
        names: list[int | None] = [slot + 1 for slot in range(self.slots)]
        self._punica.update_metadata(mapping, names, self.slots + 1, self._vocabulary)
        self._applies = True

    def stop(self) -> None:
        """From now on no row applies one."""
        self._applies = False

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Within it no row applies one."""
        former, self._applies = self._applies, False
        try:
            yield
        finally:
            self._applies = former

    def _make_optional(self, module: Any) -> None:
        adapted: Callable[..., Any] = module.forward
        base: Callable[..., Any] = module.base_layer

        def forward(*args: Any, **kwargs: Any) -> Any:
            return (adapted if self._applies else base)(*args, **kwargs)

        module.forward = forward


class HostPunica(PunicaWrapperCPU):
    """LoRA on a CPU: a product for the rows of each adapter.

    vLLM's own copies an adapter's weights for each row. And it takes -1, by which rows without an
    adapter are marked, for the last slot.
    """

    def update_metadata(self, mapping: LoRAMapping, *args: Any, **kwargs: Any) -> None:
        """See `PunicaWrapperBase`."""
        self._update_base_metadata(mapping, *args, **kwargs)
        slots = self.token_lora_indices
        self._rows = [
            (slot, (slots == slot).nonzero().flatten()) for slot in slots.unique().tolist()
        ]

    def _apply_shrink(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
    ) -> None:
        for slot, rows in self._rows:
            if slot >= 0:
                weight = w_t_all[slot, 0].to(y.dtype)
                y[rows, : len(weight)] = scale * (x[rows].to(y.dtype) @ weight.T)

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        part = y[:, y_offset : y_offset + y_slice_size]
        for slot, rows in self._rows:
            if slot >= 0:
                product = x[rows].to(y.dtype) @ w_t_all[slot, 0].to(y.dtype).T
                part[rows] = part[rows] + product if add_inputs else product

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """See `PunicaWrapperBase`."""
        self._apply_expand(y, x, lora_b_stacked, 0, y.shape[1], add_inputs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """See `PunicaWrapperBase`."""
        # The rows' padding of the vocabulary has no weights.
        self.add_lora_linear(
            y, x, (lora_a_stacked,), (lora_b_stacked,), scale, (lora_b_stacked.shape[2],)
        )


def _wrapped(
    model: Any, name: str, module: Any, packed: dict[str, list[str]]
) -> WrappedLayer | None:
    """The sizes of a wrapped layer; None for a kind whose parts are not known."""
    kind, base = type(module), module.base_layer
    if kind is VocabParallelEmbeddingWithLoRA:
        vocabulary = base.org_vocab_size
        return WrappedLayer(module, (name,), vocabulary, (base.embedding_dim,), _table(base))
    if kind is LogitsProcessorWithLoRA:
        head, vocabulary = model.get_submodule(name), base.vocab_size
        return WrappedLayer(module, (name,), module.hidden_size, (vocabulary,), _table(head))
    if kind in _QKV:
        # Ranks that share a head of keys and values count it once each.
        heads = (base.total_num_heads, base.total_num_kv_heads, base.total_num_kv_heads)
        outputs = tuple(count * base.head_size for count in heads)
        if base.v_head_size != base.head_size:
            return None
    elif kind is MergedColumnParallelLinearWithLoRA:
        outputs = tuple(base.output_sizes)
    elif kind in _WHOLE:
        outputs = (base.output_size,)
    else:
        return None
    parts = tuple(packed.get(name, (name,)))
    if len(parts) == 1:
        outputs = (sum(outputs),)
    if len(parts) != len(outputs):
        return None
    return WrappedLayer(module, parts, base.input_size, outputs)


def _table(layer: VocabParallelEmbedding) -> VocabularyTable:
    shard = layer.shard_indices
    weight = layer.weight[: shard.num_org_elements]
    return VocabularyTable(weight, shard.org_vocab_start_index, layer.org_vocab_size)
