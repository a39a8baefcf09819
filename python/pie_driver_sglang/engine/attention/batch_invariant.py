"""Batch-invariant attention of decodes, drafts and prefills."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pie_driver_sglang.engine.attention.paged import AttentionLayer, PagedDecode
from pie_driver_sglang.kernels.attention import batch_invariant, fixed_splits
from pie_driver_sglang.kernels.attention.fixed_splits import FixedSplits
from pie_driver_sglang.kernels.attention.prompt_rows import find_runs
from pie_driver_sglang.kernels.attention.split_plan import SKIP_ROW, DecodeRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pie_driver_sglang.engine.backend import Extends
    from pie_driver_sglang.engine.block_table import BlockTable


class _PassRows(NamedTuple):
    """The rows of a pass, by the kernel that attends with them."""

    split: tuple[DecodeRows, FixedSplits] | None
    """Rows whose splits are divided among programs."""
    tiled: DecodeRows | None
    """Rows of which many follow one another in a context."""


def extend_rows(
    table_rows: torch.Tensor, extends: Extends, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block-table row and the KV tokens of each token of a prefill, ``[tokens]`` int64.

    Args:
        table_rows: ``[requests]`` int64: the block-table row of each request.
        extends: Of the pass.
        tokens: Of all requests.
    """
    lens, device = extends.seq_lens, table_rows.device
    owners = torch.repeat_interleave(
        torch.arange(len(lens), device=device), lens.long(), output_size=tokens
    )
    first = (extends.prefix_lens - extends.start_loc).long()
    kv_lens = first[owners] + torch.arange(1, tokens + 1, device=device)
    return table_rows[owners].long(), kv_lens


class BatchInvariantAttention(PagedDecode):
    """Decodes and prefills by kernels between which a row's bits do not differ."""

    def __init__(
        self, table: BlockTable, layers: Sequence[AttentionLayer], multiprocessors: int
    ) -> None:
        """Plans nothing yet.

        Args:
            table: The block table.
            layers: All layers with KV, of equal KV heads, without caps and sinks.
            multiprocessors: Of the GPU.
        """
        super().__init__(table, layers, multiprocessors, None)
        # A shared prefix is read for all its rows at once, which would split their KV elsewhere.
        self.shares_prefixes = False
        self._pass_rows: _PassRows | None = None

    def plan(self, table_rows: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """See `PagedDecode.plan`."""
        rows = DecodeRows(self._table.slots, table_rows, kv_lens)
        tiled = None
        if self._has_prompts(len(kv_lens)):
            follows, leads = find_runs(table_rows, kv_lens)
            inside = follows | leads
            tiled = rows._replace(table_rows=torch.where(inside, table_rows, SKIP_ROW))
            rows = rows._replace(table_rows=torch.where(inside, SKIP_ROW, table_rows))
        splits = fixed_splits.plan_fixed_splits(
            rows, self._layers[0].kv_heads, self._table.requests
        )
        self._pass_rows = _PassRows((rows, splits), tiled)

    def plan_extend(self, table_rows: torch.Tensor, extends: Extends, tokens: int) -> None:
        """Plans a prefill.

        Args:
            table_rows: ``[requests]`` int64: the block-table row of each.
            extends: Of the pass.
            tokens: Of all requests.
        """
        rows = DecodeRows(self._table.slots, *extend_rows(table_rows, extends, tokens))
        self._pass_rows = _PassRows(None, rows)

    def attend(
        self, layer: AttentionLayer, queries: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `PagedDecode.attend`; of the planned decode or prefill.

        Raises:
            ValueError: There are sinks.
        """
        if sinks is not None:
            raise ValueError("batch-invariant attention has no sinks")
        return self._attend(layer, queries.reshape(-1, layer.heads, layer.head_dim)).flatten(1)

    def _attend(self, layer: AttentionLayer, queries: torch.Tensor) -> torch.Tensor:
        """``[rows, heads, value_dim]`` from ``[rows, heads, head_dim]``."""
        if self._pass_rows is None:
            raise RuntimeError("a pass whose attention was not planned")
        out = queries.new_empty(len(queries), layer.heads, layer.value_dim)
        page_size = self._table.page_size
        split, tiled = self._pass_rows
        if tiled is not None:
            batch_invariant.attend_row_tiles(
                queries, layer.keys, layer.values, out, tiled, layer.scale, page_size, layer.window
            )
        if split is not None:
            batch_invariant.attend_split_rows(
                queries, layer.keys, layer.values, out, *split, layer.scale, page_size,
                self._multiprocessors, layer.window,
            )  # fmt: skip
        return out

    def attend_single(self, *_: object) -> None:
        """None: rows alone are attended to as others are."""
