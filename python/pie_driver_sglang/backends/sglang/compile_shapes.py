"""What the kernels of a driver depend on, by the model's `config.json` and the driver's options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from pie_driver_sglang.compilation.dry_model import DryLayers, DryModel
from pie_driver_sglang.config.arch import context_length, text_config, vocab_size
from pie_driver_sglang.config.model_features import returns_embeddings
from pie_driver_sglang.config.options import DriverOptions
from pie_driver_sglang.memory.batch_sizes import chunk_tokens

_FA3_HEADS: Final = (64, 128, 256)
_HOPPER: Final = 9
_VOCABULARY_UNIT: Final = 64
"""SGLang pads the LM head to a multiple."""
_DENSE: Final[Mapping[str, bool]] = MappingProxyType(
    {
        "LlamaForCausalLM": False,
        "MistralForCausalLM": False,
        "Qwen2ForCausalLM": True,
        "Qwen3ForCausalLM": False,
    }
)
"""Architectures with a dense MLP, and whether the QKV projection always has a bias."""
_SPARSE: Final = ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
_DETERMINISTIC: Final = "enable_deterministic_inference"


def unknown_kernels_reason(hf_config: Mapping[str, Any], options: DriverOptions) -> str | None:
    """Why the kernels of a driver are not known before it starts; None where they are."""
    if options.disable_cuda_graph:
        return "`disable_cuda_graph` is set"
    if returns_embeddings(hf_config, is_embedding=options.is_embedding):
        return "the model returns embeddings"
    if options.enable_lora:
        return "`enable_lora` is set"
    if options.spec_eagle_path:
        return "an EAGLE head drafts"
    return None


def dry_model(
    hf_config: Mapping[str, Any],
    options: DriverOptions,
    dtype: str,
    *,
    major: int,
    memory: int,
    ranks: int = 1,
) -> DryModel:
    """What the kernels of a driver depend on; without layers where SGLang's own run.

    Args:
        hf_config: The model's `config.json`.
        options: The driver's.
        dtype: Of activations.
        major: The GPU's major compute capability.
        memory: Of the GPU, in bytes.
        ranks: GPUs that share the model, and have an equal part of it each.
    """
    layers = _layers(hf_config, options, ranks)
    by_rule = options.paged_decode is None
    prefills_by_fa3 = (
        layers is not None
        and major == _HOPPER
        and layers.head_dim in _FA3_HEADS
        and dtype != "float32"
        and (by_rule or options.attention_backend.startswith("fa3"))
    )
    return DryModel(
        layers=layers,
        dtype=dtype,
        vocab_size=vocab_size(hf_config) or 0,
        head_rows=_head_rows(vocab_size(hf_config) or 0, ranks),
        context_length=options.context_length or context_length(hf_config),
        page_size=options.page_size,
        requests=options.max_forward_requests,
        chunk_tokens=chunk_tokens("cuda", memory, options.chunked_prefill_size),
        graph_sizes=options.graph_sizes,
        fuse_layers=options.fuse_layers,
        deterministic=bool(options.server_args.get(_DETERMINISTIC)),
        prefills_by_fa3=prefills_by_fa3,
        ranks=ranks,
    )


def _head_rows(vocabulary: int, ranks: int) -> int:
    """Rows of a rank's part of the LM head, which SGLang pads; it starts if ranks divide them."""
    return -(-vocabulary // _VOCABULARY_UNIT) * _VOCABULARY_UNIT // ranks


def _layers(hf_config: Mapping[str, Any], options: DriverOptions, ranks: int) -> DryLayers | None:
    """A rank's part of the layers that the driver's kernels run as a whole; None for others."""
    text = text_config(hf_config)
    [architecture, *_] = hf_config["architectures"]
    quantized = hf_config.get("quantization_config") or options.server_args.get("quantization")
    window = text.get("use_sliding_window", True) and text.get("sliding_window")
    others = (
        options.paged_decode is False,
        options.kv_cache_dtype != "auto",
        quantized,
        window,
        text.get("mlp_bias"),
        # Of SGLang's classes those that read it have a bias in the output projection, too.
        text.get("attention_bias"),
        (text.get("partial_rotary_factor") or 1) != 1,
        text.get("mlp_only_layers"),
        (text.get("decoder_sparse_step") or 1) != 1,
    )
    if any(others) or architecture not in (*_DENSE, *_SPARSE):
        return None
    sparse = architecture in _SPARSE
    names = ("num_experts", "num_local_experts") if sparse else ()
    heads = text["num_attention_heads"]
    inner = text.get("moe_intermediate_size") if sparse else None
    return DryLayers(
        width=text["hidden_size"],
        heads=heads // ranks,
        kv_heads=max((text.get("num_key_value_heads") or heads) // ranks, 1),
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        inner=(inner or text["intermediate_size"]) // ranks,
        qkv_bias=_DENSE.get(architecture, False),
        qk_norm=architecture.startswith("Qwen3"),
        experts=next((text[name] for name in names if text.get(name)), 0),
        top_k=text.get("num_experts_per_tok", 0) if sparse else 0,
        renormalize=text.get("norm_topk_prob", True),
    )
