"""FP8 matrices of SGLang's linear layers, and its own products of them.

SGLang keeps such a matrix transposed, with a scale for each output or one for all, or as it is with
a scale for each block. Two of its classes make them: of the method `fp8`, and of checkpoints by
compressed-tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsLinearMethod,
)
from sglang.srt.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Fp8
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

from pie_driver_sglang.engine.layers.weights import QuantizedLinear
from pie_driver_sglang.kernels.gemm.fp8_rows import FP8, GROUP, QuantizedWeights


class UnknownQuantization(Exception):
    """Something about a quantized layer that the kernels do not know."""


def read_quantized(module: Any) -> QuantizedLinear | None:
    """The FP8 weights of a linear layer; None if it has none.

    Raises:
        UnknownQuantization: Some are quantized by a method that the kernels do not support.
    """
    method = module.quant_method
    if type(method) is Fp8LinearMethod:
        if method.use_marlin or method.use_mxfp8:
            raise UnknownQuantization("its FP8 weights are not computed with as FP8")
        scales = module.weight_scale_inv if method.block_quant else module.weight_scale
        block = method.weight_block_size
    elif type(method) is CompressedTensorsLinearMethod:
        scheme = module.scheme
        if type(scheme) is not CompressedTensorsW8A8Fp8:
            return None
        scales, block = module.weight_scale, scheme.weight_block_size
    else:
        return None
    weight = module.weight.data if block is not None else module.weight.data.t()
    if weight.dtype != FP8 or not weight.is_contiguous():
        raise UnknownQuantization("its FP8 weights lie in another order")
    row_scale = getattr(module, "input_scale", None)
    if row_scale is not None:
        row_scale = row_scale.data.reshape(-1)
        if row_scale.numel() != 1:
            raise UnknownQuantization("its rows have several scales")
    weights = QuantizedWeights(weight, _read_scales(scales.data, weight, block), row_scale)
    return QuantizedLinear(weights, lambda rows: method.apply(module, rows))


def _read_scales(scales: torch.Tensor, weight: torch.Tensor, block: Any) -> torch.Tensor:
    outputs, inputs = weight.shape
    if scales.dtype != torch.float32:
        raise UnknownQuantization(f"its scales are {scales.dtype}")
    if block is None:
        if scales.numel() not in (1, outputs):
            raise UnknownQuantization(f"{scales.numel()} scales of {outputs} outputs")
        return scales.reshape(-1).expand(outputs).contiguous()
    if list(block) != [GROUP, GROUP] or outputs % GROUP or inputs % GROUP:
        raise UnknownQuantization(f"blocks of {list(block)} in {outputs} by {inputs} weights")
    return scales.contiguous()
