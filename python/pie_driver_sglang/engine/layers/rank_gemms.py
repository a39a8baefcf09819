"""GEMMs of a tensor parallel rank: the kernels of `small_batch`, without norms and residuals.

The all-reduce between them adds to the residual and normalizes (`all_reduce_norm`), so rows come
normalized, and what a rank adds up is stored as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pie_driver_sglang.engine.layers.gemm_runner import GemmRunner
from pie_driver_sglang.engine.layers.gemm_table import GemmTable, TunedGemm
from pie_driver_sglang.engine.layers.weights import Layer
from pie_driver_sglang.kernels.gemm import small_m, tiled, wgmma
from pie_driver_sglang.kernels.gemm.norm_rope import silu_and_mul
from pie_driver_sglang.kernels.gemm.search_space import GemmConfig, GemmProblem
from pie_driver_sglang.kernels.gemm.types import (
    STORE,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Norm,
    TileConfig,
    Workspace,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaGemm


class RankGemms:
    """GEMMs of steps that are bound by reading weights; larger ones have no config."""

    def __init__(self, runner: GemmRunner, table: GemmTable | None) -> None:
        """Takes the kernels, and the measured configs of the GPU."""
        self._runner = runner
        self._table = GemmTable("") if table is None else table

    @classmethod
    def of(cls, layers: Sequence[Layer], norm: Norm, table: GemmTable | None) -> RankGemms:
        """The GEMMs of a model's layers on this rank's device."""
        weight = norm.weight
        outputs = max(len(norm.weight), *(len(layer.qkv.weight) for layer in layers))
        floats, semaphores = tiled.workspace_sizes(small_m.MAX_ROWS, outputs)
        workspace = Workspace(
            torch.zeros(floats, device=weight.device),
            torch.zeros(semaphores, dtype=torch.int32, device=weight.device),
        )
        on_hopper = wgmma.supports_wgmma(weight.device) and weight.itemsize == 2
        gemm = WgmmaGemm(weight.dtype, weight.device) if on_hopper else None
        return cls(GemmRunner(workspace, gemm), table)

    def multiply(
        self, rows: torch.Tensor, matrix: LinearWeights, epilogue: Epilogue
    ) -> torch.Tensor | None:
        """Computes ``rows @ weight.T``. Can be captured.

        Args:
            rows: ``[rows, inputs]``, contiguous.
            matrix: Of the rows' dtype; with a bias only without SwiGLU.
            epilogue: `ADD_RESIDUAL` for what ranks add up, which is stored only.

        Returns:
            ``[rows, outputs]``, half of them with SwiGLU; None where there is no config.
        """
        measured = self._measured(len(rows), matrix, epilogue)
        if measured is not None and measured.config is None:
            # cuBLAS was the fastest.
            out = torch.nn.functional.linear(rows, *matrix)
            return silu_and_mul(out) if epilogue == SWIGLU else out
        config = self.find_config(len(rows), matrix, epilogue)
        if config is None:
            return None
        stored = SWIGLU if epilogue == SWIGLU else STORE
        return self._runner.multiply(rows, matrix, config, stored)

    def _measured(self, rows: int, matrix: LinearWeights, epilogue: Epilogue) -> TunedGemm | None:
        height, inputs = matrix.weight.shape
        problem = GemmProblem(epilogue, 1, height, inputs, matrix.weight.itemsize).at(rows)
        found = None if problem is None else self._table.get(problem)
        return found if found is not None and _runs(found.config, self._runner) else None

    def find_config(
        self, rows: int, matrix: LinearWeights, epilogue: Epilogue
    ) -> GemmConfig | None:
        """The config of a GEMM: a measured one, or one by rule; see :meth:`multiply`."""
        height, inputs = matrix.weight.shape
        itemsize = matrix.weight.itemsize
        measured = self._measured(rows, matrix, epilogue)
        if measured is not None:
            return measured.config
        if self._runner.wgmma_gemm is not None and rows > 1:
            return wgmma.find_wgmma_config(rows, height, inputs, itemsize, epilogue)
        outputs = height // 2 if epilogue == SWIGLU else height
        return small_m.find_small_m_config(rows, outputs, inputs, epilogue)


def _runs(config: GemmConfig | None, runner: GemmRunner) -> bool:
    """Whether these GEMMs run a measured config; TMA of `tiled` needs rows with sums of squares."""
    if isinstance(config, TileConfig):
        return not config.tma
    return config is None or runner.wgmma_gemm is not None
