"""LoRA adapters of dense layers whose norms are folded, in steps of any rows.

Beside each GEMM one kernel shrinks its inputs for the adapters of all rows
(``kernels/gemm/lora.py``); the GEMM expands. The RMS scale of rows is applied to sums that have the
adapters' part already, so adapters, too, are multiplied by the weights of the norms
(`Adapters.fold`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pie_driver_sglang.engine.layers.weights import LayerAdapters
from pie_driver_sglang.kernels.gemm.lora import (
    LoraRows,
    LoraWeights,
    Shrunk,
    load_shrink_kernel,
    lora_shrink,
)

if TYPE_CHECKING:
    from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

_NO_ADAPTERS = LayerAdapters(None, None, None, None)


class LayerLora(NamedTuple):
    """The adapters of a layer in a step."""

    adapters: LayerAdapters
    rows: LoraRows | None
    """The adapter of each row; None for a step without adapters."""
    kernel: CudaKernel | None
    """Of the shrink, where the GPU has one in CUDA C++."""

    def shrink(self, x: torch.Tensor, weights: LoraWeights | None) -> Shrunk | None:
        """Shrinks the inputs of a matrix, ``[rows, inputs]``; None where it has no adapters."""
        if weights is None or self.rows is None:
            return None
        return lora_shrink(x, self.rows, weights, self.kernel)


NO_LORA = LayerLora(_NO_ADAPTERS, None, None)
"""A layer without adapters."""


class FusedLora:
    """The adapters of all layers, in device slots."""

    def __init__(self, adapters: Sequence[LayerAdapters]) -> None:
        """Loads the shrink's kernel, which all layers share."""
        self._adapters = adapters
        downs = (one.down for layer in adapters for one in layer if one is not None)
        first = next(downs, None)
        self._kernel = None if first is None else load_shrink_kernel(first.dtype, first.device)

    def of_rows(self, rows: LoraRows) -> list[LayerLora]:
        """The layers of a step whose rows have these adapters."""
        return [LayerLora(layer, rows, self._kernel) for layer in self._adapters]
