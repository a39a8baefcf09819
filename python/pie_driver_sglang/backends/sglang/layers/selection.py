"""Chooses the fused layers of a model; SGLang runs one kernel an operation.

Llama-like models run fused layers while a graph is captured: FP8 weights (``fp8.py``), mixtures of
experts (``small_batch.py``) or dense 16-bit weights (``dense.py``). All others run SGLang's layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.backends.sglang import process_groups
from pie_driver_sglang.backends.sglang.attention.paged import PagedDecode
from pie_driver_sglang.backends.sglang.compat.attention import decode_backend
from pie_driver_sglang.backends.sglang.compat.layers import (
    ExpertLayer,
    Layer,
    QuantizedLayer,
    UnknownLayer,
    expect,
    find_decoder,
    read_layers,
    read_norm,
)
from pie_driver_sglang.backends.sglang.compat.loading import refuse_updates
from pie_driver_sglang.backends.sglang.compat.model import resolved
from pie_driver_sglang.backends.sglang.compat.pools import keeps_heads
from pie_driver_sglang.backends.sglang.compat.ranks import place_of, shares_memory, tensor_group
from pie_driver_sglang.backends.sglang.layers.dense import DenseLayers
from pie_driver_sglang.backends.sglang.layers.fp8 import Fp8Layers
from pie_driver_sglang.backends.sglang.layers.small_batch import MoeLayers, SmallBatchLayers
from pie_driver_sglang.kernels.comm import all_reduce_norm
from pie_driver_sglang.kernels.comm.all_reduce_norm import LamportAllReduceNorm
from pie_driver_sglang.kernels.gemm.linear import MAX_SHARED_BYTES
from pie_driver_sglang.kernels.gemm.types import LinearWeights, Norm

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner

_WIDEST = 16384
"""Widest hidden states that one program normalizes."""
_KV_CACHE_BACKENDS = ("fa3",)
"""SGLang's attention backends whose prefills attend to nothing but the KV cache."""
FROZEN_NORMS = (
    "weights cannot be updated: the weights of norms were multiplied into the layers after them; "
    "start with `fuse_layers = false` to update weights"
)
"""Why SGLang refuses to update weights."""
FROZEN_SCALES = (
    "weights cannot be updated: the layers have read the scales of FP8 weights; start with "
    "`fuse_layers = false` to update weights"
)
"""The same for FP8 weights."""

FusedLayers = DenseLayers | Fp8Layers | MoeLayers
"""The fused layers of a model."""


def fuse_layers(runner: ModelRunner) -> FusedLayers:
    """Chooses the fused layers of a model.

    Raises:
        UnknownLayer: None of them supports the model, with the reason.
    """
    attention = decode_backend(runner)
    if not isinstance(attention, PagedDecode):
        raise UnknownLayer("it attends by another backend")
    expect(_has_shared_memory(runner), "a multiprocessor has too little shared memory")
    model, norm, layers = read_supported_layers(runner)
    prefills = resolved(runner).attention_backends[0] in _KV_CACHE_BACKENDS
    if isinstance(layers[0], QuantizedLayer):
        expect(place_of(runner).size == 1, "its FP8 matrices are on several devices")
        expect(not resolved(runner).enable_lora, "adapters are added to its FP8 matrices")
        refuse_updates(runner, FROZEN_SCALES)
        return Fp8Layers(model, layers, norm, attention, prefills=prefills)
    _expect_plain_weights(layers)
    all_reduce = _make_all_reduce(runner, norm)
    # LoRA needs normalized rows. With tensor parallelism the all-reduce kernel normalizes anyway.
    folds = not resolved(runner).enable_lora and all_reduce is None
    if isinstance(layers[0], ExpertLayer):
        small_batch = SmallBatchLayers.of(layers, norm, attention)
        expect(small_batch is not None, "its experts have other shapes")
        expect(folds and _fold(runner, layers), "its norms cannot be folded")
        assert small_batch is not None
        return MoeLayers(model, small_batch)
    folded = folds and _fold(runner, layers)
    return DenseLayers(model, layers, norm, attention, all_reduce, prefills=prefills, folded=folded)


