"""A model's architecture name, sizes, dtype and media, from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import ConfigError, Unsupported, quoted

#: Names for which the runtime has a chat template (the Pie driver protocol). Any other name gets
#: plain ChatML.
TEMPLATE_NAMES: Final = frozenset(
    {
        "deepseek_v3",
        "deepseek_v4",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "glm_moe_dsa",
        "gpt_oss",
        "gptoss",
        "kimi_k2",
        "kimi_k25",
        "l4ma",
        "llama2",
        "llama3",
        "ministral3",
        "mistral3",
        "nemotron_h",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_vl",
        "qwen3_vl_text",
        "r1",
    }
)

#: Hugging Face model types that the runtime knows by another name.
_RUNTIME_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"llama": "llama3", "mistral": "mistral3", "gpt_oss": "gptoss"}
)

#: Keys under which a multi-modal config holds the config of its language model.
_TEXT_KEYS: Final = ("text_config", "llm_config", "language_config", "thinker_config")


#: SGLang's model classes with a vision encoder that the driver feeds.
_IMAGE_ARCHITECTURES: Final = frozenset(
    {
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    }
)

#: Of their vision encoder, where the config leaves it out. Patches of Qwen2-VL and Qwen2.5-VL have
#: 14 pixels along a side, which also fit the frame.
_VISION_DEFAULTS: Final[Mapping[str, int]] = MappingProxyType(
    {"in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
)

#: Keys of the trained context length, in SGLang's order.
_CONTEXT_KEYS: Final = (
    "max_sequence_length",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "max_position_embeddings",
    # GPT-2's name.
    "n_positions",
)
_DEFAULT_CONTEXT: Final = 2048

#: The driver's dtype by its name in `config.json`.
_DTYPE_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bfloat16": "bfloat16",
        "float": "float32",
        "float16": "float16",
        "float32": "float32",
        "half": "float16",
    }
)
#: Where SGLang looks for the config of the language model, in this order.
_LANGUAGE_KEYS: Final = ("thinker_config", "llm_config", "language_config", "text_config")


def arch_name(hf_config: Mapping[str, Any]) -> str:
    """Return the architecture name for the runtime, which selects the chat template by it.

    It is the config's `model_type`, or the runtime's name for it; for a multi-modal model without a
    template, that of its language model. By names with `qwen3` or `gemma4` the runtime may send
    images to a text model, so frames with media must be rejected later.

    Raises:
        ConfigError: The config has no `model_type`.
    """
    names = [_runtime_name(config) for config in _text_configs(hf_config)]
    outer = names[-1]
    if not outer:
        raise ConfigError(
            f"the model's config.json has no usable `model_type`: "
            f"{quoted(hf_config.get('model_type'))}",
            "download the model again, or use a snapshot in the Hugging Face format",
        )
    if outer in TEMPLATE_NAMES:
        return outer
    return next((name for name in names if name in TEMPLATE_NAMES), outer)


def vocab_size(hf_config: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size; None if the config leaves it to the architecture's default."""
    for config in _text_configs(hf_config):
        size = config.get("vocab_size")
        if type(size) is int and size > 0:
            return size
    return None


class ContextLimit(NamedTuple):
    """The context length of a model, and the key of its config that sets it."""

    positions: int
    source: str


def context_length(hf_config: Mapping[str, Any]) -> int:
    """Return the context length that SGLang derives from the config."""
    limit = context_limit(hf_config)
    return _DEFAULT_CONTEXT if limit is None else limit.positions


def context_limit(hf_config: Mapping[str, Any]) -> ContextLimit | None:
    """The context length that SGLang derives from the config; None without a key for it.

    It is the trained length times the rope factor, unless the length includes the factor.
    """
    config = text_config(hf_config)
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    factor: Any = 1
    if isinstance(scaling, Mapping) and scaling.get("rope_type") != "llama3":
        plain = "original_max_position_embeddings" in scaling
        factor = 1 if plain else scaling.get("factor") or 1
    factor = factor if _is_number(factor) else 1
    key = next((key for key in _CONTEXT_KEYS if _is_number(config.get(key))), None)
    if key is None:
        return None
    source = f"`{key}`" if factor == 1 else f"`{key}` {config[key]} times the rope factor {factor}"
    return ContextLimit(int(config[key] * factor), source)


