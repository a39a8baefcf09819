"""Decodes of dense models in few kernels, where SGLang runs one for each operation.

What a step of few rows takes is how often it waits, for memory and for the kernel before. Models
whose layers are built as Llama's run as the kernels of ``kernels/dense_layers.py`` while a graph is
captured, and, where FlashAttention-3 attends, in prefills. All others run as SGLang has them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.models import llama, qwen2, qwen3

from pie_driver_sglang.kernels import all_reduce_norm, dense_layers
from pie_driver_sglang.kernels.all_reduce_norm import LamportAllReduceNorm
from pie_driver_sglang.kernels.dense_layers import Heads, LinearWeights, Norm, Scale
from pie_driver_sglang.srt import frozen_weights, groups
from pie_driver_sglang.srt.paged_attention import PagedDecode

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_WIDEST = 16384
"""Hidden states of which one program normalizes a row."""
_FEW_ROWS = 64
"""Of more rows products are a library's, which adds to what there is, and parts do not pay."""
_STORED = ("fa3",)
"""SGLang's backends whose prefills attend to nothing but what is stored."""
_BUILDS = {
    llama.LlamaModel: (llama.LlamaDecoderLayer, llama.LlamaAttention, llama.LlamaMLP),
    qwen2.Qwen2Model: (qwen2.Qwen2DecoderLayer, qwen2.Qwen2Attention, qwen2.Qwen2MLP),
    qwen3.Qwen3Model: (qwen3.Qwen3DecoderLayer, qwen3.Qwen3Attention, qwen2.Qwen2MLP),
}
"""Models and the classes that their layers, attention and MLPs are of."""


class _Layer(NamedTuple):
    """One layer, as its kernels want it."""

    before: Norm
    qkv: LinearWeights
    heads: Heads
    attention: RadixAttention
    out: LinearWeights
    between: Norm
    gate_up: LinearWeights
    down: LinearWeights


class _Unknown(Exception):
    """Something about a model that the kernels do not know."""


