"""Chooses the fused layers of a model; the library runs one kernel an operation.

Llama-like models run fused layers while a graph is captured: FP8 weights (``fp8.py``), mixtures of
experts (``small_batch.py``) or dense 16-bit weights (``dense.py``). Where rows must not depend on
their batch, dense layers are those of ``batch_invariant.py``. All others run the library's layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.attention.batch_invariant import BatchInvariantAttention
from pie_driver_sglang.engine.folded_norms import FoldedNorms
from pie_driver_sglang.engine.layers.batch_invariant import (
    BatchInvariantGemm,
    BatchInvariantLayers,
    check_weights,
)
from pie_driver_sglang.engine.layers.dense import DenseLayers
from pie_driver_sglang.engine.layers.fp8 import Fp8Layers
from pie_driver_sglang.engine.layers.gemm_table import GemmTable
from pie_driver_sglang.engine.layers.small_batch import MoeLayers, SmallBatchLayers
from pie_driver_sglang.engine.layers.weights import (
    DecoderWeights,
    ExpertLayer,
    Layer,
    LayerAdapters,
    QuantizedLayer,
    UnsupportedLayer,
    require,
)
from pie_driver_sglang.kernels.comm import all_reduce_norm
from pie_driver_sglang.kernels.comm.all_reduce_norm import LamportAllReduceNorm
from pie_driver_sglang.kernels.gemm.linear import MAX_SHARED_BYTES
from pie_driver_sglang.kernels.gemm.lora import supports_lora
from pie_driver_sglang.kernels.gemm.types import LinearWeights, Norm

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import ModelBackend

_KEPT = "an EAGLE head takes what layers get, which these kernels do not keep"
_WIDEST = 16384
"""Widest hidden states that one program normalizes."""
FROZEN_NORMS = (
    "weights cannot be updated by SGLang itself: the weights of norms were multiplied into the "
    "layers after them; use the driver's updates, or start with `fuse_layers = false`"
)
"""Why the library refuses to update weights."""
FROZEN_SCALES = (
    "weights cannot be updated: the layers have read the scales of FP8 weights; start with "
    "`fuse_layers = false` to update weights"
)
"""The same for FP8 weights."""

FusedLayers = BatchInvariantLayers | DenseLayers | Fp8Layers | MoeLayers
"""The fused layers of a model."""


def fuse_layers(backend: ModelBackend, *, applies_adapters: bool = False) -> FusedLayers:
    """Chooses the fused layers of a model.

    Args:
        backend: Has loaded it.
        applies_adapters: Whether fused layers apply LoRA adapters where they can; the library's
            apply all others.

    Raises:
        UnsupportedLayer: None of them supports the model, with the reason.
    """
    attention = backend.decode_attention
    if attention is None:
        raise UnsupportedLayer("it attends by another backend")
    require(_has_shared_memory(backend), "a multiprocessor has too little shared memory")
    decoder, norm, layers, attends_stored = read_supported_layers(backend)
    ranks = backend.group.world_size
    if isinstance(attention, BatchInvariantAttention):
        dense = [layer for layer in layers if isinstance(layer, Layer)]
        require(len(dense) == len(layers), "its layers are not dense")
        require(backend.draft_model is None, _KEPT)
        _require_plain_weights(dense)
        check_weights(dense, ranks)
        require(_fold(backend, dense), "its norms cannot be folded")
        table = load_gemm_table(backend.device)
        gemm = BatchInvariantGemm(norm.weight.dtype, norm.weight.device, table)
        group = backend.group if ranks > 1 else None
        return BatchInvariantLayers(decoder, dense, norm, attention, gemm, group)
    if isinstance(layers[0], QuantizedLayer):
        require(ranks == 1, "its FP8 matrices are on several devices")
        require(backend.lora is None, "adapters are added to its FP8 matrices")
        require(backend.draft_model is None, _KEPT)
        backend.freeze_weights(FROZEN_SCALES)
        return Fp8Layers(decoder, layers, norm, attention, prefills=attends_stored)
    _require_plain_weights(layers)
    all_reduce = _make_all_reduce(backend, norm)
    # The library's LoRA needs normalized rows, or adapters that are folded, too. With tensor
    # parallelism the all-reduce kernel normalizes anyway.
    folds = (backend.lora is None or applies_adapters) and all_reduce is None
    if isinstance(layers[0], ExpertLayer):
        require(backend.draft_model is None, _KEPT)
        small_batch = SmallBatchLayers.of(layers, norm, attention, load_gemm_table(backend.device))
        require(small_batch is not None, "its experts have other shapes")
        folds = folds and backend.lora is None
        require(folds and _fold(backend, layers), "its norms cannot be folded")
        assert small_batch is not None
        return MoeLayers(decoder, small_batch)
    folded = folds and _fold(backend, layers)
    return DenseLayers(
        decoder, layers, norm, attention, all_reduce,
        prefills=attends_stored, folded=folded,
        table=load_gemm_table(backend.device),
        adapters=_layer_adapters(backend) if folded else None,
    )  # fmt: skip


def _layer_adapters(backend: ModelBackend) -> list[LayerAdapters] | None:
    """The adapters of each layer, if there are some, and kernels for them."""
    slots = None if backend.lora is None else backend.lora.adapter_slots
    if slots is None:
        return None
    found = slots.layer_adapters()
    return found if found and all(supports_lora(*layer) for layer in found) else None


def load_gemm_table(device: torch.device) -> GemmTable | None:
    """The measured GEMM configs of a GPU; None for other devices."""
    if device.type != "cuda":
        return None
    return GemmTable.load(torch.cuda.get_device_name(device))


def read_supported_layers(backend: ModelBackend) -> DecoderWeights:
    """The layers of a Llama-like model.

    Raises:
        UnsupportedLayer: It is not, with the reason.
    """
    weights = backend.decoder_weights()
    width = len(weights.norm.weight)
    require(width <= _WIDEST, f"its rows have {width} numbers")
    return weights


def _require_plain_weights(layers: list[Layer] | list[ExpertLayer]) -> None:
    """Refuses weights on another device, or of a tensor subclass."""
    for layer in layers:
        weights = [part.weight for part in layer if isinstance(part, Norm | LinearWeights)]
        if isinstance(layer, ExpertLayer):
            mixture = layer.experts
            weights += [mixture.router.weight, mixture.gate_up, mixture.down]
        # Fake ones are those of a dry run.
        plain = all(type(weight) in (torch.Tensor, FakeTensor) for weight in weights)
        require(plain, "its weights are not plain tensors")
        there = all(weight.device == layer.heads.k_cache.device for weight in weights)
        require(there, "some of its weights lie elsewhere")


def _fold(backend: ModelBackend, layers: list[Layer] | list[ExpertLayer]) -> bool:
    """Folds norm weights into the matrices after them, if possible.

    Not in float16, where GEMMs of unnormalized rows may overflow. A router keeps its norm: rounding
    its weights again would change the experts of rows. Updates of weights fold again.
    """
    if layers[0].before.weight.dtype == torch.float16:
        return False
    pairs = []
    for layer in layers:
        pairs.append((layer.before.weight, layer.qkv.weight))
        if not isinstance(layer, ExpertLayer):
            pairs.append((layer.between.weight, layer.gate_up.weight))
    backend.folded = FoldedNorms(pairs)
    # The library would not fold.
    backend.freeze_weights(FROZEN_NORMS)
    return True


def _make_all_reduce(backend: ModelBackend, norm: Norm) -> LamportAllReduceNorm | None:
    group, (width,), dtype = backend.group, norm.weight.shape, norm.weight.dtype
    rank, ranks = group.rank_in_group, group.world_size
    if ranks == 1:
        return None
    tuning = all_reduce_norm.TUNINGS.get(ranks)
    if tuning is None:
        raise UnsupportedLayer(f"{ranks} ranks add up what they have")
    # Rows are sent in words of 4 bytes.
    require(width * dtype.itemsize % 4 == 0, f"its rows have {width} numbers, which is odd")
    require(group.shares_memory, "its ranks do not share memory")
    reasons = process_groups.gathered(_deadlock_reason(backend, tuning))
    require(not any(reasons), "; ".join(filter(None, reasons)))
    size = LamportAllReduceNorm.size(ranks, tuning.max_rows, width, dtype)
    memory, error_text = None, ""
    try:
        memory = group.map_memory(norm.weight.device, size)
    except RuntimeError as error:
        error_text = str(error)
    # All ranks must decide alike.
    errors = "; ".join(filter(None, process_groups.gathered(error_text)))
    if memory is None or errors:
        raise UnsupportedLayer(f"its ranks do not share memory: {errors}")
    return LamportAllReduceNorm(memory, rank, width, dtype, tuning)


def _deadlock_reason(backend: ModelBackend, tuning: all_reduce_norm.AllReduceTuning) -> str:
    """Why the all-reduce kernels could deadlock on this GPU; empty if they cannot."""
    if backend.device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(backend.device)
    return all_reduce_norm.residency_error(int(properties.multi_processor_count), tuning)


def _has_shared_memory(backend: ModelBackend) -> bool:
    if backend.device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(backend.device)
    return int(properties.shared_memory_per_block_optin) >= MAX_SHARED_BYTES
