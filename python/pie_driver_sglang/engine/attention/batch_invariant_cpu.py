"""Batch-invariant attention on the CPU, by torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from pie_driver_sglang.engine.attention.batch_invariant import BatchInvariantAttention, extend_rows
from pie_driver_sglang.engine.attention.paged import AttentionLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pie_driver_sglang.engine.backend import Extends
    from pie_driver_sglang.engine.block_table import BlockTable

QUERY_ROWS: Final = 16
"""Rows of a query block: positions ``[16 n, 16 n + 16)`` of a context."""


class QueryBlock(NamedTuple):
    """Rows of a pass in one query block of one context."""

    table_row: int
    """Of the block table."""
    start: int
    """Position of the block's first row, a multiple of `QUERY_ROWS`."""
    rows: list[int]
    """Rows of the pass."""
    offsets: list[int]
    """Their rows in the block."""


def find_query_blocks(table_rows: Iterable[int], kv_lens: Iterable[int]) -> list[QueryBlock]:
    """Divides the rows of a pass into query blocks; rows of padding are in none.

    Args:
        table_rows: The block-table row of each; 0 is padding.
        kv_lens: KV tokens of each, its own included.
    """
    blocks: list[QueryBlock] = []
    last: dict[tuple[int, int], QueryBlock] = {}
    for row, (table_row, kv_len) in enumerate(zip(table_rows, kv_lens, strict=True)):
        if table_row == 0:
            continue
        offset = (kv_len - 1) % QUERY_ROWS
        key = (table_row, kv_len - 1 - offset)
        block = last.get(key)
        if block is None or offset in block.offsets:
            block = last[key] = QueryBlock(*key, [], [])
            blocks.append(block)
        block.rows.append(row)
        block.offsets.append(offset)
    return blocks


class CpuBatchInvariantAttention(BatchInvariantAttention):
    """Attends with whole query blocks, whose missing rows are zeros.

    The matrices of a row have shapes, and the row a place in them, that depend on its position
    only. So its bits do not depend on the pass that it is computed in, a decode or a prefill.
    """

    def __init__(self, table: BlockTable, layers: Sequence[AttentionLayer]) -> None:
        """Plans nothing yet.

        Args:
            table: The block table.
            layers: All layers with KV, without caps and sinks.
        """
        super().__init__(table, layers, multiprocessors=1)
        self._blocks: list[QueryBlock] | None = None

    def plan(self, table_rows: torch.Tensor, kv_lens: torch.Tensor) -> None:
        """See `PagedDecode.plan`."""
        self._blocks = find_query_blocks(table_rows.tolist(), kv_lens.tolist())

    def plan_extend(self, table_rows: torch.Tensor, extends: Extends, tokens: int) -> None:
        """See `BatchInvariantAttention.plan_extend`."""
        self.plan(*extend_rows(table_rows, extends, tokens))

    def _attend(self, layer: AttentionLayer, queries: torch.Tensor) -> torch.Tensor:
        if self._blocks is None:
            raise RuntimeError("a pass whose attention was not planned")
        out = queries.new_zeros(len(queries), layer.heads, layer.value_dim)
        for block in self._blocks:
            mixed = self._attend_block(block, layer, queries[block.rows])
            out[block.rows] = mixed[block.offsets].to(out.dtype)
        return out

    def _attend_block(
        self, block: QueryBlock, layer: AttentionLayer, queries: torch.Tensor
    ) -> torch.Tensor:
        """``[QUERY_ROWS, heads, value_dim]`` float32 from ``[rows, heads, head_dim]``."""
        group = layer.heads // layer.kv_heads
        first = 0 if layer.window < 0 else max(0, block.start - layer.window)
        end = block.start + QUERY_ROWS
        stored = block.start + max(block.offsets) + 1
        slots = self._table.slots[block.table_row, first:stored].long()
        keys, values = (
            _zero_padded(pages[slots], end - first) for pages in (layer.keys, layer.values)
        )
        rows = queries.new_zeros(QUERY_ROWS, *queries.shape[1:], dtype=torch.float32)
        rows[block.offsets] = queries.float()
        heads = rows.view(QUERY_ROWS, layer.kv_heads, group, -1).permute(1, 0, 2, 3).flatten(1, 2)
        scores = heads @ keys.permute(1, 2, 0) * layer.scale
        positions = torch.arange(block.start, end).repeat_interleave(group).unsqueeze(1)
        tokens = torch.arange(first, end)
        hidden = tokens > positions
        if layer.window >= 0:
            hidden |= tokens < positions - layer.window
        weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
        mixed = weights @ values.permute(1, 0, 2)
        mixed = mixed.view(layer.kv_heads, QUERY_ROWS, group, -1).permute(1, 0, 2, 3)
        return mixed.flatten(1, 2)


def _zero_padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """The first rows of ``[length, heads, dim]`` float32, whose others are zeros."""
    padded = torch.zeros(length, *rows.shape[1:])
    padded[: len(rows)] = rows
    return padded
