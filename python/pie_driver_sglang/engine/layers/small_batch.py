"""Decodes of few rows: the layers of a model as kernels that read weights and little else.

See ``kernels/gemm/small_m.py`` and ``kernels/moe/experts.py``. More than one row go by
``kernels/gemm/wgmma.py`` on GPUs that run it; on others ``kernels/gemm/tiled.py`` has what is
called few rows of large matrices. They want norms that were folded into the matrices after them, so
they run what can be folded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.engine.layers.weights import ExpertLayer, Layer, QuantizedLayer
from pie_driver_sglang.kernels.gemm import dense_layers, small_m, tiled, wgmma
from pie_driver_sglang.kernels.gemm.dense_layers import LinearWeights, Norm, Scale
from pie_driver_sglang.kernels.gemm.fp8_gemv import ProductKind
from pie_driver_sglang.kernels.gemm.small_m import Cut, Scratch, Stream
from pie_driver_sglang.kernels.gemm.tiled import Tile
from pie_driver_sglang.kernels.gemm.wgmma import BatchCut, BatchProducts
from pie_driver_sglang.kernels.moe import experts, routing

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import AttentionLayer, PagedDecode
    from pie_driver_sglang.engine.backend import Decoder, PassContext

NARROW, _WIDEST = 2048, 4096
"""Widths of hidden states between which the kernels are the fastest up to 32 rows, not 16."""
_TILED = (64, 128)
"""Rows up to which products of large matrices may go by tiles."""
_RESCALED_ROWS = 512
"""Of more rows it takes less time to compute their scale in a kernel of its own."""
_Cuts = tuple[Cut | Tile | BatchCut | None, ...]
"""Of the products of a layer, the experts' last; None for those that are a library's."""


class FewRows:
    """The layers of a model whose norms are folded into the matrices after them."""

    def __init__(
        self,
        layers: Sequence[Layer | ExpertLayer],
        norm: Norm,
        attention: PagedDecode,
        most_rows: int,
        *,
        most_tiled: int = 0,
        batch: BatchProducts | None = None,
    ) -> None:
        """Takes layers for which :meth:`of` finds cuts, and the norm after the last one.

        Args:
            layers: The model's.
            norm: After the last one.
            attention: Of decodes.
            most_rows: Of a step whose products are those of few rows.
            most_tiled: Of a step whose products go by tiles.
            batch: Kernels of more than one row; those above are for one row then.
        """
        self._batch = batch
        self._most_batch = 0 if batch is None else _most_batch_rows(layers)
        self.most_rows = max(most_rows, most_tiled, self._most_batch)
        """Most rows of a step."""
        self._most_cut = most_rows
        self._layers = layers
        self._norm = norm
        self._attention = attention
        self._scratch = _make_scratch(layers, norm, most_rows, most_tiled)

    @classmethod
    def of(
        cls, layers: Sequence[Layer | ExpertLayer], norm: Norm, attention: PagedDecode
    ) -> FewRows | None:
        """The layers of a model; None if the kernels do not take its matrices."""
        [width], weight = norm.weight.shape, norm.weight
        if weight.device.type == "cuda" and weight.itemsize != 2:
            return None
        most_rows = _most_expert_rows(layers)
        if not most_rows:
            most_rows = 32 if NARROW <= width <= _WIDEST else 16
        # One of each kind of cut.
        steps = [rows for rows in (1, 2, 16, 32, 64, 65, 256) if rows <= most_rows]
        if any(_cuts(rows, layer) is None for rows in steps for layer in layers):
            return None
        most_tiled, batch = 0, None
        if wgmma.runs_on(weight.device) and _most_batch_rows(layers):
            batch = BatchProducts(weight.dtype, weight.device)
        elif width >= NARROW and weight.itemsize == 2:
            most_tiled = max((rows for rows in _TILED if _tiled(rows, layers)), default=0)
        return cls(layers, norm, attention, most_rows, most_tiled=most_tiled, batch=batch)

    @property
    def batches(self) -> bool:
        """Whether it has kernels of its own for batches of rows."""
        return self._most_batch > 1

    def run(
        self, embedded: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        """Runs the layers of a decode. Can be captured.

        Args:
            embedded: ``[rows, width]``, at most `most_rows`; overwritten.
            positions: ``[rows]`` int64.
            context: Of the pass.

        Returns:
            ``[rows, width]``: normalized hidden states.
        """
        stream: Stream | None = None
        for layer in self._layers:
            cuts = self._find(len(embedded), layer)
            if cuts is None:
                raise ValueError(f"no cuts for a step of {len(embedded)} rows")
            if stream is None:
                stream = _begin(embedded, cuts)
            stream = self._attend(layer, stream, cuts, positions, context)
            stream = self._transform(layer, stream, cuts)
        return dense_layers.add_norm(embedded[None], None, self._norm)[0]

    def _find(self, rows: int, layer: Layer | ExpertLayer) -> _Cuts | None:
        """How the products of a layer are divided."""
        if 1 < rows <= self._most_batch:
            return _batch_cuts(rows, layer)
        return _cuts(rows, layer) if rows <= self._most_cut else _tiles(rows, layer)

    def _attend(
        self,
        layer: Layer | ExpertLayer,
        stream: Stream,
        cuts: _Cuts,
        positions: torch.Tensor,
        context: PassContext,
    ) -> Stream:
        """The first half of a layer."""
        if cuts[0] is None:
            seen = attend_unscaled(
                layer, stream.rows, positions, context, self._attention.attend, out_of_place=False
            )
        else:
            qkv = self._multiply(
                stream.rows, layer.qkv, cuts[0], stream=stream, epsilon=layer.before.epsilon
            )
            seen = attend(qkv, layer, self._attention, positions, context)
        return self._add(seen, layer.out, cuts[1], stream)

    def _transform(self, layer: Layer | ExpertLayer, stream: Stream, cuts: _Cuts) -> Stream:
        """The second half of a layer."""
        if isinstance(layer, ExpertLayer):
            return experts.add_chosen(stream, layer.between, layer.experts, self._scratch)
        if cuts[2] is None:
            middle = gate_unscaled(layer, stream.rows)
        else:
            middle = self._multiply(
                stream.rows, layer.gate_up, cuts[2], stream=stream,
                epsilon=layer.between.epsilon, gated=True,
            )  # fmt: skip
        return self._add(middle, layer.down, cuts[3], stream)

    def _add(
        self,
        rows: torch.Tensor,
        matrix: LinearWeights,
        cut: Cut | Tile | BatchCut | None,
        stream: Stream,
    ) -> Stream:
        if cut is None:
            return _unknown(stream.rows.addmm_(rows, matrix.weight.t()))
        squares = stream.squares.new_empty(len(rows), _squares(stream.rows, cut))
        into = Stream(stream.rows, squares)
        self._multiply(rows, matrix, cut, into=into)
        return into

    def _multiply(
        self, rows: torch.Tensor, matrix: LinearWeights, cut: Cut | Tile | BatchCut, **named: Any
    ) -> torch.Tensor:
        if isinstance(cut, BatchCut):
            assert self._batch is not None
            gated = named.pop("gated", False)
            kind = ProductKind.of(gated=gated, adds="into" in named)
            return self._batch.multiply(rows, matrix, cut, kind, **named)
        if isinstance(cut, Cut):
            return small_m.product(rows, matrix, cut, self._scratch, **named)
        return tiled.tiled_product(rows, matrix, cut, self._scratch, **named)


class ExpertLayers:
    """The layers of a mixture of experts; steps of more rows run as SGLang has them."""

    def __init__(self, decoder: Decoder, layers: FewRows) -> None:
        """Takes a decoder and its layers."""
        self._decoder = decoder
        self._layers = layers

    def takes(self, rows: int) -> bool:
        """Whether it runs steps of so many rows."""
        return rows <= self._layers.most_rows

    @contextlib.contextmanager
    def prefilling(self) -> Iterator[None]:
        """Within, the model runs as SGLang has it."""
        yield

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model runs as these kernels; its input is a decode of rows that it takes."""
        with self._decoder.run_instead(self._run):
            yield

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        return self._layers.run(self._decoder.embed(input_ids), positions, context)