def read_supported_layers(
    runner: ModelRunner,
) -> tuple[Any, Norm, list[Layer] | list[QuantizedLayer] | list[ExpertLayer]]:
    """The decoder of a model, its last norm and its layers, if they are Llama-like.

    Raises:
        UnknownLayer: They are not, with the reason.
    """
    model = find_decoder(runner.model)
    pool = runner.token_to_kv_pool
    expect(keeps_heads(pool), f"its KV pool is a {type(pool).__name__}")
    norm = read_norm(model.norm)
    expect(pool.store_dtype == norm.weight.dtype, f"its KV is {pool.store_dtype}")
    expect(len(norm.weight) <= _WIDEST, f"its rows have {len(norm.weight)} numbers")
    return model, norm, read_layers(model, pool)


def _expect_plain_weights(layers: list[Layer] | list[ExpertLayer]) -> None:
    """Refuses weights on another device, or of a tensor subclass."""
    for layer in layers:
        weights = [part.weight for part in layer if isinstance(part, Norm | LinearWeights)]
        if isinstance(layer, ExpertLayer):
            mixture = layer.experts
            weights += [mixture.router.weight, mixture.gate_up, mixture.down]
        plain = all(type(weight) is torch.Tensor for weight in weights)
        expect(plain, "its weights are not plain tensors")
        there = all(weight.device == layer.heads.k_cache.device for weight in weights)
        expect(there, "some of its weights lie elsewhere")


def _fold(runner: ModelRunner, layers: list[Layer] | list[ExpertLayer]) -> bool:
    """Folds norm weights into the matrices after them, if possible.

    Not in float16, where GEMMs of unnormalized rows may overflow, nor with biases, which must not
    be scaled. Afterwards weights cannot be updated. A router keeps its norm: rounding its weights
    again would change the experts of rows.
    """
    if layers[0].before.weight.dtype == torch.float16:
        return False
    if any(layer.qkv.bias is not None for layer in layers):
        return False
    for layer in layers:
        normed = [(layer.before, layer.qkv)]
        if not isinstance(layer, ExpertLayer):
            normed.append((layer.between, layer.gate_up))
        for norm, matrix in normed:
            matrix.weight.mul_(norm.weight)
            norm.weight.fill_(1.0)
    refuse_updates(runner, FROZEN_NORMS)
    return True


def _make_all_reduce(runner: ModelRunner, norm: Norm) -> LamportAllReduceNorm | None:
    (rank, ranks), (width,), dtype = place_of(runner), norm.weight.shape, norm.weight.dtype
    if ranks == 1:
        return None
    tuning = all_reduce_norm.TUNINGS.get(ranks)
    if tuning is None:
        raise UnknownLayer(f"{ranks} ranks add up what they have")
    # Rows are sent in words of 4 bytes.
    expect(width * dtype.itemsize % 4 == 0, f"its rows have {width} numbers, which is odd")
    group = tensor_group()
    expect(shares_memory(group), "its ranks do not share memory")
    reasons = process_groups.gathered(_unsupported_reason(runner, tuning))
    expect(not any(reasons), "; ".join(filter(None, reasons)))
    size = LamportAllReduceNorm.size(ranks, tuning.max_rows, width, dtype)
    memory, error_text = None, ""
    try:
        memory = all_reduce_norm.map_peer_memory(group.cpu_group, norm.weight.device, size)
    except RuntimeError as error:
        error_text = str(error)
    # All ranks must decide alike.
    errors = "; ".join(filter(None, process_groups.gathered(error_text)))
    if memory is None or errors:
        raise UnknownLayer(f"its ranks do not share memory: {errors}")
    return LamportAllReduceNorm(memory, rank, width, dtype, tuning)


def _unsupported_reason(runner: ModelRunner, tuning: all_reduce_norm.AllReduceTuning) -> str:
    """Why the all-reduce kernels could deadlock on this GPU; empty if they cannot."""
    if runner.device != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(runner.gpu_id)
    return all_reduce_norm.residency_error(int(properties.multi_processor_count), tuning)


def _has_shared_memory(runner: ModelRunner) -> bool:
    if runner.device != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(runner.gpu_id)
    return int(properties.shared_memory_per_block_optin) >= MAX_SHARED_BYTES
