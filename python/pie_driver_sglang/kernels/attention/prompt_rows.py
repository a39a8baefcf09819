"""Finds prefills among the rows of a captured step, on the device, in torch.

In a graph every token of a prompt is a row (``rust/planner/src/staging/graph.rs``). Consecutive
rows of one context, each of which sees one token more, are a prefill; any other row is a decode.
All sizes are fixed, so this can be captured. FlashAttention-3 takes the segments as `cu_seqlens_q`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pie_driver_sglang.kernels.attention.split_plan import SKIP_ROW, DecodeRows


class Prompts(NamedTuple):
    """A step as segments: prefills, and the rows between them, which read no KV here."""

    starts: torch.Tensor
    """``[segments + 1]`` int32: first row of each segment; unused ones begin after the last row."""
    kv_lens: torch.Tensor
    """``[segments]`` int32: KV length of a prompt's last row; 0 for rows between prompts."""
    pages: torch.Tensor
    """``[segments, pages]`` int32: the pages of a prompt; any for rows between prompts."""


def find_runs(table_rows: torch.Tensor, kv_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds consecutive rows of one context, each of which sees one token more. Can be captured.

    Args:
        table_rows: ``[rows]`` int64; 0 is padding.
        kv_lens: ``[rows]`` int64.

    Returns:
        ``[rows]`` bool: whether a row continues the one before it, and whether the next one
        continues it.
    """
    follows = torch.zeros(len(kv_lens) + 1, dtype=torch.bool, device=kv_lens.device)
    follows[1:-1] = (table_rows[1:] == table_rows[:-1]) & (kv_lens[1:] == kv_lens[:-1] + 1)
    follows[:-1] &= table_rows > 0
    return follows[:-1], follows[1:]


def find_prompts(rows: DecodeRows, most: int, page_size: int) -> tuple[Prompts, DecodeRows]:
    """The prefills of a step, and its rows with those of prefills set to `SKIP_ROW`.

    Args:
        rows: Of the step, without common prefixes.
        most: Most requests of a step, each with consecutive rows of its own context.
        page_size: Tokens of a page.
    """
    owners, kv_lens, count = rows.table_rows, rows.kv_lens, len(rows.kv_lens)
    follows, leads = find_runs(owners, kv_lens)
    inside = follows | leads
    # A prompt, or rows that follow one; before the first prompt there may be some, too.
    begins = torch.where(inside, ~follows, torch.nn.functional.pad(inside[:-1], (1, 0)))
    begins[:1] = True
    segment = begins.cumsum(0) - 1
    segments = 2 * min(most, count // 2) + 1

    def per_segment(chosen: torch.Tensor, values: torch.Tensor, default: int) -> torch.Tensor:
        """The value of the chosen row of each segment; unused segments get the default."""
        found = values.new_full((segments + 1,), default)
        return found.scatter_(0, torch.where(chosen, segment, segments), values)[:segments]

    starts = per_segment(begins, torch.arange(count, device=owners.device), count)
    tables = per_segment(inside & ~follows, owners, 0)
    first_slots = rows.table[:, : rows.table.shape[1] // page_size * page_size : page_size]
    prompts = Prompts(
        torch.nn.functional.pad(starts, (0, 1), value=count).int(),
        per_segment(inside & ~leads, kv_lens, 0).int(),
        first_slots.index_select(0, tables) // page_size,
    )
    # Padding lies between prompts, too.
    left = torch.where(inside | (owners == 0), SKIP_ROW, owners)
    return prompts, rows._replace(table_rows=left)