def auto_dtype(hf_config: Mapping[str, Any]) -> str:
    """Return the activation dtype that SGLang 0.5.17 selects on a GPU for `dtype="auto"`.

    It is the checkpoint's dtype. A checkpoint in float32, or without a dtype, runs in float16, but
    Gemma in bfloat16, because its activations exceed the range of float16.

    Raises:
        Unsupported: The driver does not support the checkpoint's dtype.
    """
    architecture = next(iter(hf_config.get("architectures") or ()), "")
    if architecture.startswith("Llava") and architecture.endswith("ForCausalLM"):
        return "float16"
    if architecture == "GptOssForCausalLM" and _quantization(hf_config) == "mxfp4":
        return "bfloat16"
    config, stored = _language_config(hf_config)
    if stored is None:
        name = "float32"
    elif isinstance(stored, str) and stored in _DTYPE_NAMES:
        name = _DTYPE_NAMES[stored]
    else:
        raise Unsupported(
            f"the model's config.json has `dtype` = {quoted(stored)}, in which the driver runs no "
            "model",
            'set `dtype="bfloat16"`, or correct config.json',
        )
    if name != "float32":
        return name
    return "bfloat16" if str(config.get("model_type", "")).startswith("gemma") else "float16"


def text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model, which is nested in a multi-modal config."""
    return next(_text_configs(hf_config))


def takes_images(hf_config: Mapping[str, Any]) -> bool:
    """Whether the driver supports images with this model."""
    return not _IMAGE_ARCHITECTURES.isdisjoint(hf_config.get("architectures") or ())


def image_token_bytes(hf_config: Mapping[str, Any]) -> int:
    """Return the frame bytes per image token: pixels and positions; 0 for text models."""
    if not takes_images(hf_config):
        return 0
    channels, size, merge, frames = _vision(hf_config)
    patch = 4 * channels * frames * size**2 + 8
    return int(merge**2 * patch + 12)


def image_merge(hf_config: Mapping[str, Any]) -> int | None:
    """`spatial_merge_size`: patches along a side of an image token; None for text models."""
    return _vision(hf_config)[2] if takes_images(hf_config) else None


def _vision(hf_config: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of `_VISION_DEFAULTS`, in that order."""
    vision = hf_config.get("vision_config")
    given: Mapping[str, Any] = vision if isinstance(vision, Mapping) else {}
    return tuple(
        int(given[key]) if _is_number(given.get(key)) else default
        for key, default in _VISION_DEFAULTS.items()
    )


def _language_config(hf_config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Any]:
    """The language model's config as SGLang finds it, and its dtype, which may be inherited."""
    dtype = _own_dtype(hf_config)
    key = next((key for key in _LANGUAGE_KEYS if isinstance(hf_config.get(key), Mapping)), None)
    if key is None:
        return hf_config, dtype
    config: Mapping[str, Any] = hf_config[key]
    dtype = _own_dtype(config) or dtype
    inner = config.get("text_config")
    if key == "thinker_config" and isinstance(inner, Mapping):
        # The type of the outer config replaces that of the inner one.
        return inner, dtype
    return config, dtype


def _own_dtype(config: Mapping[str, Any]) -> Any:
    return config.get("dtype") or config.get("torch_dtype")


def _quantization(hf_config: Mapping[str, Any]) -> Any:
    quantization = hf_config.get("quantization_config")
    return quantization.get("quant_method") if isinstance(quantization, Mapping) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2**40


def _runtime_name(config: Mapping[str, Any]) -> str:
    name = config.get("model_type")
    return _RUNTIME_NAMES.get(name, name) if isinstance(name, str) else ""


def _text_configs(hf_config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the nested language-model configs, the innermost first, and the config itself last."""
    chain: list[Mapping[str, Any]] = [hf_config]
    while len(chain) < 8:  # Real configs nest twice.
        nested = (chain[-1].get(key) for key in _TEXT_KEYS)
        inner = next((config for config in nested if isinstance(config, Mapping)), None)
        if inner is None:
            break
        chain.append(inner)
    yield from reversed(chain)
