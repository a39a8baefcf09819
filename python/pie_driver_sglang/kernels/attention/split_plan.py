"""Decode attention over pages: how the work of a step is split among programs.

The KV of all rows is counted in blocks of tokens. Each program of a KV head takes the same number
of blocks, in the order of the rows (stream-K). So a program may begin and end within a row, and the
time depends on the sum of the lengths only. The plan is computed on the device once a step, and
grids are fixed, so everything can be captured.

Rows with a common prefix may read it together, and each row reads the rest by itself (`Prefixes`).
Both are work like any other; the second of the two parts to finish merges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.pdl import pdl_options, pdl_wait_trigger

_FEW_ROWS = 256
"""Up to this many rows are planned at once; more in larger chunks."""
_FINE_ROWS = 16
"""Up to this many rows, blocks are smaller, since each program has few of them."""
ELSEWHERE = -1
"""In place of the table row: another kernel computes the row, so it is left as it is."""
_ELSEWHERE = tl.constexpr(ELSEWHERE)


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
    """Groups of rows with a common prefix, as `rust/planner/src/prefix.rs` finds them."""

    lens: torch.Tensor
    """``[rows]`` int32: tokens of the group's prefix, fewer than the row reads; multiples of every
    `SplitTuning.block`. 0 for rows without a group."""
    places: torch.Tensor
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
    """``[rows]`` int64; 0 is padding, whose output is ignored; may be `ELSEWHERE`."""
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
    """``[6, most tiles]`` int32, for each tile: its last row, the number of rows before that one,
    blocks up to its end, KV length and table row of the last row, and KV that its rows read in a
    group's tile. For the tile of a group the latter is -1, and the last row is an index into
    `Prefixes.order`."""
    stretches: torch.Tensor
    """``[2, programs]`` int32: the first tile of a program, and the one after its last."""
    arrived: torch.Tensor
    """``[kv_heads, programs]`` int32, zeros between layers: how many programs have stored their
    partial result of the tile that begins in a program and continues in the next."""
    met: torch.Tensor
    """``[rows, heads]`` int32, zeros between layers: whether one of a row's two parts is stored.
    Empty without groups."""


def plan_splits(rows: DecodeRows, split: SplitPlan, multiprocessors: int) -> WorkPlan:
    """Divides the step's blocks among programs; can be captured.

    A kernel that is not launched early must come before the first `paged_attend.attend_paged`.
    """
    count = len(rows.kv_lens)
    groups = None if split.windowed else rows.prefixes
    programs = max(1, multiprocessors * split.tuning.programs // split.kv_heads)
    heads = split.kv_heads * split.group
    most = count if groups is None else 2 * count
    sizes = ((3,), (6, most), (2, programs), (split.kv_heads, programs), (most - count, heads))
    made = [torch.empty(size, dtype=torch.int32, device=rows.kv_lens.device) for size in sizes]
    # Rows and programs per iteration of an instance.
    planned_rows, planned_programs = (_FEW_ROWS, 32) if count <= _FEW_ROWS else (1024, 16)
    _plan_splits[(triton.cdiv(programs, planned_programs),)](
        rows.table_rows, rows.kv_lens, *(groups or [rows.kv_lens] * 5), *made,
        count, most, programs, split.window,
        BLOCK=split.tuning.block, WINDOWED=split.windowed, GROUPED=groups is not None,
        TILE=split.tile,
        ROWS=planned_rows, PROGRAMS=planned_programs, KV_HEADS=split.kv_heads, HEADS=heads,
        num_warps=8, **pdl_options(rows.kv_lens.device),
    )  # fmt: skip
    return WorkPlan(split, *made)


@triton.jit
def seen_from(kv_len, window, WINDOWED: tl.constexpr):
    """The first token that a row with this KV length sees."""
    if WINDOWED:
        return tl.maximum(kv_len - 1 - window, 0)
    else:  # noqa: RET505  (Triton's compiler drops one of the branches)
        return 0


@triton.jit
def _goes_on(table_rows, kv_lens, prefix_lens, rows, row_count, GROUPED: tl.constexpr):
    """Whether rows see the previous row's KV and one token more.

    Padding rows go together as well: their output is ignored.
    """
    known = (rows > 0) & (rows < row_count)
    own = tl.load(table_rows + rows, mask=known, other=0)
    same = own == tl.load(table_rows + rows - 1, mask=known, other=0)
    kv_len = tl.load(kv_lens + rows, mask=known, other=0)
    longer = kv_len == tl.load(kv_lens + rows - 1, mask=known, other=0) + 1
    if GROUPED:
        common = tl.load(prefix_lens + rows, mask=known, other=0)
        same = same & (common == tl.load(prefix_lens + rows - 1, mask=known, other=0))
    return known & same & (longer | (own == 0))


@triton.jit
def _tiles(
    table_rows, kv_lens, prefix_lens, rows, row_count, start, window,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, GROUPED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """For the last row of each tile: the number of rows before it, its KV length and its blocks.

    Other rows give -1, and no blocks. Also returns where each run of rows begins that continue each
    other; `start` is where the run of the row before the first one begins.
    """
    goes_on = _goes_on(table_rows, kv_lens, prefix_lens, rows, row_count, GROUPED)
    starts = tl.associative_scan(tl.where(goes_on, start, rows), 0, _larger)
    before = (rows - starts) % TILE
    next_goes_on = _goes_on(table_rows, kv_lens, prefix_lens, rows + 1, row_count, GROUPED)
    ends = (before == TILE - 1) | (next_goes_on == 0)
    own = tl.load(table_rows + rows, mask=rows < row_count, other=_ELSEWHERE)
    ends = ends & (own != _ELSEWHERE)
    kv_len = tl.load(kv_lens + rows, mask=ends, other=0).to(tl.int32)
    if GROUPED:
        unseen = tl.load(prefix_lens + rows, mask=ends, other=0) // BLOCK
    else:
        unseen = seen_from(kv_len - before, window, WINDOWED) // BLOCK
    # One block for rows that see nothing: a program must write their zeros.
    blocks = tl.maximum(tl.cdiv(kv_len, BLOCK) - unseen, 1)
    return tl.where(ends, before, -1), kv_len, tl.where(ends, blocks, 0), starts


@triton.jit
def _group_tiles(
    prefix_lens, places, group_starts, used, rows, row_count, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The same for tiles of groups; also indices into `Prefixes.order`, and prefix lengths."""
    common = tl.load(prefix_lens + rows, mask=rows < row_count, other=0)
    listed = common > 0
    entries = tl.load(places + rows, mask=listed, other=0)
    start = tl.load(group_starts + entries, mask=listed, other=0)
    # Entries after the last one are undefined.
    known = listed & (entries + 1 < used)
    next_start = tl.load(group_starts + entries + 1, mask=known, other=-1)
    before = (entries - start) % TILE
    ends = listed & ((before == TILE - 1) | (next_start != start))
    ahead = tl.where(ends, before, -1)
    return ahead, tl.where(ends, common // BLOCK, 0), entries, common


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["row_count", "most", "program_count", "window"])
def _plan_splits(
    table_rows, kv_lens, prefix_lens, places, _order, group_starts, entry_count,
    totals, tiles, stretches, arrived, met, row_count, most, program_count, window,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, GROUPED: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, PROGRAMS: tl.constexpr, KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Plans `PROGRAMS` programs. Each instance sums all rows; the first one stores the tiles."""
    if PDL:
        pdl_wait_trigger()
    lanes = tl.arange(0, ROWS)
    used = 0
    if GROUPED:
        used = tl.load(entry_count)
    total = 0
    tile_count = 0
    start = 0
    for first in range(0, row_count, ROWS):
        rows = first + lanes
        ahead, _, blocks, starts = _tiles(
            table_rows, kv_lens, prefix_lens, rows, row_count, start, window,
            BLOCK, WINDOWED, GROUPED, TILE,
        )  # fmt: skip
        total += tl.sum(blocks)
        tile_count += tl.sum((ahead >= 0).to(tl.int32))
        if GROUPED:
            ahead, blocks, _, _ = _group_tiles(
                prefix_lens, places, group_starts, used, rows, row_count, BLOCK, TILE
            )
            total += tl.sum(blocks)
            tile_count += tl.sum((ahead >= 0).to(tl.int32))
        start = tl.max(starts)
    share = tl.cdiv(total, program_count)
    programs = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    keeps = tl.program_id(0) == 0
    tl.store(totals, share, mask=keeps)
    tl.store(totals + 1, total, mask=keeps)
    tl.store(totals + 2, tile_count, mask=keeps)
    passed = 0
    passed_tiles = 0
    start = 0
    # Tiles that end before a program begins, and those that begin before it ends.
    ended = tl.zeros([PROGRAMS], tl.int32)
    begun = tl.zeros([PROGRAMS], tl.int32)
    block = (programs * share)[:, None]
    for first in range(0, row_count, ROWS):
        rows = first + lanes
        ahead, kv_len, blocks, starts = _tiles(
            table_rows, kv_lens, prefix_lens, rows, row_count, start, window,
            BLOCK, WINDOWED, GROUPED, TILE,
        )  # fmt: skip
        is_tile = ahead >= 0
        own = tl.load(table_rows + rows, mask=is_tile & keeps, other=0).to(tl.int32)
        if GROUPED:
            group_ahead, group_blocks, entries, common = _group_tiles(
                prefix_lens, places, group_starts, used, rows, row_count, BLOCK, TILE
            )
            is_group = group_ahead >= 0
            ends = passed + tl.cumsum(blocks + group_blocks, 0)
            numbers = passed_tiles + tl.cumsum(is_tile.to(tl.int32) + is_group.to(tl.int32), 0)
            group_ends = ends - blocks
            ended += _at_most(group_ends, block, is_group)
            begun += _at_most(group_ends - group_blocks, block + share - 1, is_group)
            kept = is_group & keeps
            row = tl.load(table_rows + rows, mask=kept, other=0).to(tl.int32)
            _keep(
                tiles + numbers - 1 - is_tile.to(tl.int32), most, entries, group_ahead, group_ends,
                common, row, kept,
            )  # fmt: skip
            tl.store(tiles + numbers - 1 - is_tile.to(tl.int32) + 5 * most, -1, mask=kept)
            tl.store(tiles + numbers - 1 + 5 * most, common, mask=is_tile & keeps)
            passed += tl.sum(group_blocks)
            passed_tiles += tl.sum(is_group.to(tl.int32))
        else:
            ends = passed + tl.cumsum(blocks, 0)
            numbers = passed_tiles + tl.cumsum(is_tile.to(tl.int32), 0)
        ended += _at_most(ends, block, is_tile)
        begun += _at_most(ends - blocks, block + share - 1, is_tile)
        _keep(tiles + numbers - 1, most, rows, ahead, ends, kv_len, own, is_tile & keeps)
        passed += tl.sum(blocks)
        passed_tiles += tl.sum(is_tile.to(tl.int32))
        start = tl.max(starts)
    known = programs < program_count
    tl.store(stretches + programs, ended, mask=known)
    tl.store(stretches + program_count + programs, begun, mask=known)
    for head in range(KV_HEADS):
        tl.store(arrived + head * program_count + programs, 0, mask=known)
    if used > 0:
        for head in range(tl.program_id(0), HEADS, tl.num_programs(0)):
            for first in range(0, row_count, ROWS):
                rows = first + lanes
                tl.store(met + rows * HEADS + head, 0, mask=rows < row_count)


@triton.jit
def _at_most(places, blocks, tiles):
    """The number of tiles at or before each block: ``[blocks]`` int32."""
    return tl.sum(((places[None, :] <= blocks) & tiles[None, :]).to(tl.int32), 1)


@triton.jit
def _keep(place, most, last, ahead, end, kv_len, table_row, kept):
    """Stores the first five fields of tiles."""
    tl.store(place, last, mask=kept)
    tl.store(place + most, ahead, mask=kept)
    tl.store(place + 2 * most, end, mask=kept)
    tl.store(place + 3 * most, kv_len, mask=kept)
    tl.store(place + 4 * most, table_row, mask=kept)