def attend(
    qkv: torch.Tensor,
    layer: Layer | ExpertLayer | QuantizedLayer,
    attention: PagedDecode,
    positions: torch.Tensor,
    context: PassContext,
) -> torch.Tensor:
    """What the rows of a decode see, ``[rows, queries * dim]``: of one row by one kernel.

    Args:
        qkv: ``[rows, heads]``: queries, keys and values; overwritten.
        layer: Whose they are.
        attention: Of decodes.
        positions: ``[rows]`` int64.
        context: Of the pass.
    """
    slots = context.out_cache_loc
    if len(qkv) == 1:
        alone = attention.attend_lone(layer.attention, qkv, layer.heads, positions, slots)
        if alone is not None:
            return alone
    queries = dense_layers.norm_rope_store(qkv, layer.heads, positions, slots)
    return attention.attend(layer.attention, queries)


def attend_unscaled(
    layer: Layer | ExpertLayer,
    rows: torch.Tensor,
    positions: torch.Tensor,
    context: PassContext,
    attend_stored: Callable[[AttentionLayer, torch.Tensor], torch.Tensor],
    *,
    out_of_place: bool,
) -> torch.Tensor:
    """What rows see, whose norm is applied to queries, keys and values.

    Args:
        layer: One whose norms are folded.
        rows: ``[rows, width]``: the residual.
        positions: ``[rows]`` int64.
        context: Of the pass.
        attend_stored: The attention of queries over KV that is stored.
        out_of_place: Whether queries get storage of their own.
    """
    queries = dense_layers.norm_rope_store(
        torch.nn.functional.linear(rows, layer.qkv.weight),
        layer.heads,
        positions,
        context.out_cache_loc,
        scale=_scale(rows, layer.before.epsilon),
        out_of_place=out_of_place,
    )
    if out_of_place:
        queries = queries.flatten(1)
    return attend_stored(layer.attention, queries)


