"""A `ModelBackend` without an inference library: a model whose next token is a sum modulo.

Its KV is the id of each token, so that a wrong slot, block-table row or length shows in the next
token. The logits of a row are one-hot: the sum of all tokens that it sees, modulo the vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pie_driver_sglang.engine.backend import (
    BackendInfo,
    EncodedImage,
    Extends,
    Hidden,
    PassContext,
    PassInputs,
    RowLogits,
)
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.engine.layers.weights import DecoderWeights, UnsupportedLayer
from pie_driver_sglang.ranks.types import ALONE

PAGE, PAGES, VOCABULARY, REQUESTS, ROW_PAGES = 16, 64, 300, 8, 12


class SingleRank:
    """A `RankGroup` of one."""

    world_size, rank_in_group, shares_memory = 1, 0, False

    def all_gather(self, part: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return part

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        received.copy_(sent)


class FakeBackend:
    """Implements `ModelBackend` on the CPU."""

    info = BackendInfo("fake", PAGES, PAGE, VOCABULARY, 128, torch.float32, "fake",
                       mask_refusal="it has no masks", graphs_take_prompts=True)  # fmt: skip
    device = torch.device("cpu")
    rank, group = ALONE, SingleRank()
    lora = states = weights = pooling = draft_model = None
    folded: Any = None
    decode_attention: Any = None

    def __init__(self) -> None:
        self.block_table = BlockTable(REQUESTS, ROW_PAGES, PAGE, self.device)
        self.kv = torch.zeros(PAGES + 1, PAGE, dtype=torch.int64)
        self.passes: list[str] = []

    def kv_pages(self) -> list[torch.Tensor]:
        return [self.kv]

    def weight_bytes(self) -> int:
        return 0

    def make_context(
        self,
        inputs: PassInputs,
        extends: Extends | None = None,
        images: Sequence[EncodedImage] | None = None,
    ) -> PassContext:
        assert images is None
        return PassContext(inputs.out_cache_loc, extends, (inputs, extends))

    def forward(self, context: PassContext, mask: Any = None) -> Hidden:
        assert mask is None
        self.passes.append("decode" if context.is_decode else "extend")
        return self._run(context)

    @contextlib.contextmanager
    def plan_decode(self, context: PassContext) -> Iterator[None]:
        self.passes.append("step")
        yield

    def run_model(self, context: PassContext) -> Hidden:
        return self._run(context)

    def _run(self, context: PassContext) -> Hidden:
        inputs, extends = context.native
        kv = self.kv.view(-1)
        kv[context.out_cache_loc] = inputs.input_ids
        counts = [1] * len(inputs.seq_lens) if extends is None else extends.seq_lens_cpu
        sums = []
        for row, end, count in zip(inputs.req_pool_indices, inputs.seq_lens, counts, strict=True):
            slots = self.block_table.slots[row, :end].long()
            sums += kv[slots].cumsum(0)[len(slots) - count :].tolist()
        targets = torch.tensor(sums) % VOCABULARY
        return Hidden(torch.nn.functional.one_hot(targets, VOCABULARY).float(), None)

    def lm_head(self, hidden: Hidden, states: torch.Tensor) -> RowLogits:
        return RowLogits(states * 20, None, None)

    def logits(self, hidden: Hidden, states: torch.Tensor) -> torch.Tensor:
        return states * 20

    def decoder_weights(self) -> DecoderWeights:
        raise UnsupportedLayer("it has no layers")

    def plan_in_graph(self, context: PassContext) -> None:
        raise NotImplementedError("the CPU has no graphs")

    def capturing(self, stream: Any, rows: int) -> Any:
        raise NotImplementedError("the CPU has no graphs")

    def embedding_table(self) -> Any:
        raise NotImplementedError("it has no embeddings")

    def encode_images(self, images: Any) -> torch.Tensor:
        raise NotImplementedError("it has no vision encoder")

    def replace_gemms(self, gemm: Any, supports: Any) -> None:
        """It has none."""

    def freeze_weights(self, reason: str) -> None:
        """Its weights are never updated."""
