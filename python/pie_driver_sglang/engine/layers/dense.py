"""Dense Llama-like layers of 16-bit weights in few kernels, where libraries run one an operation.

Small steps are bound by kernel launches and by reading weights. Steps that `small_batch` does not
support run with folded norms between cuBLAS GEMMs. Tensor parallel ranks run GEMMs of `rank_gemms`
without folded norms. Where these have no config, or the library applies LoRA, GEMMs are those of
``kernels/gemm/linear.py``. Prefills have folded norms where FlashAttention-3 attends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.engine.layers.attention import (
    attend,
    attend_decode,
    attend_folded_norm,
    kv_cache_attention,
    swiglu_folded_norm,
)
from pie_driver_sglang.engine.layers.gemm_table import GemmTable
from pie_driver_sglang.engine.layers.lora import NO_LORA, FusedLora, LayerLora
from pie_driver_sglang.engine.layers.rank_gemms import RankGemms
from pie_driver_sglang.engine.layers.small_batch import NARROW_WIDTH, SmallBatchLayers
from pie_driver_sglang.kernels.comm.all_reduce_norm import LamportAllReduceNorm
from pie_driver_sglang.kernels.gemm import linear
from pie_driver_sglang.kernels.gemm.lora import LoraRows, lora_expand
from pie_driver_sglang.kernels.gemm.norm_rope import add_rms_norm, silu_and_mul
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    Epilogue,
    LinearWeights,
    Norm,
)

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import PagedDecode
    from pie_driver_sglang.engine.backend import Decoder, PassContext
    from pie_driver_sglang.engine.layers.weights import Layer, LayerAdapters

_MAX_ROWS, _NARROW_MAX_ROWS = 256, 64
"""Above this many rows cuBLAS GEMMs with folded norms are faster; the second one for narrow layers
without WGMMA kernels."""


class DenseLayers:
    """The layers of a loaded model, run as fused kernels."""

    def __init__(
        self,
        decoder: Decoder,
        layers: list[Layer],
        norm: Norm,
        attention: PagedDecode,
        all_reduce: LamportAllReduceNorm | None,
        *,
        prefills: bool,
        folded: bool,
        table: GemmTable | None = None,
        adapters: list[LayerAdapters] | None = None,
    ) -> None:
        """Wraps a model.

        Args:
            decoder: The model without its LM head.
            layers: Its layers.
            norm: After the last layer.
            attention: The decode attention.
            all_reduce: Of tensor parallel ranks; None for one device.
            prefills: Whether prefills attend to nothing but the KV cache.
            folded: Whether norms are folded into the weights after them.
            table: Measured configs of GEMMs with folded norms.
            adapters: LoRA adapters of the layers, only where norms are folded; None where the
                library applies them.
        """
        self._decoder = decoder
        self._attention = attention
        self._layers = layers
        self._all_reduce = all_reduce
        self._folded = folded
        self._prefills = prefills
        self._small_batch = SmallBatchLayers.of(layers, norm, attention, table) if folded else None
        self._rank_gemms = None if all_reduce is None else RankGemms.of(layers, norm, table)
        self._lora = FusedLora(adapters) if adapters else None
        # The norm after each layer.
        self._norms = [*(layer.before for layer in layers[1:]), norm]

    @property
    def small_batch(self) -> SmallBatchLayers | None:
        """The layers of small steps, where norms are folded."""
        return self._small_batch

    @contextlib.contextmanager
    def patched_prefill(self) -> Iterator[None]:
        """Within, the model's forward of a prefill runs these layers, if they support it."""
        supported = self._folded and self._prefills
        patch = self._decoder.run_instead(self._run_folded)
        with patch if supported else contextlib.nullcontext():
            yield

    def supports(self, num_rows: int) -> bool:
        """Whether decodes of so many rows run these layers."""
        return self._all_reduce is None or num_rows <= self._all_reduce.max_rows

    @contextlib.contextmanager
    def patched_decode(self) -> Iterator[None]:
        """Within, the model's forward of a supported decode runs these layers."""
        with self._decoder.run_instead(self._run):
            yield

    @property
    def applies_adapters(self) -> bool:
        """Whether decodes with LoRA adapters run these layers."""
        return self._lora is not None

    @contextlib.contextmanager
    def patched_lora_decode(self, rows: LoraRows) -> Iterator[None]:
        """As :meth:`patched_decode`, with the adapter of each row."""
        lora = self._lora
        if lora is None:
            raise RuntimeError("the library applies adapters: these layers have none")

        def run(
            input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
        ) -> torch.Tensor:
            return self._run_with_lora(input_ids, positions, context, lora.of_rows(rows))

        with self._decoder.run_instead(run):
            yield

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        if self._folded and len(input_ids) > self._max_small_rows():
            return self._run_folded(input_ids, positions, context)
        embedded = self._decoder.embed(input_ids)
        if self._small_batch is not None and len(input_ids) <= self._small_batch.max_rows:
            return self._small_batch.run(self._decoder, embedded, positions, context)
        rows, residual = add_rms_norm(embedded[None], None, self._layers[0].before)
        for number, (layer, norm) in enumerate(zip(self._layers, self._norms, strict=True)):
            self._decoder.keep_input(number, residual)
            qkv = self._multiply(rows, layer.qkv, STORE)
            if self._all_reduce is None:
                attended = attend(
                    qkv, layer, positions, context, self._attention.attend, out_of_place=False
                )
            else:
                attended = attend_decode(qkv, layer, self._attention, positions, context)
            rows, residual = self._project_add(0, attended, layer.out, residual, layer.between)
            activated = self._multiply(rows, layer.gate_up, SWIGLU)
            rows, residual = self._project_add(1, activated, layer.down, residual, norm)
        return rows

    def _run_with_lora(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: PassContext,
        lora: list[LayerLora],
    ) -> torch.Tensor:
        small, rows = self._small_batch, len(input_ids)
        if small is None or rows > min(small.max_rows, self._max_small_rows()):
            return self._run_folded(input_ids, positions, context, lora)
        embedded = self._decoder.embed(input_ids)
        return small.run(self._decoder, embedded, positions, context, lora)

    def _max_small_rows(self) -> int:
        """Rows up to which steps with folded norms do not run cuBLAS GEMMs only."""
        wide = len(self._norms[-1].weight) >= NARROW_WIDTH
        if self._small_batch is not None and (wide or self._small_batch.has_wgmma):
            return min(_MAX_ROWS, self._small_batch.max_rows)
        return min(_MAX_ROWS, _NARROW_MAX_ROWS)

    def _project_add(
        self,
        buffer: int,
        rows: torch.Tensor,
        matrix: LinearWeights,
        residual: torch.Tensor,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Projection, all-reduce, residual add and RMSNorm: normalized rows, and the residual."""
        if self._all_reduce is None:
            partial_sums = _linear(rows, matrix, linear.MAX_SPLIT_K)
            return add_rms_norm(partial_sums, residual, norm)
        out = self._multiply(rows, matrix, ADD_RESIDUAL)
        return self._all_reduce.add_rms_norm(buffer, out, residual, norm)

    def _multiply(
        self, rows: torch.Tensor, matrix: LinearWeights, epilogue: Epilogue
    ) -> torch.Tensor:
        """A projection of normalized rows; `ADD_RESIDUAL` is one that ranks add up."""
        if self._rank_gemms is not None:
            found = self._rank_gemms.multiply(rows, matrix, epilogue)
            if found is not None:
                return found
        return _linear_swiglu(rows, matrix) if epilogue == SWIGLU else _linear(rows, matrix)[0]

    def _run_folded(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        context: PassContext,
        lora: list[LayerLora] | None = None,
    ) -> torch.Tensor:
        """CuBLAS GEMMs of the residual; the kernel after each applies the RMS scale."""
        attend_kv_cache = kv_cache_attention(self._decoder, self._attention, context)
        residual = self._decoder.embed(input_ids)
        adapters = lora or [NO_LORA] * len(self._layers)
        for number, (layer, own) in enumerate(zip(self._layers, adapters, strict=True)):
            self._decoder.keep_input(number, residual)
            # Activations are freed early: the memory plan is made for such a pass.
            attended = attend_folded_norm(
                layer, residual, positions, context, attend_kv_cache,
                lora=own.shrink(residual, own.adapters.qkv), out_of_place=not context.is_decode,
            )  # fmt: skip
            shrunk = own.shrink(attended, own.adapters.out)
            lora_expand(residual.addmm_(attended, layer.out.weight.t()), shrunk)
            del attended
            shrunk = own.shrink(residual, own.adapters.gate_up)
            activated = swiglu_folded_norm(layer, residual, shrunk)
            shrunk = own.shrink(activated, own.adapters.down)
            lora_expand(residual.addmm_(activated, layer.down.weight.t()), shrunk)
            del activated
        return add_rms_norm(residual[None], None, self._norms[-1])[0]


def _linear(rows: torch.Tensor, matrix: LinearWeights, max_split_k: int = 1) -> torch.Tensor:
    outputs, inputs = matrix.weight.shape
    config = linear.find_linear_config(len(rows), outputs, inputs, max_split_k)
    if config is None:
        return torch.nn.functional.linear(rows, *matrix).unsqueeze(0)
    return linear.linear(rows, matrix, config)


def _linear_swiglu(rows: torch.Tensor, matrix: LinearWeights) -> torch.Tensor:
    outputs, inputs = matrix.weight.shape
    config = linear.find_linear_config(len(rows), outputs // 2, inputs, swiglu=True)
    if config is None:
        return silu_and_mul(torch.nn.functional.linear(rows, matrix.weight))
    return linear.linear_swiglu(rows, matrix, config)
