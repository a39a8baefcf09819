"""The interface between the engine core and an inference library that has loaded the model.

The core owns the block table, the staging block, CUDA graphs, sampling, page copies and LoRA slots.
A backend owns the model's modules, its KV buffers and its attention metadata:

================  ==================================================================================
`ModelBackend`    a loaded model: sizes, KV buffers, passes up to the last hidden state, LM head
`Decoder`         the decoder layers of a model that fused layers may take the place of
`RankGroup`       collective operations of tensor parallelism
================  ==================================================================================

**Thread.** Every call comes from the serving thread, one at a time, unless a method says otherwise.
**Stream.** Work goes to the current CUDA stream of that thread; nothing waits for the device unless
it says so. **Ranks.** A method that runs the model or the LM head is collective: all ranks call it.

What only some libraries or models have is in `backend_features`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from pie_driver_sglang._core import AttentionMask
    from pie_driver_sglang.engine.attention.paged import PagedDecode
    from pie_driver_sglang.engine.backend_features import (
        DraftModel,
        LoraBackend,
        PoolingBackend,
        StateBackend,
        WeightBackend,
    )
    from pie_driver_sglang.engine.folded_norms import FoldedNorms
    from pie_driver_sglang.engine.layers.weights import DecoderWeights
    from pie_driver_sglang.kernels.comm.all_reduce_norm import PeerMemory
    from pie_driver_sglang.ranks.types import Mask, Rank


class Vision(NamedTuple):
    """What the model's vision encoder takes."""

    patch_values: int
    """Numbers of one patch."""
    merge_size: int
    """Side of the square of patches that one row stands for."""
    max_side: int
    """Longest side of an image, in patches."""


class BackendInfo(NamedTuple):
    """Sizes of a loaded model, and what its backend supports; the same on all ranks."""

    name: str
    """Of the library, as the log names whose layers run: ``sglang``."""
    total_pages: int
    """KV pages besides page 0 of the buffers, which padding writes to."""
    page_size: int
    """Tokens of a page."""
    vocab_size: int
    context_length: int
    dtype: torch.dtype
    """Of activations."""
    attention_backend: str
    """The library's name for it, or ``prefill,decode``."""
    uses_mrope: bool = False
    """Whether rotary positions have three axes (M-RoPE)."""
    is_multimodal: bool = False
    is_sparse: bool = False
    """Whether it is a mixture of experts."""
    vision: Vision | None = None
    """None where images are not supported."""
    mask_refusal: str | None = None
    """Why :meth:`ModelBackend.forward` takes no mask."""
    graph_refusal: str | None = None
    """Why decodes cannot be captured: metadata that is made on the host, say."""
    paged_decode_refusal: str | None = None
    """Why `PagedDecode` is not the attention of decodes."""
    graphs_take_prompts: bool = False
    """Whether a captured decode may have more rows than the block table has requests."""
    embedding_size: int = 0
    """Numbers of a pooled row of an embedding model; 0 for a model that generates."""
    embedding_normalized: bool = False
    """Whether pooled rows have norm 1."""
    embed_size: int = 0
    """Numbers of an embedding of `input_embeds`; 0 where none are taken."""


class PassInputs(NamedTuple):
    """The rows of a pass, on the device unless it says otherwise."""

    input_ids: torch.Tensor
    """``[tokens]`` int64."""
    positions: torch.Tensor
    """``[tokens]`` int64."""
    mrope_positions: torch.Tensor | None
    """``[3, tokens]`` int64, of a model with several axes."""
    out_cache_loc: torch.Tensor
    """``[tokens]`` int64: the KV slot of each token; vLLM's ``slot_mapping``."""
    req_pool_indices: torch.Tensor
    """``[requests]`` int64: rows of the block table."""
    seq_lens: torch.Tensor
    """``[requests]`` int64: tokens of each context, with those of this pass."""
    seq_lens_cpu: torch.Tensor
    """The same on the host."""
    seq_lens_sum: int
    """Their sum, or a bound of it that sizes buffers."""


class Extends(NamedTuple):
    """What an extend (prefill) has besides, ``[requests]`` int32 each; the last two on the host."""

    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    start_loc: torch.Tensor
    seq_lens_cpu: Sequence[int]
    prefix_lens_cpu: Sequence[int]


class EncodedImage(NamedTuple):
    """The embeddings of an image, which take the place of those of its placeholder tokens."""

    request: int
    """Of the pass."""
    kv: tuple[int, int]
    """KV indices of its tokens: the first, and the one after the last."""
    embeddings: torch.Tensor
    """``[rows, hidden]``."""


