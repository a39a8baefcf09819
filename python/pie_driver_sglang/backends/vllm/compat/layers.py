"""The layers of Llama and Qwen, taken apart: which of vLLM's classes the fused kernels know."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.models import llama, qwen2, qwen3

from pie_driver_sglang.engine.layers.weights import Layer, require
from pie_driver_sglang.kernels.gemm.types import Heads, LinearWeights, Norm

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import AttentionLayer
    from pie_driver_sglang.engine.backend import PassContext

_BUILDS = {
    llama.LlamaModel: (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP),
    qwen2.Qwen2Model: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP),
    qwen3.Qwen3Model: (qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen2.Qwen2MLP),
}
"""Models and the classes that their layers, attention and MLPs are of."""
_TURNS = ("forward_native", "forward_cuda", "forward_static")
"""What rotary embeddings compute by; variants that differ in their table only have the same."""

Run = Callable[[torch.Tensor, torch.Tensor, "PassContext"], torch.Tensor]


class LlamaDecoder:
    """Implements `Decoder` by vLLM's model without its LM head."""

    def __init__(
        self,
        model: Any,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
        planned: Callable[[], PassContext],
    ) -> None:
        """Wraps a model.

        Args:
            model: As :func:`find_decoder` gives it.
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


def find_decoder(causal: Any) -> Any:
    """The part of a causal language model before its LM head, if its class is known.

    Raises:
        UnsupportedLayer: It is another one, or does something besides.
    """
    model: Any = getattr(causal, "model", None)
    require(type(model) in _BUILDS, f"it is a {type(model).__name__}")
    require(not model.aux_hidden_state_layers, "hidden states of some layers are wanted")
    require(model.do_not_compile, "torch.compile runs it")
    return model


def read_norm(norm: RMSNorm) -> Norm:
    """The weight of an `RMSNorm`.

    Raises:
        UnsupportedLayer: It is a norm of another kind.
    """
    plain = type(norm) is RMSNorm and norm.has_weight and norm.variance_size_override is None
    require(plain, "its norm is not a plain RMSNorm")
    return Norm(norm.weight.data, norm.variance_epsilon)


def read_layers(model: Any, attention: Mapping[str, AttentionLayer]) -> list[Layer]:
    """The layers of a model in their order.

    Args:
        model: As :func:`find_decoder` gives it.
        attention: Rule and KV of layers, by the names that vLLM has registered them by.

    Raises:
        UnsupportedLayer: One of them is not known.
    """
    tables: dict[int, torch.Tensor] = {}
    return [_read_layer(layer, _BUILDS[type(model)], attention, tables) for layer in model.layers]


def _read_layer(
    layer: Any,
    build: Any,
    attention: Mapping[str, AttentionLayer],
    tables: dict[int, torch.Tensor],
) -> Layer:
    for part, kind in zip((layer, layer.self_attn, layer.mlp), build, strict=True):
        require(type(part) is kind, f"it has a {type(part).__name__}")
    own, mlp = layer.self_attn, layer.mlp
    require(type(mlp.act_fn) is SiluAndMul, f"it has a {type(mlp.act_fn).__name__}")
    require(type(own.attn) is Attention, f"it attends by a {type(own.attn).__name__}")
    stored = attention[own.attn.layer_name]
    return Layer(
        read_norm(layer.input_layernorm),
        _read_matrix(own.qkv_proj, QKVParallelLinear),
        _read_heads(own, stored, tables),
        stored,
        _read_matrix(own.o_proj, RowParallelLinear),
        read_norm(layer.post_attention_layernorm),
        _read_matrix(mlp.gate_up_proj, MergedColumnParallelLinear),
        _read_matrix(mlp.down_proj, RowParallelLinear),
    )


def _read_matrix(linear: Any, kind: type) -> LinearWeights:
    require(type(linear) is kind, f"it has a {type(linear).__name__}")
    method = type(linear.quant_method)
    require(method is UnquantizedLinearMethod, f"it has a linear layer with {method.__name__}")
    weight, bias = linear.weight.data, linear.bias
    require(weight.dim() == 2 and weight.is_contiguous(), "its weights lie in another order")
    require(bias is None or kind is QKVParallelLinear, f"a {kind.__name__} of it has a bias")
    require(not linear.skip_bias_add, "a bias is added elsewhere")
    return LinearWeights(weight, None if bias is None else bias.data)


def _read_heads(attention: Any, stored: AttentionLayer, tables: dict[int, torch.Tensor]) -> Heads:
    rotary, dim = attention.rotary_emb, stored.head_dim
    turns = isinstance(rotary, RotaryEmbedding) and all(
        getattr(type(rotary), name) is getattr(RotaryEmbedding, name) for name in _TURNS
    )
    require(turns, f"its positions are a {type(rotary).__name__}'s")
    require(rotary.rotary_dim == dim, f"{rotary.rotary_dim} of {dim} dimensions turn")
    require(stored.value_dim == dim, f"values of {stored.value_dim} with keys of {dim}")
    require(not getattr(attention, "dual_chunk_attention_config", None), "it attends in chunks")
    # Qwen2's class has norms of heads as an option.
    normalized = getattr(attention, "qk_norm", True)
    query_norm, key_norm = (
        read_norm(norm) if normalized and norm is not None else None
        for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    )
    if id(rotary) not in tables:
        # Kernels here multiply in float32; vLLM keeps the table as activations are.
        with stored.keys.device:
            tables[id(rotary)] = rotary._compute_cos_sin_cache().float().contiguous()
    return Heads(
        stored.heads,
        query_norm,
        key_norm,
        tables[id(rotary)],
        rotary.is_neox_style,
        stored.keys,
        stored.values,
    )
