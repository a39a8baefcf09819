"""The layers of Llama and Qwen, taken apart: which of vLLM's classes the fused kernels know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import llama, mixtral, qwen2, qwen3, qwen3_moe

from pie_driver_sglang.engine.layers.reading import (
    fused_experts,
    mlp_of,
    read_head_norms,
    read_linear,
    require_rotary,
)
from pie_driver_sglang.engine.layers.weights import ExpertLayer, Layer, require
from pie_driver_sglang.kernels.gemm.types import Heads, LinearWeights, Norm
from pie_driver_sglang.kernels.moe.experts import Experts

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import AttentionLayer
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
_ORDERED = (UnquantizedMoeBackend.TRITON,)
"""Kernels of experts for which vLLM leaves weights as checkpoints have them."""
_ROTARY_METHODS = ("forward_native", "forward_cuda", "forward_static")
"""What rotary embeddings compute by; variants that differ in their table only have the same."""

Run = Callable[[torch.Tensor, torch.Tensor, "PassContext"], torch.Tensor]


class VllmDecoder:
    """Implements `Decoder` by vLLM's model without its LM head."""

    def __init__(
        self,
        model: Any,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
        planned: Callable[[], PassContext],
    ) -> None:
        """Wraps a model.

        Args:
            model: As :func:`find_vllm_decoder` gives it.
            attend: Number of a layer and queries -> what they see of stored KV, in prefills.
            planned: The pass that runs.
        """
        self._model = model
        self._attend = attend
        self._planned = planned

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[tokens, hidden]`` embeddings."""
        embedded: torch.Tensor = self._model.embed_input_ids(input_ids)
        return embedded

    def attend(self, layer_id: int, queries: torch.Tensor, context: PassContext) -> torch.Tensor:
        """See `Decoder.attend`."""
        return self._attend(layer_id, queries)

    def keep_input(self, layer: int, residual: torch.Tensor) -> None:
        """See `Decoder.keep_input`; there is no draft model."""

    @contextlib.contextmanager
    def run_instead(self, run: Run) -> Iterator[None]:
        """Replaces the model's `forward`; see `Decoder.run_instead`."""

        def forward(
            input_ids: torch.Tensor, positions: torch.Tensor, *others: None, **named: None
        ) -> torch.Tensor:
            if any(other is not None for other in (*others, *named.values())):
                raise ValueError("a pass has tokens and nothing else")
            return run(input_ids, positions, self._planned())

        self._model.forward = forward
        try:
            yield
        finally:
            del self._model.forward


def find_vllm_decoder(causal: Any) -> Any:
    """The part of a causal language model before its LM head, if its class is known.

    Raises:
        UnsupportedLayer: It is another one, or does something besides.
    """
    model: Any = getattr(causal, "model", None)
    require(type(model) in _BUILDS, f"it is a {type(model).__name__}")
    # Mixtral's class has no such list.
    captured = getattr(model, "aux_hidden_state_layers", ())
    require(not captured, "hidden states of some layers are wanted")
    require(model.do_not_compile, "torch.compile runs it")
    return model


def read_rms_norm(norm: RMSNorm) -> Norm:
    """The weight of an `RMSNorm`.

    Raises:
        UnsupportedLayer: It is a norm of another kind.
    """
    plain = type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None
    require(plain, "its norm is not a plain RMSNorm")
    return Norm(norm.weight.data, norm.variance_epsilon)


def read_vllm_layers(
    model: Any, attention: Mapping[str, AttentionLayer]
) -> list[Layer] | list[ExpertLayer]:
    """The layers of a model in their order.

    Args:
        model: As :func:`find_vllm_decoder` gives it.
        attention: Rule and KV of layers, by the names that vLLM has registered them by.

    Raises:
        UnsupportedLayer: One of them is not known.
    """
    build, tables = _BUILDS[type(model)], dict[int, torch.Tensor]()
    halves = [_read_half(layer, build, attention, tables) for layer in model.layers]
    mlps = [mlp_of(layer) for layer in model.layers]
    if build[-1] in _MIXTURES:
        experts = map(_read_experts, mlps)
        return [ExpertLayer(*half, mixture) for half, mixture in zip(halves, experts, strict=True)]
    return [Layer(*half, *_read_mlp(mlp)) for half, mlp in zip(halves, mlps, strict=True)]


