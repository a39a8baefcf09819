"""`SglangBackend`: a loaded `ModelRunner` behind the interface of the engine core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from pie_driver_sglang.backends.sglang import support
from pie_driver_sglang.backends.sglang.attention.masked import MaskedAttention
from pie_driver_sglang.backends.sglang.attention.paged import installed_attention
from pie_driver_sglang.backends.sglang.compat import selection
from pie_driver_sglang.backends.sglang.compat.attention import attending
from pie_driver_sglang.backends.sglang.compat.layers import (
    LlamaDecoder,
    find_decoder,
    read_layers,
    read_norm,
    replace_linear_gemms,
)
from pie_driver_sglang.backends.sglang.compat.loading import refuse_updates
from pie_driver_sglang.backends.sglang.compat.logits import (
    LogitsMetadata,
    LogitsProcessor,
    applies_adapters,
    compute_logits,
    compute_part,
    divert,
    plain_head,
    replace_gemm,
)
from pie_driver_sglang.backends.sglang.compat.model import resolved
from pie_driver_sglang.backends.sglang.compat.passes import (
    capturing,
    context_of,
    embedding_width,
    find_embedding_table,
    image_embeddings,
    image_inputs,
    image_pixels,
    make_batch,
)
from pie_driver_sglang.backends.sglang.compat.pooling import (
    ends_of_prompts,
    ends_with_pooler,
    has_decoder,
    normalizes,
    pool_states,
    pooled_rows,
    run_decoder,
)
from pie_driver_sglang.backends.sglang.compat.pools import (
    RecurrentState,
    keeps_heads,
    kv_pages,
    paged,
)
from pie_driver_sglang.backends.sglang.compat.ranks import TensorGroup
from pie_driver_sglang.backends.sglang.lora import SglangLora
from pie_driver_sglang.backends.sglang.measure import chosen_experts, weight_bytes
from pie_driver_sglang.backends.sglang.weights import SglangWeights
from pie_driver_sglang.config.arch import takes_images
from pie_driver_sglang.engine.backend import (
    BackendInfo,
    EncodedImage,
    Extends,
    Hidden,
    PassContext,
    PassInputs,
    RowLogits,
    Vision,
)
from pie_driver_sglang.engine.layers.weights import DecoderWeights, require
from pie_driver_sglang.observability.active import SGLANG

if TYPE_CHECKING:
    from pie_driver_sglang._core import AttentionMask
    from pie_driver_sglang.backends.sglang.boot import Booted
    from pie_driver_sglang.backends.sglang.compat.model import ModelRunner
    from pie_driver_sglang.backends.sglang.compat.passes import ForwardBatch
    from pie_driver_sglang.engine.attention.paged import PagedDecode
    from pie_driver_sglang.engine.folded_norms import FoldedNorms
    from pie_driver_sglang.ranks.types import Mask, Rank

_STORED = ("fa3",)
"""SGLang's backends whose prefills attend to nothing but what is stored."""
_MOST_PATCHES = 8192
"""Along a side of an image, where the encoder has no limit."""


class _Head(NamedTuple):
    """What SGLang computes the logits of a pass from, besides hidden states."""

    processor: LogitsProcessor
    input_ids: Any
    lm_head: Any
    """The model's, or SGLang's wrapper of it, which applies adapters."""
    metadata: LogitsMetadata


