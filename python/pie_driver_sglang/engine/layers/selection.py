"""Which kernels run the layers of a model, where SGLang runs one for each operation.

Models whose layers are built as Llama's run as kernels that know each other while a graph is
captured: in FP8 (``quantized.py``), of a mixture (``small_m.py``), or of plain numbers
(``dense.py``). All others run as SGLang has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

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
from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.layers.dense import DenseLayers
from pie_driver_sglang.engine.layers.fp8 import QuantizedLayers
from pie_driver_sglang.engine.layers.small_batch import ExpertLayers, FewRows
from pie_driver_sglang.kernels.comm import all_reduce_norm
from pie_driver_sglang.kernels.comm.all_reduce_norm import LamportAllReduceNorm
from pie_driver_sglang.kernels.gemm import dense_layers
from pie_driver_sglang.kernels.gemm.dense_layers import LinearWeights, Norm

if TYPE_CHECKING:
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner

_WIDEST = 16384
"""Hidden states of which one program normalizes a row."""
_STORED = ("fa3",)
"""SGLang's backends whose prefills attend to nothing but what is stored."""
FROZEN = (
    "weights cannot be updated: the weights of norms were multiplied into the layers after them; "
    "start with `fuse_layers = false` to update weights"
)
"""Why SGLang refuses to update weights."""
FROZEN_SCALES = (
    "weights cannot be updated: the layers have read the scales of FP8 weights; start with "
    "`fuse_layers = false` to update weights"
)
"""The same of weights in FP8."""

FusedLayers = DenseLayers | QuantizedLayers | ExpertLayers
"""The layers of a model that few kernels can run."""


def fuse_layers(runner: ModelRunner) -> FusedLayers:
    """Chooses the kernels of a model's layers.

    Raises:
        UnknownLayer: None of them knows the model, with the reason.
    """
    attention = decode_backend(runner)
    if not isinstance(attention, PagedDecode):
        raise UnknownLayer("it attends by another backend")
    expect(_has_room(runner), "a multiprocessor has too little shared memory")
    model, norm, layers = known_layers(runner)
    prefills = resolved(runner).attention_backends[0] in _STORED
    if isinstance(layers[0], QuantizedLayer):
        expect(place_of(runner).size == 1, "its FP8 matrices are on several devices")
        expect(not resolved(runner).enable_lora, "adapters are added to its FP8 matrices")
        refuse_updates(runner, FROZEN_SCALES)
        return QuantizedLayers(model, layers, norm, attention, prefills=prefills)
    _expect_plain(layers)
    sums = _all_reduce(runner, norm)
    # Adapters want rows to which the norms' weights were applied. Between ranks a kernel
    # must add up what products are, and may as well normalize it.
    folds = not resolved(runner).enable_lora and sums is None
    if isinstance(layers[0], ExpertLayer):
        few = FewRows.of(layers, norm, attention)
        expect(few is not None, "its experts have other shapes")
        expect(folds and _fold(runner, layers), "its norms cannot be folded")
        assert few is not None
        return ExpertLayers(model, few)
    folded = folds and _fold(runner, layers)
    return DenseLayers(model, layers, norm, attention, sums, prefills=prefills, folded=folded)


def known_layers(
    runner: ModelRunner,
) -> tuple[Any, Norm, list[Layer] | list[QuantizedLayer] | list[ExpertLayer]]:
    """The decoder of a model, its last norm and its layers, if they are built as Llama's.

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


def _expect_plain(layers: list[Layer] | list[ExpertLayer]) -> None:
    """Weights may lie on the host, or be of a type that computes in its own way."""
    for layer in layers:
        weights = [part.weight for part in layer if isinstance(part, Norm | LinearWeights)]
        if isinstance(layer, ExpertLayer):
            mixture = layer.experts
            weights += [mixture.router.weight, mixture.gate_up, mixture.down]
        plain = all(type(weight) is torch.Tensor for weight in weights)
        expect(plain, "its weights are not plain tensors")
        there = all(weight.device == layer.heads.keys.device for weight in weights)
        expect(there, "some of its weights lie elsewhere")


def _fold(runner: ModelRunner, layers: list[Layer] | list[ExpertLayer]) -> bool:
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
    refuse_updates(runner, FROZEN)
    return True


def _all_reduce(runner: ModelRunner, norm: Norm) -> LamportAllReduceNorm | None:
    (rank, ranks), (width,), dtype = place_of(runner), norm.weight.shape, norm.weight.dtype
    if ranks == 1:
        return None
    tuning = all_reduce_norm.TUNINGS.get(ranks)
    if tuning is None:
        raise UnknownLayer(f"{ranks} ranks add up what they have")
    # They are sent in words of 4 bytes.
    expect(width * dtype.itemsize % 4 == 0, f"its rows have {width} numbers, which is odd")
    group = tensor_group()
    expect(shares_memory(group), "its ranks do not share memory")
    obstacles = process_groups.gathered(_find_obstacle(runner, tuning))
    expect(not any(obstacles), "; ".join(filter(None, obstacles)))
    size = LamportAllReduceNorm.size(ranks, tuning.most_rows, width, dtype)
    shared, why = None, ""
    try:
        shared = all_reduce_norm.map_peer_memory(group.cpu_group, norm.weight.device, size)
    except RuntimeError as error:
        why = str(error)
    # What one rank does all must do.
    reasons = "; ".join(filter(None, process_groups.gathered(why)))
    if shared is None or reasons:
        raise UnknownLayer(f"its ranks do not share memory: {reasons}")
    return LamportAllReduceNorm(shared, rank, width, dtype, tuning)


def _find_obstacle(runner: ModelRunner, tuning: all_reduce_norm.AllReduceTuning) -> str:
    """Why the kernels of ranks could wait for each other for ever; empty if they cannot."""
    if runner.device != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(runner.gpu_id)
    return all_reduce_norm.find_obstacle(int(properties.multi_processor_count), tuning)


def _has_room(runner: ModelRunner) -> bool:
    if runner.device != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(runner.gpu_id)
    return int(properties.shared_memory_per_block_optin) >= dense_layers.SHARED_BYTES
