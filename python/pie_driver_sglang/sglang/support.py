"""Which models a configuration computes right; the others are refused at start, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

from pie_driver_sglang.errors import StartError

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner


GRAPH_BACKENDS = frozenset({"triton"})
"""Attention backends whose decode metadata is made on the device alone."""


def check_config(model_config: ModelConfig, attention_backend: str | None) -> None:
    """Refuses what is known before the weights are read.

    Raises:
        StartError: The model does not generate text, or the backend cannot serve its attention.
    """
    architecture = model_config.hf_config.architectures[0]
    if not model_config.is_generation:
        raise StartError(
            f"{architecture} does not generate text", hint="use a causal language model"
        )
    if attention_backend == "torch_native" and model_config.attention_arch == AttentionArch.MLA:
        raise StartError(
            f"{architecture} uses multi-head latent attention, which the CPU backend lacks",
            hint='set `device = ["cuda:0"]`',
        )


def check_model(runner: ModelRunner) -> None:
    """Refuses attention that `torch_native` would compute wrongly without an error.

    Raises:
        StartError: Attention soft-capping, or a sliding window that SGLang's model class ignores.
    """
    layers = _attention_layers(runner)
    config = runner.model_config.hf_text_config
    if runner.server_args.attention_backend == "torch_native" and any(
        (layer.logit_cap or 0) > 0 for layer in layers
    ):
        raise StartError(
            "the model soft-caps its attention scores, which the CPU backend ignores",
            hint='set `device = ["cuda:0"]`, or choose a model without attention soft-capping',
        )
    window = _sliding_window(config)
    ignored = not any((layer.sliding_window_size or -1) > -1 for layer in layers)
    if window is not None and window < runner.model_config.context_len and ignored:
        raise StartError(
            f"the model attends to a sliding window of {window} tokens, which SGLang's "
            f"{type(runner.model).__name__} ignores",
            hint=f"set `context_length = {window}` or choose a model without a window",
        )


def check_pool(runner: ModelRunner) -> None:
    """Refuses KV pools that the planner's single slot space cannot describe.

    Raises:
        StartError: The model keeps recurrent state or a second pool.
    """
    pool = runner.token_to_kv_pool
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool):
        raise StartError(
            f"the model needs a {type(pool).__name__}, which this driver does not support yet",
            hint="use a model with plain attention layers",
        )


def mask_obstacle(runner: ModelRunner) -> str | None:
    """Why the driver cannot apply attention masks to this model; None when it can."""
    pool = runner.token_to_kv_pool
    if type(pool) is not MHATokenToKVPool:
        return f"the model's KV pool is a {type(pool).__name__}"
    if pool.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the model's KV pool keeps {pool.dtype}"
    if not all(_is_plain(layer) for layer in _attention_layers(runner)):
        return "some of the model's layers attend in a way of their own"
    return None


def lane_obstacle(runner: ModelRunner) -> str | None:
    """Why short batches cannot run as one captured step; None when they can."""
    args = runner.server_args
    backend = args.decode_attention_backend or args.attention_backend
    if runner.device != "cpu" and backend not in GRAPH_BACKENDS:
        return (
            f"the attention backend {backend} plans decodes on the host; "
            f"set `decode_attention_backend` to one of {', '.join(sorted(GRAPH_BACKENDS))}"
        )
    return None


def _is_plain(layer: RadixAttention) -> bool:
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and not layer.use_irope
        and layer.pos_encoding_mode == "NONE"
        and layer.xai_temperature_len <= 0
        and (not layer.logit_cap or layer.logit_capping_method == "tanh")
    )


def _attention_layers(runner: ModelRunner) -> list[RadixAttention]:
    return [module for module in runner.model.modules() if isinstance(module, RadixAttention)]


def _sliding_window(config: Any) -> int | None:
    """The window in tokens, where the configuration switches one on for some layer."""
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None
    layer_types = getattr(config, "layer_types", None)
    if layer_types and "sliding_attention" not in layer_types:
        return None
    return int(window)
