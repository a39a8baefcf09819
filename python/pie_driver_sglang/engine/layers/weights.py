"""The weights of decoder layers, as fused layers read them; a backend fills them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from pie_driver_sglang.engine.attention.paged import AttentionLayer
from pie_driver_sglang.engine.backend import Decoder
from pie_driver_sglang.kernels.gemm.fp8_rows import QuantizedWeights
from pie_driver_sglang.kernels.gemm.lora import LoraWeights
from pie_driver_sglang.kernels.gemm.types import Heads, LinearWeights, Norm
from pie_driver_sglang.kernels.moe.experts import Experts


class QuantizedLinear(NamedTuple):
    """A linear layer whose weights are FP8."""

    weights: QuantizedWeights
    apply: Callable[[torch.Tensor], torch.Tensor]
    """The library's own GEMM: it quantizes ``[rows, inputs]`` itself."""


class Layer(NamedTuple):
    """One layer, as the fused kernels want it."""

    before: Norm
    qkv: LinearWeights
    heads: Heads
    attention: AttentionLayer
    out: LinearWeights
    between: Norm
    gate_up: LinearWeights
    down: LinearWeights


class LayerAdapters(NamedTuple):
    """LoRA adapters of the matrices of a `Layer`; None for one that takes none."""

    qkv: LoraWeights | None
    out: LoraWeights | None
    gate_up: LoraWeights | None
    down: LoraWeights | None


class QuantizedLayer(NamedTuple):
    """One layer whose matrices are FP8."""

    before: Norm
    qkv: QuantizedLinear
    heads: Heads
    attention: AttentionLayer
    out: QuantizedLinear
    between: Norm
    gate_up: QuantizedLinear
    down: QuantizedLinear


class ExpertLayer(NamedTuple):
    """One layer with a mixture of experts."""

    before: Norm
    qkv: LinearWeights
    heads: Heads
    attention: AttentionLayer
    out: LinearWeights
    between: Norm
    experts: Experts


class DecoderWeights(NamedTuple):
    """A decoder that is built as Llama's."""

    decoder: Decoder
    norm: Norm
    """After the last layer."""
    layers: list[Layer] | list[QuantizedLayer] | list[ExpertLayer]
    """In their order, all of one kind."""
    attends_stored: bool
    """Whether prefills attend to nothing but KV that is stored, their own tokens' included."""


class UnsupportedLayer(Exception):
    """Something about a model that the fused layers do not support."""


def require(supported: bool, what: str) -> None:
    """Raises `UnsupportedLayer` with `what` unless something is supported."""
    if not supported:
        raise UnsupportedLayer(what)
