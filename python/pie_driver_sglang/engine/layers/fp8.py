"""Dense layers of FP8 weights in few kernels.

The kernel that quantizes a GEMM's input also applies norm, SwiGLU and residual add, and the kernel
after a GEMM applies scales. GEMMs of small steps are the driver's own, with a residual-add
epilogue; larger ones are cuBLAS's, or the library's for block scales.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.engine.layers.attention import attend, attend_decode, kv_cache_attention
from pie_driver_sglang.kernels.gemm import fp8_gemv, tiled, wgmma
from pie_driver_sglang.kernels.gemm.fp8_gemv import Fp8Gemv
from pie_driver_sglang.kernels.gemm.fp8_rows import (
    QuantizedRows,
    UnscaledOutput,
    quantize,
    unscaled_fp8_gemm,
)
from pie_driver_sglang.kernels.gemm.norm_rope import add_rms_norm, silu_and_mul
from pie_driver_sglang.kernels.gemm.types import (
    ADD_RESIDUAL,
    STORE,
    SWIGLU,
    Epilogue,
    Norm,
    RmsScale,
    TileConfig,
    Workspace,
)
from pie_driver_sglang.kernels.gemm.wgmma import WgmmaConfig, WgmmaGemm

if TYPE_CHECKING:
    from pie_driver_sglang.engine.attention.paged import PagedDecode
    from pie_driver_sglang.engine.backend import Decoder, PassContext
    from pie_driver_sglang.engine.layers.weights import QuantizedLayer, QuantizedLinear

_MAX_TILED_ROWS = 128
"""Most rows of :func:`tiled_gemm`."""
_CUBLAS_ALIGNMENT = 16
"""Outputs and inputs of an FP8 cuBLAS GEMM are multiples of this."""
_Rows = torch.Tensor | UnscaledOutput


class Fp8Layers:
    """The layers of a model whose weights are FP8."""

    def __init__(
        self,
        decoder: Decoder,
        layers: Sequence[QuantizedLayer],
        norm: Norm,
        attention: PagedDecode,
        *,
        prefills: bool,
    ) -> None:
        """Wraps a model.

        Args:
            decoder: The model without its LM head.
            layers: Its layers.
            norm: After the last layer.
            attention: The decode attention.
            prefills: Whether prefills attend to nothing but the KV cache.
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
        outputs = max(len(matrix.weights.weight) for matrix in matrices)
        floats, semaphores = tiled.workspace_sizes(_MAX_TILED_ROWS, outputs)
        self._workspace = Workspace(
            torch.empty(floats, device=device),
            torch.zeros(semaphores, dtype=torch.int32, device=device),
        )
        self._gemv = Fp8GemvLayers.of(layers, norm, attention)
        halves = norm.weight.dtype in (torch.bfloat16, torch.float16)
        supported = halves and wgmma.supports_wgmma(device)
        self._wgmma = WgmmaGemm(norm.weight.dtype, device) if supported else None

    def supports(self, num_rows: int) -> bool:
        """Whether decodes of so many rows run these layers."""
        return num_rows > 0

    @contextlib.contextmanager
    def patched_prefill(self) -> Iterator[None]:
        """Within, the model's forward of a prefill runs these layers, if they support it."""
        with self.patched_decode() if self._prefills else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def patched_decode(self) -> Iterator[None]:
        """Within, the model's forward of a supported decode runs these layers."""
        with self._decoder.run_instead(self._run):
            yield

    def _run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, context: PassContext
    ) -> torch.Tensor:
        residual = self._decoder.embed(input_ids)
        if len(residual) == 1 and self._gemv is not None and context.is_decode:
            return self._gemv.run(residual, positions, context)
        # Output of the last GEMM, if it was not added to the residual yet.
        pending: _Rows | None = None
        for layer in self._layers:
            qkv = self._norm_project(residual, pending, layer.before, layer.qkv, STORE)
            attended = self._attend(layer, qkv, positions, context)
            del qkv
            pending = self._project_add(attended, layer.out, residual)
            gate_up = self._norm_project(residual, pending, layer.between, layer.gate_up, SWIGLU)
            pending = self._project_add(gate_up, layer.down, residual, swiglu=True)
        rows, before, scales = _norm_inputs(residual, pending)
        return add_rms_norm(rows[None], before, self._norm, scales)[0]

    def _attend(
        self,
        layer: QuantizedLayer,
        qkv: _Rows,
        positions: torch.Tensor,
        context: PassContext,
    ) -> torch.Tensor:
        attend_kv_cache = kv_cache_attention(self._decoder, self._attention, context)
        if isinstance(qkv, UnscaledOutput):
            scale = RmsScale(qkv.row_scales, 0.0)
            return attend(
                qkv.rows, layer, positions, context, attend_kv_cache,
                scale=scale, output_scales=qkv.output_scales,
                out_of_place=not context.is_decode,
            )  # fmt: skip
        if context.is_decode:
            return attend_decode(qkv, layer, self._attention, positions, context)
        return attend(qkv, layer, positions, context, attend_kv_cache, out_of_place=True)

    def _norm_project(
        self,
        residual: torch.Tensor,
        pending: _Rows | None,
        norm: Norm,
        linear: QuantizedLinear,
        epilogue: Epilogue,
    ) -> _Rows:
        """Adds `pending` to the residual in place, normalizes, quantizes and projects it.

        Only the driver's own GEMMs have the epilogue; the output of others is still gate and up.
        """
        weights, config = linear.weights, self._find_config(residual, linear, epilogue)
        if config is None and not _supports_cublas(linear):
            rows, before, scales = _norm_inputs(residual, pending)
            return linear.apply(add_rms_norm(rows[None], before, norm, scales)[0])
        quantized = quantize(
            residual if pending is None else pending,
            residual=None if pending is None else residual,
            norm=norm, grouped=weights.grouped, scale=weights.row_scale,
        )  # fmt: skip
        if config is None:
            return unscaled_fp8_gemm(quantized, weights, self._one, residual.dtype)
        return self._multiply(quantized, linear, config, epilogue)

    def _project_add(
        self, rows: _Rows, linear: QuantizedLinear, residual: torch.Tensor, *, swiglu: bool = False
    ) -> _Rows | None:
        """Projects rows and adds them to the residual; returns what is still to be added.

        With `swiglu` the rows are gate and up, unless they are as wide as the weight's inputs.
        """
        weights, config = linear.weights, self._find_config(residual, linear, ADD_RESIDUAL)
        width = (rows.rows if isinstance(rows, UnscaledOutput) else rows).shape[1]
        swiglu = swiglu and width != weights.weight.shape[1]
        if config is None and not _supports_cublas(linear):
            if isinstance(rows, UnscaledOutput):
                raise ValueError("some matrices of a layer have blocks, others have not")
            return linear.apply(silu_and_mul(rows) if swiglu else rows)
        quantized = quantize(rows, swiglu=swiglu, grouped=weights.grouped, scale=weights.row_scale)
        if config is None:
            return unscaled_fp8_gemm(quantized, weights, self._one, residual.dtype)
        self._multiply(quantized, linear, config, ADD_RESIDUAL, residual)
        return None

    def _find_config(
        self, rows: torch.Tensor, linear: QuantizedLinear, epilogue: Epilogue
    ) -> TileConfig | WgmmaConfig | None:
        """The config of the driver's own GEMM; None where it is cuBLAS's or the library's."""
        count, (height, inputs) = len(rows), linear.weights.weight.shape
        if self._wgmma is not None and not linear.weights.grouped:
            found = wgmma.find_wgmma_config(count, height, inputs, 1, epilogue)
            if found is not None:
                return found
        if count > _MAX_TILED_ROWS:
            return None
        outputs = height // 2 if epilogue == SWIGLU else height
        return tiled.find_tiled_config(count, outputs, inputs, 1, epilogue)

    def _multiply(
        self,
        given: QuantizedRows,
        linear: QuantizedLinear,
        config: TileConfig | WgmmaConfig,
        epilogue: Epilogue,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights = linear.weights
        if isinstance(config, WgmmaConfig):
            assert self._wgmma is not None
            return self._wgmma.multiply(given, weights, config, epilogue, residual=residual)
        return tiled.tiled_gemm(
            given, weights, config, self._workspace, swiglu=epilogue == SWIGLU, residual=residual,
            dtype=self._norm.weight.dtype,
        )  # fmt: skip


class Fp8GemvLayers:
    """The layers of a decode of one row, by GEMVs that quantize the row themselves."""

    def __init__(
        self, layers: Sequence[QuantizedLayer], norm: Norm, attention: PagedDecode
    ) -> None:
        """Takes layers that :meth:`of` supports, and the norm after the last one."""
        self._layers = layers
        self._norm = norm
        self._attention = attention
        self._kernels: dict[tuple[Any, ...], Fp8Gemv] = {}

    @classmethod
    def of(
        cls, layers: Sequence[QuantizedLayer], norm: Norm, attention: PagedDecode
    ) -> Fp8GemvLayers | None:
        """The layers of a model; None if the kernel does not support its weights."""
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
        supported = typed and all(fp8_gemv.supports_gemv(weights) for weights in matrices)
        return cls(layers, norm, attention) if supported else None

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
            qkv = self._multiply(residual, layer.qkv, STORE, norm=layer.before)
            attended = attend_decode(qkv, layer, self._attention, positions, context)
            self._multiply(attended, layer.out, ADD_RESIDUAL, residual=residual)
            activated = self._multiply(residual, layer.gate_up, SWIGLU, norm=layer.between)
            self._multiply(activated, layer.down, ADD_RESIDUAL, residual=residual)
        return add_rms_norm(residual[None], None, self._norm)[0]

    def _multiply(
        self,
        row: torch.Tensor,
        linear: QuantizedLinear,
        epilogue: Epilogue,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weights, inputs = linear.weights, row.shape[1]
        static_scale = weights.row_scale is not None
        key = (inputs, epilogue, norm is not None, static_scale, weights.grouped)
        if key not in self._kernels:
            config = fp8_gemv.find_gemv_config(inputs)
            if config is None:
                raise ValueError(f"no GEMV config for {inputs} inputs")
            self._kernels[key] = Fp8Gemv(
                inputs, epilogue, row.dtype, row.device, config,
                normed=norm is not None, static_scale=static_scale, grouped=weights.grouped,
            )  # fmt: skip
        return self._kernels[key].multiply(row, weights, norm=norm, residual=residual)


def _norm_inputs(
    residual: torch.Tensor, pending: _Rows | None
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor, torch.Tensor] | None]:
    """The first, second and fourth argument of :func:`add_rms_norm`."""
    if pending is None:
        return residual, None, None
    if isinstance(pending, UnscaledOutput):
        return pending.rows, residual, (pending.row_scales, pending.output_scales)
    return pending, residual, None


def _supports_cublas(linear: QuantizedLinear) -> bool:
    """Whether cuBLAS supports the FP8 GEMM."""
    weight = linear.weights.weight
    aligned = all(size % _CUBLAS_ALIGNMENT == 0 for size in weight.shape)
    return weight.device.type == "cuda" and aligned and not linear.weights.grouped
