"""Rejects models that the vLLM driver does not serve, by `config.json`, before vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from pie_driver_sglang.config.arch import context_limit, text_config
from pie_driver_sglang.config.config_file import ConfigRules
from pie_driver_sglang.config.engine_args import VLLM_ARCHITECTURES, VLLM_VERSION
from pie_driver_sglang.config.hf_config import check_heads, check_sizes
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.config.vllm_options import ON_SGLANG, parse_vllm_options
from pie_driver_sglang.errors import ConfigError, Unsupported, nearest, quoted

#: With this variable vLLM accepts a longer context than the model's.
_LONGER: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

#: Settings with which vLLM does not go by the file, so that only vLLM can check the model.
_OTHER_CONFIGS: Final = frozenset({"config_format", "model_class_overrides"})

#: Settings with which the longest context is left to vLLM.
CHANGING_ARGS: Final = _OTHER_CONFIGS | {"hf_overrides"}

#: Widths of MLPs, which ranks divide.
_WIDTHS: Final = ("intermediate_size", "moe_intermediate_size")

#: Keys of a language model's config by which it is of a kind that is not served, and the kind.
_KINDS: Final[Mapping[str, str]] = {
    "kv_lora_rank": "latent attention (MLA), whose KV the vLLM driver does not keep",
    "index_topk": "sparse attention, which chooses KV by an index of its own",
    "mamba_d_state": "recurrent state (Mamba), which the vLLM driver does not keep yet",
    "ssm_state_size": "recurrent state (Mamba), which the vLLM driver does not keep yet",
    "linear_conv_kernel_dim": "recurrent state (linear attention), which the vLLM driver does not "
    "keep yet",
    "conv_L_cache": "recurrent state (short convolutions), which the vLLM driver does not keep yet",
}


def overridden_config(hf_config: Mapping[str, Any], options: DriverOptions) -> Mapping[str, Any]:
    """A `config.json` with the option `hf_overrides`, as vLLM applies it.

    Raises:
        ConfigError: It sets `architectures` to something else than names.
    """
    changed = _merged(hf_config, options.server_args.get("hf_overrides", {}))
    names = changed["architectures"]
    if isinstance(names, list) and names and all(isinstance(name, str) for name in names):
        return changed
    raise ConfigError(
        f"option `hf_overrides` sets `architectures` to {quoted(names)}, expected a list of names",
        'set it to e.g. `["LlamaForCausalLM"]`, or remove it',
    )


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Configs in a config, e.g. of its language model, are changed key by key."""
    merged = {**config, **overrides}
    for key, inner in config.items():
        if isinstance(inner, Mapping) and "model_type" in inner and key in overrides:
            given = overrides[key]
            merged[key] = _merged(inner, given) if isinstance(given, Mapping) else given
    return merged


def check_vllm_model(hf_config: Mapping[str, Any], options: DriverOptions, ranks: int) -> None:
    """Reject a model that vLLM lacks or the driver does not serve with it, and too long a context.

    Args:
        hf_config: The model's, of :func:`overridden_config`.
        options: The driver's.
        ranks: Processes that the model is to be spread over.

    Raises:
        ConfigError: One of them is wrong.
    """
    if not _OTHER_CONFIGS.isdisjoint(options.server_args):
        return
    check_heads(hf_config, ranks)
    _check_widths(hf_config, ranks)
    _check_architecture(hf_config)
    config = text_config(hf_config)
    check_sizes(config)
    _check_kind(hf_config, config)
    _check_length(hf_config, options.context_length)


def _check_widths(hf_config: Mapping[str, Any], ranks: int) -> None:
    """Reject MLPs that cannot be sharded evenly."""
    config = text_config(hf_config)
    for key in _WIDTHS:
        value = config.get(key)
        sizes = value if isinstance(value, list) else [value]
        if odd := next((size for size in sizes if isinstance(size, int) and size % ranks), None):
            fitting = [str(count) for count in range(1, ranks) if odd % count == 0]
            raise ConfigError(
                f"`driver.tensor_parallel_size` is {ranks}, but the model's `{key}` is {odd}, "
                "which cannot be divided evenly",
                f"use {' or '.join(fitting)} devices",
            )


def _check_architecture(hf_config: Mapping[str, Any]) -> None:
    names = hf_config["architectures"]
    if not VLLM_ARCHITECTURES.isdisjoint(names):
        return
    shown = names[0] if len(names[0]) < 80 and names[0].isidentifier() else quoted(names[0])
    # vLLM could fall back to transformers, which the driver does not support.
    raise Unsupported(
        f"vLLM {VLLM_VERSION} has no {shown} for text generation, which the model's config.json "
        "names under `architectures`",
        f"{nearest(names[0], tuple(sorted(VLLM_ARCHITECTURES)))} use a model of an architecture "
        "that vLLM has".strip(),
    )


def _check_kind(hf_config: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    kind = next((text for key, text in _KINDS.items() if config.get(key)), None)
    if hf_config.get("is_encoder_decoder"):
        kind = "an encoder, whose output the vLLM driver does not keep"
    if kind is not None:
        raise Unsupported(
            f"the model ({hf_config['architectures'][0]}) has {kind}",
            f"{ON_SGLANG}, or choose a model with plain attention",
        )


def _check_length(hf_config: Mapping[str, Any], asked: int | None) -> None:
    limit = context_limit(hf_config)
    longer = os.environ.get(_LONGER, "") in ("1", "true", "True")
    if asked is None or limit is None or asked <= limit.positions or longer:
        return
    raise ConfigError(
        f"option `max_model_len` is {asked}, but the model has {limit.positions} positions "
        f"({limit.source} in its config.json)",
        f"set `max_model_len` to at most {limit.positions}, or remove it; {_LONGER}=1 in the "
        "environment lifts it, but the model is not made for more",
    )


VLLM_RULES: Final = ConfigRules(parse_vllm_options, check_vllm_model, overridden_config)
