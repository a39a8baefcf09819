"""Which kernels run the decoder layers of a model, where the library runs one per operation.

Models whose layers are built as Llama's run as fused kernels while a graph is captured: in FP8
(``fp8.py``), of a mixture of experts (``small_batch.py``), or of 16-bit weights (``dense.py``). All
others run as the library has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.layers.dense import DenseLayers
from pie_driver_sglang.engine.layers.fp8 import QuantizedLayers
from pie_driver_sglang.engine.layers.small_batch import ExpertLayers, FewRows
from pie_driver_sglang.engine.layers.weights import (
    DecoderWeights,
    ExpertLayer,
    Layer,
    QuantizedLayer,
    UnsupportedLayer,
    require,
)
from pie_driver_sglang.kernels.comm import all_reduce_norm
from pie_driver_sglang.kernels.comm.all_reduce_norm import LamportAllReduceNorm
from pie_driver_sglang.kernels.gemm import dense_layers
from pie_driver_sglang.kernels.gemm.dense_layers import LinearWeights, Norm

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import ModelBackend

_WIDEST = 16384
"""Hidden states of which one program normalizes a row."""
FROZEN = (
    "weights cannot be updated: the weights of norms were multiplied into the layers after them; "
    "start with `fuse_layers = false` to update weights"
)
"""Why the library refuses to update weights."""
FROZEN_SCALES = (
    "weights cannot be updated: the layers have read the scales of FP8 weights; start with "
    "`fuse_layers = false` to update weights"
)
"""The same of weights in FP8."""

FusedLayers = DenseLayers | QuantizedLayers | ExpertLayers
"""The layers of a model that few kernels can run."""


def fuse_layers(backend: ModelBackend) -> FusedLayers:
    """Chooses the kernels of a model's layers.

    Raises:
        UnsupportedLayer: None of them knows the model, with the reason.
    """
    attention = backend.decode_attention
    if attention is None:
        raise UnsupportedLayer("it attends by another backend")
    require(_has_room(backend), "a multiprocessor has too little shared memory")
    decoder, norm, layers, attends_stored = known_layers(backend)
    ranks = backend.group.world_size
    if isinstance(layers[0], QuantizedLayer):
        require(ranks == 1, "its FP8 matrices are on several devices")
        require(backend.lora is None, "adapters are added to its FP8 matrices")
        backend.freeze_weights(FROZEN_SCALES)
        return QuantizedLayers(decoder, layers, norm, attention, prefills=attends_stored)
    _require_plain(layers)
    sums = _all_reduce(backend, norm)
    # Adapters want rows to which the norms' weights were applied. Between ranks a kernel
    # must add up what products are, and may as well normalize it.
    folds = backend.lora is None and sums is None
    if isinstance(layers[0], ExpertLayer):
        few = FewRows.of(layers, norm, attention)
        require(few is not None, "its experts have other shapes")
        require(folds and _fold(backend, layers), "its norms cannot be folded")
        assert few is not None
        return ExpertLayers(decoder, few)
    folded = folds and _fold(backend, layers)
    return DenseLayers(
        decoder, layers, norm, attention, sums, prefills=attends_stored, folded=folded
    )


def known_layers(backend: ModelBackend) -> DecoderWeights:
    """The layers of a model that is built as Llama's.

    Raises:
        UnsupportedLayer: It is not, with the reason.
    """
    weights = backend.decoder_weights()
    width = len(weights.norm.weight)
    require(width <= _WIDEST, f"its rows have {width} numbers")
    return weights


def _require_plain(layers: list[Layer] | list[ExpertLayer]) -> None:
    """Weights may lie on the host, or be of a type that computes in its own way."""
    for layer in layers:
        weights = [part.weight for part in layer if isinstance(part, Norm | LinearWeights)]
        if isinstance(layer, ExpertLayer):
            mixture = layer.experts
            weights += [mixture.router.weight, mixture.gate_up, mixture.down]
        plain = all(type(weight) is torch.Tensor for weight in weights)
        require(plain, "its weights are not plain tensors")
        there = all(weight.device == layer.heads.keys.device for weight in weights)
        require(there, "some of its weights lie elsewhere")


def _fold(backend: ModelBackend, layers: list[Layer] | list[ExpertLayer]) -> bool:
    """Gives the weights of norms to the products after them, if these can take rows as they are.

    The products of such rows may be too large for float16. A bias would need another scale. From
    then on weights cannot be updated. A router keeps its norm, so that rows keep their experts.
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
    backend.freeze_weights(FROZEN)
    return True


def _all_reduce(backend: ModelBackend, norm: Norm) -> LamportAllReduceNorm | None:
    group, (width,), dtype = backend.group, norm.weight.shape, norm.weight.dtype
    rank, ranks = group.rank_in_group, group.world_size
    if ranks == 1:
        return None
    tuning = all_reduce_norm.TUNINGS.get(ranks)
    if tuning is None:
        raise UnsupportedLayer(f"{ranks} ranks add up what they have")
    # They are sent in words of 4 bytes.
    require(width * dtype.itemsize % 4 == 0, f"its rows have {width} numbers, which is odd")
    require(group.shares_memory, "its ranks do not share memory")
    obstacles = process_groups.gathered(_find_obstacle(backend, tuning))
    require(not any(obstacles), "; ".join(filter(None, obstacles)))
    size = LamportAllReduceNorm.size(ranks, tuning.most_rows, width, dtype)
    shared, why = None, ""
    try:
        shared = all_reduce_norm.map_peer_memory(group.cpu_group, norm.weight.device, size)
    except RuntimeError as error:
        why = str(error)
    # What one rank does all must do.
    reasons = "; ".join(filter(None, process_groups.gathered(why)))
    if shared is None or reasons:
        raise UnsupportedLayer(f"its ranks do not share memory: {reasons}")
    return LamportAllReduceNorm(shared, rank, width, dtype, tuning)


def _find_obstacle(backend: ModelBackend, tuning: all_reduce_norm.AllReduceTuning) -> str:
    """Why the kernels of ranks could wait for each other for ever; empty if they cannot."""
    if backend.device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(backend.device)
    return all_reduce_norm.find_obstacle(int(properties.multi_processor_count), tuning)


def _has_room(backend: ModelBackend) -> bool:
    if backend.device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(backend.device)
    return int(properties.shared_memory_per_block_optin) >= dense_layers.SHARED_BYTES
