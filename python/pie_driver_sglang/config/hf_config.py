"""Reads a model's `config.json`, and rejects unsupported models before SGLang is imported."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.config.arch import context_limit, text_config
from pie_driver_sglang.config.draft_head import check_draft_head
from pie_driver_sglang.config.model_features import check_features
from pie_driver_sglang.config.option_checks import loads_plugins
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.config.server_args import ARCHITECTURES, SGLANG_VERSION
from pie_driver_sglang.errors import ConfigError, Unsupported, nearest, quoted, reason

DOWNLOAD: Final = "download the model again, e.g. with `hf download <repository>`"

#: Plausible ranges of a language model's sizes.
_SIZES: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        "head_dim": (1, 2**12),
        "hidden_size": (1, 2**20),
        "intermediate_size": (0, 2**24),
        "max_position_embeddings": (1, 2**31 - 1),
        "moe_intermediate_size": (0, 2**24),
        "n_embd": (1, 2**20),
        "n_head": (1, 2**14),
        "n_layer": (1, 2**12),
        "n_positions": (1, 2**31 - 1),
        "n_routed_experts": (0, 2**16),
        "num_attention_heads": (1, 2**14),
        "num_experts": (0, 2**16),
        "num_experts_per_tok": (0, 2**16),
        "num_hidden_layers": (1, 2**12),
        "num_key_value_heads": (1, 2**14),
        "num_local_experts": (0, 2**16),
        "vocab_size": (1, 2**24),
    }
)

#: SGLang renames the architecture of these model types.
_RENAMED_TYPES: Final = frozenset(
    {"deepseek-ocr", "deepseek_vl_v2", "dots_vlm", "longcat_flash", "multi_modality"}
)
_RENAMED: Final = frozenset({"LongcatCausalLM", "LongcatFlashNgramForCausalLM"})

#: With this variable SGLang accepts a longer context than the model's.
_LONGER_CONTEXT: Final = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"

#: Settings that change what SGLang makes of the file.
_CHANGING: Final = frozenset({"json_model_override_args", "model_config_parser", "model_impl"})


#: Files in which a model names Python code of its own.
_CODE_FILES: Final = (
    "config.json",
    "tokenizer_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def hidden_size(hf_config: Mapping[str, Any]) -> int:
    """Numbers of a hidden state of the language model; 0 where the file does not say."""
    config = text_config(hf_config)
    return int(config.get("hidden_size") or config.get("n_embd") or 0)


def files_with_code(snapshot_dir: Path) -> list[str]:
    """The files of a model with an `auto_map`, which runs Python code of its folder if trusted."""
    found = []
    for name in _CODE_FILES:
        try:
            config = json.loads((snapshot_dir / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(config, dict) and config.get("auto_map"):
            found.append(name)
    return found


def load_hf_config(snapshot_dir: Path) -> dict[str, Any]:
    """Return the model's `config.json`, which must name a type and an architecture.

    Raises:
        ConfigError: The file is missing, unreadable or not a model's config.
    """
    path = snapshot_dir / "config.json"
    try:
        if path.exists() and not path.is_file():  # A pipe would be waited for.
            raise ConfigError(f"{quoted(str(path))} is not a regular file", DOWNLOAD)
        # Not msgspec: transformers writes `Infinity` into some configs.
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        message = f"the snapshot {quoted(str(snapshot_dir))} has no config.json"
        raise ConfigError(message, DOWNLOAD) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {quoted(str(path))}: {reason(error)}", DOWNLOAD) from error
    if not isinstance(config, dict):
        raise ConfigError(f"{quoted(str(path))} is not a JSON object", DOWNLOAD)
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or not model_type:
        raise _incomplete(path, "model_type", model_type)
    if not _is_list_of_names(architectures):
        raise _incomplete(path, "architectures", architectures)
    return config


def check_hf_config(hf_config: Mapping[str, Any], options: DriverOptions, ranks: int) -> None:
    """Reject a model that SGLang or the driver lacks, implausible sizes, and options beyond it.

    Args:
        hf_config: Of :func:`load_hf_config`.
        options: The driver's.
        ranks: Processes that the model is spread over.

    Raises:
        Unsupported: SGLang has no class for the model, or the driver lacks a feature for it.
        ConfigError: One of them is wrong.
    """
    model_impl = options.server_args.get("model_impl", "auto")
    check_features(hf_config, options.kv_cache_dtype, model_impl, options.context_length)
    if _CHANGING.isdisjoint(options.server_args):
        _check_architectures(hf_config)
        check_sizes(text_config(hf_config))
        _check_context(hf_config, options.context_length)
    check_heads(hf_config, ranks)
    if options.spec_eagle_path is not None:
        check_draft_head(options.spec_eagle_path, hf_config, ranks)


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)


def _incomplete(path: Path, key: str, value: object) -> ConfigError:
    return ConfigError(
        f"{quoted(str(path))} has no usable `{key}`: {quoted(value)}",
        "use a snapshot of a causal language model in the Hugging Face format",
    )


def _check_architectures(hf_config: Mapping[str, Any]) -> None:
    """Reject a model for which SGLang has no class, unless plugins may add one."""
    names = hf_config["architectures"]
    known = ARCHITECTURES | _RENAMED
    if not known.isdisjoint(names) or hf_config["model_type"] in _RENAMED_TYPES:
        return
    if loads_plugins() or os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE"):
        return
    shown = names[0] if len(names[0]) < 80 and names[0].isidentifier() else quoted(names[0])
    hint = "use a model of an architecture that SGLang has; docs/supported-models.md lists some"
    # SGLang could fall back to transformers, which the driver does not support.
    raise Unsupported(
        f"SGLang {SGLANG_VERSION} has no {shown}, which the model's config.json names under "
        "`architectures`",
        f"{nearest(names[0], known)} {hint}".strip(),
    )


def check_sizes(config: Mapping[str, Any]) -> None:
    """Reject a language model's config with implausible sizes."""
    for key, (low, high) in _SIZES.items():
        value = config.get(key)
        # Some models have a number for each layer.
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if number is not None and not (type(number) is int and low <= number <= high):
                raise ConfigError(
                    f"the model's config.json has `{key}` = {quoted(number)}, expected an integer "
                    f"from {low} to {high}",
                    f"correct `{key}` in config.json, or {DOWNLOAD}",
                )
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    # Latent attention has no KV heads, and some models have a number for each layer.
    is_grouped = "kv_lora_rank" not in config
    if is_grouped and isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise ConfigError(
            f"the model's config.json has `num_attention_heads` = {heads} and "
            f"`num_key_value_heads` = {kv_heads}, which does not divide it",
            f"correct `num_key_value_heads` in config.json, or {DOWNLOAD}",
        )


