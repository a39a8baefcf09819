"""The memory plan of a model that vLLM is about to load."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers

from pie_driver_sglang.checkpoint.tensors import DamagedError, Tensor
from pie_driver_sglang.checkpoint.weights import (
    load_settings,
    read_tensors,
    tensors_of_shape,
    weight_parts,
)
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.errors import StartError, reason
from pie_driver_sglang.memory.host import available_bytes
from pie_driver_sglang.memory.plan_types import Device, MemorySettings, ModelSizes, Part
from pie_driver_sglang.memory.sizes import Shape, memory_settings, rotary_part, sizes_of_shape

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)


def measure_host() -> Device:
    """The host, with all of its free memory."""
    total = psutil.virtual_memory().total
    return Device("cpu", total, min(available_bytes(), total))


def vllm_settings(config: DriverConfig, resolved: VllmConfig, device: Device) -> MemorySettings:
    """What the options mean for the memory."""
    options = config.driver.options
    settings = memory_settings(
        options,
        device,
        ranks=1,
        context_length=resolved.model_config.max_model_len,
        page_size=options.page_size,
        backends=(options.attention_backend, options.attention_backend),
        deterministic=False,
    )
    return settings._replace(kept_pages=config.driver.kept_pages, max_pages=config.driver.max_pages)


def vllm_sizes(config: DriverConfig, resolved: VllmConfig) -> ModelSizes:
    """The sizes of a model before its weights are read.

    Raises:
        StartError: The checkpoint is damaged or cannot be read.
    """
    shape, itemsize = _shape_of_config(resolved), resolved.model_config.dtype.itemsize
    return sizes_of_shape(
        shape,
        _weight_parts(config, resolved, shape),
        config.driver.options,
        config.model.hf_config,
        itemsize=itemsize,
        kv_itemsize=itemsize,
    )


def _shape_of_config(resolved: VllmConfig) -> Shape:
    model: Any = resolved.model_config
    text, hidden = model.hf_text_config, model.get_hidden_size()
    heads, head_dim = model.model_arch_config.total_num_attention_heads, model.get_head_size()
    layers = model.get_total_num_hidden_layers()
    inner = _largest(text, "intermediate_size", "ffn_hidden_size") or 4 * hidden
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
        expert_inner=_largest(text, "moe_intermediate_size") or inner,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        positions=_largest(text, "max_position_embeddings"),
        rotary_dim=int(head_dim * share),
        rotary_tables=max(1, sum(isinstance(kind, dict) for kind in rotary.values())),
    )


def expert_choices(resolved: VllmConfig) -> int:
    """Experts that a token takes; 0 for a dense model."""
    return _largest(resolved.model_config.hf_text_config, "num_experts_per_tok")


def _largest(config: Any, *names: str) -> int:
    """A size in a model's configuration, the largest of layers; 0 where it is missing."""
    value = next(filter(None, (getattr(config, name, None) for name in names)), 0)
    return int(max(value) if isinstance(value, list | tuple) else value)


def _weight_parts(config: DriverConfig, resolved: VllmConfig, shape: Shape) -> tuple[Part, ...]:
    model: Any = resolved.model_config
    itemsize = model.dtype.itemsize
    loading = load_settings(
        shape, itemsize, quantized=model.is_quantized, method=model.quantization
    )
    tensors = _listed_tensors(config, resolved)
    if not tensors:
        logger.warning("the memory plan estimates the weights by the sizes in config.json")
        tensors = [*tensors_of_shape(shape, itemsize)]
    rotary = rotary_part(shape, model.max_model_len, itemsize, on_host=True)
    return (*weight_parts(tensors, loading), rotary)


def _listed_tensors(config: DriverConfig, resolved: VllmConfig) -> list[Tensor]:
    """Those of the snapshot, or of the model's class where the weights are made up.

    Empty where neither lists them.

    Raises:
        StartError: A file is damaged or cannot be read.
    """
    model: Any = resolved.model_config
    if resolved.load_config.load_format == "dummy":
        return _parameters(model)
    stored = getattr(model.hf_config, "dtype", None) or model.dtype
    if isinstance(stored, str):
        stored = getattr(torch, stored, model.dtype)
    try:
        return read_tensors(config.model.snapshot_dir, stored.itemsize)
    except DamagedError as error:
        raise StartError(str(error), "download the snapshot again") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartError(
            f"cannot read the sizes of the weights in {config.model.snapshot_dir}: {reason(error)}",
            "check the files' permissions, or download the snapshot again",
        ) from error


def _parameters(model: Any) -> list[Tensor]:
    """Of the class in transformers; empty if it cannot be made."""
    try:
        make: Any = getattr(transformers, model.hf_config.architectures[0])
        with torch.device("meta"):
            parameters = [*make(model.hf_config).named_parameters()]
    except Exception:
        logger.debug("transformers does not make the model", exc_info=True)
        return []
    itemsize = model.dtype.itemsize
    return [
        Tensor(name, tuple(value.shape), value.numel() * itemsize, floating=True)
        for name, value in parameters
    ]
