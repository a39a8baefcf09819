"""Stream-K work plan of decode attention, computed on the device once a step, in Triton.

The KV of all rows is counted in blocks of tokens, and each program of a KV head gets the same
number of blocks, in the order of rows. A program may begin and end within a row, so the time
depends on the sum of lengths only. Grids are fixed, so everything can be captured.

Rows of a prefix group read their common prefix together, as a tile of M, and each row reads the
rest by itself (`Prefixes`); the second of the two parts to finish merges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

_ONE_CHUNK_ROWS = 256
"""Up to this many rows are planned in one chunk; more in larger chunks."""
_FINE_ROWS = 16
"""Up to this many rows, blocks are smaller, since each program has few of them."""
SKIP_ROW = -1
"""In place of a table row: the row is skipped, because another kernel computes it."""
_SKIP_ROW = tl.constexpr(SKIP_ROW)

# Rows of `WorkPlan.tiles`.
LAST_ROW = tl.constexpr(0)
"""Last row of the tile; for the tile of a group its index in `Prefixes.order`."""
ROWS_BEFORE = tl.constexpr(1)
"""Rows of the tile before the last one."""
END_BLOCK = tl.constexpr(2)
"""Blocks up to the end of the tile, those of earlier tiles included."""
KV_LEN = tl.constexpr(3)
"""KV length of the last row; of a group's tile the common prefix."""
TABLE_ROW = tl.constexpr(4)
"""Block-table row of the last row."""
PREFIX_LEN = tl.constexpr(5)
"""KV that the rows read in their group's tile, which itself has -1. Not stored without groups."""
TILE_FIELDS = 6


@dataclass(frozen=True)
class SplitTuning:
    """Block sizes of decode attention; ``benches/gpu/attention_check.py --tune`` measures them."""

    block: int
    """Tokens per iteration of a program's loop."""
    warps: int
    """Warps of a program."""
    stages: int
    """Software pipeline stages: blocks that are loaded or being loaded."""
    programs: int
    """Programs per SM."""
    queries: int = 16
    """Minimum M tile of a GEMM: query heads times rows. One row's heads of a KV head always fit."""


