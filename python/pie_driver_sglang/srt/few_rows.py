"""Decodes of few rows: the layers of a model as kernels that read weights and little else.

See ``kernels/few_rows.py`` and ``kernels/experts.py``. They want norms that were folded into the
matrices after them, so they run what can be folded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.kernels import dense_layers, experts, few_rows
from pie_driver_sglang.kernels.dense_layers import LinearWeights, Norm
from pie_driver_sglang.kernels.few_rows import Cut, Scratch, Stream
from pie_driver_sglang.srt.seams.layers import ExpertLayer, Layer
from pie_driver_sglang.srt.seams.model import run_instead

if TYPE_CHECKING:
    from pie_driver_sglang.srt.seams.passes import ForwardBatch

NARROW, _WIDEST = 2048, 4096
"""Widths of hidden states between which the kernels are the fastest up to 32 rows, not 16."""
_MOST_PARTS = 4
"""Largest split-K factor of a cut."""


class FewRows:
    """The layers of a model whose norms are folded into the matrices after them."""

    def __init__(self, layers: Sequence[Layer | ExpertLayer], norm: Norm, most_rows: int) -> None:
        """Takes layers for which :meth:`of` finds cuts, and the norm after the last one."""
        self.most_rows = most_rows
        """Most rows of a step."""
        self._layers = layers
        self._norm = norm
        [width], device = norm.weight.shape, norm.weight.device
        self._scratch = Scratch(
            torch.zeros(_MOST_PARTS * most_rows * width, device=device),
            torch.zeros(width + most_rows, dtype=torch.int32, device=device),
        )

    @classmethod
    def of(cls, layers: Sequence[Layer | ExpertLayer], norm: Norm) -> FewRows | None:
        """The layers of a model; None if the kernels do not take its matrices."""
        [width], weight = norm.weight.shape, norm.weight
        if weight.device.type == "cuda" and weight.itemsize != 2:
            return None
        if isinstance(layers[0], ExpertLayer):
            most_rows = few_rows.MOST_ROWS
        else:
            most_rows = 32 if NARROW <= width <= _WIDEST else 16
        steps = [rows for rows in (1, 2, 16, 32, 64) if rows <= most_rows]
        if any(_cuts(rows, layer) is None for rows in steps for layer in layers):
            return None
        return cls(layers, norm, most_rows)

    def run(
        self, embedded: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Runs the layers of a decode. Can be captured.

        Args:
            embedded: ``[rows, width]``, at most `most_rows`; overwritten.
            positions: ``[rows]`` int64.
            forward_batch: SGLang's, for its attention.

        Returns:
            ``[rows, width]``: normalized hidden states.
        """
        stream: Stream | None = None
        for layer in self._layers:
            cuts = _cuts(len(embedded), layer)
            if cuts is None:
                raise ValueError(f"no cuts for a step of {len(embedded)} rows")
            if stream is None:
                stream = few_rows.begin(embedded, _tiles(embedded, cuts[-1]))
            stream = self._attend(layer, stream, cuts, positions, forward_batch)
            stream = self._transform(layer, stream, cuts)
        return dense_layers.add_norm(embedded[None], None, self._norm)[0]

    def _attend(
        self,
        layer: Layer | ExpertLayer,
        stream: Stream,
        cuts: tuple[Cut, ...],
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> Stream:
        """The first half of a layer."""
        qkv = few_rows.product(
            stream.rows, layer.qkv, cuts[0], self._scratch, given=stream,
            epsilon=layer.before.epsilon,
        )  # fmt: skip
        queries = dense_layers.norm_rope_store(
            qkv, layer.heads, positions, forward_batch.out_cache_loc
        )
        seen = layer.attention(queries, None, None, forward_batch, save_kv_cache=False)
        return self._add(seen, layer.out, cuts[1], stream)

    def _transform(
        self, layer: Layer | ExpertLayer, stream: Stream, cuts: tuple[Cut, ...]
    ) -> Stream:
        """The second half of a layer."""
        if isinstance(layer, ExpertLayer):
            return experts.add_chosen(stream, layer.between, layer.experts, self._scratch)
        middle = few_rows.product(
            stream.rows, layer.gate_up, cuts[2], self._scratch, given=stream,
            epsilon=layer.between.epsilon, gated=True,
        )  # fmt: skip
        return self._add(middle, layer.down, cuts[3], stream)

    def _add(self, rows: torch.Tensor, matrix: LinearWeights, cut: Cut, stream: Stream) -> Stream:
        squares = stream.squares.new_empty(len(rows), _tiles(stream.rows, cut))
        into = Stream(stream.rows, squares)
        few_rows.product(rows, matrix, cut, self._scratch, into=into)
        return into


class ExpertLayers:
    """The layers of a mixture of experts; steps of more rows run as SGLang has them."""

    def __init__(self, model: Any, layers: FewRows) -> None:
        """Takes SGLang's model without its LM head, and its layers."""
        self._model = model
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
            raise ValueError("a step has tokens and nothing else")
        return self._layers.run(self._model.embed_tokens(input_ids), positions, forward_batch)


def _tiles(stream: torch.Tensor, cut: Cut) -> int:
    """Sums of squares of a row that a product with this cut leaves."""
    return stream.shape[1] // cut.outputs


def _cuts(rows: int, layer: Layer | ExpertLayer) -> tuple[Cut, ...] | None:
    """Of the products of a layer, the experts' last; None where one has none."""
    found = [
        few_rows.find_cut(rows, *layer.qkv.weight.shape),
        few_rows.find_cut(rows, *layer.out.weight.shape, adds=True),
    ]
    if isinstance(layer, ExpertLayer):
        found += experts.find_cuts(rows, layer.experts) or (None,)
    else:
        outputs, inputs = layer.gate_up.weight.shape
        found += [
            few_rows.find_cut(rows, outputs // 2, inputs, gated=True),
            few_rows.find_cut(rows, *layer.down.weight.shape, adds=True),
        ]
    cuts = tuple(cut for cut in found if cut is not None)
    return cuts if len(cuts) == len(found) else None
