"""The memory plan of a model that vLLM is about to load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.backends.weight_sizes import largest_size, measure_host, weight_sizes
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.memory.plan_types import Device, MemorySettings, ModelSizes, Part
from pie_driver_sglang.memory.sizes import Shape, memory_settings, rotary_part, sizes_of_shape

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def measure_device(device: torch.device, config: DriverConfig) -> Device:
    """What a device has now. Ranks on a CPU share the host's memory evenly."""
    if device.type == "cpu":
        return measure_host(config.driver.tensor_parallel_size)
    free, total = torch.cuda.mem_get_info(device)
    return Device(str(device), total, free)


def vllm_settings(config: DriverConfig, resolved: VllmConfig, device: Device) -> MemorySettings:
    """What the options mean for the memory."""
    options = config.driver.options
    settings = memory_settings(
        options,
        device,
        config.driver.tensor_parallel_size,
        context_length=resolved.model_config.max_model_len,
        page_size=options.page_size,
        backends=(options.attention_backend, options.attention_backend),
        deterministic=False,
    )
    return settings._replace(
        # Every attention backend of the vLLM driver plans on the device.
        captures=not options.disable_cuda_graph,
        kept_pages=config.driver.kept_pages,
        max_pages=config.driver.max_pages,
    )


def vllm_sizes(config: DriverConfig, resolved: VllmConfig, device: torch.device) -> ModelSizes:
    """The sizes of a model before its weights are read.

    Raises:
        StartError: The checkpoint is damaged or cannot be read.
    """
    shape, itemsize = _shape_of_config(resolved), resolved.model_config.dtype.itemsize
    weights, dense_mlps = _weight_parts(config, resolved, shape, device)
    options, tables, splits = config.driver.options, 0, True
    if options.enable_lora:
        from pie_driver_sglang.backends.vllm.compat.lora import adapts_tables, splits_inputs

        tables, splits = int(adapts_tables(resolved)), splits_inputs(resolved)
    return sizes_of_shape(
        shape,
        weights,
        options,
        config.model.hf_config,
        itemsize=itemsize,
        kv_itemsize=itemsize,
        # MLPs of models without experts may have any names.
        adapted_mlps=dense_mlps if shape.chosen_experts else shape.layers,
        table_copies=tables,
        splits_inputs=splits,
    )


def _shape_of_config(resolved: VllmConfig) -> Shape:
    model: Any = resolved.model_config
    text, hidden = model.hf_text_config, model.get_hidden_size()
    heads, head_dim = model.model_arch_config.total_num_attention_heads, model.get_head_size()
    layers = model.get_total_num_hidden_layers()
    inner = largest_size(text, "intermediate_size", "ffn_hidden_size") or 4 * hidden
    rotary = getattr(text, "rope_parameters", None) or {}
    share = float(getattr(text, "partial_rotary_factor", None) or 1)
    return Shape(
        hidden_size=hidden,
        layers=layers,
        kv_layers=layers,
        vocabulary=model.get_vocab_size(),
        heads=heads,
        kv_heads=model.get_total_num_kv_heads(),
        head_dim=head_dim,
        v_head_dim=head_dim,
        latent=0,
        inner=inner,
        experts=model.get_num_experts(),
        chosen_experts=expert_choices(resolved),
        expert_inner=largest_size(text, "moe_intermediate_size") or inner,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        positions=largest_size(text, "max_position_embeddings"),
        rotary_dim=int(head_dim * share),
        rotary_tables=max(1, sum(isinstance(kind, dict) for kind in rotary.values())),
    )


def expert_choices(resolved: VllmConfig) -> int:
    """Experts that a token takes; 0 for a dense model."""
    return largest_size(resolved.model_config.hf_text_config, "num_experts_per_tok")


def _weight_parts(
    config: DriverConfig, resolved: VllmConfig, shape: Shape, device: torch.device
) -> tuple[tuple[Part, ...], int]:
    """All that is loaded, and the number of layers with a dense MLP."""
    model: Any = resolved.model_config
    dummy = resolved.load_config.load_format == "dummy"
    stored = weight_sizes(config, model, shape, dummy=dummy, quantized=model.is_quantized)
    context, itemsize = model.max_model_len, model.dtype.itemsize
    rotary = [rotary_part(shape, context, itemsize, on_host=True)]
    if device.type != "cpu":
        # Fused layers have a table of their own.
        rotary.append(rotary_part(shape, context, itemsize, on_host=False))
    return (*stored.parts, *rotary), stored.dense_mlps
