"""Model sizes from `config.json`, for a memory plan without SGLang.

`backends/sglang/measure.py` reads the same shape from SGLang's `ModelConfig`; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.checkpoint.tensors import DamagedError, LoadSettings, Tensor
from pie_driver_sglang.checkpoint.weights import (
    layer_tensors,
    load_settings,
    read_tensors,
    tensors_of_shape,
    weight_parts,
)
from pie_driver_sglang.config.arch import context_length, text_config, vocab_size
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.errors import ConfigError, quoted
from pie_driver_sglang.memory.plan_types import SHARDED, Device, MemorySettings, ModelSizes, Part
from pie_driver_sglang.memory.sizes import Shape, memory_settings, rotary_part, sizes_of_shape

ITEMSIZES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element, by torch's dtype names."""
_LATENT_HEAD: Final = 256
"""SGLang's head dimension for latent attention (MLA)."""
_RECURRENT_KEYS: Final = (
    "conv_L_cache",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "ssm_state_size",
)
_ATTENDING: Final = frozenset(
    {"attention", "chunked_attention", "full_attention", "sliding_attention"}
)


class WeightSizes(NamedTuple):
    """The sizes of weights, and their source."""

    parts: tuple[Part, ...]
    source: str
    """For people: the files, an index, or the shape."""
    layers: tuple[Part, ...] = ()
    """Of `parts`, those of the layers, where tensors are known by name."""


