"""GPU kernels of decode attention over pages: each row attends to its own KV.

What the rows see is counted in blocks of tokens. The programs of a KV head take equally many of
them, in the order of the rows, so a program may begin and end within a row, and rows of any mix of
lengths take as long as their sum. A row that one program has alone is finished there; of the others
each program leaves a part, and the one that is the last to do so merges them. Shares are computed
on the device, once a step, and grids are fixed: everything can be captured. A row's result depends
on how it is cut, so its last bits may depend on the other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from pie_driver_sglang.chained_triton import chained, follow
from pie_driver_sglang.sglang.masked_torch import Rule

_LOG2E = tl.constexpr(1.4426950408889634)
_FEW_ROWS = 256
"""More are looked at in larger steps."""
_MERGED_NUMBERS = tl.constexpr(8192)
"""Numbers of a row's parts that are merged at once, about."""
_MOST_PAGES = 8
"""Pages of a block that are looked up one by one; smaller ones come as a vector of slots."""


@dataclass(frozen=True)
class Tuning:
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


def tuning(dim: int, group: int, itemsize: int, *, prompts: bool = False) -> Tuning:
    """The cut for a layer.

    Args:
        dim: head size, the larger of keys' and values'.
        group: heads that share a KV head.
        itemsize: bytes of a stored element.
        prompts: whether many rows of the step see the same KV, as those of prompts do.
    """
    elements = 4096 if itemsize > 2 else 8192
    width = int(triton.next_power_of_2(dim))
    if prompts and group <= 64 and width <= 128 and itemsize <= 2:
        return Tuning(min(128, elements // width), warps=4, stages=3, programs=2, queries=64)
    # Up to 16 heads take the same registers.
    elements = elements * 16 // max(16, int(triton.next_power_of_2(group)))
    return Tuning(min(128, max(16, elements // width)), warps=4, stages=3, programs=2)


class Rows(NamedTuple):
    """The rows of a step, each of which sees a beginning of the KV of its table row."""

    table: torch.Tensor
    """``[table rows, tokens]`` int32: storage slot of each KV index, consecutive within a page."""
    table_rows: torch.Tensor
    """``[rows]`` int64; 0 = padding, whose results nobody wants."""
    kv_lens: torch.Tensor
    """``[rows]`` int64: KV that the row sees, its own token's included."""


class Cut(NamedTuple):
    """What layers have in common that share their programs in the same way."""

    tuning: Tuning
    kv_heads: int
    group: int
    """Heads that share a KV head."""
    window: int
    """Stored keys that a row sees at most before its own, by KV index; -1 = all."""

    @property
    def queries(self) -> int:
        """Heads of rows that a product has room for, a power of two."""
        return max(self.tuning.queries, int(triton.next_power_of_2(self.group)))

    @property
    def tile(self) -> int:
        """Rows that a product has room for: their KV is loaded once."""
        return self.queries // self.group


class Shares(NamedTuple):
    """Which blocks each program of a KV head looks at.

    A tile is rows that are looked at together. The blocks of all tiles are numbered in their order.
    """

    cut: Cut
    totals: torch.Tensor
    """``[3]`` int32: blocks of a program, all blocks, all tiles."""
    tiles: torch.Tensor
    """``[5, rows]`` int32, of each tile: its last row, rows in front of that one, blocks up to its
    end, and KV and table row of the last row. There are at most as many as rows."""
    stretches: torch.Tensor
    """``[2, programs]`` int32: the tile that a program begins in, and the one behind its last."""
    arrived: torch.Tensor
    """``[kv_heads, programs]`` int32, zeros between layers: how many have left their part of the
    tile that begins in a program and goes on in the next."""


def share(rows: Rows, cut: Cut, multiprocessors: int) -> Shares:
    """Shares the step's blocks out; can be captured.

    Before the first :func:`attend` there must be a kernel in front that is not launched early.
    """
    count = len(rows.kv_lens)
    programs = max(1, multiprocessors * cut.tuning.programs // cut.kv_heads)
    totals, tiles, stretches, arrived = (
        torch.empty(size, dtype=torch.int32, device=rows.kv_lens.device)
        for size in ((3,), (5, count), (2, programs), (cut.kv_heads, programs))
    )
    # Rows and programs that an instance compares at once.
    planned_rows, planned_programs = (_FEW_ROWS, 32) if count <= _FEW_ROWS else (1024, 16)
    _share[(triton.cdiv(programs, planned_programs),)](
        rows.table_rows, rows.kv_lens, totals, tiles, stretches, arrived,
        count, programs, cut.window,
        BLOCK=cut.tuning.block, WINDOWED=cut.window >= 0, TILE=cut.tile,
        ROWS=planned_rows, PROGRAMS=planned_programs, KV_HEADS=cut.kv_heads,
        num_warps=8, **chained(rows.kv_lens.device),
    )  # fmt: skip
    return Shares(cut, totals, tiles, stretches, arrived)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    rows: Rows,
    shares: Shares,
    rule: Rule,
    page_size: int,
    value_scale: float = 1.0,
) -> None:
    """Attends with every row; one that sees nothing gives zeros. Can be captured.

    Sums are float32, factors of products have the type of the queries.

    Args:
        queries: ``[rows, heads, dim]``, heads contiguous.
        keys: ``[slots, kv_heads, dim]`` of any float type; each serves the same number of
            neighbouring heads.
        values: ``[slots, kv_heads, value_dim]``.
        out: ``[rows, heads, value_dim]``, heads contiguous, written.
        rows: the step.
        shares: of this step, for this layer's `kv_heads` and window.
        rule: the layer, but for its window; the scale includes that of stored keys.
        page_size: tokens of a page.
        value_scale: what stored values are to be multiplied with.
    """
    row_count, heads, dim = queries.shape
    _, kv_heads, value_dim = values.shape
    how, tile, programs = shares.cut.tuning, shares.cut.tile, shares.stretches.shape[1]
    parts = queries.new_empty((2 * programs * tile, heads, value_dim), dtype=torch.float32)
    sums = queries.new_empty((2 * programs * tile, heads), dtype=torch.float32)
    sinks = out if rule.sinks is None else rule.sinks
    # Scores are exponents of two; where capped, cap * tanh(score / cap).
    scale, cap = rule.scale * _LOG2E.value, 0.0
    if rule.cap:
        scale, cap = rule.scale / rule.cap, rule.cap * _LOG2E.value
    _attend[(kv_heads, programs)](
        queries, keys, values, out, rows.table, *shares[1:], parts, sums, sinks,
        scale, value_scale, cap, shares.cut.window, row_count,
        queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), rows.table.stride(0),
        GROUP=shares.cut.group, DIM=dim, VALUE_DIM=value_dim,
        PAGE=page_size, PAGES=_pages(how.block, page_size), BLOCK=how.block,
        GROUP_BLOCK=shares.cut.queries, HEAD_BLOCK=triton.next_power_of_2(shares.cut.group),
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        VALUE_BLOCK=max(16, triton.next_power_of_2(value_dim)),
        CAPPED=rule.cap > 0, WINDOWED=shares.cut.window >= 0, SINKS=rule.sinks is not None,
        TILE=tile, num_warps=how.warps, num_stages=how.stages, **chained(queries.device),
    )  # fmt: skip


def _pages(block: int, page_size: int) -> int:
    """Pages that a block consists of or lies in; 0 where each token is looked up."""
    if page_size % block == 0:
        return 1
    pages, rest = divmod(block, page_size)
    return pages if not rest and pages <= _MOST_PAGES else 0


@triton.jit  # type: ignore[untyped-decorator]
def _first_seen(kv_len, window, WINDOWED: tl.constexpr):  # type: ignore[no-untyped-def]
    if WINDOWED:
        return tl.maximum(kv_len - 1 - window, 0)
    else:  # noqa: RET505  (Triton's compiler drops one of the branches)
        return 0


@triton.jit
def _goes_on(  # type: ignore[no-untyped-def]
    table_rows, kv_lens, rows, row_count
):
    """Whether rows see the KV of the row in front of them and one token more.

    Of padding it does not matter what it sees, so that goes together, too.
    """
    known = (rows > 0) & (rows < row_count)
    own = tl.load(table_rows + rows, mask=known, other=0)
    same = own == tl.load(table_rows + rows - 1, mask=known, other=0)
    kv_len = tl.load(kv_lens + rows, mask=known, other=0)
    longer = kv_len == tl.load(kv_lens + rows - 1, mask=known, other=0) + 1
    return known & same & (longer | (own == 0))


@triton.jit  # type: ignore[untyped-decorator]
def _tiles(  # type: ignore[no-untyped-def]
    table_rows, kv_lens, rows, row_count, start, window,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What the last row of a tile knows: rows in front of it, else -1; KV and blocks, else none.

    Also where the stretches begin whose rows go on with each other; `start` is where the one before
    the first row does.
    """
    goes_on = _goes_on(table_rows, kv_lens, rows, row_count)
    starts = tl.associative_scan(tl.where(goes_on, start, rows), 0, _larger)
    before = (rows - starts) % TILE
    ends = (before == TILE - 1) | (_goes_on(table_rows, kv_lens, rows + 1, row_count) == 0)
    ends = ends & (rows < row_count)
    kv_len = tl.load(kv_lens + rows, mask=ends, other=0).to(tl.int32)
    unseen = _first_seen(kv_len - before, window, WINDOWED) // BLOCK
    # One for rows that see nothing, so that somebody writes their zeros.
    blocks = tl.maximum(tl.cdiv(kv_len, BLOCK) - unseen, 1)
    return tl.where(ends, before, -1), kv_len, tl.where(ends, blocks, 0), starts


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["row_count", "program_count", "window"])  # type: ignore[untyped-decorator]
def _share(  # type: ignore[no-untyped-def]
    table_rows, kv_lens, totals, tiles, stretches, arrived, row_count, program_count, window,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, KV_HEADS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Shares for `PROGRAMS` programs; each instance sums all rows, the first one keeps tiles."""
    if CHAINED:
        follow()
    lanes = tl.arange(0, ROWS)
    total = 0
    tile_count = 0
    start = 0
    for first in range(0, row_count, ROWS):
        ahead, _, blocks, starts = _tiles(
            table_rows, kv_lens, first + lanes, row_count, start, window, BLOCK, WINDOWED, TILE
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
            table_rows, kv_lens, rows, row_count, start, window, BLOCK, WINDOWED, TILE
        )
        is_tile = ahead >= 0
        ends = passed + tl.cumsum(blocks, 0)
        over = (ends[None, :] <= block) & is_tile[None, :]
        ended += tl.sum(over.to(tl.int32), 1)
        under = ((ends - blocks)[None, :] < block + share) & is_tile[None, :]
        begun += tl.sum(under.to(tl.int32), 1)
        kept = is_tile & keeps
        place = tiles + passed_tiles + tl.cumsum(is_tile.to(tl.int32), 0) - 1
        own = tl.load(table_rows + rows, mask=kept, other=0)
        tl.store(place, rows, mask=kept)
        tl.store(place + row_count, ahead, mask=kept)
        tl.store(place + 2 * row_count, ends, mask=kept)
        tl.store(place + 3 * row_count, kv_len, mask=kept)
        tl.store(place + 4 * row_count, own.to(tl.int32), mask=kept)
        passed += tl.sum(blocks)
        passed_tiles += tl.sum(is_tile.to(tl.int32))
        start = tl.max(starts)
    known = programs < program_count
    tl.store(stretches + programs, ended, mask=known)
    tl.store(stretches + program_count + programs, begun, mask=known)
    for head in range(KV_HEADS):
        tl.store(arrived + head * program_count + programs, 0, mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _look_up(  # type: ignore[no-untyped-def]
    slots, token, end, PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr
):
    """Where the block at `token` is stored: first slots of its pages, or slots of its tokens."""
    found = ()
    if PAGES == 0:
        index = token + tl.arange(0, BLOCK)
        found = (tl.load(slots + index, mask=index < end, other=0),)  # type: ignore[assignment]
    for page in tl.static_range(PAGES):
        index = token + page * PAGE
        start = tl.load(slots + index, mask=index < end, other=0)
        found = found + (start,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _slots(  # type: ignore[no-untyped-def]
    found, PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr
):
    """``[BLOCK]`` int64 slots of a block that was looked up."""
    slots = found[0]
    lanes = tl.arange(0, BLOCK)
    if PAGES > 0:
        slots = found[0] + lanes
    for page in tl.static_range(1, PAGES):
        slots = tl.where(lanes >= page * PAGE, found[page] + lanes - page * PAGE, slots)
    return slots.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    mixed, best, total, sinks, heads, in_group, SINKS: tl.constexpr
):
    """Values by their weights; best and total as exponents of two."""
    if SINKS:
        sink = tl.load(sinks + heads, mask=in_group, other=0.0).to(tl.float32) * _LOG2E
        largest = tl.maximum(best, sink)
        mixed = mixed * tl.exp2(best - largest)[:, None]
        total = total * tl.exp2(best - largest) + tl.exp2(sink - largest)
    # A row that sees nothing gives zeros.
    return mixed / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit  # type: ignore[untyped-decorator]
def _attend_span(  # type: ignore[no-untyped-def]
    q, head_keys, head_values, slots_row, found, first_token, end_token, first_seen, kv_lens,
    scale, cap, window, key_slot_stride, value_slot_stride,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Whole blocks of rows: weighted values, the largest score, and the sum of the weights.

    Scores are exponents of two, weights those of scores above the largest. Of each row of `q` the
    KV is what `kv_lens` says, ``[GROUP_BLOCK]``.
    """
    lanes = tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    # Summed over the lanes at the end, for sums over lanes make warps wait for each other.
    totals = tl.zeros([GROUP_BLOCK, BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for token in tl.range(first_token, end_token, BLOCK):
        slots = _slots(found, PAGE, PAGES, BLOCK)
        # One turn ahead: the address of KV must not wait for it.
        found = _look_up(slots_row, token + BLOCK, end_token, PAGE, PAGES, BLOCK)
        # Storage that the row does not see may hold anything, even what is no number.
        seen = token + lanes < end_token
        if WINDOWED:
            seen = seen & (token + lanes >= first_seen)
        k = tl.load(
            head_keys + slots[None, :] * key_slot_stride + dims[:, None],
            mask=seen[None, :] & (dims[:, None] < DIM),
            other=0.0,
        )
        v = tl.load(
            head_values + slots[:, None] * value_slot_stride + value_dims[None, :],
            mask=seen[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        if CAPPED:
            # tanh(x) = 2 sigmoid(2 x) - 1
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
        own = token + lanes[None, :] < kv_lens[:, None]
        if WINDOWED:
            own = own & (token + lanes[None, :] >= kv_lens[:, None] - 1 - window)
        scores = tl.where(own, scores, float("-inf"))
        largest = tl.maximum(best, tl.max(scores, 1))
        # Of a row that has seen nothing yet all weights are 0.
        level = tl.where(largest == float("-inf"), 0.0, largest)
        shrink = tl.exp2(best - level)
        weights = tl.exp2(scores - level[:, None])
        totals = totals * shrink[:, None] + weights
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        best = largest
    return mixed, best, tl.sum(totals, 1)


@triton.jit(do_not_specialize=["row_count", "window"])  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    queries, keys, values, out, table, totals, tiles, stretches, arrived, parts, sums, sinks,
    scale, value_scale, cap, window, row_count,
    query_stride, key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    out_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr,
    TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A program's share of the blocks, with the heads of one KV head.

    Shares and the block table are read before the kernel in front has ended: it wrote neither.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    share = tl.load(totals)
    block = program * share
    stop = tl.minimum(block + share, tl.load(totals + 1))
    tile_count = tl.load(totals + 2)
    start = tl.load(stretches + program)
    until = tl.load(stretches + tl.num_programs(1) + program)
    begin = tl.load(tiles + 2 * row_count + start - 1, mask=start > 0, other=0)
    row, ahead, end, kv_len, slots = _tile(tiles, start, tile_count, row_count, table, table_stride)
    following = _tile(tiles, start + 1, tile_count, row_count, table, table_stride)
    seen = _span(block, tl.minimum(end, stop), begin, ahead, kv_len, window, BLOCK, WINDOWED)
    found = _look_up(slots, seen[0], seen[1], PAGE, PAGES, BLOCK)
    group = tl.arange(0, GROUP_BLOCK)
    # The heads of the first row of the tile, then those of the second one.
    number = group // GROUP
    heads = kv_head * GROUP + group % GROUP
    value_dims = tl.arange(0, VALUE_BLOCK)
    own_queries = queries + heads * DIM
    if CHAINED:
        follow()
    q = _load_queries(own_queries, number, row, ahead, query_stride, DIM, DIM_BLOCK)
    for tile in range(start, until):
        last = tl.minimum(end, stop)
        # What the next tiles need is on its way while this one's KV is looked at.
        next_row, next_ahead, next_end, next_kv_len, next_slots = following
        following = _tile(tiles, tile + 2, tile_count, row_count, table, table_stride)
        next_seen = _span(
            last, tl.minimum(next_end, stop), end, next_ahead, next_kv_len, window, BLOCK, WINDOWED
        )
        next_found = _look_up(next_slots, next_seen[0], next_seen[1], PAGE, PAGES, BLOCK)
        next_q = _load_queries(
            own_queries, number, next_row, next_ahead, query_stride, DIM, DIM_BLOCK
        )
        mixed, best, total = _attend_span(
            q, keys + kv_head * key_head_stride, values + kv_head * value_head_stride,
            slots, found, seen[0], seen[1], _first_seen(kv_len - ahead, window, WINDOWED),
            kv_len - ahead + number, scale, cap, window, key_slot_stride, value_slot_stride,
            DIM, VALUE_DIM, PAGE, PAGES, BLOCK, GROUP_BLOCK, DIM_BLOCK, VALUE_BLOCK,
            CAPPED, WINDOWED,
        )  # fmt: skip
        mixed = mixed * value_scale
        asks = number <= ahead
        first, final = begin // share, (end - 1) // share
        if first == final:
            mixed = _finish(mixed, best, total, sinks, heads, asks, SINKS)
            rows = (row - ahead + number).to(tl.int64)
            tl.store(
                out + (rows * out_stride + heads * VALUE_DIM)[:, None] + value_dims[None, :],
                mixed,
                mask=asks[:, None] & (value_dims[None, :] < VALUE_DIM),
            )
        else:
            _leave(
                mixed, best, total, out, parts, sums, sinks, arrived, program, first, final,
                row - ahead, ahead, number, kv_head, out_stride,
                GROUP, VALUE_DIM, GROUP_BLOCK, HEAD_BLOCK, VALUE_BLOCK, SINKS, TILE,
            )  # fmt: skip
        block = last
        begin = end
        row, ahead, end, kv_len, slots = next_row, next_ahead, next_end, next_kv_len, next_slots
        seen = next_seen
        found = next_found
        q = next_q


@triton.jit
def _tile(tiles, tile, tile_count, row_count, table, table_stride):  # type: ignore[no-untyped-def]
    """A tile's last row, rows in front of it, its end, KV and slots; nothing behind the last."""
    place = tiles + tile
    known = tile < tile_count
    row = tl.load(place, mask=known, other=0)
    ahead = tl.load(place + row_count, mask=known, other=0)
    end = tl.load(place + 2 * row_count, mask=known, other=0)
    kv_len = tl.load(place + 3 * row_count, mask=known, other=0)
    table_row = tl.load(place + 4 * row_count, mask=known, other=0).to(tl.int64)
    return row, ahead, end, kv_len, table + table_row * table_stride


@triton.jit  # type: ignore[untyped-decorator]
def _load_queries(  # type: ignore[no-untyped-def]
    own_queries, number, row, ahead, query_stride, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr
):
    """Those of a tile's rows: ``[GROUP_BLOCK, DIM_BLOCK]``."""
    rows = (row - ahead + number).to(tl.int64)
    dims = tl.arange(0, DIM_BLOCK)
    return tl.load(
        (own_queries + rows * query_stride)[:, None] + dims[None, :],
        mask=(number <= ahead)[:, None] & (dims[None, :] < DIM),
        other=0.0,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _place(program, first, number, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where a program leaves its part of a row: two tiles, the latter begins in the program."""
    return (2 * program + (program == first).to(tl.int32)) * TILE + number


@triton.jit  # type: ignore[untyped-decorator]
def _leave(  # type: ignore[no-untyped-def]
    mixed, best, total, out, parts, sums, sinks, arrived, program, first, final,
    first_row, ahead, number, kv_head, out_stride,
    GROUP: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, SINKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Keeps a program's part of a tile; the last of `first` to `final` merges all of them."""
    heads = kv_head * GROUP + tl.arange(0, GROUP_BLOCK) % GROUP
    head_count = tl.num_programs(0) * GROUP
    asks = number <= ahead
    value_dims = tl.arange(0, VALUE_BLOCK)[None, :]
    place = _place(program, first, number, TILE) * head_count + heads
    tl.store(
        parts + place[:, None] * VALUE_DIM + value_dims,
        mixed / tl.where(total > 0, total, 1.0)[:, None],
        mask=asks[:, None] & (value_dims < VALUE_DIM),
    )
    tl.store(sums + place, best + tl.log2(total), mask=asks)
    # No warp says that its part is there before all warps' are.
    tl.debug_barrier()
    count = arrived + kv_head * tl.num_programs(1) + first
    if tl.atomic_add(count, 1, sem="acq_rel") == final - first:
        tl.store(count, 0)
        AT_ONCE: tl.constexpr = max(1, _MERGED_NUMBERS // (HEAD_BLOCK * VALUE_BLOCK))
        # Whatever takes fewer turns.
        if final - first < (ahead + 1) * tl.cdiv(final - first + 1, AT_ONCE):
            mixed, best, total = _merged_rows(
                parts, sums, first, final, number, heads, head_count, asks,
                VALUE_DIM, GROUP_BLOCK, VALUE_BLOCK, TILE,
            )  # fmt: skip
            mixed = _finish(mixed, best, total, sinks, heads, asks, SINKS)
            start = (first_row + number).to(tl.int64) * out_stride + heads * VALUE_DIM
            written = asks[:, None] & (value_dims < VALUE_DIM)
            tl.store(out + start[:, None] + value_dims, mixed, mask=written)
        else:
            lanes = tl.arange(0, HEAD_BLOCK)
            in_group = lanes < GROUP
            own_heads = kv_head * GROUP + lanes
            for turn in range(ahead + 1):
                one, largest, weight = _merged_parts(
                    parts, sums, first, final, turn, own_heads, in_group, head_count,
                    VALUE_DIM, HEAD_BLOCK, VALUE_BLOCK, AT_ONCE, TILE,
                )  # fmt: skip
                one = _finish(one, largest, weight, sinks, own_heads, in_group, SINKS)
                begin = (first_row + turn).to(tl.int64) * out_stride + own_heads * VALUE_DIM
                kept = in_group[:, None] & (value_dims < VALUE_DIM)
                tl.store(out + begin[:, None] + value_dims, one, mask=kept)


@triton.jit  # type: ignore[untyped-decorator]
def _merged_rows(  # type: ignore[no-untyped-def]
    parts, sums, first, final, number, heads, head_count, asks,
    VALUE_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """What programs `first` to `final` left of a tile, as :func:`_attend_span`: part by part."""
    value_dims = tl.arange(0, VALUE_BLOCK)
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for program in range(first, final + 1):
        place = _place(program, first, number, TILE) * head_count + heads
        # Past the first-level cache, which knows nothing of other programs.
        logs = tl.load(sums + place, mask=asks, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            parts + place[:, None] * VALUE_DIM + value_dims[None, :],
            mask=asks[:, None] & (value_dims[None, :] < VALUE_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        largest = tl.maximum(best, logs)
        level = tl.where(largest == float("-inf"), 0.0, largest)
        shrink = tl.exp2(best - level)
        weights = tl.exp2(logs - level)
        total = total * shrink + weights
        mixed = mixed * shrink[:, None] + weights[:, None] * part
        best = largest
    return mixed, best, total


@triton.jit  # type: ignore[untyped-decorator]
def _merged_parts(  # type: ignore[no-untyped-def]
    parts, sums, first, final, number, heads, in_set, head_count,
    VALUE_DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What programs `first` to `final` left of one row of a tile: many parts at once."""
    value_dims = tl.arange(0, VALUE_BLOCK)[None, None, :]
    best = tl.full([HEAD_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([HEAD_BLOCK], tl.float32)
    mixed = tl.zeros([HEAD_BLOCK, VALUE_BLOCK], tl.float32)
    for start in range(first, final + 1, AT_ONCE):
        programs = start + tl.arange(0, AT_ONCE)
        known = in_set[:, None] & (programs <= final)[None, :]
        places = _place(programs, first, number, TILE)[None, :] * head_count + heads[:, None]
        # Past the first-level cache, which knows nothing of other programs.
        logs = tl.load(sums + places, mask=known, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            parts + places[:, :, None] * VALUE_DIM + value_dims,
            mask=known[:, :, None] & (value_dims < VALUE_DIM),
            other=0.0,
            cache_modifier=".cg",
        )
        largest = tl.maximum(best, tl.max(logs, 1))
        level = tl.where(largest == float("-inf"), 0.0, largest)
        shrink = tl.exp2(best - level)
        weights = tl.exp2(logs - level[:, None])
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.sum(weights[:, :, None] * part, 1)
        best = largest
    return mixed, best, total


@triton.jit  # type: ignore[untyped-decorator]
def _span(  # type: ignore[no-untyped-def]
    block, last, begin, ahead, kv_len, window, BLOCK: tl.constexpr, WINDOWED: tl.constexpr
):
    """The first token of a tile's blocks up to `last`, and the end of those that one row sees."""
    skipped = _first_seen(kv_len - ahead, window, WINDOWED) // BLOCK - begin
    return (block + skipped) * BLOCK, tl.minimum((last + skipped) * BLOCK, kv_len)