class DenseLayers:
    """The layers of a loaded model, as kernels that know each other."""

    def __init__(
        self,
        model: Any,
        layers: list[_Layer],
        norm: Norm,
        sums: LamportAllReduceNorm | None,
        *,
        prefills: bool,
        folded: bool,
    ) -> None:
        """Takes a model apart.

        Args:
            model: SGLang's, without its LM head.
            layers: Its layers.
            norm: Behind the last layer.
            sums: Of the ranks' parts; None for a model on one device.
            prefills: Whether prefills attend to nothing but what is stored.
            folded: Whether products have taken the weights of norms.
        """
        self._model = model
        self._layers = layers
        self._sums = sums
        self._folded = folded
        self._prefills = prefills
        # What follows each layer.
        self._norms = [*(layer.before for layer in layers[1:]), norm]

    @classmethod
    def of(cls, runner: ModelRunner) -> DenseLayers | None:
        """A model's layers; None for a model that these kernels do not know."""
        try:
            backend: Any = getattr(runner.attn_backend, "decode_backend", None)
            _expect(isinstance(backend, PagedDecode), "it attends by another backend")
            model: Any = getattr(runner.model, "model", None)
            build = _BUILDS.get(type(model))
            _expect(build is not None, f"it is a {type(model).__name__}")
            _expect(not model.layers_to_capture, "hidden states of some layers are wanted")
            _expect(not hasattr(model.config, "scale_emb"), "its embeddings are scaled")
            _expect(_has_room(runner), "a multiprocessor has too little shared memory")
            pool = runner.token_to_kv_pool
            _expect(type(pool) is MHATokenToKVPool, f"its KV pool is a {type(pool).__name__}")
            norm = _norm(model.norm)
            _expect(pool.store_dtype == norm.weight.dtype, f"its KV is {pool.store_dtype}")
            _expect(len(norm.weight) <= _WIDEST, f"its rows have {len(norm.weight)} numbers")
            layers = [_layer(layer, build, pool) for layer in model.layers]
            _expect_plain(layers)
            sums = _all_reduce(runner, norm)
        except _Unknown as reason:
            logger.info("layers run as SGLang has them: %s", reason)
            return None
        prefills, _ = runner.server_args.get_attention_backends()
        # Adapters want rows to which the norms' weights were applied. Between ranks a kernel must
        # add up what products are, and may as well normalize it.
        folds = not runner.server_args.enable_lora and sums is None
        folded = folds and _fold(runner, layers)
        return cls(model, layers, norm, sums, prefills=prefills in _STORED, folded=folded)

    @contextlib.contextmanager
    def prefilling(self) -> Iterator[None]:
        """Within, the model runs as these kernels, if they can; its input is a prefill."""
        if self._folded and self._prefills:
            self._model.forward = self._run_many
        try:
            yield
        finally:
            vars(self._model).pop("forward", None)

    def takes(self, rows: int) -> bool:
        """Whether it runs steps of so many rows."""
        return self._sums is None or rows <= self._sums.most_rows

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the model runs as these kernels; its input is a decode of rows that it takes."""
        self._model.forward = self._run
        try:
            yield
        finally:
            del self._model.forward

    def _run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        *others: None,
        **named: None,
    ) -> torch.Tensor:
        if self._folded and len(input_ids) > _FEW_ROWS:
            return self._run_many(input_ids, positions, forward_batch, *others, **named)
        _expect_nothing(*others, *named.values())
        embedded = self._model.embed_tokens(input_ids)[None]
        rows, residual = dense_layers.add_norm(embedded, None, self._layers[0].before)
        for layer, norm in zip(self._layers, self._norms, strict=True):
            qkv = _linear(rows, layer.qkv)[0]
            queries = dense_layers.norm_rope_store(
                qkv, layer.heads, positions, forward_batch.out_cache_loc
            )
            seen = layer.attention(queries, None, None, forward_batch, save_kv_cache=False)
            rows, residual = self._add(0, seen, layer.out, residual, layer.between)
            middle = _gated(rows, layer.gate_up)
            rows, residual = self._add(1, middle, layer.down, residual, norm)
        return rows

    def _add(
        self,
        turn: int,
        rows: torch.Tensor,
        matrix: LinearWeights,
        residual: torch.Tensor,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What half of a layer adds, normalized, and what it was added to."""
        if self._sums is None:
            parts = _linear(rows, matrix, dense_layers.MOST_PARTS)
            return dense_layers.add_norm(parts, residual, norm)
        [part] = _linear(rows, matrix)
        return self._sums.add_norm(turn, part, residual, norm)

    def _run_many(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        *others: None,
        **named: None,
    ) -> torch.Tensor:
        """Products are made of rows as they are, and scaled by the kernels behind them."""
        _expect_nothing(*others, *named.values())
        out_of_place = not forward_batch.forward_mode.is_decode()
        residual = self._model.embed_tokens(input_ids)
        for layer in self._layers:
            # Nothing keeps what was used: such a pass is what the memory is planned for.
            seen = _seen(layer, residual, positions, forward_batch, out_of_place=out_of_place)
            residual.addmm_(seen, layer.out.weight.t())
            del seen
            residual.addmm_(_middle(layer, residual), layer.down.weight.t())
        return dense_layers.add_norm(residual[None], None, self._norms[-1])[0]


def _expect_plain(layers: list[_Layer]) -> None:
    """Weights may lie on the host, or be of a type that computes in its own way."""
    for layer in layers:
        weights = [part.weight for part in layer if isinstance(part, Norm | LinearWeights)]
        plain = all(type(weight) is torch.Tensor for weight in weights)
        _expect(plain, "its weights are no plain tensors")
        there = all(weight.device == layer.heads.keys.device for weight in weights)
        _expect(there, "some of its weights lie elsewhere")


