"""LoRA adapters of dense layers whose norms are folded, in steps of any rows.

Before each GEMM one kernel shrinks its inputs for the adapters of all rows
(``kernels/gemm/lora.py``); the GEMM expands. The RMS scale of rows is applied to sums that have the
adapters' part already, so adapters, too, are multiplied by the weights of the norms
(`Adapters.fold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pie_driver_sglang.engine.layers.weights import LayerAdapters
from pie_driver_sglang.kernels.gemm.lora import (
    LoraRows,
    LoraWeights,
    Shrunk,
    lora_shrink,
    shrink_workspace_sizes,
)
from pie_driver_sglang.kernels.gemm.types import Workspace

_NO_ADAPTERS = LayerAdapters(None, None, None, None)


class LayerLora(NamedTuple):
    """The adapters of a layer in a step."""

    adapters: LayerAdapters
    rows: LoraRows | None
    """The adapter of each row; None for a step without adapters."""
    workspace: Workspace | None

    def shrink(self, x: torch.Tensor, weights: LoraWeights | None) -> Shrunk | None:
        """Shrinks the inputs of a matrix, ``[rows, inputs]``; None where it has no adapters."""
        if weights is None or self.rows is None or self.workspace is None:
            return None
        return lora_shrink(x, self.rows, weights, self.workspace)


NO_LORA = LayerLora(_NO_ADAPTERS, None, None)
"""A layer without adapters."""


class FusedLora:
    """The adapters of all layers, in device slots."""

    def __init__(self, adapters: Sequence[LayerAdapters]) -> None:
        """Allocates the workspace, which all layers share."""
        self._adapters = adapters
        weights = [one for layer in adapters for one in layer if one is not None]
        sizes = [(1, 1), *(shrink_workspace_sizes(one) for one in weights)]
        floats, semaphores = map(max, zip(*sizes, strict=True))
        device = weights[0].down.device if weights else None
        self._workspace = Workspace(
            torch.zeros(floats, device=device),
            torch.zeros(semaphores, dtype=torch.int32, device=device),
        )

    def of_rows(self, rows: LoraRows) -> list[LayerLora]:
        """The layers of a step whose rows have these adapters."""
        return [LayerLora(layer, rows, self._workspace) for layer in self._adapters]
