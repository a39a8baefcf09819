"""`VllmBackend`: a model of vLLM behind the interface of the engine core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pie_driver_sglang.backends.vllm import support
from pie_driver_sglang.backends.vllm.attention import PagedAttention
from pie_driver_sglang.backends.vllm.compat.layers import (
    VllmDecoder,
    find_vllm_decoder,
    read_rms_norm,
    read_vllm_layers,
)
from pie_driver_sglang.backends.vllm.compat.model import compute_head, keep_workspace
from pie_driver_sglang.backends.vllm.compat.passes import run_layers
from pie_driver_sglang.backends.vllm.compat.ranks import (
    VllmGroup,
    capturing_tp_group,
    compute_head_part,
)
from pie_driver_sglang.backends.vllm.measure import expert_choices
from pie_driver_sglang.engine.backend import (
    BackendInfo,
    EncodedImage,
    Extends,
    Hidden,
    PassContext,
    PassInputs,
    RowLogits,
)
from pie_driver_sglang.engine.layers.weights import DecoderWeights, UnsupportedLayer, require

if TYPE_CHECKING:
    from pie_driver_sglang._core import AttentionMask
    from pie_driver_sglang.backends.vllm.attention import PassAttention
    from pie_driver_sglang.backends.vllm.boot import BootedVllm
    from pie_driver_sglang.engine.attention.paged import PagedDecode
    from pie_driver_sglang.engine.backend_features import (
        DraftModel,
        PoolingBackend,
        StateBackend,
        WeightBackend,
    )
    from pie_driver_sglang.engine.folded_norms import FoldedNorms
    from pie_driver_sglang.ranks.types import Mask, Rank

VLLM: Final = "vllm"


class _Pass(NamedTuple):
    """A pass as vLLM runs it."""

    inputs: PassInputs
    extends: Extends | None


class VllmBackend:
    """Implements `ModelBackend`."""

    weights: WeightBackend | None = None
    folded: FoldedNorms | None = None
    states: StateBackend | None = None
    pooling: PoolingBackend | None = None
    draft_model: DraftModel | None = None

    def __init__(self, booted: BootedVllm, rank: Rank) -> None:
        """Takes a loaded model."""
        self.rank = rank
        self.device = booted.device
        self.group = VllmGroup()
        self.info = _vllm_info(booted)
        self._config = booted.config
        self._model = booted.model
        self._attention = booted.attention
        self._kv = booted.kv
        self._row_tokens = booted.block_table.slots.shape[1]
        # Packed weights have left their modules.
        self._weight_bytes = booted.weight_bytes
        self.lora = booted.lora
        self._planned: PassContext | None = None

    @property
    def decode_attention(self) -> PagedDecode | None:
        """See `ModelBackend.decode_attention`."""
        return _decode_attention(self._attention)

    def kv_pages(self) -> list[torch.Tensor]:
        """See `ModelBackend.kv_pages`."""
        return self._kv

    def weight_bytes(self) -> int:
        """As loaded: afterwards vLLM packs weights for CPU kernels, outside of parameters."""
        return self._weight_bytes

    def make_context(
        self,
        inputs: PassInputs,
        extends: Extends | None = None,
        images: Sequence[EncodedImage] | None = None,
    ) -> PassContext:
        """See `ModelBackend.make_context`."""
        if images is not None:
            raise ValueError("the vLLM driver serves no images")
        return PassContext(inputs.out_cache_loc, extends, _Pass(inputs, extends))

    def forward(self, context: PassContext, mask: AttentionMask | Mask | None = None) -> Hidden:
        """See `ModelBackend.forward`."""
        if mask is not None:
            raise ValueError(support.MASKS)
        with self.plan_decode(context):
            return self.run_model(context)

    @contextlib.contextmanager
    def plan_decode(self, context: PassContext) -> Iterator[None]:
        """See `ModelBackend.plan_decode`."""
        inputs, extends = _rows(context)
        self._attention.plan(inputs, extends, int(inputs.seq_lens_cpu.max()))
        yield

    def plan_in_graph(self, context: PassContext) -> None:
        """See `ModelBackend.plan_in_graph`."""
        # Lengths are known to the device only.
        self._attention.plan(*_rows(context), self._row_tokens)

    def run_model(self, context: PassContext) -> Hidden:
        """See `ModelBackend.run_model`."""
        self._planned = context
        inputs, _ = _rows(context)
        states = run_layers(self._model, self._config, self._attention.metadata, inputs)
        return Hidden(states, None)

    @contextlib.contextmanager
    def capturing(self, stream: torch.cuda.Stream, rows: int) -> Iterator[None]:
        """See `ModelBackend.capturing`."""
        if self.info.is_sparse:
            # Graphs keep the address of the workspace, which would move when it grows.
            self._run_largest_pass()
            keep_workspace()
        alone = self.group.world_size == 1
        with contextlib.nullcontext() if alone else capturing_tp_group(stream):
            yield

    def _run_largest_pass(self) -> None:
        """A pass of as many rows as there may be, on the page for padding."""
        rows = self._config.scheduler_config.max_num_batched_tokens
        zeros = torch.zeros(rows, dtype=torch.int64, device=self.device)
        inputs = PassInputs(
            input_ids=zeros,
            positions=zeros,
            mrope_positions=None,
            out_cache_loc=zeros,
            req_pool_indices=zeros,
            seq_lens=zeros + 1,
            seq_lens_cpu=torch.ones(rows, dtype=torch.int64),
            seq_lens_sum=rows,
        )
        self.forward(self.make_context(inputs))

    def lm_head(self, hidden: Hidden, states: torch.Tensor) -> RowLogits:
        """Capped and scaled; see `ModelBackend.lm_head`."""
        with self._head_without_adapters():
            if self.group.world_size > 1:
                return RowLogits(compute_head_part(self._model, states), self.group, None)
            return RowLogits(compute_head(self._model, states), None, None)

    def logits(self, hidden: Hidden, states: torch.Tensor) -> torch.Tensor:
        """See `ModelBackend.logits`."""
        adapted = hidden.adapters is not None
        with contextlib.nullcontext() if adapted else self._head_without_adapters():
            return compute_head(self._model, states)

    def _head_without_adapters(self) -> contextlib.AbstractContextManager[None]:
        """Within it logits are the base model's, whatever the pass before has applied."""
        return contextlib.nullcontext() if self.lora is None else self.lora.unbound()

    def decoder_weights(self) -> DecoderWeights:
        """See `ModelBackend.decoder_weights`."""
        model, attention = find_vllm_decoder(self._model), self._attention
        if not isinstance(attention, PagedAttention):
            raise UnsupportedLayer("vLLM's layers on the CPU have packed weights")
        there = all(x.device.type == self.device.type for x in model.parameters())
        require(there, "some of its weights are in host memory")
        norm = read_rms_norm(model.norm)
        require(self._kv[0].dtype == norm.weight.dtype, f"its KV is {self._kv[0].dtype}")
        decoder = VllmDecoder(model, attention.attend_prefill, self._planned_pass)
        layers = read_vllm_layers(model, attention.layers)
        return DecoderWeights(decoder, norm, layers, attends_stored=True)

    def freeze_weights(self, reason: str) -> None:
        """Nothing updates weights: there is no server of vLLM."""

    def replace_gemms(
        self,
        gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        supports: Callable[[torch.Tensor], bool],
    ) -> None:
        """No option of the vLLM driver asks for it."""
        raise NotImplementedError("the vLLM driver has no batch-invariant attention")

    def embedding_table(self) -> torch.nn.Module:
        """There is no way for embeddings: `info.embed_size` is 0."""
        raise NotImplementedError("the vLLM driver takes no `input_embeds`")

    def encode_images(
        self, images: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]
    ) -> torch.Tensor:
        """There is no vision encoder: `info.vision` is None."""
        raise NotImplementedError("the vLLM driver serves no images")

    def _planned_pass(self) -> PassContext:
        if self._planned is None:
            raise RuntimeError("no pass runs")
        return self._planned


def _rows(context: PassContext) -> _Pass:
    rows: _Pass = context.native
    return rows


def _decode_attention(attention: PassAttention) -> PagedDecode | None:
    return attention.decode if isinstance(attention, PagedAttention) else None


def _vllm_info(booted: BootedVllm) -> BackendInfo:
    model: Any = booted.config.model_config
    attention = booted.attention
    paged, decode = isinstance(attention, PagedAttention), _decode_attention(attention)
    refusal = None if decode else "another is set" if paged else "`pie` decodes on a GPU"
    return BackendInfo(
        name=VLLM,
        total_pages=len(booted.kv[0]) - 1,
        page_size=booted.block_table.page_size,
        vocab_size=model.get_vocab_size(),
        context_length=model.max_model_len,
        dtype=model.dtype,
        attention_backend=booted.attention_name,
        is_sparse=expert_choices(booted.config) > 0,
        mask_refusal=support.MASKS,
        paged_decode_refusal=refusal,
        # By another kernel each row of a prompt would read its KV anew.
        graphs_take_prompts=not paged or decode is not None,
    )
