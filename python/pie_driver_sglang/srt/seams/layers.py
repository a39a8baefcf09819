"""The layers of Llama and Qwen, taken apart: which of SGLang's classes the fused kernels know."""

from __future__ import annotations

from typing import Any, NamedTuple

from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.models import llama, qwen2, qwen3

from pie_driver_sglang.kernels.dense_layers import Heads, LinearWeights, Norm
from pie_driver_sglang.srt.seams.pools import MHATokenToKVPool, stored_kv

_BUILDS = {
    llama.LlamaModel: (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP),
    qwen2.Qwen2Model: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP),
    qwen3.Qwen3Model: (qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen2.Qwen2MLP),
}
"""Models and the classes that their layers, attention and MLPs are of."""


class Layer(NamedTuple):
    """One layer, as the fused kernels want it."""

    before: Norm
    qkv: LinearWeights
    heads: Heads
    attention: RadixAttention
    out: LinearWeights
    between: Norm
    gate_up: LinearWeights
    down: LinearWeights


class UnknownLayer(Exception):
    """Something about a model that the kernels do not know."""


def expect(known: bool, what: str) -> None:
    """Says what is unknown.

    Raises:
        UnknownLayer: It is not known.
    """
    if not known:
        raise UnknownLayer(what)


def find_decoder(causal: Any) -> Any:
    """The part of a causal language model before its LM head, if its class is known.

    Raises:
        UnknownLayer: It is another one, or does something besides.
    """
    model: Any = getattr(causal, "model", None)
    expect(type(model) in _BUILDS, f"it is a {type(model).__name__}")
    expect(not model.layers_to_capture, "hidden states of some layers are wanted")
    expect(not hasattr(model.config, "scale_emb"), "its embeddings are scaled")
    return model


def read_norm(norm: RMSNorm) -> Norm:
    """The weight of an `RMSNorm`; a new field may mean that it computes something else.

    Raises:
        UnknownLayer: It is a norm of another kind.
    """
    plain = (
        type(norm) is RMSNorm
        and norm.has_weight
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )
    expect(plain, "it has a norm of its own kind")
    return Norm(norm.weight.data, norm.variance_epsilon)


def read_layers(model: Any, pool: MHATokenToKVPool) -> list[Layer]:
    """The layers of a model in their order.

    Args:
        model: As :func:`find_decoder` gives it.
        pool: Where its KV is.

    Raises:
        UnknownLayer: One of them is not known.
    """
    return [_read_layer(layer, _BUILDS[type(model)], pool) for layer in model.layers]


def _read_layer(layer: Any, build: Any, pool: MHATokenToKVPool) -> Layer:
    of_layer, of_attention, of_mlp = build
    expect(type(layer) is of_layer, f"one of its layers is a {type(layer).__name__}")
    attention, mlp = layer.self_attn, layer.mlp
    for part, kind in ((attention, of_attention), (mlp, of_mlp), (mlp.act_fn, SiluAndMul)):
        expect(type(part) is kind, f"it has a {type(part).__name__}")
    return Layer(
        read_norm(layer.input_layernorm),
        _read_matrix(attention.qkv_proj, QKVParallelLinear),
        _read_heads(attention, pool),
        attention.attn,
        _read_matrix(attention.o_proj, RowParallelLinear),
        read_norm(layer.post_attention_layernorm),
        _read_matrix(mlp.gate_up_proj, MergedColumnParallelLinear),
        _read_matrix(mlp.down_proj, RowParallelLinear),
    )


def _read_matrix(linear: Any, kind: type) -> LinearWeights:
    if isinstance(linear, BaseLayerWithLoRA):
        linear = linear.base_layer
    expect(type(linear) is kind, f"it has a {type(linear).__name__}")
    method = type(linear.quant_method)
    expect(method is UnquantizedLinearMethod, f"it has a linear layer with {method.__name__}")
    weight, bias = linear.weight.data, linear.bias
    expect(weight.dim() == 2 and weight.is_contiguous(), "its weights lie in another order")
    expect(bias is None or kind is QKVParallelLinear, f"a {kind.__name__} of it has a bias")
    expect(not linear.skip_bias_add, "a bias is added elsewhere")
    return LinearWeights(weight, None if bias is None else bias.data)


def _read_heads(attention: Any, pool: MHATokenToKVPool) -> Heads:
    rotary: RotaryEmbedding = attention.rotary_emb
    layer: RadixAttention = attention.attn
    # Variants that differ in their table only.
    turns = isinstance(rotary, RotaryEmbedding) and all(
        getattr(type(rotary), name) is getattr(RotaryEmbedding, name)
        for name in ("forward", "forward_cuda", "forward_native")
    )
    dim = layer.qk_head_dim
    expect(turns, f"its positions are a {type(rotary).__name__}'s")
    expect(rotary.rotary_dim == dim, f"{rotary.rotary_dim} of {dim} dimensions turn")
    expect(type(layer) is RadixAttention, f"it attends by a {type(layer).__name__}")
    expect(layer.v_head_dim == dim, f"values of {layer.v_head_dim} with keys of {dim}")
    expect(layer.k_scale is None, "its KV is scaled")
    query_norm, key_norm = (
        None if norm is None else read_norm(norm)
        for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    )
    keys, values = stored_kv(pool, layer)
    for stored in (keys, values):
        expect(stored.dim() == 3 and stored[0].is_contiguous(), "its KV lies in another order")
    return Heads(
        layer.tp_q_head_num,
        query_norm,
        key_norm,
        rotary.cos_sin_cache,
        rotary.is_neox_style,
        keys,
        values,
    )
