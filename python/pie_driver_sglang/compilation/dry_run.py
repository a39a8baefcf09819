"""Runs the steps of a model's CUDA graphs with fake tensors, for what they launch.

The code is that of a capture: `fuse_layers`, `CudaGraphRunner` and the decode attention. Only the
model is a stand-in, with layers of the right shapes, dtypes and strides and without weights. Needs
no GPU.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import torch
from torch._subclasses import fake_tensor

from pie_driver_sglang.compilation.dry_model import DryLayers, DryModel
from pie_driver_sglang.engine.attention.batch_invariant import BatchInvariantAttention
from pie_driver_sglang.engine.attention.paged import AttentionLayer, PagedDecode
from pie_driver_sglang.engine.backend import (
    Extends,
    Hidden,
    ModelBackend,
    PassContext,
    PassInputs,
    RowLogits,
)
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.engine.cuda_graphs import CudaGraphRunner
from pie_driver_sglang.engine.graph_runner import GraphRunner
from pie_driver_sglang.engine.layers.batch_invariant import BatchInvariantGemm, supports_weight
from pie_driver_sglang.engine.layers.selection import FusedLayers, fuse_layers, load_gemm_table
from pie_driver_sglang.engine.layers.weights import (
    DecoderWeights,
    ExpertLayer,
    Layer,
    UnsupportedLayer,
)
from pie_driver_sglang.engine.model_drafts import ModelDrafter
from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams, MaskedRequests
from pie_driver_sglang.kernels.attention.masked_triton import masked_attention
from pie_driver_sglang.kernels.attention.page_copy import BufferRows, copy_rows
from pie_driver_sglang.kernels.comm.all_reduce_norm import PeerMemory
from pie_driver_sglang.kernels.gemm.types import Heads, LinearWeights, Norm
from pie_driver_sglang.kernels.moe.experts import Experts
from pie_driver_sglang.kernels.moe.routing import Router
from pie_driver_sglang.kernels.sampling import sampler
from pie_driver_sglang.kernels.sampling.logit_rows import LogitRows
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams
from pie_driver_sglang.kernels.sampling.token_history import TokenHistory
from pie_driver_sglang.memory.batch_sizes import row_pages
from pie_driver_sglang.memory.graphs import GraphSpec, graph_specs

logger = logging.getLogger(__name__)

_LAYERS = 1
"""Layers of the stand-in: all layers of a model launch the same kernels."""
_PAGES = 64
"""KV pages of the stand-in."""
_PREFILL_ROWS = (8, 1024)
"""Tokens of its prefills, of either way to scale rows."""


def dry_run(model: DryModel, device: torch.device) -> None:
    """Runs every graph's step, and prefills, once.

    A step that cannot run with fake tensors is left out: kernels that it alone launches are missing
    from a recording.

    Args:
        model: The model.
        device: The GPU, whose properties torch must know.
    """
    with fake_gpu():
        for rank in range(model.ranks):
            executor = _DryExecutor(model, device, rank)
            for what in (
                executor.copy_page, executor.prefill, executor.attend_masked, executor.sample,
            ):  # fmt: skip
                with _left_out(what.__name__):
                    what()
            _DryGraphs(executor, executor.backend.graph_specs(), model.requests).run()


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Within it tensors are fake, also those on a GPU that torch's properties alone know."""
    # On a host with a GPU it would make a context there.
    without_context = mock.patch.object(fake_tensor, "init_gpu_context", lambda _: None)
    with without_context, _FakeMode(), torch.inference_mode():
        yield


