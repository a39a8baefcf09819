"""Layers of plain numbers in few kernels, where SGLang runs one for each operation.

What a step of few rows takes is how often it waits, for memory and for the kernel before. These
layers run as the kernels of ``kernels/gemm/dense_layers.py`` while a graph is captured, and, where
FlashAttention-3 attends, in prefills.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.engine.layers.small_batch import (
    NARROW,
    FewRows,
    attend_unscaled,
    gate_unscaled,
)
from pie_driver_sglang.kernels.comm.all_reduce_norm import LamportAllReduceNorm
from pie_driver_sglang.kernels.gemm import dense_layers
from pie_driver_sglang.kernels.gemm.dense_layers import LinearWeights, Norm

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import AttentionLayer, PagedDecode
    from pie_driver_sglang.engine.backend import Decoder, PassContext
    from pie_driver_sglang.engine.layers.weights import Layer

_FEW_ROWS, _NARROW_FEW_ROWS = 256, 64
"""Of more rows products are a library's, which adds to what there is, and parts do not pay; the
second for layers that are narrow, where batches have no kernels of their own."""


class DenseLayers:
    """The layers of a loaded model, as kernels that know each other."""

    def __init__(
        self,
        decoder: Decoder,
        layers: list[Layer],
        norm: Norm,
        attention: PagedDecode,
        sums: LamportAllReduceNorm | None,
        *,
        prefills: bool,
        folded: bool,
    ) -> None:
        """Takes a model apart.

        Args:
            decoder: The model without its LM head.
            layers: Its layers.
            norm: After the last layer.
            attention: Of decodes.
            sums: Of the ranks' parts; None for a model on one device.
            prefills: Whether prefills attend to nothing but what is stored.
            folded: Whether products have taken the weights of norms.
        """
        self._decoder = decoder
        self._attention = attention
        self._layers = layers
        self._sums = sums
        self._folded = folded
        self._prefills = prefills
        self._few = FewRows.of(layers, norm, attention) if folded else None
        # What follows each layer.
        self._norms = [*(layer.before for layer in layers[1:]), norm]

    @contextlib.contextmanager
    def prefilling(self) -> Iterator[None]:
        """Within, the model runs as these kernels, if they can; its input is a prefill."""
        can = self._folded and self._prefills
        with self._decoder.run_instead(self._run_many) if can else contextlib.nullcontext():
            yield

    def takes(self, rows: int) -> bool:
        """Whether it runs steps of so many rows."""
        return self._sums is None or rows <= self._sums.most_rows

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model runs as these kernels; its input is a decode of rows that it takes."""
        with self._decoder.run_instead(self._run):
            yield

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        if self._folded and len(input_ids) > self._most_few_rows():
            return self._run_many(input_ids, positions, context)
        if self._few is not None and len(input_ids) <= self._few.most_rows:
            embedded = self._decoder.embed(input_ids)
            return self._few.run(embedded, positions, context)
        embedded = self._decoder.embed(input_ids)[None]
        rows, residual = dense_layers.add_norm(embedded, None, self._layers[0].before)
        for layer, norm in zip(self._layers, self._norms, strict=True):
            qkv = _linear(rows, layer.qkv)[0]
            queries = dense_layers.norm_rope_store(
                qkv, layer.heads, positions, context.out_cache_loc
            )
            seen = self._attention.attend(layer.attention, queries)
            rows, residual = self._add(0, seen, layer.out, residual, layer.between)
            middle = _gated(rows, layer.gate_up)
            rows, residual = self._add(1, middle, layer.down, residual, norm)
        return rows

    def _most_few_rows(self) -> int:
        """Of more rows a library's products are the faster ones; later where layers are small."""
        wide = len(self._norms[-1].weight) >= NARROW
        if self._few is not None and (wide or self._few.batches):
            return min(_FEW_ROWS, self._few.most_rows)
        return min(_FEW_ROWS, _NARROW_FEW_ROWS)

    def _add(
        self,
        turn: int,
        rows: torch.Tensor,
        matrix: LinearWeights,
        residual: torch.Tensor,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What half of a layer adds, normalized, and what it was added to."""
        if self._sums is None:
            parts = _linear(rows, matrix, dense_layers.MOST_PARTS)
            return dense_layers.add_norm(parts, residual, norm)
        [part] = _linear(rows, matrix)
        return self._sums.add_norm(turn, part, residual, norm)

    def _run_many(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        """Products take rows as they are; the kernels after them scale the results."""

        def attend_prefill(layer: AttentionLayer, queries: torch.Tensor) -> torch.Tensor:
            return self._decoder.attend(layer.layer_id, queries, context)

        attend_stored = self._attention.attend if context.is_decode else attend_prefill
        residual = self._decoder.embed(input_ids)
        for layer in self._layers:
            # Nothing keeps what was used: such a pass is what the memory is planned for.
            seen = attend_unscaled(
                layer, residual, positions, context, attend_stored,
                out_of_place=not context.is_decode,
            )  # fmt: skip
            residual.addmm_(seen, layer.out.weight.t())
            del seen
            residual.addmm_(gate_unscaled(layer, residual), layer.down.weight.t())
        return dense_layers.add_norm(residual[None], None, self._norms[-1])[0]


def _linear(rows: torch.Tensor, matrix: LinearWeights, most_parts: int = 1) -> torch.Tensor:
    outputs, inputs = matrix.weight.shape
    tiling = dense_layers.tiling(len(rows), outputs, inputs, most_parts)
    if tiling is None:
        return torch.nn.functional.linear(rows, *matrix).unsqueeze(0)
    return dense_layers.linear(rows, matrix, tiling)


def _gated(rows: torch.Tensor, matrix: LinearWeights) -> torch.Tensor:
    outputs, inputs = matrix.weight.shape
    tiling = dense_layers.tiling(len(rows), outputs // 2, inputs, gated=True)
    if tiling is None:
        return dense_layers.gate(torch.nn.functional.linear(rows, matrix.weight))
    return dense_layers.gated(rows, matrix, tiling)
