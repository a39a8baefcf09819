"""FP8 GEMV for Hopper in CUDA C++ (``cuda/fp8_gemv.cu``): one row times an FP8 weight.

Each CTA applies RMSNorm and quantizes the row to FP8 itself, so no kernel runs between two GEMVs.
Epilogues: scales with store, SwiGLU or residual add. No library has an FP8 GEMV with fused
quantization.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import torch

from pie_driver_sglang.kernels.gemm.fp8_rows import QuantizedWeights
from pie_driver_sglang.kernels.gemm.types import SWIGLU, Epilogue, Norm

_PIECE = 64
"""Inputs that four threads load at once."""
_TILE = 16
"""Outputs of a tile."""
_HOPPER = 9


@dataclass(frozen=True)
class GemvConfig:
    """Launch options of a GEMV."""

    threads: int
    """Of a CTA, whose warps divide the inputs."""
    unroll: int
    """Pieces of 64 inputs that a warp loads at once; two are a quantization group."""
    ctas_per_sm: int
    """CTAs of an SM, which divide the tiles."""

    def fits(self, inputs: int) -> bool:
        """Whether the warps divide so many inputs."""
        return inputs % (self.threads // 32 * self.unroll * _PIECE) == 0


GEMV_CONFIGS = (
    GemvConfig(256, 4, 2), GemvConfig(256, 2, 3), GemvConfig(128, 2, 6), GemvConfig(64, 2, 12),
)  # fmt: skip
"""The best on an H100 first, then some for other shapes."""


def find_gemv_config(inputs: int) -> GemvConfig | None:
    """Chooses the config for so many inputs; None where the kernel does not support them."""
    return next((config for config in GEMV_CONFIGS if config.fits(inputs)), None)


def supports_gemv(weights: QuantizedWeights) -> bool:
    """Whether the kernel supports the shape and the GPU of a weight."""
    outputs, inputs = weights.weight.shape
    whole = outputs % _TILE == 0 and find_gemv_config(inputs) is not None
    cuda = weights.weight.device.type == "cuda"
    return (
        cuda and whole and torch.cuda.get_device_capability(weights.weight.device)[0] == _HOPPER
    )  # fmt: skip


class Fp8Gemv:
    """The kernel for weights with the same inputs, epilogue, norm and scales."""

    def __init__(
        self,
        inputs: int,
        epilogue: Epilogue,
        dtype: torch.dtype,
        device: torch.device,
        config: GemvConfig,
        *,
        normed: bool,
        static_scale: bool,
        grouped: bool,
    ) -> None:
        """Compiles it.

        Args:
            inputs: Of the weights.
            epilogue: The epilogue.
            dtype: Of rows and outputs: bfloat16 or float16.
            device: Where it runs.
            config: One that fits.
            normed: Whether it applies RMSNorm to the row.
            static_scale: Whether the weights come with the scale of the row.
            grouped: Whether scales are those of 128x128 blocks of the weight and of groups of 128
                inputs of the row.
        """
        # Takes half a second, for models that need it only.
        from pie_driver_sglang.kernels.cuda.compiled import CudaKernel

        macros = {
            "BF16": int(dtype is torch.bfloat16), "INPUTS": inputs, "THREADS": config.threads,
            "UNROLL": config.unroll, "CTAS_PER_SM": config.ctas_per_sm, "EPILOGUE": int(epilogue),
            "RMS_NORM": int(normed), "STATIC_SCALE": int(static_scale), "GROUPED": int(grouped),
        }  # fmt: skip
        self._epilogue = epilogue
        self._config = config
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._max_ctas = sms * config.ctas_per_sm
        self._kernel = CudaKernel("fp8_gemv.cu", macros, device)

    def multiply(
        self,
        row: torch.Tensor,
        weights: QuantizedWeights,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes ``row @ weight.T`` with the epilogue. Can be captured.

        Grid: at most `ctas_per_sm` CTAs an SM, which loop over tiles of 16 outputs.

        Args:
            row: ``[1, inputs]``, contiguous.
            weights: FP8, with scales.
            norm: RMSNorm of the row.
            residual: ``[1, outputs]``, added to in place by `ADD_RESIDUAL`.

        Returns:
            ``[1, outputs]``, half of them with SwiGLU; `residual` if given.
        """
        outputs = len(weights.weight) // (2 if self._epilogue == SWIGLU else 1)
        tiles = len(weights.weight) // _TILE
        out = row.new_empty(1, outputs) if residual is None else residual
        unused = weights.scales
        self._kernel.launch(
            (min(tiles, self._max_ctas),), self._config.threads, row, weights.weight,
            weights.scales, row if norm is None else norm.weight,
            unused if weights.row_scale is None else weights.row_scale, out,
            numpy.float32(0.0 if norm is None else norm.epsilon), numpy.int32(tiles),
        )  # fmt: skip
        return out
