"""What a memory plan reads of a model's weights and configuration, for either library."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import psutil
import torch
import transformers

from pie_driver_sglang.checkpoint.tensors import DamagedError, Tensor
from pie_driver_sglang.checkpoint.weights import (
    dense_mlps,
    is_loaded,
    layer_tensors,
    load_settings,
    read_tensors,
    tensors_of_shape,
    weight_parts,
)
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.errors import StartError, reason
from pie_driver_sglang.memory.host import available_bytes
from pie_driver_sglang.memory.plan_types import Device, Part
from pie_driver_sglang.memory.sizes import Shape

logger = logging.getLogger(__name__)


class StoredWeights(NamedTuple):
    """The sizes of a model's weights."""

    parts: tuple[Part, ...]
    """Of all."""
    layers: tuple[Part, ...]
    """Of `parts`, those of the layers."""
    dense_mlps: int
    """Layers with an MLP that is no part of a block with experts; all where no tensor is known by
    name."""


def measure_host(ranks: int = 1) -> Device:
    """The host. Ranks share its free memory evenly."""
    total = psutil.virtual_memory().total
    return Device("cpu", total, min(available_bytes(), total) // ranks)


def largest_size(config: Any, *names: str) -> int:
    """A size in a model's configuration, the largest of layers; 0 where it is missing."""
    value = next(filter(None, (getattr(config, name, None) for name in names)), 0)
    return int(max(value) if isinstance(value, list | tuple) else value)


def weight_sizes(
    config: DriverConfig, model_config: Any, shape: Shape, *, dummy: bool, quantized: bool
) -> StoredWeights:
    """The sizes of a model's weights, which are not read.

    Args:
        config: Names the snapshot.
        model_config: SGLang's or vLLM's `ModelConfig`.
        shape: Of the model.
        dummy: Whether the weights are made up.
        quantized: Whether the checkpoint is quantized.

    Raises:
        StartError: A file is damaged or cannot be read.
    """
    itemsize = model_config.dtype.itemsize
    loading = load_settings(shape, itemsize, quantized=quantized, method=model_config.quantization)
    tensors = _class_tensors(model_config) if dummy else _stored_tensors(config, model_config)
    if not tensors:
        logger.warning("the memory plan estimates the weights by the sizes in config.json")
        tensors = [*tensors_of_shape(shape, itemsize)]
    kept = [tensor for tensor in layer_tensors(tensors) if is_loaded(tensor, loading)]
    mlps = dense_mlps(kept) if kept else shape.layers
    return StoredWeights(weight_parts(tensors, loading), weight_parts(kept, loading), mlps)


def _stored_tensors(config: DriverConfig, model_config: Any) -> list[Tensor]:
    """Those of the snapshot; empty if it has none."""
    stored = getattr(model_config.hf_config, "dtype", None) or model_config.dtype
    if isinstance(stored, str):
        stored = getattr(torch, stored, model_config.dtype)
    try:
        return read_tensors(config.model.snapshot_dir, stored.itemsize)
    except DamagedError as error:
        raise StartError(str(error), "download the snapshot again") from error
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise StartError(
            f"cannot read the sizes of the weights in {config.model.snapshot_dir}: {reason(error)}",
            "check the files' permissions, or download the snapshot again",
        ) from error


def _class_tensors(model_config: Any) -> list[Tensor]:
    """Of the model's class in transformers; empty if it has none, or cannot make it."""
    hf_config = model_config.hf_config
    make: Any = getattr(transformers, hf_config.architectures[0], None)
    if make is None:
        return []
    try:
        with torch.device("meta"):
            parameters = [*make(hf_config).named_parameters()]
    except Exception:
        logger.debug("transformers does not make the model", exc_info=True)
        return []
    itemsize = model_config.dtype.itemsize
    return [
        Tensor(name, tuple(value.shape), value.numel() * itemsize, floating=True)
        for name, value in parameters
    ]