def _expect_nothing(*others: None) -> None:
    if any(other is not None for other in others):
        raise ValueError("a step or a prefill has tokens and nothing else")


def _fold(runner: ModelRunner, layers: list[_Layer]) -> bool:
    """Gives the weights of norms to the products behind them, if these can take rows as they are.

    The products of such rows may be too large for float16. A bias would need another scale. From
    then on weights cannot be updated.
    """
    if layers[0].before.weight.dtype == torch.float16:
        return False
    if any(layer.qkv.bias is not None for layer in layers):
        return False
    for layer in layers:
        for norm, matrix in ((layer.before, layer.qkv), (layer.between, layer.gate_up)):
            matrix.weight.mul_(norm.weight)
            norm.weight.fill_(1.0)
    frozen_weights.freeze(runner)
    return True


def _seen(
    layer: _Layer,
    residual: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: ForwardBatch,
    *,
    out_of_place: bool,
) -> torch.Tensor:
    """What many rows see."""
    queries = dense_layers.norm_rope_store(
        torch.nn.functional.linear(residual, layer.qkv.weight),
        layer.heads,
        positions,
        forward_batch.out_cache_loc,
        scale=Scale(residual, layer.before.epsilon),
        out_of_place=out_of_place,
    )
    if out_of_place:
        queries = queries.flatten(1)
    seen: torch.Tensor = layer.attention(queries, None, None, forward_batch, save_kv_cache=False)
    return seen


def _middle(layer: _Layer, residual: torch.Tensor) -> torch.Tensor:
    """What an MLP has of many rows between its products."""
    return dense_layers.gate(
        torch.nn.functional.linear(residual, layer.gate_up.weight),
        Scale(residual, layer.between.epsilon),
    )


def _linear(rows: torch.Tensor, matrix: LinearWeights, most_parts: int = 1) -> torch.Tensor:
    outputs, inputs = matrix.weight.shape
    tiling = dense_layers.tiling(len(rows), outputs, inputs, most_parts)
    if tiling is None:
        return torch.nn.functional.linear(rows, *matrix).unsqueeze(0)
    return dense_layers.linear(rows, matrix, tiling)