def _check_context(hf_config: Mapping[str, Any], asked: int | None) -> None:
    """Reject a longer context than SGLang allows."""
    limit = context_limit(hf_config)
    if asked is None or limit is None or asked <= limit.positions or _may_exceed_context():
        return
    raise ConfigError(
        f"option `context_length` is {asked}, but the model has {limit.positions} positions "
        f"({limit.source} in its config.json)",
        f"set `context_length` to at most {limit.positions}, or remove it; "
        f"{_LONGER_CONTEXT}=1 in the environment lifts it, but the model is not made for more",
    )


def _may_exceed_context() -> bool:
    values = (os.environ.get(name, "") for name in (_LONGER_CONTEXT, "SGLANG_IS_IN_CI"))
    return any(value.lower() in ("true", "1", "yes", "y") for value in values)


def check_heads(hf_config: Mapping[str, Any], ranks: int) -> None:
    """Reject a model whose attention heads cannot be sharded evenly.

    Raises:
        ConfigError: They cannot. It names the numbers that fit.
    """
    text = hf_config.get("text_config")
    text = text if isinstance(text, dict) else hf_config
    heads = text.get("num_attention_heads")
    kv_heads = text.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return

    def fits(count: int) -> bool:
        return heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0)

    if not fits(ranks):
        fitting = [str(count) for count in range(1, 2 * ranks) if fits(count)]
        raise ConfigError(
            f"`driver.tensor_parallel_size` is {ranks}, but the model has {heads} attention heads "
            f"over {kv_heads} of keys and values, which cannot be divided evenly",
            f"use {' or '.join(fitting)} devices",
        )