def _read_half(
    layer: Any,
    build: Any,
    attention: Mapping[str, AttentionLayer],
    tables: dict[int, torch.Tensor],
) -> tuple[Norm, LinearWeights, Heads, AttentionLayer, LinearWeights, Norm]:
    """A layer up to the norm before its MLP."""
    own = layer.self_attn
    for part, kind in zip((layer, own, mlp_of(layer)), build, strict=True):
        require(type(part) is kind, f"it has a {type(part).__name__}")
    require(type(own.attn) is Attention, f"it attends by a {type(own.attn).__name__}")
    stored = attention[own.attn.layer_name]
    return (
        read_rms_norm(layer.input_layernorm),
        _read_matrix(own.qkv_proj, QKVParallelLinear),
        _read_heads(own, stored, tables),
        stored,
        _read_matrix(own.o_proj, RowParallelLinear),
        read_rms_norm(layer.post_attention_layernorm),
    )


def _read_mlp(mlp: Any) -> tuple[LinearWeights, LinearWeights]:
    require(type(mlp.act_fn) is SiluAndMul, f"it has a {type(mlp.act_fn).__name__}")
    return (
        _read_matrix(mlp.gate_up_proj, MergedColumnParallelLinear),
        _read_matrix(mlp.down_proj, RowParallelLinear),
    )


def _read_experts(block: Any) -> Experts:
    """The experts of a block whose router is a softmax over all of them."""
    runner = block.experts
    require(type(runner) is MoERunner, f"it has a {type(runner).__name__}")
    experts, router, method = (
        runner.routed_experts,
        runner.router,
        runner.routed_experts.quant_method,
    )
    plain = type(method) is UnquantizedFusedMoEMethod and method.unquantized_backend in _ORDERED
    require(plain, f"it has experts with {type(method).__name__} in another order")
    sizes = experts.moe_config.moe_parallel_config
    one_device = (sizes.tp_size, sizes.dp_size, sizes.ep_size) == (1, 1, 1)
    require(one_device, "its experts are on several devices")
    softmax = type(router) is FusedTopKRouter and router.scoring_func == "softmax"
    require(softmax and router.eplb_state is None, "its router chooses differently")
    transforms = (runner.routed_input_transform, runner.routed_output_transform)
    require(runner.shared_experts is None, "it has shared experts")
    limits = (experts.swiglu_limit, experts.swiglu_alpha, experts.swiglu_beta)
    usual = (
        experts.activation == MoEActivation.SILU
        and not experts.apply_router_weight_on_input
        and runner.routed_scaling_factor == experts.routed_scaling_factor == 1.0
        and all(part is None for part in (*transforms, *limits))
    )
    require(usual, "its experts compute differently")
    chooses = _read_matrix(block.gate, ReplicatedLinear)
    gate_up, down = experts.w13_weight.data, experts.w2_weight.data
    return fused_experts(chooses, router.top_k, router.renormalize, gate_up, down)


def _read_matrix(wrapped: Any, kind: type) -> LinearWeights:
    # Graphs that run fused layers apply no adapters.
    linear = getattr(wrapped, "base_layer", wrapped)
    require(type(linear) is kind, f"it has a {type(linear).__name__}")
    biased = kind is QKVParallelLinear
    return read_linear(linear, kind, UnquantizedLinearMethod, biased=biased)


def _read_heads(attention: Any, stored: AttentionLayer, tables: dict[int, torch.Tensor]) -> Heads:
    rotary, dim = attention.rotary_emb, stored.head_dim
    require_rotary(rotary, RotaryEmbedding, _ROTARY_METHODS, dim)
    require(stored.value_dim == dim, f"values of {stored.value_dim} with keys of {dim}")
    require(not getattr(attention, "dual_chunk_attention_config", None), "it attends in chunks")
    # Qwen2's class has norms of heads as an option.
    normalized = getattr(attention, "qk_norm", True)
    norms = read_head_norms(attention, read_rms_norm) if normalized else (None, None)
    if id(rotary) not in tables:
        # Kernels here multiply in float32; vLLM keeps the table as activations are.
        with stored.keys.device:
            tables[id(rotary)] = rotary._compute_cos_sin_cache().float().contiguous()
    return Heads(
        stored.heads,
        *norms,
        tables[id(rotary)],
        rotary.is_neox_style,
        stored.keys,
        stored.values,
    )
