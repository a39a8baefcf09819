"""The memory plan of a model that SGLang is about to load, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.backends.sglang.compat.model import (
    attached_head,
    attention_layer_count,
    kv_dtype,
    recurrent_config,
    state_bytes,
    uses_latent_attention,
)
from pie_driver_sglang.backends.sglang.compat.settings import Resolved
from pie_driver_sglang.backends.weight_sizes import largest_size, measure_host, weight_sizes
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.memory.plan_types import Device, MemorySettings, ModelSizes, Part
from pie_driver_sglang.memory.sizes import Shape, memory_settings, rotary_part, sizes_of_shape

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.model import ModelConfig, ModelRunner
    from pie_driver_sglang.backends.sglang.compat.settings import ServerArgs


def measure(name: str, gpu_id: int, ranks: int) -> Device:
    """What a device has now. Ranks on a CPU share the host's memory evenly."""
    if name == "cpu":
        return measure_host(ranks)
    free, total = torch.cuda.mem_get_info(gpu_id)
    return Device(name, total, free)


def weight_bytes(runner: ModelRunner) -> int:
    """What the parameters and buffers of a loaded model take of its device's memory."""
    device = runner.device
    modules = [module for module in (runner.model, attached_head(runner)) if module is not None]
    tensors = {x for module in modules for x in (*module.parameters(), *module.buffers())}
    return sum(x.numel() * x.itemsize for x in tensors if x.device.type == device)


def settings_of(
    config: DriverConfig, model_config: ModelConfig, args: ServerArgs, device: Device
) -> MemorySettings:
    """What a configuration means for the memory."""
    settings = Resolved(args)
    planned = memory_settings(
        config.driver.options,
        device,
        config.driver.tensor_parallel_size,
        context_length=model_config.context_len,
        page_size=settings.page_size,
        backends=settings.attention_backends,
        deterministic=settings.enable_deterministic_inference,
    )
    return planned._replace(kept_pages=config.driver.kept_pages, max_pages=config.driver.max_pages)


def sizes_of(config: DriverConfig, model_config: ModelConfig, args: ServerArgs) -> ModelSizes:
    """The sizes of a model before its weights are read.

    Raises:
        StartError: The checkpoint is damaged or cannot be read.
    """
    shape, recurrent = _shape_of(model_config), recurrent_config(model_config)
    weights, layers = _weights(config, model_config, shape, args)
    return sizes_of_shape(
        shape,
        weights,
        config.driver.options,
        config.model.hf_config,
        itemsize=model_config.dtype.itemsize,
        kv_itemsize=kv_dtype(args, model_config).itemsize,
        state_bytes=0 if recurrent is None else state_bytes(recurrent, Resolved(args).tp_size),
        layer_weights=layers,
    )


def chosen_experts(model_config: ModelConfig) -> int:
    """Experts that a row takes; 0 for a dense model."""
    return largest_size(model_config.hf_text_config, "num_experts_per_tok")


def _shape_of(model_config: ModelConfig) -> Shape:
    """What SGLang's `ModelConfig` knows of a model, class defaults included."""
    text, hidden = model_config.hf_text_config, model_config.hidden_size
    recurrent, latent = recurrent_config(model_config), uses_latent_attention(model_config)
    inner = largest_size(text, "intermediate_size") or 4 * hidden
    kinds = getattr(text, "rope_parameters", None) or {}
    share = float(getattr(text, "partial_rotary_factor", None) or 1)
    return Shape(
        hidden_size=hidden,
        layers=model_config.num_hidden_layers,
        kv_layers=attention_layer_count(model_config, recurrent),
        vocabulary=model_config.vocab_size,
        heads=model_config.num_attention_heads,
        kv_heads=model_config.get_total_num_kv_heads(),
        head_dim=model_config.head_dim,
        v_head_dim=model_config.v_head_dim,
        latent=model_config.kv_lora_rank + model_config.qk_rope_head_dim if latent else 0,
        inner=inner,
        experts=largest_size(text, "num_experts", "num_local_experts", "n_routed_experts"),
        chosen_experts=chosen_experts(model_config),
        expert_inner=largest_size(text, "moe_intermediate_size") or inner,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        positions=largest_size(text, "max_position_embeddings"),
        rotary_dim=int(model_config.head_dim * share),
        rotary_tables=max(1, sum(isinstance(kind, dict) for kind in kinds.values())),
        recurrent=recurrent is not None,
    )


def _weights(
    config: DriverConfig, model_config: ModelConfig, shape: Shape, args: ServerArgs
) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """All weights with the rotary tables, and those of the layers."""
    settings = Resolved(args)
    weights, layers, _ = weight_sizes(
        config,
        model_config,
        shape,
        dummy=settings.load_format == "dummy",
        quantized=bool(getattr(model_config.hf_config, "quantization_config", None)),
    )
    itemsize, on_host = model_config.dtype.itemsize, settings.device == "cpu"
    rotary = rotary_part(shape, model_config.context_len, itemsize, on_host=on_host)
    return (*weights, rotary), layers
