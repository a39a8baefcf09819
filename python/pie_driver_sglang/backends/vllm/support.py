"""Models of vLLM that are refused, with the reason: before the weights are loaded, and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pie_driver_sglang.backends.vllm.compat.attention import CUSTOM
from pie_driver_sglang.backends.vllm.compat.model import PAGED_SPECS, KvLayer, head_sizes
from pie_driver_sglang.config.options import PAGED_DECODE
from pie_driver_sglang.config.vllm_options import (
    CPU_ATTENTION,
    FLASH_ATTENTION,
    ON_SGLANG,
    VLLM_TRITON,
)
from pie_driver_sglang.errors import StartError

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

    from pie_driver_sglang.engine.attention.paged import AttentionLayer

MASKS: str = "the attention of the vLLM driver is causal"
"""Why attention masks are refused."""
WIDEST: int = 256
"""Numbers of a head that the driver's kernels and FlashAttention 3 have been tried with."""

_FA3, _HALF = 3, 2
_HINT = f"{ON_SGLANG}, or choose a model with plain attention"


def check_vllm_config(config: VllmConfig, device: torch.device) -> None:
    """Refuses kinds of models, before the weights are read.

    Raises:
        StartError: The model is of one of them.
    """
    model: Any = config.model_config
    kinds = {
        "recurrent state, which the vLLM driver does not keep yet": model.is_hybrid
        or model.has_inner_state,
        "no attention, for which the vLLM driver has no KV": model.is_attention_free,
        "latent attention (MLA), whose KV the vLLM driver does not keep": model.use_mla,
        "an encoder, whose output the vLLM driver does not keep": model.is_encoder_decoder,
        "positions on several axes, which the vLLM driver does not send yet": model.uses_mrope,
        "an encoder of images, video or audio, which the vLLM driver does not serve yet": (
            model.is_multimodal_model
        ),
        "a pooler, and generates no text": model.runner_type != "generate",
        "a diffusion decoder": model.is_diffusion,
    }
    found = next((kind for kind, is_one in kinds.items() if is_one), None)
    if found is not None:
        raise StartError(f"the model ({model.architecture}) has {found}", _HINT)
    width = model.get_head_size()
    if device.type != "cpu" and width > WIDEST:
        raise StartError(
            f"the model has attention heads of {width} numbers, and the driver's attention takes "
            f"at most {WIDEST}",
            ON_SGLANG,
        )
    if device.type == "cpu" and width not in (widths := head_sizes()):
        raise StartError(
            f"the model has attention heads of {width} numbers, and vLLM's CPU attention takes "
            f"{', '.join(map(str, widths))}",
            ON_SGLANG,
        )


def check_lora_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Refuses adapters of a type that vLLM's kernels lack, before the weights are read.

    Raises:
        StartError: It is one.
    """
    if device.type != "cpu" and dtype.itemsize != _HALF:
        name = str(dtype).removeprefix("torch.")
        raise StartError(
            f"activations are {name}, and vLLM's LoRA kernels compute in bfloat16 and float16",
            'set `activation_dtype = "bfloat16"` (`dtype` of a server), or remove `enable_lora`',
        )


def prefill_backend(layers: Sequence[AttentionLayer], asked: str, version: int | None) -> str:
    """The kernel of prefills on a GPU: FlashAttention 3 where it can, else vLLM's Triton kernel.

    Args:
        layers: All layers with KV.
        asked: The option `attention_backend`.
        version: Of the FlashAttention that vLLM would run.

    Raises:
        StartError: FlashAttention is asked for and cannot attend.
    """
    if asked == VLLM_TRITON:
        return VLLM_TRITON
    reason = None
    if version != _FA3:
        reason = "vLLM's FlashAttention 3 needs a Hopper GPU and its library `_vllm_fa3_C`"
    elif any(layer.keys.itemsize != _HALF for layer in layers):
        reason = "FlashAttention 3 computes in bfloat16 and float16"
    elif any(layer.head_dim % 8 or layer.head_dim != layer.value_dim for layer in layers):
        reason = "FlashAttention 3 takes heads of a multiple of 8 numbers, values as keys"
    if reason is None:
        return FLASH_ATTENTION
    if asked == PAGED_DECODE:
        return VLLM_TRITON
    raise StartError(
        f"the attention backend {asked} cannot run this model: {reason}",
        f'set `attention_backend = "{PAGED_DECODE}"`, or remove it',
    )


def check_kv_layers(layers: Sequence[KvLayer], page_size: int) -> None:
    """Refuses layers that are not causal, or whose KV is not a row for each token in our pages.

    Raises:
        StartError: There is such a layer, or none with KV.
    """
    if not layers:
        raise StartError("the model has no layer with KV", _HINT)
    for layer in layers:
        if (kind := _unsupported_kind(layer)) is not None:
            raise StartError(f"layer {layer.name} {kind}", _HINT)
        spec: Any = layer.spec
        if spec.block_size != page_size:
            raise StartError(
                f"layer {layer.name} wants pages of {spec.block_size} tokens, not {page_size}",
                f"set `block_size = {spec.block_size}` in the options",
            )


def _unsupported_kind(layer: KvLayer) -> str | None:
    """What a layer does that the driver's pages or its causal passes lack."""
    spec, backend = layer.spec, layer.backend.get_name()
    if type(spec) not in PAGED_SPECS:
        return f"keeps its KV as {type(spec).__name__}, not token by token"
    if backend not in (CPU_ATTENTION, CUSTOM):
        return f"attends by {backend}, not {CPU_ATTENTION} or {PAGED_DECODE}"
    if getattr(spec, "non_causal", False):
        return "attends to later tokens of a prompt (prefix LM), and the driver's passes are causal"
    if chunk := getattr(spec, "attention_chunk_size", None):
        return f"attends within chunks of {chunk} tokens, which no kernel here computes"
    return None