def gate_unscaled(layer: Layer, rows: torch.Tensor) -> torch.Tensor:
    """What an MLP has between its products of the residual, ``[rows, width]``."""
    return dense_layers.gate(
        torch.nn.functional.linear(rows, layer.gate_up.weight),
        _scale(rows, layer.between.epsilon),
    )


def _scale(rows: torch.Tensor, epsilon: float) -> Scale:
    """The RMS scale of rows, which every program computes again where rows are few."""
    if len(rows) > _RESCALED_ROWS:
        return dense_layers.find_scale(rows, epsilon)
    return Scale(rows, epsilon)


def _begin(embedded: torch.Tensor, cuts: _Cuts) -> Stream:
    """The stream of embeddings, with sums of squares as the last product of a layer leaves them."""
    first, *_, last = cuts
    if first is None or last is None:
        return _unknown(embedded)
    return small_m.begin(embedded, _squares(embedded, last))


def _unknown(rows: torch.Tensor) -> Stream:
    """A stream whose sums of squares nothing knows."""
    return Stream(rows, rows.new_empty(len(rows), 0, dtype=torch.float32))


def _squares(stream: torch.Tensor, cut: Cut | Tile | BatchCut) -> int:
    """Sums of squares of a row that a product with this cut leaves."""
    return stream.shape[1] // cut.outputs


def _tiled(rows: int, layers: Sequence[Layer | ExpertLayer]) -> bool:
    """Whether some products of steps of so many rows go by tiles, in all layers."""
    found = [_tiles(rows, layer) for layer in layers]
    return all(tiles is not None and any(tiles) for tiles in found)