def read_shape(hf_config: Mapping[str, Any]) -> Shape:
    """The sizes in a checked `config.json`.

    Raises:
        ConfigError: A size is missing, or the model has recurrent state, whose size only SGLang
            knows.
    """
    text = text_config(hf_config)
    _refuse_recurrent(text, hf_config)
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    layers = _number(text, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    heads = _number(text, "num_attention_heads", "n_head", "n_heads")
    latent = text.get("kv_lora_rank")
    head_dim = text.get("head_dim") or hidden // heads
    v_head_dim = text.get("v_head_dim") or head_dim
    rotary_dim = int(head_dim * float(text.get("partial_rotary_factor") or 1))
    inner = _most(text, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    return Shape(
        hidden_size=hidden,
        layers=layers,
        kv_layers=layers,
        vocabulary=vocab_size(hf_config) or _number(text, "vocab_size"),
        heads=heads,
        kv_heads=_kv_heads(text, heads),
        head_dim=_LATENT_HEAD if latent else head_dim,
        v_head_dim=v_head_dim,
        latent=latent + text.get("qk_rope_head_dim", 0) if latent else 0,
        inner=inner,
        experts=_most(text, "num_experts", "num_local_experts", "n_routed_experts"),
        chosen_experts=_most(text, "num_experts_per_tok"),
        expert_inner=_most(text, "moe_intermediate_size") or inner,
        tied=bool(text.get("tie_word_embeddings", hf_config.get("tie_word_embeddings", False))),
        positions=_most(text, "max_position_embeddings", "n_positions"),
        rotary_dim=_LATENT_HEAD if latent else rotary_dim,
        rotary_tables=_rotary_tables(text),
    )


def model_of(
    shape: Shape,
    weights: WeightSizes,
    options: DriverOptions,
    hf_config: Mapping[str, Any],
    dtype: str,
    on_host: bool,
) -> ModelSizes:
    """The sizes of a model for the plan.

    Args:
        shape: Of :func:`read_shape`.
        weights: Of :func:`read_weights`.
        options: The driver's.
        hf_config: The model's `config.json`.
        dtype: The activations', a key of `ITEMSIZES`.
        on_host: Whether the model runs on the CPU.
    """
    itemsize = ITEMSIZES[dtype]
    context = options.context_length or context_length(hf_config)
    return sizes_of_shape(
        shape,
        (*weights.parts, rotary_part(shape, context, itemsize, on_host=on_host)),
        options,
        hf_config,
        itemsize=itemsize,
        kv_itemsize=kv_itemsize(options.kv_cache_dtype, itemsize),
        layer_weights=weights.layers,
    )


def settings_for(
    options: DriverOptions, hf_config: Mapping[str, Any], device: Device, ranks: int
) -> MemorySettings:
    """The settings of a plan from a driver's options."""
    passed = options.server_args
    return memory_settings(
        options,
        device,
        ranks,
        context_length=options.context_length or context_length(hf_config),
        page_size=options.page_size,
        backends=(
            passed.get("prefill_attention_backend", options.attention_backend),
            passed.get("decode_attention_backend", options.attention_backend),
        ),
        deterministic=bool(passed.get("enable_deterministic_inference")),
    )


def read_weights(
    folder: Path, shape: Shape, hf_config: Mapping[str, Any], options: DriverOptions, dtype: str
) -> WeightSizes:
    """The sizes of a snapshot's weights, from headers, the index, or the shape.

    Args:
        folder: The snapshot; it needs no weights.
        shape: Of :func:`read_shape`.
        hf_config: The model's `config.json`.
        options: The driver's.
        dtype: The activations', a key of `ITEMSIZES`.

    Raises:
        ConfigError: A file is damaged; or there is none, and the shape is not enough.
    """
    loading = load_settings(
        shape,
        ITEMSIZES[dtype],
        quantized=bool(hf_config.get("quantization_config")),
        method=options.server_args.get("quantization"),
    )
    stored = hf_config.get("dtype") or hf_config.get("torch_dtype") or dtype
    try:
        tensors = read_tensors(folder, ITEMSIZES.get(str(stored), ITEMSIZES[dtype]))
    except (DamagedError, OSError) as error:
        raise ConfigError(str(error), "download the snapshot again") from error
    if tensors:
        return _by_tensors(tensors, loading, "the headers of its files")
    size = _indexed_bytes(folder)
    if size:
        return WeightSizes((Part(size, SHARDED),), "the index of its files")
    if shape.latent:
        raise ConfigError(
            "there are no weights, and the shape of latent attention does not give their size",
            "download the index of the weights: `hf download <repository> --include '*.json'`",
        )
    tensors = list(tensors_of_shape(shape, loading.itemsize))
    return _by_tensors(tensors, loading, "the shape in config.json: an estimate")


def _by_tensors(tensors: Sequence[Tensor], loading: LoadSettings, source: str) -> WeightSizes:
    layers = weight_parts(layer_tensors(tensors), loading)
    return WeightSizes(weight_parts(tensors, loading), source, layers)


def kv_itemsize(kv_cache_dtype: str, activation: int) -> int:
    """Bytes of an element in the KV pool."""
    if kv_cache_dtype == "auto":
        return activation
    return 2 if kv_cache_dtype in ("bf16", "bfloat16") else 1


def _refuse_recurrent(text: Mapping[str, Any], hf_config: Mapping[str, Any]) -> None:
    kinds = text.get("layer_types")
    others = set(kinds) - _ATTENDING if isinstance(kinds, list) else set()
    found = sorted(others) or [key for key in _RECURRENT_KEYS if text.get(key)]
    if found:
        raise ConfigError(
            f"{hf_config['architectures'][0]} keeps recurrent state ({quoted(found[0])} in its "
            "config.json), whose size only SGLang knows",
            "start the driver: it plans such a model before it loads it",
        )


def _number(config: Mapping[str, Any], *names: str) -> int:
    value = next((config[name] for name in names if config.get(name)), None)
    if type(value) is not int:
        raise ConfigError(
            f"the model's config.json has no usable `{names[0]}`: {quoted(value)}",
            "start the driver: SGLang may know the size from the model's class",
        )
    return value


def _most(config: Mapping[str, Any], *names: str) -> int:
    """A size, the largest where layers have different ones; 0 where it is missing."""
    value = next((config[name] for name in names if config.get(name)), 0)
    return int(max(value) if isinstance(value, list) else value)


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    """As SGLang counts them."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    names = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num")
    return next((int(text[name]) for name in names if text.get(name)), heads)


def _rotary_tables(text: Mapping[str, Any]) -> int:
    given = text.get("rope_parameters") or {}
    kinds = sum(isinstance(kind, Mapping) for kind in given.values())
    # Older configs of models with two kinds.
    return max(kinds, 2 if text.get("rope_local_base_freq") else 1)


def _indexed_bytes(folder: Path) -> int:
    """The size that the index of safetensors files gives; 0 without one."""
    path = folder / "model.safetensors.index.json"
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["metadata"]["total_size"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0