@contextlib.contextmanager
def _left_out(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.warning("%s cannot run with fake tensors: %s", what, error)


class _FakeMode(fake_tensor.FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors whose operations ask no GPU, though torch is told that there is one."""

    avoid_device_init = True
    # Without the import of torch's compiler, which takes seconds.
    __torch_dispatch__ = inspect.unwrap(fake_tensor.FakeTensorMode.__torch_dispatch__)


class _DryGraphs(CudaGraphRunner):
    """The steps of a capture, uncaptured."""

    def __init__(self, executor: _DryExecutor, specs: list[GraphSpec], slots: int) -> None:
        GraphRunner.__init__(self, executor, specs, slots)
        self._device_mask_words = torch.empty_like(self._mask_words, device=self._device)

    def run(self) -> None:
        """Runs each step."""
        for graph in self._graphs:
            with _left_out(f"a step of {graph.rows} rows, {graph.kind.name.lower()}"):
                self._step(graph)


class _DryExecutor:
    """Implements `StepModel` for a stand-in."""

    def __init__(self, model: DryModel, device: torch.device, rank: int) -> None:
        self.backend: Any = DryBackend(model, device, rank)
        self.block_table = self.backend.block_table
        slots = (_PAGES + 1) * model.page_size
        self.history = TokenHistory(self.block_table.slots, slots, model.vocab_size)
        self.fused: FusedLayers | None = None
        # With a head nothing is compiled ahead.
        self.drafter: ModelDrafter | None = None
        self.hidden = Hidden(torch.empty(0), None)
        if model.fuse_layers and model.layers is not None:
            # Of several ranks the library runs some.
            expected = (UnsupportedLayer,) if model.ranks > 1 else ()
            with _left_out("fused layers"), contextlib.suppress(*expected):
                self.fused = fuse_layers(cast(ModelBackend, self.backend))

    def unbind_adapters(self) -> None:
        """There are none."""

    def run_model(self, context: PassContext) -> None:
        """Runs the layers."""
        self.hidden = self.backend.run_model(context)

    def head_logits(self, rows: torch.Tensor | None) -> RowLogits:
        """Multiplies by the LM head."""
        states = self.hidden.states if rows is None else self.hidden.states[rows]
        return self.backend.lm_head(self.hidden, states)  # type: ignore[no-any-return]

    def prefill(self) -> None:
        """Runs fused layers in prefills."""
        if self.fused is None:
            return
        for rows in _PREFILL_ROWS:
            context = self.backend.make_extend(rows)
            with self.fused.patched_prefill():
                self.backend.run_model(context)

    def copy_page(self) -> None:
        """Copies a page over all layers."""
        device = self.backend.device
        table = torch.zeros(2 * _LAYERS, dtype=torch.int64, device=device)
        buffers = BufferRows(torch.int64, table, table, table.int(), 0)
        copy_rows(buffers, table[:1], buffers, table[:1].clone())

    def attend_masked(self) -> None:
        """Attends in a prefill with a mask."""
        numbers = torch.zeros(1, dtype=torch.int64, device=self.backend.device)
        lens = numbers.int()
        table = self.block_table.slots
        requests = MaskedRequests(table, numbers, numbers, lens, lens, numbers, lens)
        for layer in self.backend.attention_layers:
            queries = layer.keys.new_empty(8, layer.heads, layer.head_dim)
            rule = AttentionParams(layer.scale, layer.logit_cap, layer.window)
            out = torch.empty_like(queries)
            masked_attention(queries, layer.keys, layer.values, out, requests, rule, 8)

    def sample(self) -> None:
        """Masks and samples logits of a pass that no graph runs, which are float32."""
        vocab, device = self.backend.info.vocab_size, self.backend.device
        logits = torch.empty(8, vocab, device=device)
        floats = torch.empty(8, device=device)
        words = torch.empty(8, 2, dtype=torch.int32, device=device)
        sampler.mask_logits(LogitRows(logits), words, words.flatten())
        sampler.sample(logits, SlotParams(floats, floats.int(), floats, floats, floats))


class DryGroup:
    """Implements `RankGroup` for a rank of a stand-in, by fake tensors."""

    shares_memory = True

    def __init__(self, ranks: int, rank: int) -> None:
        """Takes the number of ranks, and that of this one."""
        self.world_size, self.rank_in_group = ranks, rank

    def map_memory(self, device: torch.device, size: int) -> PeerMemory:
        """Memory of each rank."""
        ranks = range(self.world_size)
        return PeerMemory([torch.empty(size, dtype=torch.uint8, device=device) for _ in ranks])

    def all_gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """As if all ranks had one tensor."""
        return torch.cat([part] * self.world_size, dim)

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """By a library's kernel, which is not compiled here."""
        return torch.empty_like(part)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Nothing is received."""


class DryBackend:
    """The part of `ModelBackend` that steps and `fuse_layers` need, for a stand-in."""

    lora = None
    draft_model = None
    folded: Any = None

    def __init__(self, model: DryModel, device: torch.device, rank: int = 0) -> None:
        """Makes fake tensors; within a `FakeTensorMode`.

        Args:
            model: What it stands for.
            device: The GPU.
            rank: The number of this GPU among `model.ranks`.
        """
        self.device = device
        self._model = model
        self._dtype = getattr(torch, model.dtype)
        width = 0 if model.layers is None else model.layers.width
        self.info = SimpleNamespace(
            vocab_size=model.vocab_size, uses_mrope=False, dtype=self._dtype,
            graphs_take_prompts=model.layers is not None,
        )  # fmt: skip
        self.group = DryGroup(model.ranks, rank)
        pages = row_pages(model.context_length, model.page_size)
        self.block_table = BlockTable(model.requests, pages, model.page_size, device)
        self._embeddings = self._empty(model.head_rows, width or 64)
        self._norm = self._make_norm(width)
        self._layers = [] if model.layers is None else self._make_layers(model.layers)
        self.decode_attention = self._make_attention() if self._layers else None
        self._run: Callable[..., torch.Tensor] | None = None
        self._head: Callable[..., torch.Tensor] = torch.nn.functional.linear
        if model.deterministic and supports_weight(self._embeddings):
            self._head = BatchInvariantGemm(self._dtype, device, load_gemm_table(device))

    @property
    def attention_layers(self) -> list[AttentionLayer]:
        """Those with KV."""
        return [layer.attention for layer in self._layers]

    def graph_specs(self) -> list[GraphSpec]:
        """The graphs of such a driver."""
        model, attention = self._model, self.decode_attention
        return graph_specs(
            model.requests,
            model.chunk_tokens,
            groups=attention is not None and attention.shares_prefixes,
            prompts=self.info.graphs_take_prompts,
            sparse=model.layers is not None and model.layers.experts > 0,
            adapters=False,
            chosen=model.graph_sizes,
        )

    def decoder_weights(self) -> DecoderWeights:
        """See `ModelBackend.decoder_weights`."""
        decoder: Any = self
        layers: Any = self._layers
        return DecoderWeights(decoder, self._norm, layers, self._model.prefills_by_fa3)

    def freeze_weights(self, _: str) -> None:
        """Nothing updates them."""

    def make_context(self, inputs: PassInputs) -> PassContext:
        """See `ModelBackend.make_context`."""
        return PassContext(inputs.out_cache_loc, None, inputs)

    def make_extend(self, rows: int) -> PassContext:
        """A prefill of one request."""
        numbers = torch.zeros(rows, dtype=torch.int64, device=self.device)
        lens = numbers[:1].int()
        extends = Extends(lens, lens, lens, [rows], [0])
        if isinstance(self.decode_attention, BatchInvariantAttention):
            self.decode_attention.plan_extend(numbers[:1], extends, rows)
        inputs = PassInputs(
            numbers, numbers, None, numbers, numbers[:1], numbers[:1], numbers[:1], rows
        )
        return PassContext(numbers, extends, inputs)

    def plan_in_graph(self, context: PassContext) -> None:
        """See `ModelBackend.plan_in_graph`."""
        if self.decode_attention is not None:
            inputs: PassInputs = context.native
            self.decode_attention.plan(inputs.req_pool_indices, inputs.seq_lens)

    def run_model(self, context: PassContext) -> Hidden:
        """Runs fused layers, or the attention of others."""
        inputs: PassInputs = context.native
        if self._run is not None:
            return Hidden(self._run(inputs.input_ids, inputs.positions, context), None)
        states = self.embed(inputs.input_ids)
        if self.decode_attention is not None and context.is_decode:
            for layer in self.attention_layers:
                queries = self._empty(len(states), layer.heads * layer.head_dim)
                self.decode_attention.attend(layer, queries)
        return Hidden(states, None)

    def lm_head(self, _: Hidden, states: torch.Tensor) -> RowLogits:
        """See `ModelBackend.lm_head`."""
        logits = self._head(states, self._embeddings)
        return RowLogits(logits, self.group if self.group.world_size > 1 else None, None)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See `Decoder.embed`."""
        return self._empty(len(input_ids), self._embeddings.shape[1])

    def attend(self, _: int, queries: torch.Tensor, __: PassContext) -> torch.Tensor:
        """See `Decoder.attend`; by a library's kernel, which is not compiled here."""
        return torch.empty_like(queries)

    def keep_input(self, layer: int, residual: torch.Tensor) -> None:
        """See `Decoder.keep_input`; there is no draft model."""

    @contextlib.contextmanager
    def run_instead(self, run: Callable[..., torch.Tensor]) -> Iterator[None]:
        """See `Decoder.run_instead`."""
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def _empty(self, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype or self._dtype, device=self.device)

    def _make_norm(self, width: int) -> Norm:
        return Norm(self._empty(width), 1e-6)

    def _make_layers(self, shape: DryLayers) -> list[Layer] | list[ExpertLayer]:
        heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
        slots = (_PAGES + 1) * self._model.page_size
        table = self._empty(self._model.context_length, dim, dtype=torch.float32)
        halves: list[Any] = []
        for number in range(_LAYERS):
            keys, values = (self._empty(slots, kv_heads, dim) for _ in range(2))
            norms = [self._make_norm(dim) if shape.qk_norm else None for _ in range(2)]
            outputs = (heads + 2 * kv_heads) * dim
            bias = self._empty(outputs) if shape.qkv_bias else None
            halves.append((
                self._make_norm(shape.width),
                LinearWeights(self._empty(outputs, shape.width), bias),
                Heads(heads, norms[0], norms[1], table, True, keys, values),
                AttentionLayer(
                    number, heads, kv_heads, dim, dim, dim**-0.5, 0.0, -1, keys, values
                ),
                LinearWeights(self._empty(shape.width, heads * dim)),
                self._make_norm(shape.width),
            ))  # fmt: skip
        if shape.experts:
            return [ExpertLayer._make((*half, self._make_experts(shape))) for half in halves]
        gate_up, down = (2 * shape.inner, shape.width), (shape.width, shape.inner)
        return [
            Layer._make((*half, *(LinearWeights(self._empty(*size)) for size in (gate_up, down))))
            for half in halves
        ]

    def _make_experts(self, shape: DryLayers) -> Experts:
        router = Router(self._empty(shape.experts, shape.width), shape.top_k, shape.renormalize)
        return Experts(
            router,
            self._empty(shape.experts, 2 * shape.inner, shape.width),
            self._empty(shape.experts, shape.width, shape.inner),
        )

    def _make_attention(self) -> PagedDecode:
        layers = self.attention_layers
        properties: Any = torch.cuda.get_device_properties(self.device)
        multiprocessors = int(properties.multi_processor_count)
        if self._model.deterministic:
            return BatchInvariantAttention(self.block_table, layers, multiprocessors)
        prompts = (lambda *_: None) if self._model.prefills_by_fa3 else None
        return PagedDecode(self.block_table, layers, multiprocessors, prompts)
