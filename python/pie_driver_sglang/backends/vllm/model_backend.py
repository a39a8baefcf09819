"""`VllmBackend`: a model of vLLM behind the interface of the engine core, on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from pie_driver_sglang.backends.vllm import support
from pie_driver_sglang.backends.vllm.compat.model import VllmGroup, compute_head
from pie_driver_sglang.backends.vllm.compat.passes import AttentionRows, run_layers
from pie_driver_sglang.backends.vllm.measure import expert_choices
from pie_driver_sglang.config.vllm_options import CPU_ATTENTION
from pie_driver_sglang.engine.backend import (
    BackendInfo,
    EncodedImage,
    Extends,
    Hidden,
    PassContext,
    PassInputs,
    RowLogits,
)
from pie_driver_sglang.engine.layers.weights import DecoderWeights, UnsupportedLayer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pie_driver_sglang._core import AttentionMask
    from pie_driver_sglang.backends.vllm.boot import BootedVllm
    from pie_driver_sglang.engine.attention.paged import PagedDecode
    from pie_driver_sglang.engine.backend import LoraBackend, StateBackend, WeightBackend
    from pie_driver_sglang.engine.folded_norms import FoldedNorms
    from pie_driver_sglang.ranks.types import Mask, Rank

VLLM: Final = "vllm"
_ON_CPU: Final = "the vLLM backend runs on the CPU only, which has no graphs"


class _Rows(NamedTuple):
    """A pass as vLLM runs it."""

    input_ids: torch.Tensor
    attention: AttentionRows


class VllmBackend:
    """Implements `ModelBackend`."""

    device = torch.device("cpu")
    lora: LoraBackend | None = None
    weights: WeightBackend | None = None
    folded: FoldedNorms | None = None
    states: StateBackend | None = None
    decode_attention: PagedDecode | None = None

    def __init__(self, booted: BootedVllm, rank: Rank) -> None:
        """Takes a loaded model."""
        self.rank = rank
        self.group = VllmGroup()
        self.info = _vllm_info(booted)
        self._model = booted.model
        self._planner = booted.planner
        self._kv = booted.kv
        self._block_table = booted.block_table
        # Packed weights have left their modules.
        self._weight_bytes = booted.weight_bytes

    def kv_pages(self) -> list[torch.Tensor]:
        """See `ModelBackend.kv_pages`."""
        return self._kv

    def weight_bytes(self) -> int:
        """As loaded: afterwards vLLM packs weights for its kernels, outside of parameters."""
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
        rows = _Rows(inputs.input_ids, self._attention_rows(inputs, extends))
        return PassContext(inputs.out_cache_loc, extends, rows)

    def _attention_rows(self, inputs: PassInputs, extends: Extends | None) -> AttentionRows:
        """Block table, lengths and slots, as vLLM's attention takes them."""
        most_kv = int(inputs.seq_lens_cpu.max())
        size = self._block_table.page_size
        columns = self._block_table.slots[:, : -(-most_kv // size) * size : size]
        requests = len(inputs.seq_lens)
        starts = torch.arange(requests + 1, dtype=torch.int32)
        if extends is not None:
            starts[1:] = extends.seq_lens.cumsum(0)
        return AttentionRows(
            starts=starts,
            seq_lens=inputs.seq_lens.int(),
            pages=columns[inputs.req_pool_indices] // size,
            slots=inputs.out_cache_loc,
            positions=inputs.positions,
            most_tokens=1 if extends is None else max(extends.seq_lens_cpu),
            most_kv=most_kv,
        )

    def forward(self, context: PassContext, mask: AttentionMask | Mask | None = None) -> Hidden:
        """See `ModelBackend.forward`."""
        if mask is not None:
            raise ValueError(support.MASKS)
        with self.plan_decode(context):
            return self.run_model(context)

    @contextlib.contextmanager
    def plan_decode(self, context: PassContext) -> Iterator[None]:
        """See `ModelBackend.plan_decode`."""
        with self._planner.attending(context.native.attention):
            yield

    def run_model(self, context: PassContext) -> Hidden:
        """See `ModelBackend.run_model`."""
        rows: _Rows = context.native
        return Hidden(run_layers(self._model, rows.input_ids, rows.attention.positions), None)

    def lm_head(self, hidden: Hidden, states: torch.Tensor) -> RowLogits:
        """Whole rows, capped and scaled; see `ModelBackend.lm_head`."""
        return RowLogits(compute_head(self._model, states), None, None)

    def logits(self, hidden: Hidden, states: torch.Tensor) -> torch.Tensor:
        """See `ModelBackend.logits`."""
        return compute_head(self._model, states)

    def decoder_weights(self) -> DecoderWeights:
        """See `ModelBackend.decoder_weights`."""
        raise UnsupportedLayer("vLLM's layers on the CPU have packed weights")

    def freeze_weights(self, reason: str) -> None:
        """Nothing updates weights: there is no server of vLLM."""

    def plan_in_graph(self, context: PassContext) -> None:
        """Not on the CPU."""
        raise NotImplementedError(_ON_CPU)

    def capturing(self, stream: torch.cuda.Stream, rows: int) -> AbstractContextManager[None]:
        """Not on the CPU."""
        raise NotImplementedError(_ON_CPU)

    def replace_gemms(
        self,
        gemm: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        supports: Callable[[torch.Tensor], bool],
    ) -> None:
        """Not on the CPU, where no option asks for it."""
        raise NotImplementedError(_ON_CPU)

    def embedding_table(self) -> torch.nn.Module:
        """There is no way for embeddings: `info.embed_size` is 0."""
        raise NotImplementedError("the vLLM driver takes no `input_embeds`")

    def encode_images(
        self, images: Sequence[tuple[torch.Tensor, tuple[int, int, int]]]
    ) -> torch.Tensor:
        """There is no vision encoder: `info.vision` is None."""
        raise NotImplementedError("the vLLM driver serves no images")


def _vllm_info(booted: BootedVllm) -> BackendInfo:
    model: Any = booted.config.model_config
    return BackendInfo(
        name=VLLM,
        total_pages=len(booted.kv[0]) - 1,
        page_size=booted.block_table.page_size,
        vocab_size=model.get_vocab_size(),
        context_length=model.max_model_len,
        dtype=model.dtype,
        attention_backend=CPU_ATTENTION,
        is_sparse=expert_choices(booted.config) > 0,
        mask_refusal=support.MASKS,
        paged_decode_refusal="`pie` decodes on a GPU",
        graphs_take_prompts=True,
    )
