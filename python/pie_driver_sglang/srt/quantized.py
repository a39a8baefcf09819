"""The layers of dense models whose weights are FP8, in few kernels.

Norms, gates and sums are parts of the kernels that quantize the rows of a product. Of few rows the
products are the driver's own, which add to the residual themselves; of more they are SGLang's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.kernels import dense_layers, few_rows, many_rows
from pie_driver_sglang.kernels.dense_layers import Norm
from pie_driver_sglang.kernels.few_rows import Cut, Scratch
from pie_driver_sglang.kernels.many_rows import Tile
from pie_driver_sglang.kernels.quantize import QuantizedRows, QuantizedWeights, quantize
from pie_driver_sglang.srt.seams.model import run_instead
from pie_driver_sglang.srt.seams.passes import is_decode
from pie_driver_sglang.srt.seams.quantized import (
    QuantizedLinear,
    multiplies_quantized,
    multiply_quantized,
)

if TYPE_CHECKING:
    from pie_driver_sglang.srt.seams.layers import QuantizedLayer
    from pie_driver_sglang.srt.seams.passes import ForwardBatch

MOST_ROWS = 128
"""Rows up to which products are the driver's own."""


class QuantizedLayers:
    """The layers of a model whose matrices are FP8."""

    def __init__(
        self, model: Any, layers: Sequence[QuantizedLayer], norm: Norm, *, prefills: bool
    ) -> None:
        """Takes a model apart.

        Args:
            model: SGLang's, without its LM head.
            layers: Its layers.
            norm: After the last layer.
            prefills: Whether prefills attend to nothing but what is stored.
        """
        self._model = model
        self._layers = layers
        self._norm = norm
        self._prefills = prefills
        device = norm.weight.device
        [first, *_] = layers
        matrices = (first.qkv, first.out, first.gate_up, first.down)
        highest = max(len(matrix.weights.weight) for matrix in matrices)
        parts, tiles = many_rows.scratch_sizes(MOST_ROWS, highest)
        self._scratch = Scratch(
            torch.empty(parts, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )

    def takes(self, rows: int) -> bool:
        """Whether it runs steps of so many rows."""
        return rows > 0

    @contextlib.contextmanager
    def prefilling(self) -> Iterator[None]:
        """Within, the model runs as these kernels, if they can; its input is a prefill."""
        with self.applied() if self._prefills else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model runs as these kernels; its input is a decode of rows that it takes."""
        with run_instead(self._model, self._run):
            yield

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        *others: None,
        **named: None,
    ) -> torch.Tensor:
        if any(other is not None for other in (*others, *named.values())):
            raise ValueError("a pass has tokens and nothing else")
        out_of_place = not is_decode(forward_batch)
        residual = self._model.embed_tokens(input_ids)
        added: torch.Tensor | None = None
        for layer in self._layers:
            qkv = self._project(residual, added, layer.before, layer.qkv)
            queries = dense_layers.norm_rope_store(
                qkv, layer.heads, positions, forward_batch.out_cache_loc, out_of_place=out_of_place
            )
            if out_of_place:
                queries = queries.flatten(1)
            seen = layer.attention(queries, None, None, forward_batch, save_kv_cache=False)
            del qkv, queries
            added = self._add(seen, layer.out, residual, gated=False)
            middle = self._project(residual, added, layer.between, layer.gate_up, gated=True)
            added = self._add(middle, layer.down, residual, gated=True)
        if added is None:
            return dense_layers.add_norm(residual[None], None, self._norm)[0]
        return dense_layers.add_norm(added[None], residual, self._norm)[0]

    def _project(
        self,
        residual: torch.Tensor,
        added: torch.Tensor | None,
        norm: Norm,
        linear: QuantizedLinear,
        *,
        gated: bool = False,
    ) -> torch.Tensor:
        """The product of the residual, normalized, after what is to be added to it in place.

        The product is that of a gate and an up projection if `gated`, which are joined if the
        product is the driver's own.
        """
        weights, tile = linear.weights, _find_cut(residual, linear, gated=gated)
        if tile is None and not _multiplies(linear):
            rows, _ = dense_layers.add_norm(
                (residual if added is None else added)[None],
                None if added is None else residual,
                norm,
            )
            return linear.apply(rows)
        plain = residual if added is None else added
        given = quantize(
            plain, residual=None if added is None else residual, norm=norm,
            grouped=weights.grouped, scale=weights.row_scale,
        )  # fmt: skip
        if tile is None:
            return multiply_quantized(given, weights, residual.dtype)
        return self._multiply(given, weights, tile, gated=gated, dtype=residual.dtype)

    def _add(
        self, rows: torch.Tensor, linear: QuantizedLinear, residual: torch.Tensor, *, gated: bool
    ) -> torch.Tensor | None:
        """Adds the product of rows to the residual; returns what is to be added later instead.

        Rows are still to be joined if `gated`, unless they are as wide as the matrix.
        """
        weights, tile = linear.weights, _find_cut(rows, linear, adds=True)
        inputs = weights.weight.shape[1]
        gated = gated and rows.shape[1] != inputs
        if tile is None and not _multiplies(linear):
            return linear.apply(dense_layers.gate(rows) if gated else rows)
        given = quantize(rows, gated=gated, grouped=weights.grouped, scale=weights.row_scale)
        if tile is None:
            return multiply_quantized(given, weights, rows.dtype)
        self._multiply(given, weights, tile, into=residual)
        return None

    def _multiply(
        self, given: QuantizedRows, weights: QuantizedWeights, how: Cut | Tile, **named: Any
    ) -> torch.Tensor:
        """The driver's own product."""
        if isinstance(how, Cut):
            return few_rows.product(given, weights, how, self._scratch, **named)
        return many_rows.tiled_product(given, weights, how, self._scratch, **named)


def _find_cut(
    rows: torch.Tensor, linear: QuantizedLinear, *, adds: bool = False, gated: bool = False
) -> Cut | Tile | None:
    """How the driver's own product of so many rows is cut; None where it is SGLang's."""
    count, (outputs, inputs) = len(rows), linear.weights.weight.shape
    if count > MOST_ROWS:
        return None
    height = outputs // 2 if gated else outputs
    if count == 1:
        return few_rows.find_quantized_cut(height, inputs, adds=adds, gated=gated)
    return many_rows.find_tile(count, height, inputs, 1, adds=adds, gated=gated)


def _multiplies(linear: QuantizedLinear) -> bool:
    """Whether SGLang's kernel takes rows that are quantized already."""
    return multiplies_quantized() and not linear.weights.grouped
