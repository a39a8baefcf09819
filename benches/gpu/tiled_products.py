"""Products by tiles (``kernels/gemm/tiled.py``) and what float64 says of them."""

from __future__ import annotations

import torch

from pie_driver_sglang.kernels.gemm import tiled
from pie_driver_sglang.kernels.gemm.fp8_rows import (
    FP8,
    FP8_MAX,
    QuantizedRows,
    QuantizedWeights,
    quantize,
)
from pie_driver_sglang.kernels.gemm.types import LinearWeights, TileConfig, Workspace


def randn(*size: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    """In bfloat16, or in float32 for the interpreter."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return (torch.randn(*size, device=device) * scale).to(dtype)


class TiledProduct:
    """Rows and a matrix, and what float64 says of their product."""

    def __init__(
        self,
        count: int,
        outputs: int,
        inputs: int,
        device: torch.device,
        itemsize: int,
        *,
        swiglu: bool,
    ) -> None:
        self._gated, self._outputs = swiglu, outputs
        height = outputs * (2 if swiglu else 1)
        rows = randn(count, inputs, device=device)
        weight = randn(height, inputs, device=device, scale=inputs**-0.5)
        self._dtype = rows.dtype
        self._given: torch.Tensor | QuantizedRows = rows
        self._matrix: LinearWeights | QuantizedWeights = LinearWeights(weight)
        exact = rows.double() @ weight.double().T
        if itemsize == 1:
            quantized = quantize(rows)
            scales = weight.float().abs().amax(1) / FP8_MAX
            rounded = (weight.float() / scales[:, None]).to(FP8)
            self._given, self._matrix = quantized, QuantizedWeights(rounded, scales)
            exact = quantized.rows.double() * quantized.scales.double()
            exact = exact @ (rounded.double() * scales.double()[:, None]).T
        if swiglu:
            gate, up = exact.chunk(2, dim=-1)
            exact = torch.nn.functional.silu(gate) * up
        self.exact = exact

    def run(self, tile: TileConfig, *, add_residual: bool) -> torch.Tensor:
        """The product; added to zeros if `add_residual`."""
        count, device = self.exact.shape[0], self.exact.device
        parts, tiles = tiled.workspace_sizes(max(count, tile.block_m), self._outputs)
        workspace = Workspace(
            torch.full((parts,), torch.nan, device=device),
            torch.zeros(tiles, dtype=torch.int32, device=device),
        )
        into = (
            torch.zeros(self.exact.shape, dtype=self._dtype, device=device)
            if add_residual
            else None
        )
        return tiled.tiled_gemm(
            self._given, self._matrix, tile, workspace, residual=into, swiglu=self._gated,
            dtype=self._dtype,
        )  # fmt: skip