class PassContext(NamedTuple):
    """A pass as the layers see it."""

    out_cache_loc: torch.Tensor
    """``[tokens]`` int64, as in `PassInputs`."""
    extends: Extends | None
    """Of an extend; None for a decode."""
    native: Any
    """The library's own: SGLang's ``ForwardBatch``, vLLM's ``ForwardContext``."""

    @property
    def is_decode(self) -> bool:
        """Whether each request has one row."""
        return self.extends is None


class Hidden(NamedTuple):
    """What the logits of a finished pass can be computed from."""

    states: torch.Tensor
    """``[tokens, hidden]`` after the final norm; of an embedding model the pooled rows,
    ``[requests, embedding size]``."""
    native: Any
    """What else the library's LM head takes."""
    adapters: list[int] | None = None
    """The adapter of each row, -1 for none; None when the LM head applies none."""
    request_ends: torch.Tensor | None = None
    """Of an embedding model, ``[requests]`` int64: the row after the last of each request."""
    read: Callable[[Sequence[int]], None] | None = None
    """Is told the numbers of the requests whose pooled rows are read: their prompts have ended."""

    def pooled(self, rows: torch.Tensor) -> torch.Tensor:
        """The pooled rows of the requests that have these rows of the pass, in float32."""
        if self.request_ends is None:
            raise RuntimeError("the pass is not one of an embedding model")
        requests = torch.searchsorted(self.request_ends, rows, right=True)
        if self.read is not None:
            self.read(requests.tolist())
        return self.states[requests].float()


class RowLogits(NamedTuple):
    """Logits of rows, as far as this rank has computed them."""

    part: torch.Tensor
    """``[rows, width]`` in the model's dtype: the whole vocabulary, or this rank's part of it. At
    its end it may be padded."""
    ranks: RankGroup | None
    """The ranks that have a part each, in the order of the vocabulary; None if this is all."""
    softcap: float | None
    """Limit of the logits' size that is still to be applied, by ``cap * tanh(logit / cap)``."""


class RankGroup(Protocol):
    """The ranks of a tensor-parallel model. All of them make the same calls in the same order."""

    @property
    def world_size(self) -> int:
        """Ranks."""

    @property
    def rank_in_group(self) -> int:
        """This rank's number, ``0..world_size``."""

    @property
    def shares_memory(self) -> bool:
        """Whether a kernel of one rank can read the device memory of all others."""

    def map_memory(self, device: torch.device, size: int) -> PeerMemory:
        """Maps memory of all ranks, where they share it; see `map_peer_memory`.

        Raises:
            RuntimeError: The memory cannot be mapped.
        """

    def all_gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Concatenates the ranks' tensors of one shape in a dimension. Can be captured."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Adds up the ranks' contiguous tensors, rounded to their dtype. Can be captured.

        By which path, and so in which order, may depend on the size. Of two ranks every path gives
        equal numbers: one addition, which has no order, rounded once.

        Args:
            part: This rank's, which may be overwritten.
        """

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Sends equal parts of ``[n]`` to the ranks, and receives as many. Can be captured."""


class Decoder(Protocol):
    """The decoder layers of a model, between token ids and the LM head."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[tokens]`` int64 -> ``[tokens, hidden]`` embeddings. Can be captured."""

    def attend(self, layer_id: int, queries: torch.Tensor, context: PassContext) -> torch.Tensor:
        """The library's attention over KV that is stored already, of an extend.

        Args:
            layer_id: As in `DecoderWeights`.
            queries: ``[tokens, heads * dim]`` after RoPE.
            context: Of the pass, whose metadata is planned.

        Returns:
            ``[tokens, heads * value_dim]``
        """

    def run_instead(
        self, run: Callable[[torch.Tensor, torch.Tensor, PassContext], torch.Tensor]
    ) -> AbstractContextManager[None]:
        """Within it, passes call `run` in the place of the decoder layers.

        Args:
            run: Takes token ids and positions, ``[tokens]`` int64, and the pass; returns
                ``[tokens, hidden]`` after the final norm, and has told :meth:`keep_input` what each
                layer got. A pass with other inputs, as embeddings of images, raises `ValueError`.
        """

    def keep_input(self, layer: int, residual: torch.Tensor) -> None:
        """Keeps a copy of what a layer gets, if a draft model takes it. Can be captured.

        Args:
            layer: Its number, from 0.
            residual: ``[tokens, hidden]``, before the norm; it may be overwritten later.
        """