class SglangBackend:
    """Implements `ModelBackend`."""

    def __init__(self, booted: Booted, rank: Rank) -> None:
        runner = booted.runner
        self.runner = runner
        self.rank = rank
        self.device = torch.device(
            f"cuda:{runner.gpu_id}" if runner.device == "cuda" else runner.device
        )
        self.info = _info(booted)
        self._pools = ends_with_pooler(runner)
        self.group = TensorGroup()
        self.lora = SglangLora(runner) if resolved(runner).enable_lora else None
        self.weights = SglangWeights(runner, self.device)
        self.folded: FoldedNorms | None = None
        self.states = RecurrentState.of(runner.req_to_token_pool)
        self._masked_attention = MaskedAttention(runner)
        self._hidden: Hidden | None = None
        self.draft_model = booted.head
        self._aux: Sequence[torch.Tensor] | None = None
        # Logits are computed for sampled rows only.
        divert(runner.model, self._keep)
        if self._pools:
            self.info = self.info._replace(
                embedding_size=self._measure_embedding(),
                embedding_normalized=normalizes(runner.model),
            )

    @property
    def pooling(self) -> Self | None:
        """See `ModelBackend.pooling`."""
        return self if self._pools and has_decoder(self.runner.model) else None

    @property
    def decode_attention(self) -> PagedDecode | None:
        """See `ModelBackend.decode_attention`."""
        return installed_attention(self.runner)

    def kv_pages(self) -> list[torch.Tensor]:
        """See `ModelBackend.kv_pages`."""
        pages = kv_pages(paged(self.runner.token_to_kv_pool))
        if self.draft_model is not None:
            pages.append(self.draft_model.features.view(len(pages[0]), -1))
        return pages

    def weight_bytes(self) -> int:
        """See `ModelBackend.weight_bytes`."""
        return weight_bytes(self.runner)

    def make_context(
        self,
        inputs: PassInputs,
        extends: Extends | None = None,
        images: Sequence[EncodedImage] | None = None,
    ) -> PassContext:
        """Makes a `ForwardBatch`; see `ModelBackend.make_context`."""
        batch = make_batch(inputs, extends)
        selection.passes().plan_kv(self.runner, batch)
        if images is not None:
            # The id of placeholders, which is no token's.
            placeholder = self.info.vocab_size
            batch.mm_inputs = [
                image_inputs(
                    image_embeddings(image.embeddings, image.kv, placeholder)
                    for image in images
                    if image.request == request
                )
                for request in range(len(inputs.seq_lens))
            ]
        return context_of(batch)

    def forward(self, context: PassContext, mask: AttentionMask | Mask | None = None) -> Hidden:
        """Runs a pass by SGLang's runner; see `ModelBackend.forward`."""
        batch = context.native
        masked = self._masked_attention
        with contextlib.nullcontext() if mask is None else masked.applied(mask, batch):
            output = self.runner.forward(batch)
        if self._pools:
            return self._pooled(output.logits_output, batch)
        return self._finish_pass(batch)

    def pool(self, context: PassContext, states: torch.Tensor) -> Hidden:
        """See `PoolingBackend.pool`."""
        batch = context.native
        return self._pooled(pool_states(self.runner.model, states, batch), batch)

    def _pooled(self, output: Any, batch: Any) -> Hidden:
        ends = batch.extend_seq_lens.long().cumsum(0)
        read = ends_of_prompts(self.runner.model)
        return Hidden(pooled_rows(output), None, request_ends=ends, read=read)

    @contextlib.contextmanager
    def plan_decode(self, context: PassContext) -> Iterator[None]:
        """See `ModelBackend.plan_decode`."""
        backend = self.runner.attn_backend
        # SGLang's runner allocates a row per request, and a step may have more rows.
        with attending(backend):
            backend.init_forward_metadata(context.native)
            yield

    def plan_in_graph(self, context: PassContext) -> None:
        """See `ModelBackend.plan_in_graph`."""
        backend = self.runner.attn_backend
        backend.init_forward_metadata_out_graph(context.native, in_capture=True)
        backend.init_forward_metadata_in_graph(context.native)

    def run_model(self, context: PassContext) -> Hidden:
        """Runs the model alone; see `ModelBackend.run_model`."""
        batch = context.native
        if self._pools:
            return Hidden(run_decoder(self.runner.model, batch), None)
        self.runner.model.forward(batch.input_ids, batch.positions, batch)
        return self._finish_pass(batch)

    @contextlib.contextmanager
    def capturing(self, stream: torch.cuda.Stream, rows: int) -> Iterator[None]:
        """See `ModelBackend.capturing`."""
        backend = self.runner.attn_backend
        backend.init_cuda_graph_state(rows, rows)
        with capturing(backend, stream):
            yield

    def lm_head(self, hidden: Hidden, states: torch.Tensor) -> RowLogits:
        """See `ModelBackend.lm_head`."""
        head: _Head = hidden.native
        part, in_parts, softcap = compute_part(head.processor, states, _lm_head(hidden))
        return RowLogits(part, self.group if in_parts else None, softcap)

    def logits(self, hidden: Hidden, states: torch.Tensor) -> torch.Tensor:
        """See `ModelBackend.logits`."""
        head: _Head = hidden.native
        of_pass = (head.input_ids, _lm_head(hidden), head.metadata)
        return compute_logits(head.processor, states, *of_pass)

    def replace_gemms(
        self,
        gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        supports: Callable[[torch.Tensor], bool],
    ) -> None:
        """See `ModelBackend.replace_gemms`."""
        replace_linear_gemms(self.runner.model, gemm, supports)
        for module in self.runner.model.modules():
            if isinstance(module, LogitsProcessor):
                replace_gemm(module, gemm, supports)

    def embedding_table(self) -> torch.nn.Module:
        """See `ModelBackend.embedding_table`."""
        table = find_embedding_table(self.runner.model)
        if table is None:
            raise RuntimeError("the model has no single embedding table")
        return table

    def encode_images(
        self, images: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]
    ) -> torch.Tensor:
        """See `ModelBackend.encode_images`."""
        items = [image_pixels(pixels, grid) for pixels, grid in images]
        embeddings: torch.Tensor = self.runner.model.get_image_feature(items)
        return embeddings

    def decoder_weights(self) -> DecoderWeights:
        """See `ModelBackend.decoder_weights`."""
        model, pool = find_decoder(self.runner.model), self.runner.token_to_kv_pool
        require(
            all(x.device.type == self.runner.device for x in model.parameters()),
            "some of its weights are in host memory",
        )
        require(keeps_heads(pool), f"its KV pool is a {type(pool).__name__}")
        norm = read_norm(model.norm)
        require(pool.store_dtype == norm.weight.dtype, f"its KV is {pool.store_dtype}")
        attends_stored = resolved(self.runner).attention_backends[0] in _STORED
        return DecoderWeights(LlamaDecoder(model), norm, read_layers(model, pool), attends_stored)

    def freeze_weights(self, reason: str) -> None:
        """See `ModelBackend.freeze_weights`."""
        refuse_updates(self.runner, reason)

    @torch.inference_mode()
    def _measure_embedding(self) -> int:
        """Numbers of a pooled row: a pass of one token, by the row and the page for padding."""
        zero, one = (torch.full((1,), value, device=self.device) for value in (0, 1))
        lens = one.int()
        inputs = PassInputs(
            input_ids=zero,
            positions=zero,
            mrope_positions=zero.expand(3, 1) if self.info.uses_mrope else None,
            out_cache_loc=zero,
            req_pool_indices=zero,
            seq_lens=one,
            seq_lens_cpu=one.cpu(),
            seq_lens_sum=1,
        )
        extends = Extends(lens, zero.int(), zero.int(), [1], [0])
        return self.forward(self.make_context(inputs, extends)).states.shape[1]

    def _keep(
        self,
        processor: LogitsProcessor,
        states: torch.Tensor,
        input_ids: Any,
        lm_head: Any,
        metadata: LogitsMetadata,
        aux: Sequence[torch.Tensor] | None,
    ) -> None:
        self._aux = aux
        self._hidden = Hidden(states, _Head(processor, input_ids, lm_head, metadata))

    def _finish_pass(self, batch: ForwardBatch) -> Hidden:
        """Stores what a draft model needs of the rows of a pass that has run."""
        hidden = self._take_hidden()
        aux, self._aux = self._aux, None
        if self.draft_model is not None:
            states = hidden.states if aux is None else torch.cat(list(aux), dim=-1)
            self.draft_model.store(batch, states, self.info.vocab_size)
        return hidden

    def _take_hidden(self) -> Hidden:
        """What the last pass has left, which is its caller's from now on."""
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            raise RuntimeError("a pass has ended without hidden states")
        return hidden


