"""The layers of Llama and Qwen, taken apart: which of SGLang's classes the fused kernels know."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers import activation
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.quantization.unquant import (
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.models import llama, mixtral, qwen2, qwen3, qwen3_moe

from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.backends.sglang.compat.attention import layers_of, read_attention
from pie_driver_sglang.backends.sglang.compat.passes import run_instead
from pie_driver_sglang.backends.sglang.compat.pools import MHATokenToKVPool, stored_kv
from pie_driver_sglang.backends.sglang.compat.quantized import UnknownQuantization, read_quantized
from pie_driver_sglang.engine.attention.paged import AttentionLayer
from pie_driver_sglang.engine.layers.reading import (
    fused_experts,
    mlp_of,
    read_head_norms,
    read_linear,
    require_rotary,
)
from pie_driver_sglang.engine.layers.weights import (
    ExpertLayer,
    Layer,
    QuantizedLayer,
    QuantizedLinear,
    UnsupportedLayer,
    require,
)
from pie_driver_sglang.kernels.gemm.types import Heads, LinearWeights, Norm
from pie_driver_sglang.kernels.moe.experts import Experts

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import PassContext

_BUILDS = {
    llama.LlamaModel: (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP),
    qwen2.Qwen2Model: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP),
    qwen3.Qwen3Model: (qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen2.Qwen2MLP),
    qwen3_moe.Qwen3MoeModel: (
        qwen3_moe.Qwen3MoeDecoderLayer,
        qwen3_moe.Qwen3MoeAttention,
        qwen3_moe.Qwen3MoeSparseMoeBlock,
    ),
    mixtral.MixtralModel: (
        mixtral.MixtralDecoderLayer,
        mixtral.MixtralAttention,
        mixtral.MixtralMoE,
    ),
}
"""Models and the classes that their layers, attention and MLPs are of."""
_MIXTURES = (qwen3_moe.Qwen3MoeSparseMoeBlock, mixtral.MixtralMoE)
"""Of MLPs, those that are mixtures of experts."""
_ROTARY_METHODS = ("forward", "forward_cuda", "forward_native")
"""What rotary embeddings compute by; variants that differ in their table only have the same."""
_Matrix = LinearWeights | QuantizedLinear


class LlamaDecoder:
    """Implements `Decoder` by SGLang's model without its LM head."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._attention = {layer.layer_id: layer for layer in layers_of(model)}
        self._kept: list[torch.Tensor] = []

    @property
    def _captured(self) -> Sequence[int]:
        """Layers whose inputs the model's `forward` returns, too, for an EAGLE-3 head."""
        captured: Sequence[int] = getattr(self._model, "layers_to_capture", ())
        return captured

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` embeddings."""
        embedded: torch.Tensor = self._model.embed_tokens(input_ids)
        return embedded

    def attend(self, layer_id: int, queries: torch.Tensor, context: PassContext) -> torch.Tensor:
        """By the `RadixAttention` of a layer, without storing anything."""
        attention = self._attention[layer_id]
        seen: torch.Tensor = attention(queries, None, None, context.native, save_kv_cache=False)
        return seen

    def run_instead(
        self, run: Callable[[torch.Tensor, torch.Tensor, PassContext], torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Replaces the model's `forward`; see `Decoder.run_instead`."""
        if not self._captured:
            return run_instead(self._model, run)

        def run_and_keep(
            input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
        ) -> tuple[torch.Tensor, list[torch.Tensor]]:
            self._kept = []
            return run(input_ids, positions, context), self._kept

        return run_instead(self._model, run_and_keep)

    def keep_input(self, layer: int, residual: torch.Tensor) -> None:
        """See `Decoder.keep_input`."""
        if layer in self._captured:
            self._kept.append(residual.clone())


def has_plain_gemms(model: torch.nn.Module) -> bool:
    """Whether all weights of a model are dense matrices of 16 or 32 bits."""
    modules = list(model.modules())
    linear = [module for module in modules if isinstance(module, LinearBase)]
    return not any(isinstance(module, FusedMoE | BaseLayerWithLoRA) for module in modules) and all(
        isinstance(module.quant_method, UnquantizedLinearMethod) for module in linear
    )


def replace_linear_gemms(
    model: torch.nn.Module,
    gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    supports: Callable[[torch.Tensor], bool],
) -> None:
    """Has the linear layers of a model that :func:`has_plain_gemms` multiply by `gemm`.

    Args:
        model: The model.
        gemm: ``[rows, inputs]`` and ``[outputs, inputs]`` -> ``[rows, outputs]``.
        supports: Whether it does so by a weight; others are left as they are.
    """
    method = _ReplacedGemm(gemm)
    for module in model.modules():
        if isinstance(module, LinearBase) and supports(module.weight):
            module.quant_method = method


def runs_plain_torch(model: torch.nn.Module) -> bool:
    """Whether all GEMMs of a model are SGLang's linear layers, none packed for AMX."""
    return not any(
        isinstance(module, torch.nn.Linear) or getattr(module, "use_intel_amx_backend", False)
        for module in model.modules()
    )


def activate_by_row(model: torch.nn.Module) -> None:
    """Has activations computed row by row.

    torch divides their elements among threads, and computes those at the end of a part by scalar
    instructions, whose exponentials have other bits.
    """
    kinds = (activation.__name__, torch.nn.modules.activation.__name__)
    for module in model.modules():
        if type(module).__module__ in kinds:
            module.forward = _by_row(type(module).forward.__get__(module))


def _by_row(forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def by_row(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([forward(rows[at : at + 1]) for at in range(len(rows))])

    return by_row


class _ReplacedGemm(UnquantizedLinearMethod):
    """How SGLang applies a linear layer."""

    def __init__(self, gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._gemm = gemm

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ weight.T + bias``."""
        out = self._gemm(x.reshape(-1, x.shape[-1]).contiguous(), layer.weight)
        if bias is not None:
            out += bias
        return out.view(*x.shape[:-1], -1)


def find_decoder(causal: Any) -> Any:
    """The part of a causal language model before its LM head, if its class is known.

    Raises:
        UnsupportedLayer: It is another one, or does something besides.
    """
    model: Any = getattr(causal, "model", None)
    require(type(model) in _BUILDS, f"it is a {type(model).__name__}")
    # `LlamaEmbeddingModel` keeps no configuration.
    config = getattr(causal, "config", None)
    require(not hasattr(config, "scale_emb"), "its embeddings are scaled")
    return model


def read_norm(norm: RMSNorm) -> Norm:
    """The weight of an `RMSNorm`; a new field may mean that it computes something else.

    Raises:
        UnsupportedLayer: It is a norm of another kind.
    """
    plain = (
        type(norm) is RMSNorm
        and norm.has_weight
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )
    require(plain, "its norm is not a plain RMSNorm")
    return Norm(norm.weight.data, norm.variance_epsilon)


def read_layers(
    model: Any, pool: MHATokenToKVPool
) -> list[Layer] | list[QuantizedLayer] | list[ExpertLayer]:
    """The layers of a model in their order, all of one kind.

    Args:
        model: As :func:`find_decoder` gives it.
        pool: Where its KV is.

    Raises:
        UnsupportedLayer: One of them is not known.
    """
    build = _BUILDS[type(model)]
    if build[-1] in _MIXTURES:
        halves = [
            (*_read_half(layer, build, pool), _read_experts(mlp_of(layer)))
            for layer in model.layers
        ]
        return [ExpertLayer(*_plain(parts)) for parts in halves]
    read = [(*_read_half(layer, build, pool), *_read_mlp(mlp_of(layer))) for layer in model.layers]
    if any(isinstance(part, QuantizedLinear) for part in read[0]):
        return [QuantizedLayer(*_plain(parts, QuantizedLinear)) for parts in read]
    return [Layer(*_plain(parts)) for parts in read]


def _plain(parts: tuple[Any, ...], kind: type = LinearWeights) -> tuple[Any, ...]:
    """The parts of a layer whose matrices must all be of one kind."""
    matrices = [part for part in parts if isinstance(part, LinearWeights | QuantizedLinear)]
    require(all(type(part) is kind for part in matrices), "some of its matrices are quantized")
    return parts


def _read_half(
    layer: Any, build: Any, pool: MHATokenToKVPool
) -> tuple[Norm, _Matrix, Heads, AttentionLayer, _Matrix, Norm]:
    """A layer up to the norm before its MLP."""
    of_layer, of_attention, of_mlp = build
    require(type(layer) is of_layer, f"one of its layers is a {type(layer).__name__}")
    attention = layer.self_attn
    for part, kind in ((attention, of_attention), (mlp_of(layer), of_mlp)):
        require(type(part) is kind, f"it has a {type(part).__name__}")
    return (
        read_norm(layer.input_layernorm),
        _read_matrix(attention.qkv_proj, QKVParallelLinear),
        _read_heads(attention, pool),
        read_attention(attention.attn, pool),
        _read_matrix(attention.o_proj, RowParallelLinear),
        read_norm(layer.post_attention_layernorm),
    )


def _read_mlp(mlp: Any) -> tuple[_Matrix, _Matrix]:
    require(type(mlp.act_fn) is SiluAndMul, f"it has a {type(mlp.act_fn).__name__}")
    return (
        _read_matrix(mlp.gate_up_proj, MergedColumnParallelLinear),
        _read_matrix(mlp.down_proj, RowParallelLinear),
    )


def _read_experts(block: Any) -> Experts:
    """The experts of a block whose router is a softmax over all of them."""
    experts, config = block.experts, block.topk.topk_config
    require(type(experts) is FusedMoE, f"it has a {type(experts).__name__}")
    method = experts.quant_method
    plain = type(method) is UnquantizedFusedMoEMethod and not (
        method.use_triton_kernels
        or method.use_flashinfer_trtllm_moe
        or getattr(experts, "use_intel_amx_backend", False)
    )
    require(plain, f"it has experts with {type(method).__name__} in another order")
    sizes = (block.tp_size, getattr(block, "ep_size", 1), experts.moe_ep_size)
    require(set(sizes) == {1}, "its experts are on several devices")
    plain_choice = (
        config.scoring_func == "softmax"
        and not config.use_grouped_topk
        and not selection.layers().fuses_shared_experts(config)
        and config.custom_routing_function is None
        and config.correction_bias is None
        and config.routed_scaling_factor is None
        and config.fused_shared_experts_scaling_factor is None
    )
    require(plain_choice, "its router chooses differently")
    runs = experts.moe_runner_config
    changes = (runs.routed_scaling_factor, runs.gemm1_alpha, runs.gemm1_clamp_limit)
    usual_runs = (
        (runs.activation, runs.is_gated, runs.apply_router_weight_on_input)
        == ("silu", True, False)
        and all(change is None for change in (*changes, runs.swiglu_limit))
    )  # fmt: skip
    require(usual_runs, "its experts compute differently")
    router = _read_matrix(block.gate, ReplicatedLinear)
    if isinstance(router, QuantizedLinear):
        raise UnsupportedLayer("its router is quantized")
    gate_up, down = experts.w13_weight.data, experts.w2_weight.data
    return fused_experts(router, config.top_k, config.renormalize, gate_up, down)


def _read_matrix(linear: Any, kind: type) -> _Matrix:
    if isinstance(linear, BaseLayerWithLoRA):
        linear = linear.base_layer
    require(type(linear) is kind, f"it has a {type(linear).__name__}")
    try:
        quantized = read_quantized(linear)
    except UnknownQuantization as reason:
        raise UnsupportedLayer(str(reason)) from reason
    if quantized is not None:
        require(linear.bias is None, f"a quantized {kind.__name__} of it has a bias")
        return quantized
    biased = kind is QKVParallelLinear
    return read_linear(linear, kind, UnquantizedLinearMethod, biased=biased)


def _read_heads(attention: Any, pool: MHATokenToKVPool) -> Heads:
    rotary: RotaryEmbedding = attention.rotary_emb
    layer: RadixAttention = attention.attn
    dim = layer.qk_head_dim
    require_rotary(rotary, RotaryEmbedding, _ROTARY_METHODS, dim)
    require(type(layer) is RadixAttention, f"it attends by a {type(layer).__name__}")
    require(layer.v_head_dim == dim, f"values of {layer.v_head_dim} with keys of {dim}")
    query_norm, key_norm = read_head_norms(attention, read_norm)
    keys, values = stored_kv(pool, layer)
    # Of KV that is stored as it is computed scales are not applied.
    scaled = layer.k_scale is not None and keys.dtype.itemsize == 1
    require(not scaled, "its KV is scaled")
    for stored in (keys, values):
        require(stored.dim() == 3 and stored[0].is_contiguous(), "its KV lies in another order")
    return Heads(
        layer.tp_q_head_num,
        query_norm,
        key_norm,
        rotary.cos_sin_cache,
        rotary.is_neox_style,
        keys,
        values,
    )