def _tiles(rows: int, layer: Layer | ExpertLayer) -> _Cuts | None:
    """The tiles of the products of a layer.

    A product that applies a norm takes the sums of squares that a product by tiles has left.
    """
    if isinstance(layer, ExpertLayer):
        return None
    qkv, out, gate_up, down = (
        tiled.find_tile(
            rows, len(matrix.weight) // (2 if gated else 1), matrix.weight.shape[1],
            matrix.weight.itemsize, adds=adds, gated=gated,
        )
        for matrix, adds, gated in (
            (layer.qkv, False, False),
            (layer.out, True, False),
            (layer.gate_up, False, True),
            (layer.down, True, False),
        )
    )  # fmt: skip
    return (None if down is None else qkv, out, None if out is None else gate_up, down)


def _most_batch_rows(layers: Sequence[Layer | ExpertLayer]) -> int:
    """Most rows of which all products have kernels of batches; 0 for none."""
    most = _most_expert_rows(layers) or wgmma.MOST_BATCH_ROWS
    taken = 0
    for rows in (count for count in wgmma.ROWS if count <= most):
        if any(_batch_cuts(rows, layer) is None for layer in layers):
            break
        taken = rows
    return taken


def _make_scratch(
    layers: Sequence[Layer | ExpertLayer], norm: Norm, most_rows: int, most_tiled: int
) -> Scratch:
    """What products and routers need of steps of so many rows."""
    [width], device = norm.weight.shape, norm.weight.device
    highest = max(width, *(len(layer.qkv.weight) for layer in layers))
    own_rows = max(min(most_rows, small_m.MOST_ROWS), most_tiled)
    sizes = [tiled.scratch_sizes(own_rows, highest)]
    sizes += [
        routing.routing_scratch(most_rows, len(layer.experts.router.weight))
        for layer in layers
        if isinstance(layer, ExpertLayer)
    ]
    floats, counters = map(max, zip(*sizes, strict=True))
    return Scratch(
        torch.zeros(floats, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def _most_expert_rows(layers: Sequence[Layer | ExpertLayer]) -> int:
    """Most rows that mixtures of experts take; 0 for layers without."""
    mixtures = [layer.experts for layer in layers if isinstance(layer, ExpertLayer)]
    return min(map(experts.most_rows, mixtures), default=0)


def _batch_cuts(rows: int, layer: Layer | ExpertLayer) -> _Cuts | None:
    """The same as :func:`_cuts`, by kernels of batches."""

    def cut(matrix: LinearWeights, kind: ProductKind) -> BatchCut | None:
        weight = matrix.weight
        height, inputs = weight.shape
        return wgmma.find_batch_cut(rows, height, inputs, weight.itemsize, kind)

    found: list[Cut | BatchCut | None] = [
        cut(layer.qkv, ProductKind.STORES),
        cut(layer.out, ProductKind.ADDS),
    ]
    if isinstance(layer, ExpertLayer):
        found += experts.find_cuts(rows, layer.experts) or (None,)
    else:
        found += [cut(layer.gate_up, ProductKind.JOINS), cut(layer.down, ProductKind.ADDS)]
    return None if None in found else tuple(found)


def _cuts(rows: int, layer: Layer | ExpertLayer) -> _Cuts | None:
    """The cuts of the products of a layer, the experts' last; None where one has none."""
    if isinstance(layer, ExpertLayer) and rows > small_m.MOST_ROWS:
        own = experts.find_cuts(rows, layer.experts)
        # A library multiplies around attention.
        return None if own is None else (None, None, *own)
    found = [
        small_m.find_cut(rows, *layer.qkv.weight.shape),
        small_m.find_cut(rows, *layer.out.weight.shape, adds=True),
    ]
    if isinstance(layer, ExpertLayer):
        found += experts.find_cuts(rows, layer.experts) or (None,)
    else:
        outputs, inputs = layer.gate_up.weight.shape
        found += [
            small_m.find_cut(rows, outputs // 2, inputs, gated=True),
            small_m.find_cut(rows, *layer.down.weight.shape, adds=True),
        ]
    cuts = tuple(cut for cut in found if cut is not None)
    return cuts if len(cuts) == len(found) else None