def _info(booted: Booted) -> BackendInfo:
    runner = booted.runner
    settings, model_config = resolved(runner), runner.model_config
    table = None if ends_with_pooler(runner) else find_embedding_table(runner.model)
    return BackendInfo(
        name=SGLANG,
        total_pages=runner.max_total_num_tokens // settings.page_size,
        page_size=settings.page_size,
        vocab_size=model_config.vocab_size,
        context_length=model_config.context_len,
        dtype=model_config.dtype,
        attention_backend=",".join(dict.fromkeys(settings.attention_backends)),
        uses_mrope=bool(model_config.model_is_mrope),
        is_multimodal=bool(model_config.is_multimodal),
        is_sparse=chosen_experts(model_config) > 0,
        vision=_find_vision(runner),
        mask_refusal=support.mask_unsupported_reason(runner),
        graph_refusal=support.graph_path_unsupported_reason(runner),
        paged_decode_refusal=booted.attention,
        graphs_take_prompts=support.takes_prompts(runner),
        embed_size=0 if table is None else embedding_width(table),
    )


def _find_vision(runner: ModelRunner) -> Vision | None:
    """The model's vision encoder; None when the driver cannot serve images with this model."""
    if not takes_images(runner.model_config.hf_config.to_dict()):
        return None
    encoder = runner.model.visual
    return Vision(
        patch_values=encoder.patch_embed.proj.weight[0].numel(),
        merge_size=encoder.spatial_merge_size,
        # The rotary tables of Qwen2-VL's encoders grow with the image.
        max_side=getattr(encoder.rotary_pos_emb, "max_position_embeddings", _MOST_PATCHES),
    )


def _lm_head(hidden: Hidden) -> Any:
    """What computes the logits of a pass."""
    lm_head = hidden.native.lm_head
    if hidden.adapters is None:
        return plain_head(lm_head)
    if not applies_adapters(lm_head):
        raise RuntimeError(
            "the model takes its logits past its LM head; set `lora_target_modules` "
            "without embed_tokens and lm_head"
        )
    return lm_head
