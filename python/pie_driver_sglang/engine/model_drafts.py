"""Drafts of an EAGLE head: what a step computes after its tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from pie_driver_sglang.engine.backend import PassContext, PassInputs

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend import ModelBackend
    from pie_driver_sglang.engine.backend_features import DraftModel
    from pie_driver_sglang.engine.block_table import BlockTable

DraftPlan = Callable[[PassContext], AbstractContextManager[None]]
"""Plans the attention of a decode, which runs within."""


class ModelDrafter:
    """Drafts a chain of tokens after the last accepted token of each request of a step.

    The KV of drafts goes to the rest of the context's last page, and from there to scratch pages:
    the block table has these only while the drafts are computed. The next step overwrites it.
    """

    def __init__(
        self, backend: ModelBackend, model: DraftModel, table: BlockTable, num_drafts: int
    ) -> None:
        """Keeps no memory of its own.

        Args:
            backend: Of the loaded model.
            model: Its head.
            table: The block table that the attention reads.
            num_drafts: Passes of the head, each for one draft.
        """
        self._backend, self._model, self._table = backend, model, table
        self.num_drafts = num_drafts
        self._pages = -(-num_drafts // table.page_size)
        device = backend.device
        self._compacts = device.type == "cpu"
        self._offsets = torch.arange(table.page_size, dtype=torch.int32, device=device)

    def draft(
        self,
        fields: Mapping[str, torch.Tensor],
        rows: torch.Tensor | None,
        tokens: torch.Tensor,
        planned: DraftPlan,
    ) -> torch.Tensor:
        """Drafts after a computed step; its KV and features are stored. Can be captured on CUDA.

        Args:
            fields: Of the step's block, on the device.
            rows: ``[slots]`` int64: the row of each slot; None where it is that of the same number.
            tokens: ``[slots]`` int64, sampled; one outside the vocabulary for NaN logits.
            planned: Plans a decode.

        Returns:
            ``[slots, num_drafts]`` int32: -1 in slots that are not the last accepted of a request.
        """
        if rows is None:
            rows = torch.arange(len(tokens), device=tokens.device)
        wanted = last_accepted(fields, rows, tokens)
        # The last draft's position must be in the rotary table, and its slot in the block table.
        wanted &= fields["positions"][rows] + self.num_drafts < self._backend.info.context_length
        wanted &= fields["seq_lens"][rows] + self.num_drafts <= self._table.slots.shape[1]
        drafts = torch.full(
            (len(tokens), self.num_drafts), -1, dtype=torch.int32, device=tokens.device
        )
        if not self._compacts:
            chain = self._chain(fields, rows, tokens, wanted, planned)
            return torch.where(wanted[:, None], chain, drafts)
        slots = wanted.nonzero().flatten()
        if len(slots):
            drafts[slots] = self._chain(fields, rows[slots], tokens[slots], wanted[slots], planned)
        return drafts

    def _chain(
        self,
        fields: Mapping[str, torch.Tensor],
        rows: torch.Tensor,
        tokens: torch.Tensor,
        wanted: torch.Tensor,
        planned: DraftPlan,
    ) -> torch.Tensor:
        """``[slots, num_drafts]`` int32; rows that are not wanted attend to the padding page."""
        table, model = self._table, self._model
        table_rows = torch.where(wanted, fields["req_pool_indices"][rows], 0)
        kv_lens = torch.where(wanted, fields["seq_lens"][rows], 0)
        positions = torch.where(wanted, fields["positions"][rows], 0)
        features = model.features[fields["out_cache_loc"][rows]]
        tokens = tokens.clamp(0, self._backend.info.vocab_size - 1)
        entries, pages = self._scratch(table_rows, kv_lens)
        saved = table.pages[entries]
        table.pages[entries] = pages
        chain = []
        for draft in range(self.num_drafts):
            # Rows that are not wanted have a KV length of 1 in each pass.
            index = torch.where(wanted, kv_lens + draft, 0)
            seq_lens = index + 1
            context = self._backend.make_context(
                PassInputs(
                    input_ids=tokens,
                    positions=positions + 1 + draft,
                    mrope_positions=None,
                    out_cache_loc=table.slots[table_rows, index].long(),
                    req_pool_indices=table_rows,
                    seq_lens=seq_lens,
                    seq_lens_cpu=seq_lens if self._compacts else fields["seq_lens"][:0],
                    seq_lens_sum=len(rows),
                )
            )
            with planned(context):
                tokens, features = model.forward(context, features)
            chain.append(tokens)
        table.pages[entries] = saved
        return torch.stack(chain, dim=1).int()

    def _scratch(
        self, table_rows: torch.Tensor, kv_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block table's entries after each context's last page, and scratch pages for them.

        Returns:
            ``[slots * pages]`` int64, and the KV slots of the scratch pages, ``[slots * pages,
            page_size]`` int32. Entries beyond the row, and of padding, are the padding row's first.
        """
        table, device = self._table, kv_lens.device
        size = table.page_size
        more = torch.arange(1, self._pages + 1, device=device)
        # A row that is not wanted has no KV.
        page = (kv_lens - 1).clamp(min=0)[:, None] // size + more
        exists = (kv_lens > 0)[:, None] & (page < table.row_pages)
        entries = torch.where(exists, table_rows[:, None] * table.row_pages + page, 0).flatten()
        first = self._model.scratch_page * size
        starts = first + size * torch.arange(len(entries), device=device, dtype=torch.int32)
        return entries, starts[:, None] + self._offsets


def last_accepted(
    fields: Mapping[str, torch.Tensor], rows: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """``[slots]`` bool: whether the slot's token is the last one that its request returns.

    A draft is accepted if all before it are, and it equals the token that was sampled before it:
    as ``rust/planner/src/drafting/verify.rs`` counts.

    Args:
        fields: Of the step's block.
        rows: ``[slots]`` int64: the row of each slot, rising.
        tokens: ``[slots]`` int64: the sampled ones.
    """
    requests, inputs = fields["req_pool_indices"], fields["input_ids"]
    following = (rows + 1).clamp(max=len(inputs) - 1)
    accepts = (following > rows) & (requests[following] == requests[rows])
    accepts &= inputs[following] == tokens
    # Rows of a prompt before its last one are not sampled, and padding is not.
    ends = (fields["temperatures"][: len(rows)] >= 0) & (requests[rows] > 0) & ~accepts
    before = ends.long().cumsum(0) - ends.long()
    numbers = torch.arange(len(rows), device=rows.device)
    begins = requests[rows] != requests[rows.roll(1)]
    begins = begins | (numbers == 0)
    starts = torch.where(begins, numbers, 0).cummax(0).values
    return ends & (before == before[starts])
