"""What both backends read of the layers of Llama and Qwen, from classes that libraries share.

SGLang's classes and vLLM's have these attributes in common. What only one has is read by its
backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from pie_driver_sglang.engine.layers.weights import require
from pie_driver_sglang.kernels.gemm.types import LinearWeights, Norm
from pie_driver_sglang.kernels.moe.experts import Experts
from pie_driver_sglang.kernels.moe.routing import Router


def mlp_of(layer: Any) -> Any:
    """What follows the attention of a layer; Mixtral calls it otherwise."""
    return getattr(layer, "block_sparse_moe", None) or layer.mlp


def read_linear(linear: Any, kind: type, unquantized: type, *, biased: bool) -> LinearWeights:
    """The 16-bit weights of a linear layer.

    Args:
        linear: The layer, of class `kind`.
        kind: For the reason of a refusal.
        unquantized: The library's `UnquantizedLinearMethod`.
        biased: Whether it may have a bias.

    Raises:
        UnsupportedLayer: It computes something else.
    """
    method = type(linear.quant_method)
    require(method is unquantized, f"it has a linear layer with {method.__name__}")
    weight, bias = linear.weight.data, linear.bias
    require(weight.dim() == 2 and weight.is_contiguous(), "its weights lie in another order")
    require(bias is None or biased, f"a {kind.__name__} of it has a bias")
    require(not linear.skip_bias_add, "a bias is added elsewhere")
    return LinearWeights(weight, None if bias is None else bias.data)


def require_rotary(rotary: Any, base: type, methods: Sequence[str], dim: int) -> None:
    """Accepts rotary embeddings of all `dim` dimensions that differ in their table only.

    Args:
        rotary: The embedding.
        base: The library's `RotaryEmbedding`.
        methods: What it computes by.
        dim: Of heads.

    Raises:
        UnsupportedLayer: It computes something else.
    """
    turns = isinstance(rotary, base) and all(
        getattr(type(rotary), name) is getattr(base, name) for name in methods
    )
    require(turns, f"its positions are a {type(rotary).__name__}'s")
    require(rotary.rotary_dim == dim, f"{rotary.rotary_dim} of {dim} dimensions turn")


def read_head_norms(
    attention: Any, read_norm: Callable[[Any], Norm]
) -> tuple[Norm | None, Norm | None]:
    """The norms of query and key heads, where there are some."""
    norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    query, key = (None if norm is None else read_norm(norm) for norm in norms)
    return query, key


def fused_experts(
    router: LinearWeights,
    top_k: int,
    renormalize: bool,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> Experts:
    """The experts behind a softmax router.

    Args:
        router: ``[experts, hidden]``.
        top_k: Experts of a token.
        renormalize: Whether their weights are scaled to a sum of 1.
        gate_up: ``[experts, 2 * inner, hidden]``.
        down: ``[experts, hidden, inner]``.

    Raises:
        UnsupportedLayer: They have other shapes or strides.
    """
    total, height, width = gate_up.shape
    shapes = (router.weight.shape, down.shape)
    fits = shapes == ((total, width), (total, width, height // 2))
    require(fits, f"its experts are {tuple(gate_up.shape)} and {tuple(down.shape)}")
    require(gate_up.is_contiguous() and down.is_contiguous(), "its experts lie in another order")
    return Experts(Router(router.weight, top_k, renormalize), gate_up, down)
