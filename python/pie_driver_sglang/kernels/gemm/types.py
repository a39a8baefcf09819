"""Types of the GEMM kernels: weights, activations, epilogues and tile configurations.

Shapes are written as PyTorch does: weights are ``[outputs, inputs]``, activations
``[rows, inputs]`` with one row a token. In tile sizes M counts rows, N outputs and K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch


class Epilogue(IntEnum):
    """What a GEMM does with its sums; the values are those of `EPILOGUE` in the CUDA sources."""

    STORE = 0
    SWIGLU = 1
    """Stores ``silu(gate) * up``; the weight has the gate projection, then the up projection."""
    ADD_RESIDUAL = 2
    """Adds to the residual in place."""

    @classmethod
    def of(cls, *, swiglu: bool, add_residual: bool) -> Epilogue:
        """The epilogue that these flags name."""
        return cls.SWIGLU if swiglu else cls.ADD_RESIDUAL if add_residual else cls.STORE


STORE, SWIGLU, ADD_RESIDUAL = Epilogue


@dataclass(frozen=True)
class TileConfig:
    """Tile sizes and launch options of a Triton GEMM."""

    block_m: int
    """Rows of a tile."""
    block_n: int
    """Outputs of a tile; with SwiGLU as many of the gate and of the up projection."""
    block_k: int
    """Inputs of an iteration."""
    split_k: int = 1
    """Programs that divide the inputs of a tile."""
    num_warps: int = 4
    num_stages: int = 4
    """Software pipeline stages."""
    swap_ab: bool = False
    """Whether outputs are the M dimension of the MMA instruction, whose minimum is 64."""
    tma: bool = False
    """Whether TMA loads the operands (`tiled`), else `small_m` runs the GEMM."""

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether the tiles divide a weight of this shape."""
        return outputs % self.block_n == 0 and inputs % (self.block_k * self.split_k) == 0

    def shared_bytes(self, itemsize: int, epilogue: Epilogue) -> int:
        """Shared memory of a program's stages, in bytes."""
        held = self.block_m + self.block_n * (2 if epilogue == Epilogue.SWIGLU else 1)
        return held * self.block_k * itemsize * self.num_stages


class LinearWeights(NamedTuple):
    """Weights of a linear layer."""

    weight: torch.Tensor
    """``[outputs, inputs]``, contiguous."""
    bias: torch.Tensor | None = None
    """``[outputs]``."""


class Norm(NamedTuple):
    """RMSNorm."""

    weight: torch.Tensor
    """``[width]``."""
    epsilon: float


class Heads(NamedTuple):
    """Attention heads of a layer, and its KV cache."""

    num_q_heads: int
    q_norm: Norm | None
    """Norm of each query head; None only together with `k_norm`."""
    k_norm: Norm | None
    """Norm of each key head."""
    cos_sin_cache: torch.Tensor
    """``[positions, dim]`` float32: cosines, then sines, each of half the dimensions."""
    is_neox: bool
    """Whether rotary pairs are half a head apart (NeoX style) instead of adjacent."""
    k_cache: torch.Tensor
    """``[slots, kv_heads, dim]``, heads contiguous."""
    v_cache: torch.Tensor
    """``[slots, kv_heads, dim]``, heads contiguous."""


class RmsScale(NamedTuple):
    """A deferred RMSNorm: ``1 / rms(x)`` is applied to ``x @ weight.T`` instead of to `x`."""

    rows: torch.Tensor
    """``[rows, width]``, width contiguous: `x`; or ``[rows, 1]`` float32: the factors themselves,
    from :func:`compute_rms_scale`."""
    epsilon: float


class Residual(NamedTuple):
    """The residual of a step, with partial sums of squares for the next RMSNorm."""

    rows: torch.Tensor
    """``[rows, width]``, contiguous."""
    sum_squares: torch.Tensor
    """``[rows, tiles]`` float32: sums of squares of parts of each row; no tiles if unknown."""


class Workspace(NamedTuple):
    """Split-K workspace, shared by all GEMMs, since kernels run one after the other."""

    partial_sums: torch.Tensor
    """Float32, as many as :func:`workspace_sizes` says."""
    semaphores: torch.Tensor
    """Int32, zeros between kernels: splits of each tile that have stored their sums."""