def _gated(rows: torch.Tensor, matrix: LinearWeights) -> torch.Tensor:
    outputs, inputs = matrix.weight.shape
    tiling = dense_layers.tiling(len(rows), outputs // 2, inputs, gated=True)
    if tiling is None:
        return dense_layers.gate(torch.nn.functional.linear(rows, matrix.weight))
    return dense_layers.gated(rows, matrix, tiling)


def _all_reduce(runner: ModelRunner, norm: Norm) -> LamportAllReduceNorm | None:
    ranks, (width,), dtype = runner.ps.tp_size, norm.weight.shape, norm.weight.dtype
    if ranks == 1:
        return None
    tuning = all_reduce_norm.TUNINGS.get(ranks)
    if tuning is None:
        raise _Unknown(f"{ranks} ranks add up what they have")
    # They are sent in words of 4 bytes.
    _expect(width * dtype.itemsize % 4 == 0, f"its rows have {width} numbers, which is odd")
    from sglang.srt.distributed.device_communicators.custom_all_reduce_v2 import CustomAllReduceV2

    group = get_tp_group()
    # It shares memory in the same way, and is there if that works between these ranks.
    reach = group.ca_comm
    works = isinstance(reach, CustomAllReduceV2) and not reach.disabled
    _expect(works, "its ranks do not share memory")
    obstacles = groups.gathered(_find_obstacle(runner, tuning))
    _expect(not any(obstacles), "; ".join(filter(None, obstacles)))
    size = LamportAllReduceNorm.size(ranks, tuning.most_rows, width, dtype)
    shared, why = None, ""
    try:
        shared = all_reduce_norm.map_peer_memory(group.cpu_group, norm.weight.device, size)
    except RuntimeError as error:
        why = str(error)
    # What one rank does all must do.
    reasons = "; ".join(filter(None, groups.gathered(why)))
    if shared is None or reasons:
        raise _Unknown(f"its ranks do not share memory: {reasons}")
    return LamportAllReduceNorm(shared, runner.ps.tp_rank, width, dtype, tuning)


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


def _expect(known: bool, what: str) -> None:
    if not known:
        raise _Unknown(what)


def _layer(layer: Any, build: Any, pool: MHATokenToKVPool) -> _Layer:
    of_layer, of_attention, of_mlp = build
    _expect(type(layer) is of_layer, f"one of its layers is a {type(layer).__name__}")
    attention, mlp = layer.self_attn, layer.mlp
    for part, kind in ((attention, of_attention), (mlp, of_mlp), (mlp.act_fn, SiluAndMul)):
        _expect(type(part) is kind, f"it has a {type(part).__name__}")
    return _Layer(
        _norm(layer.input_layernorm),
        _matrix(attention.qkv_proj, QKVParallelLinear),
        _heads(attention, pool),
        attention.attn,
        _matrix(attention.o_proj, RowParallelLinear),
        _norm(layer.post_attention_layernorm),
        _matrix(mlp.gate_up_proj, MergedColumnParallelLinear),
        _matrix(mlp.down_proj, RowParallelLinear),
    )


def _norm(norm: Any) -> Norm:
    plain = (
        type(norm) is RMSNorm
        and norm.has_weight
        and norm.variance_size_override is None
        and not norm.cast_x_before_out_mul
        and not norm.fp32_residual
        and norm.override_orig_dtype is None
    )
    _expect(plain, "it has a norm of its own kind")
    return Norm(norm.weight.data, norm.variance_epsilon)


def _matrix(linear: Any, kind: type) -> LinearWeights:
    if isinstance(linear, BaseLayerWithLoRA):
        linear = linear.base_layer
    _expect(type(linear) is kind, f"it has a {type(linear).__name__}")
    method = type(linear.quant_method)
    _expect(method is UnquantizedLinearMethod, f"it has a linear layer with {method.__name__}")
    weight, bias = linear.weight.data, linear.bias
    _expect(weight.dim() == 2 and weight.is_contiguous(), "its weights lie in another order")
    _expect(bias is None or kind is QKVParallelLinear, f"a {kind.__name__} of it has a bias")
    _expect(not linear.skip_bias_add, "a bias is added elsewhere")
    return LinearWeights(weight, None if bias is None else bias.data)


def _heads(attention: Any, pool: MHATokenToKVPool) -> Heads:
    rotary, layer = attention.rotary_emb, attention.attn
    # Variants that differ in their table alone.
    turns = isinstance(rotary, RotaryEmbedding) and all(
        getattr(type(rotary), name) is getattr(RotaryEmbedding, name)
        for name in ("forward", "forward_cuda", "forward_native")
    )
    dim = layer.qk_head_dim
    _expect(turns, f"its positions are a {type(rotary).__name__}'s")
    _expect(rotary.rotary_dim == dim, f"{rotary.rotary_dim} of {dim} dimensions turn")
    _expect(type(layer) is RadixAttention, f"it attends by a {type(layer).__name__}")
    _expect(layer.v_head_dim == dim, f"values of {layer.v_head_dim} beside keys of {dim}")
    _expect(layer.k_scale is None, "its KV is scaled")
    query_norm, key_norm = (
        None if norm is None else _norm(norm)
        for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    )
    keys, values = pool.get_kv_buffer(layer.layer_id)
    for stored in (keys, values):
        _expect(stored.dim() == 3 and stored[0].is_contiguous(), "its KV lies in another order")
    return Heads(
        layer.tp_q_head_num,
        query_norm,
        key_norm,
        rotary.cos_sin_cache,
        rotary.is_neox_style,
        keys,
        values,
    )
