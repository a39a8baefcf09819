"""A model of vLLM: process groups, the loader, its layers with KV, and its LM head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
    set_custom_all_reduce,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader import get_model_loader
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.worker.workspace import (
    init_workspace_manager,
    is_workspace_manager_initialized,
    lock_workspace,
)

from pie_driver_sglang.backends.vllm.compat.ranks import group_backend, without_named_memory

PAGED_SPECS = (FullAttentionSpec, SlidingWindowSpec)
"""KV that has a row for each token, in pages: windowed layers keep all of it, too."""


class KvLayer(NamedTuple):
    """A layer that keeps KV."""

    name: str
    module: Any
    spec: KVCacheSpec
    backend: Any
    """Its attention backend, a class of vLLM."""


def head_sizes() -> list[int]:
    """Widths of heads that vLLM's CPU attention has kernels for."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    return sizes


def make_groups(config: VllmConfig, rank: int, size: int, device: torch.device) -> None:
    """Makes vLLM's groups over the process group of torch that is there already.

    Args:
        config: The settings.
        rank: This process's.
        size: Ranks.
        device: This rank's.
    """
    backend = group_backend(size, device.type)
    with set_current_vllm_config(config), without_named_memory():
        set_custom_all_reduce(False)
        init_distributed_environment(size, rank, "env://", device.index or 0, backend)
        ensure_model_parallel_initialized(size, 1)
    # Which kernel computes an operation: process-wide, and set by vLLM's workers.
    current_platform.import_ir_kernels()
    config.kernel_config.ir_op_priority.set_default()


def load_model(config: VllmConfig, check: Callable[[Any, Callable[[], None]], None]) -> Any:
    """Builds the model and loads its weights by the loader of `load_format`.

    Args:
        config: The settings.
        check: Is given the built model and what loads its weights, and calls that. Afterwards
            vLLM packs them for its kernels.
    """
    loader: Any = get_model_loader(config.load_config)
    load = loader.load_weights

    def load_checked(model: Any, model_config: Any) -> None:
        check(model, lambda: load(model, model_config))

    loader.load_weights = load_checked
    if config.model_config.is_moe and config.device_config.device_type == "cuda":
        # Layers of experts ask for it in their first pass.
        init_workspace_manager(torch.device("cuda", torch.cuda.current_device()))
    with set_current_vllm_config(config):
        return loader.load_model(vllm_config=config, model_config=config.model_config)


def keep_workspace() -> None:
    """Has the workspace of layers of experts stay where it is: a pass that needs more raises."""
    if is_workspace_manager_initialized():
        lock_workspace()


@contextmanager
def loading_by(model: Any, load: Callable[..., Any]) -> Iterator[None]:
    """Within it a function takes the place of a model's `load_weights`."""
    with mock.patch.object(model, "load_weights", load):
        yield


def kv_layers(config: VllmConfig) -> list[KvLayer]:
    """The layers that keep KV, in the order in which the model was built.

    Those that read another layer's are not among them: :func:`share_kv`.
    """
    found = []
    for name, module in attention_modules(config).items():
        spec = None if _shared(module) else module.get_kv_cache_spec(config)
        if spec is not None:
            found.append(KvLayer(name, module, spec, module.get_attn_backend()))
    return found


def allocate_kv(layer: KvLayer, pages: int, dtype: torch.dtype) -> torch.Tensor:
    """Gives a layer zeroed KV of so many pages: ``[pages, ...]``, page by page in memory."""
    spec: Any = layer.spec
    shape = layer.backend.get_kv_cache_shape(
        pages, spec.block_size, spec.num_kv_heads, spec.head_size
    )
    try:
        order = layer.backend.get_kv_cache_stride_order()
    except NotImplementedError:
        order = tuple(range(len(shape)))
    stored = torch.zeros([shape[axis] for axis in order], dtype=dtype)
    layer.module.kv_cache = stored.permute([order.index(axis) for axis in range(len(shape))])
    return stored


def allocate_pages(
    layer: KvLayer, pages: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeroed keys and values of a layer, ``[pages, page_size, kv_heads, dim]`` each.

    The layer does not know them: its backend is :class:`PagedAttentionBackend`.
    """
    spec: Any = layer.spec
    heads = (pages, spec.block_size, spec.num_kv_heads)
    # Not empty: kernels multiply numbers of the padding page by zero.
    keys = torch.zeros(*heads, spec.head_size, dtype=dtype, device=device)
    values = torch.zeros(*heads, spec.head_size_v, dtype=dtype, device=device)
    return keys, values


def shared_kv(config: VllmConfig) -> dict[str, str]:
    """The names of layers that read another one's KV, with that one's."""
    modules = attention_modules(config)
    return {name: target for name, module in modules.items() if (target := _shared(module))}


def share_kv(config: VllmConfig) -> dict[str, str]:
    """Gives layers that read another one's KV that; their names with the other's."""
    modules, shared = attention_modules(config), shared_kv(config)
    for name, target in shared.items():
        modules[name].kv_cache = modules[target].kv_cache
    return shared


def compute_head(model: Any, states: torch.Tensor) -> torch.Tensor:
    """``[rows, vocabulary]`` logits of hidden states, with the model's cap and scale."""
    logits: torch.Tensor = model.compute_logits(states)
    return logits


def attention_modules(config: VllmConfig) -> dict[str, Any]:
    """The layers with attention, by the names that the model has registered them by."""
    context: dict[str, Any] = config.compilation_config.static_forward_context
    return {name: m for name, m in context.items() if isinstance(m, AttentionLayerBase)}


def _shared(module: Any) -> str | None:
    target: str | None = getattr(module, "kv_sharing_target_layer_name", None)
    return target
