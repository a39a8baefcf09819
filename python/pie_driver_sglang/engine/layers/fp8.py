"""The layers of dense models whose weights are FP8, in few kernels.

Norms, gates and sums are parts of the kernels that quantize the rows of a product, and scales are
applied by the kernels after it. Of few rows the products are the driver's own, which add to the
residual themselves; of more they are cuBLAS's, and SGLang's where blocks have scales.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.engine.layers.small_batch import attend
from pie_driver_sglang.kernels.gemm import dense_layers, fp8_gemv, tiled, wgmma
from pie_driver_sglang.kernels.gemm.dense_layers import Norm, Scale
from pie_driver_sglang.kernels.gemm.fp8_gemv import ProductKind, RowProduct
from pie_driver_sglang.kernels.gemm.fp8_rows import (
    QuantizedRows,
    UnscaledRows,
    multiply_unscaled,
    quantize,
)
from pie_driver_sglang.kernels.gemm.small_m import Scratch
from pie_driver_sglang.kernels.gemm.tiled import Tile
from pie_driver_sglang.kernels.gemm.wgmma import BatchCut, BatchProducts

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import PagedDecode
    from pie_driver_sglang.engine.backend import Decoder, PassContext
    from pie_driver_sglang.engine.layers.weights import QuantizedLayer, QuantizedLinear

_MOST_TILED = 128
"""Rows up to which products may go by tiles."""
_MULTIPLE = 16
"""Of outputs and of inputs, as cuBLAS wants FP8."""
_Rows = torch.Tensor | UnscaledRows


class QuantizedLayers:
    """The layers of a model whose matrices are FP8."""

    def __init__(
        self,
        decoder: Decoder,
        layers: Sequence[QuantizedLayer],
        norm: Norm,
        attention: PagedDecode,
        *,
        prefills: bool,
    ) -> None:
        """Takes a model apart.

        Args:
            decoder: The model without its LM head.
            layers: Its layers.
            norm: After the last layer.
            attention: Of decodes.
            prefills: Whether prefills attend to nothing but what is stored.
        """
        self._decoder = decoder
        self._layers = layers
        self._norm = norm
        self._attention = attention
        self._prefills = prefills
        device = norm.weight.device
        self._one = torch.ones((), device=device)
        [first, *_] = layers
        matrices = (first.qkv, first.out, first.down)
        highest = max(len(matrix.weights.weight) for matrix in matrices)
        parts, tiles = tiled.scratch_sizes(_MOST_TILED, highest)
        self._scratch = Scratch(
            torch.empty(parts, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )
        self._lone = LoneRows.of(layers, norm, attention)
        halves = norm.weight.dtype in (torch.bfloat16, torch.float16)
        runs = halves and wgmma.runs_on(device)
        self._batch = BatchProducts(norm.weight.dtype, device) if runs else None

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
        with self._decoder.run_instead(self._run):
            yield

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        residual = self._decoder.embed(input_ids)
        if len(residual) == 1 and self._lone is not None and context.is_decode:
            return self._lone.run(residual, positions, context)
        added: _Rows | None = None
        for layer in self._layers:
            qkv = self._project(residual, added, layer.before, layer.qkv)
            seen = self._attend(layer, qkv, positions, context)
            del qkv
            added = self._add(seen, layer.out, residual)
            middle = self._project(residual, added, layer.between, layer.gate_up, gated=True)
            added = self._add(middle, layer.down, residual, gated=True)
        rows, before, scales = _apart(residual, added)
        return dense_layers.add_norm(rows[None], before, self._norm, scales)[0]

    def _attend(
        self,
        layer: QuantizedLayer,
        qkv: _Rows,
        positions: torch.Tensor,
        context: PassContext,
    ) -> torch.Tensor:
        if context.is_decode and isinstance(qkv, torch.Tensor):
            return attend(qkv, layer, self._attention, positions, context)
        queries = _queries(layer, qkv, positions, context)
        if context.is_decode:
            return self._attention.attend(layer.attention, queries)
        return self._decoder.attend(layer.attention.layer_id, queries.flatten(1), context)

    def _project(
        self,
        residual: torch.Tensor,
        added: _Rows | None,
        norm: Norm,
        linear: QuantizedLinear,
        *,
        gated: bool = False,
    ) -> _Rows:
        """The product of the residual, normalized, after what is to be added to it in place.

        The product is that of a gate and an up projection if `gated`; the driver's own one has
        joined them.
        """
        weights, cut = linear.weights, self._find(residual, linear, gated=gated)
        if cut is None and not _multiplies(linear):
            rows, before, scales = _apart(residual, added)
            return linear.apply(dense_layers.add_norm(rows[None], before, norm, scales)[0])
        given = quantize(
            residual if added is None else added, residual=None if added is None else residual,
            norm=norm, grouped=weights.grouped, scale=weights.row_scale,
        )  # fmt: skip
        if cut is None:
            return multiply_unscaled(given, weights, self._one, residual.dtype)
        return self._multiply(given, linear, cut, gated=gated)

    def _add(
        self, rows: _Rows, linear: QuantizedLinear, residual: torch.Tensor, *, gated: bool = False
    ) -> _Rows | None:
        """Adds the product of rows to the residual; returns what is to be added later instead.

        Rows are still to be joined if `gated`, unless they are as wide as the matrix.
        """
        weights, cut = linear.weights, self._find(residual, linear, adds=True)
        width = (rows.rows if isinstance(rows, UnscaledRows) else rows).shape[1]
        gated = gated and width != weights.weight.shape[1]
        if cut is None and not _multiplies(linear):
            if isinstance(rows, UnscaledRows):
                raise ValueError("some matrices of a layer have blocks, others have not")
            return linear.apply(dense_layers.gate(rows) if gated else rows)
        given = quantize(rows, gated=gated, grouped=weights.grouped, scale=weights.row_scale)
        if cut is None:
            return multiply_unscaled(given, weights, self._one, residual.dtype)
        self._multiply(given, linear, cut, into=residual)
        return None

    def _find(
        self,
        rows: torch.Tensor,
        linear: QuantizedLinear,
        *,
        adds: bool = False,
        gated: bool = False,
    ) -> Tile | BatchCut | None:
        """How the driver's own product of so many rows is divided; None where it is another's."""
        count, (height, inputs) = len(rows), linear.weights.weight.shape
        if self._batch is not None and not linear.weights.grouped:
            kind = ProductKind.of(gated=gated, adds=adds)
            found = wgmma.find_batch_cut(count, height, inputs, 1, kind)
            if found is not None:
                return found
        if count > _MOST_TILED:
            return None
        outputs = height // 2 if gated else height
        return tiled.find_tile(count, outputs, inputs, 1, adds=adds, gated=gated)

    def _multiply(
        self,
        given: QuantizedRows,
        linear: QuantizedLinear,
        cut: Tile | BatchCut,
        *,
        gated: bool = False,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = linear.weights
        if isinstance(cut, BatchCut):
            assert self._batch is not None
            kind = ProductKind.of(gated=gated, adds=into is not None)
            return self._batch.multiply(given, weights, cut, kind, into=into)
        return tiled.tiled_product(
            given, weights, cut, self._scratch, gated=gated, into=into,
            dtype=self._norm.weight.dtype,
        )  # fmt: skip


class LoneRows:
    """The layers of a decode of one row, whose products quantize the row themselves."""

    def __init__(
        self, layers: Sequence[QuantizedLayer], norm: Norm, attention: PagedDecode
    ) -> None:
        """Takes layers for which :meth:`of` finds kernels, and the norm after the last one."""
        self._layers = layers
        self._norm = norm
        self._attention = attention
        self._products: dict[tuple[Any, ...], RowProduct] = {}

    @classmethod
    def of(
        cls, layers: Sequence[QuantizedLayer], norm: Norm, attention: PagedDecode
    ) -> LoneRows | None:
        """The layers of a model; None if the kernels do not take its matrices."""
        dtype = norm.weight.dtype
        norms = [each for layer in layers for each in (layer.before, layer.between)]
        typed = dtype in (torch.bfloat16, torch.float16) and all(
            each.weight.dtype is dtype for each in norms
        )
        matrices = (
            linear.weights
            for layer in layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        taken = typed and all(fp8_gemv.quantizes_row(weights) for weights in matrices)
        return cls(layers, norm, attention) if taken else None

    def run(
        self, residual: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        """Runs the layers. Can be captured.

        Args:
            residual: ``[1, width]``: the embedded token; overwritten.
            positions: ``[1]`` int64.
            context: Of the pass.

        Returns:
            ``[1, width]``: normalized hidden states.
        """
        for layer in self._layers:
            qkv = self._multiply(residual, layer.qkv, ProductKind.STORES, norm=layer.before)
            seen = attend(qkv, layer, self._attention, positions, context)
            self._multiply(seen, layer.out, ProductKind.ADDS, into=residual)
            middle = self._multiply(residual, layer.gate_up, ProductKind.JOINS, norm=layer.between)
            self._multiply(middle, layer.down, ProductKind.ADDS, into=residual)
        return dense_layers.add_norm(residual[None], None, self._norm)[0]

    def _multiply(
        self,
        row: torch.Tensor,
        linear: QuantizedLinear,
        kind: ProductKind,
        *,
        norm: Norm | None = None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights, inputs = linear.weights, row.shape[1]
        fixed = weights.row_scale is not None
        key = (inputs, kind, norm is not None, fixed, weights.grouped)
        if key not in self._products:
            cut = fp8_gemv.find_row_cut(inputs)
            if cut is None:
                raise ValueError(f"a row of {inputs} numbers is not divided")
            self._products[key] = RowProduct(
                inputs, kind, row.dtype, row.device, cut,
                normed=norm is not None, fixed=fixed, grouped=weights.grouped,
            )  # fmt: skip
        return self._products[key].multiply(row, weights, norm=norm, into=into)


def _queries(
    layer: QuantizedLayer, qkv: _Rows, positions: torch.Tensor, context: PassContext
) -> torch.Tensor:
    """Queries after norm and RoPE; keys and values are stored."""
    scale = of_outputs = None
    if isinstance(qkv, UnscaledRows):
        qkv, of_rows, of_outputs = qkv
        scale = Scale(of_rows, 0.0)
    return dense_layers.norm_rope_store(
        qkv, layer.heads, positions, context.out_cache_loc,
        scale=scale, of_outputs=of_outputs, out_of_place=not context.is_decode,
    )  # fmt: skip


def _apart(
    residual: torch.Tensor, added: _Rows | None
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """What is to be added, to what, and its scales, as a norm takes them."""
    if added is None:
        return residual, None, None
    if isinstance(added, UnscaledRows):
        return added.rows, residual, (added.of_rows, added.of_outputs)
    return added, residual, None


def _multiplies(linear: QuantizedLinear) -> bool:
    """Whether cuBLAS takes rows that are quantized already."""
    weight = linear.weights.weight
    sizes = all(size % _MULTIPLE == 0 for size in weight.shape)
    return weight.device.type == "cuda" and sizes and not linear.weights.grouped