class ModelBackend(Protocol):
    """A model that a library has loaded, with its KV buffers; one rank of it."""

    @property
    def info(self) -> BackendInfo:
        """Sizes and support."""

    @property
    def device(self) -> torch.device:
        """Of weights and KV."""

    @property
    def rank(self) -> Rank:
        """Which rank this is."""

    @property
    def group(self) -> RankGroup:
        """The ranks of the model; of one rank, a group of one."""

    @property
    def lora(self) -> LoraBackend | None:
        """LoRA; None where it is off."""

    folded: FoldedNorms | None
    """Norms whose weights are folded into the matrices after them; None for none."""

    @property
    def weights(self) -> WeightBackend | None:
        """The weights, where the library can replace them while it serves."""

    @property
    def states(self) -> StateBackend | None:
        """Recurrent state; None for a model without."""

    @property
    def pooling(self) -> PoolingBackend | None:
        """Pooling apart from the model; None where only :meth:`forward` pools, or nothing does."""

    @property
    def draft_model(self) -> DraftModel | None:
        """The EAGLE head; None for a model without."""

    @property
    def decode_attention(self) -> PagedDecode | None:
        """The core's attention, where the library runs decodes by it."""

    def kv_pages(self) -> list[torch.Tensor]:
        """All KV buffers as pages: a ``[pages + 1, ...]`` view of each layer's keys or values.

        Page 0 is for padding: the core's page `p` is page `p + 1` here. Whatever is not among these
        is not copied with a page.
        """

    def weight_bytes(self) -> int:
        """Device memory of parameters and buffers."""

    def make_context(
        self,
        inputs: PassInputs,
        extends: Extends | None = None,
        images: Sequence[EncodedImage] | None = None,
    ) -> PassContext:
        """Describes a pass to the library; plans nothing.

        Args:
            inputs: The rows.
            extends: Of an extend; None for a decode.
            images: Those of the pass; None for one without.
        """

    def forward(self, context: PassContext, mask: AttentionMask | Mask | None = None) -> Hidden:
        """Plans attention and runs a pass eagerly, up to the final norm. Stores KV.

        Args:
            context: The pass. `run_instead` and bound adapters apply to it.
            mask: One bit for each row and KV index, of an extend; None for causal attention.
        """

    def plan_decode(self, context: PassContext) -> AbstractContextManager[None]:
        """Plans the attention of a decode; within it :meth:`run_model` may run. For the CPU."""

    def plan_in_graph(self, context: PassContext) -> None:
        """The same by operations on the device, within :meth:`capturing`. Can be captured.

        Reads the tensors of the pass, and the block table, anew at each launch.
        """

    def run_model(self, context: PassContext) -> Hidden:
        """Runs a planned decode up to the final norm. Can be captured.

        Args:
            context: A decode, of more rows than the block table has requests where
                `graphs_take_prompts`.
        """

    def capturing(self, stream: torch.cuda.Stream, rows: int) -> AbstractContextManager[None]:
        """Within it decodes of up to so many rows can be captured on a stream, by all ranks."""

    def lm_head(self, hidden: Hidden, states: torch.Tensor) -> RowLogits:
        """This rank's part of the logits, without adapters. Can be captured.

        Args:
            hidden: Of the pass.
            states: ``[rows, hidden]`` of its states.
        """

    def replace_gemms(
        self,
        gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        supports: Callable[[torch.Tensor], bool],
    ) -> None:
        """Has linear layers and the LM head, also that of :meth:`logits`, multiply by this.

        Args:
            gemm: ``[rows, inputs]`` and ``[outputs, inputs]`` -> ``[rows, outputs]``.
            supports: Whether it does so by a weight; others are left as they are.
        """

    def logits(self, hidden: Hidden, states: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary]`` logits, soft-capped, with the adapters that are bound to rows."""

    def embedding_table(self) -> torch.nn.Module:
        """The layer that makes embeddings ``[tokens, embed_size]`` of ids ``[tokens]``.

        A pass of :meth:`forward` calls it once, and reads no ids otherwise, where `embed_size` is
        not 0; else there is none.
        """

    def encode_images(
        self, images: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]
    ) -> torch.Tensor:
        """Runs the vision encoder.

        Args:
            images: Pixels ``[patches, patch values]`` float32 on the host, and patches of each
                axis: frames, height, width.

        Returns:
            ``[rows of all images, hidden]``
        """

    def decoder_weights(self) -> DecoderWeights:
        """The layers of a model that is built as Llama's, for fused layers.

        Raises:
            UnsupportedLayer: It is built in another way, with the reason.
        """

    def freeze_weights(self, reason: str) -> None:
        """Has the library refuse to update weights from now on, with this reason."""
