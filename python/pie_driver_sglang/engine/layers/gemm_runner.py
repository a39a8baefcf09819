"""GEMMs of layers whose norms are folded into the weights after them, by any kernel."""

from __future__ import annotations

from typing import Any

import torch

from pie_driver_sglang.kernels.gemm import small_m, tiled
from pie_driver_sglang.kernels.gemm.lora import Shrunk, lora_expand
from pie_driver_sglang.kernels.gemm.search_space import GemmConfig
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Norm,
    Residual,
    Workspace,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, WgmmaGemm


class GemmRunner:
    """Runs a GEMM by the kernel that its config belongs to."""

    def __init__(self, workspace: Workspace, wgmma_gemm: WgmmaGemm | None) -> None:
        """Takes what kernels need.

        Args:
            workspace: For split-K of the kernels in Triton.
            wgmma_gemm: None where the GPU does not have it.
        """
        self.workspace = workspace
        self.wgmma_gemm = wgmma_gemm

    def multiply(
        self, rows: torch.Tensor, matrix: LinearWeights, config: GemmConfig, epilogue: Epilogue
    ) -> torch.Tensor:
        """Computes ``rows @ weight.T`` with `STORE` or `SWIGLU`, without a norm."""
        return self._gemm(rows, matrix, config, epilogue, None)

    def project(
        self,
        residual: Residual,
        norm: Norm,
        matrix: LinearWeights,
        config: GemmConfig,
        epilogue: Epilogue,
        lora: Shrunk | None = None,
    ) -> torch.Tensor:
        """Projects the residual after its RMSNorm, whose weight is folded into both factors."""
        return self._gemm(
            residual.rows, matrix, config, epilogue, lora,
            sum_squares=residual.sum_squares, epsilon=norm.epsilon,
        )  # fmt: skip

    def project_add(
        self,
        rows: torch.Tensor,
        matrix: LinearWeights,
        config: GemmConfig | None,
        residual: Residual,
        lora: Shrunk | None = None,
    ) -> Residual:
        """Adds a projection to the residual in place; returns it with its sums of squares.

        Without a config cuBLAS does it, which leaves no sums of squares.
        """
        if config is None:
            return without_squares(lora_expand(residual.rows.addmm_(rows, matrix.weight.t()), lora))
        tiles = residual.rows.shape[1] // config.block_n
        out = Residual(residual.rows, residual.sum_squares.new_empty(len(rows), tiles))
        self._gemm(rows, matrix, config, ADD_RESIDUAL, lora, residual=out)
        return out

    def _gemm(
        self,
        rows: torch.Tensor,
        matrix: LinearWeights,
        config: GemmConfig,
        epilogue: Epilogue,
        lora: Shrunk | None,
        **named: Any,
    ) -> torch.Tensor:
        if lora is not None:
            # Not for `tiled`, which `LayerConfigs.with_lora` leaves out.
            named["lora"] = lora
        if isinstance(config, WgmmaConfig):
            assert self.wgmma_gemm is not None
            return self.wgmma_gemm.multiply(rows, matrix, config, epilogue, **named)
        gemm = tiled.tiled_gemm if config.tma else small_m.small_m_gemm
        return gemm(rows, matrix, config, self.workspace, swiglu=epilogue == SWIGLU, **named)


def without_squares(rows: torch.Tensor) -> Residual:
    """A residual whose sums of squares are unknown."""
    return Residual(rows, rows.new_empty(len(rows), 0, dtype=torch.float32))
