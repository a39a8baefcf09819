"""Decode attention over pages: how a step is cut, and what each program's share of it is.

What the rows see is counted in blocks of tokens. The programs of a KV head take equally many of
them, in the order of the rows, so a program may begin and end within a row, and rows of any mix of
lengths take as long as their sum. Shares are computed on the device, once a step, and grids are
fixed: everything can be captured.

Rows that begin with the same KV may look at that beginning together, each row at the rest alone
(`Prefixes`). Both are work like any other; what a row saw in both is merged by whoever is second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.kernels.chained import chained, follow

_FEW_ROWS = 256
"""More are looked at in larger steps."""
_FINE_ROWS = 16
"""Of so few rows programs have few blocks, which then are smaller."""


@dataclass(frozen=True)
class SplitTuning:
    """How the work is cut; ``benches/gpu/attention_check.py --tune`` measures it."""

    block: int
    """Tokens that a program looks at in one turn of its loop."""
    warps: int
    """Warps of a program."""
    stages: int
    """Blocks that a program has at hand or on their way."""
    programs: int
    """Programs for each multiprocessor."""
    queries: int = 16
    """Heads of rows that a product has room for, at least; those of a KV head and a row fit."""


def split_tuning(
    dim: int, group: int, itemsize: int, rows: int, *, prompts: bool = False
) -> SplitTuning:
    """The cut for a layer.

    Args:
        dim: head size, the larger of keys' and values'.
        group: heads that share a KV head.
        itemsize: bytes of a stored element.
        rows: of the step.
        prompts: whether many rows of the step see the same KV, as those of prompts do.
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
    """Groups of rows that begin with the same KV, as `rust/batch/src/prefix.rs` finds them."""

    lens: torch.Tensor
    """``[rows]`` int32: tokens that a row's group has in common, less than the row sees; multiples
    of every `SplitTuning.block`. 0 for rows that are in no group."""
    places: torch.Tensor
    """``[rows]`` int32: of a row that is in a group, its entry of `order`."""
    order: torch.Tensor
    """``[rows]`` int32: the rows of all groups, one group behind the other."""
    starts: torch.Tensor
    """``[rows]`` int32: of each entry of `order`, the first entry of its group."""
    used: torch.Tensor
    """``[1]`` int32: entries of `order`."""


class DecodeRows(NamedTuple):
    """The rows of a step, each of which sees a beginning of the KV of its table row."""

    table: torch.Tensor
    """``[table rows, tokens]`` int32: storage slot of each KV index, consecutive within a page."""
    table_rows: torch.Tensor
    """``[rows]`` int64; 0 = padding, whose results nobody wants."""
    kv_lens: torch.Tensor
    """``[rows]`` int64: KV that the row sees, its own token's included."""
    prefixes: Prefixes | None = None
    """What layers without a window read together."""


class SplitPlan(NamedTuple):
    """What layers have in common that share their programs in the same way."""

    tuning: SplitTuning
    kv_heads: int
    group: int
    """Heads that share a KV head."""
    window: int
    """Stored keys that a row sees at most before its own, by KV index; -1 = all."""

    @property
    def windowed(self) -> bool:
        """Whether a row does not see all that is stored."""
        return self.window >= 0

    @property
    def queries(self) -> int:
        """Heads of rows that a product has room for, a power of two."""
        return max(self.tuning.queries, int(triton.next_power_of_2(self.group)))

    @property
    def tile(self) -> int:
        """Rows that a product has room for: their KV is loaded once."""
        return self.queries // self.group


