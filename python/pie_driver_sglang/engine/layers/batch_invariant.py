"""Dense layers that give a row the same bits whatever the other rows of its pass are.

Every pass, a decode of one row or a prefill of thousands, runs the same two families of kernels:
`kernels.gemm.wgmma` with a split-K factor that depends on the matrix only, and
`kernels.attention.batch_invariant`. So decodes and prefills have the same bits, too: KV that is
computed again, after a retraction or by another replica, is the same.

With two ranks the GEMMs whose inputs are divided store their sums, which the library's all-reduce
adds up. It chooses its kernel by the number of rows, but the sum of two ranks is one addition.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.engine.attention.batch_invariant import BatchInvariantAttention
from pie_driver_sglang.engine.layers.attention import attend
from pie_driver_sglang.engine.layers.gemm_table import GemmTable
from pie_driver_sglang.engine.layers.weights import Layer, UnsupportedLayer, require
from pie_driver_sglang.kernels.gemm import small_m, wgmma
from pie_driver_sglang.kernels.gemm.norm_rope import add_rms_norm
from pie_driver_sglang.kernels.gemm.search_space import has_same_bits, invariant_problem
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Norm,
    Residual,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, WgmmaGemm

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import Decoder, PassContext, RankGroup

_ROWS = (*wgmma.BLOCK_MS, 256, *(1 << power for power in range(9, 18)))
"""Numbers of rows that `check_weights` tries: every tile size, and long prefills."""
MAX_INVARIANT_RANKS = 2
"""Most ranks: the sum of more depends on the order in which an all-reduce adds them."""


def check_weights(layers: Sequence[Layer], ranks: int = 1) -> None:
    """Refuses layers that the kernels do not support.

    Args:
        layers: A rank's part of them.
        ranks: Ranks of the model.

    Raises:
        UnsupportedLayer: One of them, with the reason.
    """
    added = ADD_RESIDUAL if ranks == 1 else STORE
    for layer in layers:
        weights = [(layer.qkv.weight, STORE), (layer.out.weight, added)]
        weights += [(layer.gate_up.weight, SWIGLU), (layer.down.weight, added)]
        for weight, epilogue in weights:
            height, inputs = weight.shape
            require(
                supports_weight(weight, epilogue),
                f"a matrix of {height} x {inputs} has no batch-invariant kernel",
            )


def supports_weight(weight: torch.Tensor, epilogue: Epilogue = STORE) -> bool:
    """Whether `BatchInvariantGemm` supports a weight, ``[outputs, inputs]``, for any rows."""
    return all(_config(rows, weight, epilogue) is not None for rows in _ROWS)


def _config(rows: int, weight: torch.Tensor, epilogue: Epilogue) -> WgmmaConfig | None:
    return wgmma.find_batch_invariant_config(rows, *weight.shape, weight.itemsize, epilogue)


def _tuned_config(
    table: GemmTable, rule: WgmmaConfig, rows: int, weight: torch.Tensor, epilogue: Epilogue
) -> WgmmaConfig:
    """A measured config that gives the same bits, if there is one."""
    height, inputs = weight.shape
    problem = invariant_problem(epilogue, rows, height, inputs, weight.itemsize)
    found = None if problem is None else table.get(problem)
    config = None if found is None else found.config
    if isinstance(config, WgmmaConfig) and has_same_bits(config, rule):
        return config
    return rule


class BatchInvariantGemm:
    """GEMMs of 16-bit weights whose rows do not depend on each other."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, table: GemmTable | None = None
    ) -> None:
        """Compiles nothing yet.

        Args:
            dtype: Of rows and weights.
            device: Theirs.
            table: Measured configs of many rows, which change no bits.
        """
        self._gemm = WgmmaGemm(dtype, device)
        self._table = table

    def __call__(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        epilogue: Epilogue = STORE,
        *,
        bias: torch.Tensor | None = None,
        normed: Residual | None = None,
        epsilon: float = 0.0,
        residual: Residual | None = None,
    ) -> torch.Tensor:
        """Computes ``rows @ weight.T``. Can be captured.

        Args:
            rows: ``[rows, inputs]``, contiguous.
            weight: ``[outputs, inputs]``.
            epilogue: The epilogue.
            bias: ``[outputs]``, only for `STORE`.
            normed: The rows with their sums of squares, if their RMSNorm is to be applied.
            epsilon: Of that norm.
            residual: That of `ADD_RESIDUAL`.

        Raises:
            UnsupportedLayer: The kernel does not support the weight.
        """
        config = _config(len(rows), weight, epilogue)
        if config is None:
            raise UnsupportedLayer(f"a matrix of {list(weight.shape)} is not supported")
        if self._table is not None:
            config = _tuned_config(self._table, config, len(rows), weight, epilogue)
        return self._gemm.multiply(
            rows, LinearWeights(weight, bias), config, epilogue,
            sum_squares=None if normed is None else normed.sum_squares, epsilon=epsilon,
            residual=residual,
        )  # fmt: skip


class BatchInvariantLayers:
    """The layers of a loaded model whose norms are folded into the weights after them."""

    def __init__(
        self,
        decoder: Decoder,
        layers: Sequence[Layer],
        norm: Norm,
        attention: BatchInvariantAttention,
        gemm: BatchInvariantGemm,
        group: RankGroup | None = None,
    ) -> None:
        """Wraps a model.

        Args:
            decoder: The model without its LM head.
            layers: Its layers.
            norm: After the last layer.
            attention: The attention of all passes.
            gemm: The GEMMs.
            group: The ranks of the model, at most `MAX_INVARIANT_RANKS`; None for one.
        """
        self._decoder = decoder
        self._layers = layers
        self._norm = norm
        self._attention = attention
        self._gemm = gemm
        self._group = group

    def supports(self, num_rows: int) -> bool:
        """Whether decodes of so many rows run these layers: all do."""
        return num_rows > 0

    @contextlib.contextmanager
    def patched_prefill(self) -> Iterator[None]:
        """Within, the model's forward of a pass runs these layers."""
        with self._decoder.run_instead(self._run):
            yield

    patched_decode = patched_prefill

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        embedded = self._decoder.embed(input_ids)
        # As many partial sums of squares as `_add` leaves.
        parts = embedded.shape[1] // wgmma.SQUARE_OUTPUTS if self._group is None else 1
        residual = small_m.start_residual(embedded, parts)
        for layer in self._layers:
            qkv = self._project(residual, layer.before, layer.qkv, STORE)
            attended = attend(
                qkv, layer, positions, context, self._attention.attend, out_of_place=False
            )
            residual = self._add(residual, attended, layer.out)
            activated = self._project(residual, layer.between, layer.gate_up, SWIGLU)
            residual = self._add(residual, activated, layer.down)
        return add_rms_norm(residual.rows[None], None, self._norm)[0]

    def _project(
        self, residual: Residual, norm: Norm, matrix: LinearWeights, epilogue: Epilogue
    ) -> torch.Tensor:
        return self._gemm(
            residual.rows, matrix.weight, epilogue,
            bias=matrix.bias, normed=residual, epsilon=norm.epsilon,
        )  # fmt: skip

    def _add(self, residual: Residual, rows: torch.Tensor, matrix: LinearWeights) -> Residual:
        if self._group is not None:
            part = self._gemm(rows, matrix.weight)
            small_m.add_to_residual(self._group.all_reduce(part), residual)
            return residual
        out = residual._replace(sum_squares=torch.empty_like(residual.sum_squares))
        self._gemm(rows, matrix.weight, ADD_RESIDUAL, residual=out)
        return out
