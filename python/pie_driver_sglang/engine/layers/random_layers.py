"""Layers of random weights in the shape of a model, to search GEMM configs without a checkpoint."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pie_driver_sglang.engine.layers.weights import Layer
from pie_driver_sglang.kernels.gemm.search_space import GemmProblem
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    LinearWeights,
    Norm,
)

_EPSILON = 1e-5


class LayerShape(NamedTuple):
    """Sizes of a dense Llama-like layer."""

    width: int
    """Of hidden states."""
    heads: int
    kv_heads: int
    head_dim: int
    middle: int
    """Of the MLP."""
    has_bias: bool = False
    """Whether the QKV projection has a bias."""

    def problems(self, rows: int) -> dict[str, GemmProblem]:
        """The GEMMs of a layer by name, for a bucket of rows."""
        attended = self.heads * self.head_dim
        qkv = attended + 2 * self.kv_heads * self.head_dim
        return {
            "qkv": GemmProblem(STORE, rows, qkv, self.width),
            "out": GemmProblem(ADD_RESIDUAL, rows, self.width, attended),
            "gate_up": GemmProblem(SWIGLU, rows, 2 * self.middle, self.width),
            "down": GemmProblem(ADD_RESIDUAL, rows, self.width, self.middle),
        }


def random_layers(
    shape: LayerShape, device: torch.device, wanted_bytes: int
) -> tuple[list[Layer], Norm]:
    """Makes bfloat16 layers, two at least, whose weights take `wanted_bytes` or more.

    They have no attention.
    """
    dtype = torch.bfloat16
    norm = Norm(torch.ones(shape.width, device=device, dtype=dtype), _EPSILON)

    def matrix(problem: GemmProblem, *, has_bias: bool) -> LinearWeights:
        weight = torch.empty(problem.height, problem.inputs, device=device, dtype=dtype)
        weight.normal_(std=problem.inputs**-0.5)
        bias = torch.randn(problem.height, device=device).to(dtype) if has_bias else None
        return LinearWeights(weight, bias)

    total = 0
    layers: list[Layer] = []
    no_attention: Any = None
    while len(layers) < 2 or total < wanted_bytes:
        qkv, out, gate_up, down = (
            matrix(problem, has_bias=shape.has_bias and name == "qkv")
            for name, problem in shape.problems(1).items()
        )
        layers.append(Layer(norm, qkv, no_attention, no_attention, out, norm, gate_up, down))
        total += sum(each.weight.nbytes for each in (qkv, out, gate_up, down))
    return layers, norm