class WorkPlan(NamedTuple):
    """Which blocks each program of a KV head looks at.

    A tile is rows that are looked at together: of a group, in what its rows have in common, or of
    one context. The blocks of all tiles are numbered in their order, a group's tile in front of its
    last row's, so that programs have as many tiles as they have blocks.
    """

    split: SplitPlan
    totals: torch.Tensor
    """``[3]`` int32: blocks of a program, all blocks, all tiles."""
    tiles: torch.Tensor
    """``[6, most tiles]`` int32, of each tile: its last row, rows in front of that one, blocks up
    to its end, KV and table row of the last row, and the KV that its rows see elsewhere. For tiles
    of a group that is -1, and the last row an entry of `Prefixes.order`."""
    stretches: torch.Tensor
    """``[2, programs]`` int32: the tile that a program begins in, and the one behind its last."""
    arrived: torch.Tensor
    """``[kv_heads, programs]`` int32, zeros between layers: how many have left their part of the
    tile that begins in a program and goes on in the next."""
    met: torch.Tensor
    """``[rows, heads]`` int32, zeros between layers: whether one of a row's two parts is there.
    Nothing without groups."""


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
    # Rows and programs that an instance compares at once.
    planned_rows, planned_programs = (_FEW_ROWS, 32) if count <= _FEW_ROWS else (1024, 16)
    _plan_splits[(triton.cdiv(programs, planned_programs),)](
        rows.table_rows, rows.kv_lens, *(groups or [rows.kv_lens] * 5), *made,
        count, most, programs, split.window,
        BLOCK=split.tuning.block, WINDOWED=split.windowed, GROUPED=groups is not None,
        TILE=split.tile,
        ROWS=planned_rows, PROGRAMS=planned_programs, KV_HEADS=split.kv_heads, HEADS=heads,
        num_warps=8, **chained(rows.kv_lens.device),
    )  # fmt: skip
    return WorkPlan(split, *made)


@triton.jit
def seen_from(kv_len, window, WINDOWED: tl.constexpr):
    """The first token that a row with so much KV sees."""
    if WINDOWED:
        return tl.maximum(kv_len - 1 - window, 0)
    else:  # noqa: RET505  (Triton's compiler drops one of the branches)
        return 0


@triton.jit
def _goes_on(table_rows, kv_lens, prefix_lens, rows, row_count, GROUPED: tl.constexpr):
    """Whether rows see the KV of the row in front of them and one token more.

    Of padding it does not matter what it sees, so that goes together, too.
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
    """What the last row of a tile knows: rows in front of it, else -1; KV and blocks, else none.

    Also where the stretches begin whose rows go on with each other; `start` is where the one before
    the first row does.
    """
    goes_on = _goes_on(table_rows, kv_lens, prefix_lens, rows, row_count, GROUPED)
    starts = tl.associative_scan(tl.where(goes_on, start, rows), 0, _larger)
    before = (rows - starts) % TILE
    next_goes_on = _goes_on(table_rows, kv_lens, prefix_lens, rows + 1, row_count, GROUPED)
    ends = (before == TILE - 1) | (next_goes_on == 0)
    ends = ends & (rows < row_count)
    kv_len = tl.load(kv_lens + rows, mask=ends, other=0).to(tl.int32)
    if GROUPED:
        unseen = tl.load(prefix_lens + rows, mask=ends, other=0) // BLOCK
    else:
        unseen = seen_from(kv_len - before, window, WINDOWED) // BLOCK
    # One for rows that see nothing, so that somebody writes their zeros.
    blocks = tl.maximum(tl.cdiv(kv_len, BLOCK) - unseen, 1)
    return tl.where(ends, before, -1), kv_len, tl.where(ends, blocks, 0), starts


@triton.jit
def _group_tiles(
    prefix_lens, places, group_starts, used, rows, row_count, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The same of tiles of groups; and entries of `Prefixes.order`, and tokens in common."""
    common = tl.load(prefix_lens + rows, mask=rows < row_count, other=0)
    listed = common > 0
    entries = tl.load(places + rows, mask=listed, other=0)
    start = tl.load(group_starts + entries, mask=listed, other=0)
    # Behind the last one there may be anything.
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
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Shares for `PROGRAMS` programs; each instance sums all rows, the first one keeps tiles."""
    if CHAINED:
        follow()
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
    """How many of the tiles have a place up to each of the blocks: ``[blocks]`` int32."""
    return tl.sum(((places[None, :] <= blocks) & tiles[None, :]).to(tl.int32), 1)


@triton.jit
def _keep(place, most, last, ahead, end, kv_len, table_row, kept):
    """Writes what tiles are, but for what is seen elsewhere."""
    tl.store(place, last, mask=kept)
    tl.store(place + most, ahead, mask=kept)
    tl.store(place + 2 * most, end, mask=kept)
    tl.store(place + 3 * most, kv_len, mask=kept)
    tl.store(place + 4 * most, table_row, mask=kept)