def split_tuning(
    dim: int, group: int, itemsize: int, rows: int, *, prompts: bool = False
) -> SplitTuning:
    """Chooses the block sizes for a layer.

    Args:
        dim: Head size, the larger of keys' and values'.
        group: Query heads per KV head.
        itemsize: Bytes of a stored element.
        rows: Rows of the step.
        prompts: Whether many rows of the step read the same KV, as those of prompts do.
    """
    elements = 4096 if itemsize > 2 else 8192
    width = int(triton.next_power_of_2(dim))
    if prompts and group <= 64 and width <= 128 and itemsize <= 2:
        return SplitTuning(min(128, elements // width), warps=4, stages=3, programs=2, queries=64)
    # Up to 16 heads take the same registers.
    elements = elements * 16 // max(16, int(triton.next_power_of_2(group)))
    block = min(128, max(16, elements // width))
    if rows <= _FINE_ROWS and block == 64:
        block = 32
    return SplitTuning(block, warps=4, stages=3, programs=2)


class Prefixes(NamedTuple):
    """Prefix groups: rows with a common KV prefix, from `rust/planner/src/prefix.rs`."""

    lens: torch.Tensor
    """``[rows]`` int32: tokens of the group's prefix, fewer than the row's KV length; multiples of
    `SplitTuning.block`. 0 for rows without a group."""
    indices: torch.Tensor
    """``[rows]`` int32: for a row in a group, its index in `order`."""
    order: torch.Tensor
    """``[rows]`` int32: the rows of all groups, one group after the other."""
    starts: torch.Tensor
    """``[rows]`` int32: for each entry of `order`, the index of its group's first entry."""
    used: torch.Tensor
    """``[1]`` int32: number of entries in `order`."""


class DecodeRows(NamedTuple):
    """The rows of a step; each attends to a prefix of the KV of its block-table row."""

    table: torch.Tensor
    """``[table rows, tokens]`` int32: storage slot of each KV index, consecutive within a page."""
    table_rows: torch.Tensor
    """``[rows]`` int64; 0 is padding, whose output is ignored; may be `SKIP_ROW`."""
    kv_lens: torch.Tensor
    """``[rows]`` int64: KV length of the row, its own token included."""
    prefixes: Prefixes | None = None
    """Common prefixes, for layers without a window."""


class SplitPlan(NamedTuple):
    """What a work plan depends on besides the rows: equal for most layers of a model."""

    tuning: SplitTuning
    kv_heads: int
    group: int
    """Query heads per KV head."""
    window: int
    """Sliding window: most earlier keys that a row sees, by KV index; -1 for all."""

    @property
    def windowed(self) -> bool:
        """Whether the layer has a sliding window."""
        return self.window >= 0

    @property
    def queries(self) -> int:
        """M tile of a GEMM, query heads times rows: a power of two."""
        return max(self.tuning.queries, int(triton.next_power_of_2(self.group)))

    @property
    def tile(self) -> int:
        """Rows of an M tile, which load their common KV once."""
        return self.queries // self.group


class WorkPlan(NamedTuple):
    """Which blocks each program of a KV head computes.

    A tile is rows that are computed together: rows of a group, over their common prefix, or
    consecutive rows of one context. The blocks of all tiles are numbered in order, with a group's
    tile before the tile of its last row, so each program has one range of blocks and of tiles.
    """

    split: SplitPlan
    totals: torch.Tensor
    """``[3]`` int32: blocks per program, number of blocks, number of tiles."""
    tiles: torch.Tensor
    """``[TILE_FIELDS, most tiles]`` int32; rows are `LAST_ROW` to `PREFIX_LEN`."""
    tile_ranges: torch.Tensor
    """``[2, programs]`` int32: first tile of each program, and the one after its last."""
    semaphores: torch.Tensor
    """``[kv_heads, programs]`` int32, zeros between layers: programs that have stored their partial
    result of the tile that begins in a program and continues in the next."""
    half_semaphores: torch.Tensor
    """``[rows, heads]`` int32, zeros between layers: whether one of a row's two halves is stored.
    Empty without groups."""


def plan_splits(rows: DecodeRows, split: SplitPlan, multiprocessors: int) -> WorkPlan:
    """Divides the step's KV blocks among programs. Can be captured.

    A kernel without PDL must run before the first :func:`attend_paged`. Grid: blocks of programs.
    """
    count = len(rows.kv_lens)
    groups = None if split.windowed else rows.prefixes
    programs = max(1, multiprocessors * split.tuning.programs // split.kv_heads)
    heads = split.kv_heads * split.group
    max_tiles = count if groups is None else 2 * count
    sizes = (
        (3,),
        (TILE_FIELDS, max_tiles),
        (2, programs),
        (split.kv_heads, programs),
        (max_tiles - count, heads),
    )
    lens, indices, _, starts, used = groups or [rows.kv_lens] * 5
    tensors = [torch.empty(size, dtype=torch.int32, device=rows.kv_lens.device) for size in sizes]
    # Rows and programs per iteration of an instance.
    planned_rows, planned_programs = (
        (_ONE_CHUNK_ROWS, 32) if count <= _ONE_CHUNK_ROWS else (1024, 16)
    )
    _plan_splits[(triton.cdiv(programs, planned_programs),)](
        rows.table_rows, rows.kv_lens, lens, indices, starts, used, *tensors,
        count, max_tiles, programs, split.window,
        BLOCK_KV=split.tuning.block, WINDOWED=split.windowed, PREFIX_GROUPS=groups is not None,
        TILE_ROWS=split.tile,
        ROWS=planned_rows, PROGRAMS=planned_programs, KV_HEADS=split.kv_heads, HEADS=heads,
        num_warps=8, **pdl_options(rows.kv_lens.device),
    )  # fmt: skip
    return WorkPlan(split, *tensors)


@triton.jit
def first_visible(kv_len, window, WINDOWED: tl.constexpr):
    """First visible token of a row with this KV length."""
    if WINDOWED:
        return tl.maximum(kv_len - 1 - window, 0)
    else:  # noqa: RET505  (Triton's compiler drops one of the branches)
        return 0


@triton.jit
def _continues_row(table_rows, kv_lens, prefix_lens, rows, row_count, PREFIX_GROUPS: tl.constexpr):
    """Whether rows see the previous row's KV and one token more; padding rows do, too."""
    known = (rows > 0) & (rows < row_count)
    own = tl.load(table_rows + rows, mask=known, other=0)
    same = own == tl.load(table_rows + rows - 1, mask=known, other=0)
    kv_len = tl.load(kv_lens + rows, mask=known, other=0)
    longer = kv_len == tl.load(kv_lens + rows - 1, mask=known, other=0) + 1
    if PREFIX_GROUPS:
        prefix = tl.load(prefix_lens + rows, mask=known, other=0)
        same = same & (prefix == tl.load(prefix_lens + rows - 1, mask=known, other=0))
    return known & same & (longer | (own == 0))


@triton.jit
def _row_tiles(
    table_rows, kv_lens, prefix_lens, rows, row_count, start, window,
    BLOCK_KV: tl.constexpr, WINDOWED: tl.constexpr, PREFIX_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """For each tile's last row: rows before it, KV length and blocks; -1, 0 and 0 for other rows.

    Also returns where each row's run of continuing rows begins; `start` is that of the row before
    the first one.
    """
    continues = _continues_row(table_rows, kv_lens, prefix_lens, rows, row_count, PREFIX_GROUPS)
    starts = tl.associative_scan(tl.where(continues, start, rows), 0, _max)
    before = (rows - starts) % TILE_ROWS
    next_continues = _continues_row(
        table_rows, kv_lens, prefix_lens, rows + 1, row_count, PREFIX_GROUPS
    )
    ends = (before == TILE_ROWS - 1) | (next_continues == 0)
    own = tl.load(table_rows + rows, mask=rows < row_count, other=_SKIP_ROW)
    ends = ends & (own != _SKIP_ROW)
    kv_len = tl.load(kv_lens + rows, mask=ends, other=0).to(tl.int32)
    if PREFIX_GROUPS:
        hidden = tl.load(prefix_lens + rows, mask=ends, other=0) // BLOCK_KV
    else:
        hidden = first_visible(kv_len - before, window, WINDOWED) // BLOCK_KV
    # At least one block: a program must write zeros for rows without visible keys.
    blocks = tl.maximum(tl.cdiv(kv_len, BLOCK_KV) - hidden, 1)
    return tl.where(ends, before, -1), kv_len, tl.where(ends, blocks, 0), starts


@triton.jit
def _group_tiles(
    prefix_lens, group_indices, group_starts, entries_used, rows, row_count, BLOCK_KV: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """The same for tiles of prefix groups, with indices into `Prefixes.order` and lengths."""
    prefix = tl.load(prefix_lens + rows, mask=rows < row_count, other=0)
    listed = prefix > 0
    entries = tl.load(group_indices + rows, mask=listed, other=0)
    start = tl.load(group_starts + entries, mask=listed, other=0)
    # Entries after the last one are undefined.
    known = listed & (entries + 1 < entries_used)
    next_start = tl.load(group_starts + entries + 1, mask=known, other=-1)
    before = (entries - start) % TILE_ROWS
    ends = listed & ((before == TILE_ROWS - 1) | (next_start != start))
    rows_before = tl.where(ends, before, -1)
    return rows_before, tl.where(ends, prefix // BLOCK_KV, 0), entries, prefix


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["row_count", "max_tiles", "program_count", "window"])
def _plan_splits(
    table_rows, kv_lens, prefix_lens, group_indices, group_starts, entry_count,
    totals, tiles, tile_ranges, semaphores, half_semaphores, row_count, max_tiles, program_count,
    window, BLOCK_KV: tl.constexpr, WINDOWED: tl.constexpr, PREFIX_GROUPS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr, PROGRAMS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Plans `PROGRAMS` programs; each instance sums all rows, and the first stores the tiles."""
    if PDL:
        pdl_wait_trigger()
    lanes = tl.arange(0, ROWS)
    entries_used = 0
    if PREFIX_GROUPS:
        entries_used = tl.load(entry_count)
    total = 0
    tile_count = 0
    start = 0
    for first in range(0, row_count, ROWS):
        rows = first + lanes
        rows_before, _, blocks, starts = _row_tiles(
            table_rows, kv_lens, prefix_lens, rows, row_count, start, window,
            BLOCK_KV, WINDOWED, PREFIX_GROUPS, TILE_ROWS,
        )  # fmt: skip
        total += tl.sum(blocks)
        tile_count += tl.sum((rows_before >= 0).to(tl.int32))
        if PREFIX_GROUPS:
            rows_before, blocks, _, _ = _group_tiles(
                prefix_lens, group_indices, group_starts, entries_used, rows, row_count, BLOCK_KV,
                TILE_ROWS,
            )  # fmt: skip
            total += tl.sum(blocks)
            tile_count += tl.sum((rows_before >= 0).to(tl.int32))
        start = tl.max(starts)
    blocks_per_program = tl.cdiv(total, program_count)
    programs = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    is_first = tl.program_id(0) == 0
    tl.store(totals, blocks_per_program, mask=is_first)
    tl.store(totals + 1, total, mask=is_first)
    tl.store(totals + 2, tile_count, mask=is_first)
    passed = 0
    passed_tiles = 0
    start = 0
    # Tiles that end before a program begins, and those that begin before it ends.
    tiles_ended = tl.zeros([PROGRAMS], tl.int32)
    tiles_begun = tl.zeros([PROGRAMS], tl.int32)
    block = (programs * blocks_per_program)[:, None]
    for first in range(0, row_count, ROWS):
        rows = first + lanes
        rows_before, kv_len, blocks, starts = _row_tiles(
            table_rows, kv_lens, prefix_lens, rows, row_count, start, window,
            BLOCK_KV, WINDOWED, PREFIX_GROUPS, TILE_ROWS,
        )  # fmt: skip
        is_tile = rows_before >= 0
        own = tl.load(table_rows + rows, mask=is_tile & is_first, other=0).to(tl.int32)
        if PREFIX_GROUPS:
            group_ahead, group_blocks, entries, prefix = _group_tiles(
                prefix_lens, group_indices, group_starts, entries_used, rows, row_count, BLOCK_KV,
                TILE_ROWS,
            )  # fmt: skip
            is_group = group_ahead >= 0
            ends = passed + tl.cumsum(blocks + group_blocks, 0)
            numbers = passed_tiles + tl.cumsum(is_tile.to(tl.int32) + is_group.to(tl.int32), 0)
            group_ends = ends - blocks
            tiles_ended += _count_at_most(group_ends, block, is_group)
            tiles_begun += _count_at_most(
                group_ends - group_blocks, block + blocks_per_program - 1, is_group
            )
            group_mask = is_group & is_first
            row = tl.load(table_rows + rows, mask=group_mask, other=0).to(tl.int32)
            _store_tiles(
                tiles + numbers - 1 - is_tile.to(tl.int32), max_tiles, entries, group_ahead,
                group_ends, prefix, row, -1, group_mask, PREFIX_GROUPS,
            )  # fmt: skip
            passed += tl.sum(group_blocks)
            passed_tiles += tl.sum(is_group.to(tl.int32))
        else:
            ends = passed + tl.cumsum(blocks, 0)
            numbers = passed_tiles + tl.cumsum(is_tile.to(tl.int32), 0)
            prefix = 0
        tiles_ended += _count_at_most(ends, block, is_tile)
        tiles_begun += _count_at_most(ends - blocks, block + blocks_per_program - 1, is_tile)
        _store_tiles(
            tiles + numbers - 1, max_tiles, rows, rows_before, ends, kv_len, own, prefix,
            is_tile & is_first, PREFIX_GROUPS,
        )  # fmt: skip
        passed += tl.sum(blocks)
        passed_tiles += tl.sum(is_tile.to(tl.int32))
        start = tl.max(starts)
    known = programs < program_count
    tl.store(tile_ranges + programs, tiles_ended, mask=known)
    tl.store(tile_ranges + program_count + programs, tiles_begun, mask=known)
    for head in range(KV_HEADS):
        tl.store(semaphores + head * program_count + programs, 0, mask=known)
    if entries_used > 0:
        for head in range(tl.program_id(0), HEADS, tl.num_programs(0)):
            for first in range(0, row_count, ROWS):
                rows = first + lanes
                tl.store(half_semaphores + rows * HEADS + head, 0, mask=rows < row_count)


@triton.jit
def _count_at_most(ends, blocks, tiles):
    """Number of tiles at or before each block: ``[blocks]`` int32."""
    return tl.sum(((ends[None, :] <= blocks) & tiles[None, :]).to(tl.int32), 1)


@triton.jit
def _store_tiles(
    tiles, max_tiles, last_row, rows_before, end_block, kv_len, table_row, prefix_len, mask,
    PREFIX_GROUPS: tl.constexpr,
):  # fmt: skip
    """Stores tiles, at pointers into the first row of `WorkPlan.tiles`."""
    tl.store(tiles + LAST_ROW * max_tiles, last_row, mask=mask)
    tl.store(tiles + ROWS_BEFORE * max_tiles, rows_before, mask=mask)
    tl.store(tiles + END_BLOCK * max_tiles, end_block, mask=mask)
    tl.store(tiles + KV_LEN * max_tiles, kv_len, mask=mask)
    tl.store(tiles + TABLE_ROW * max_tiles, table_row, mask=mask)
    if PREFIX_GROUPS:
        tl.store(tiles + PREFIX_LEN * max_tiles, prefix_len, mask=mask)
