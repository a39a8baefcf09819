"""Rejects models that the vLLM driver does not serve, by `config.json`, before vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from pie_driver_sglang.config.arch import context_limit, text_config
from pie_driver_sglang.config.engine_args import VLLM_ARCHITECTURES, VLLM_VERSION
from pie_driver_sglang.config.hf_config import check_sizes
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.errors import ConfigError, Unsupported, nearest, quoted

#: With this variable vLLM accepts a longer context than the model's.
_LONGER: Final = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"

#: Settings that change what vLLM makes of the file.
_CHANGING_ARGS: Final = frozenset({"config_format", "hf_overrides", "model_class_overrides"})

#: Keys of a language model's config by which it is of a kind that is not served, and the kind.
_KINDS: Final[Mapping[str, str]] = {
    "kv_lora_rank": "latent attention (MLA), which vLLM does not run on the CPU",
    "index_topk": "sparse attention, which chooses KV by an index of its own",
    "mamba_d_state": "recurrent state (Mamba), which the vLLM driver does not keep yet",
    "ssm_state_size": "recurrent state (Mamba), which the vLLM driver does not keep yet",
    "linear_conv_kernel_dim": "recurrent state (linear attention), which the vLLM driver does not "
    "keep yet",
    "conv_L_cache": "recurrent state (short convolutions), which the vLLM driver does not keep yet",
}


def check_vllm_model(hf_config: Mapping[str, Any], options: DriverOptions, ranks: int) -> None:
    """Reject a model that vLLM lacks or the driver does not serve with it, and too long a context.

    Args:
        hf_config: The model's `config.json`.
        options: The driver's.
        ranks: Processes that the model is to be spread over.

    Raises:
        ConfigError: One of them is wrong.
    """
    if ranks > 1:
        raise Unsupported(
            f"`driver.tensor_parallel_size` is {ranks}: the vLLM driver runs a model on one device "
            "so far",
            'list one `device`, or use the driver `type = "sglang"`',
        )
    if not _CHANGING_ARGS.isdisjoint(options.server_args):
        return
    _check_architecture(hf_config)
    config = text_config(hf_config)
    check_sizes(config)
    _check_kind(hf_config, config)
    _check_length(hf_config, options.context_length)


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
            'serve it with the driver `type = "sglang"`, or choose a model with plain attention',
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
