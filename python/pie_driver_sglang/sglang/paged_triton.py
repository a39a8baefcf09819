"""GPU kernels of decode attention over pages: each row attends to its own KV.

What the rows see is counted in blocks of tokens. The programs of a KV head take equally many of
them, in the order of the rows, so a program may begin and end within a row, and rows of any mix of
lengths take as long as their sum. A row that one program has alone is finished there; of the others
the programs leave parts, which a second kernel merges. Shares are computed on the device, once a
step, and grids are fixed: everything can be captured. A row's result depends on how it is cut, so
its last bits may depend on the other rows.
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
_MERGED_PARTS = 16
_MERGED_ROWS = 4
"""Rows of a tile that a program merges in turn; most tiles are of one row."""
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
    folds: bool = False
    """Whether the last program of a row merges what the others left, not a kernel of its own."""


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
    return Tuning(min(128, max(16, elements // width)), warps=4, stages=4, programs=2)


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
    """Which blocks each program of a KV head looks at."""

    cut: Cut
    size: torch.Tensor
    """``[1]`` int32: blocks of a program."""
    bounds: torch.Tensor
    """``[rows + 1]`` int32: blocks before each row, and of all rows."""
    first_rows: torch.Tensor
    """``[programs]`` int32: the row that a program begins in."""
    before: torch.Tensor
    """``[rows]`` int32: rows in front of each one that are looked at with it; -1 for these."""
    lasts: torch.Tensor
    """``[rows]`` int32: the last of the rows that are looked at with one, for the first of them."""
    arrived: torch.Tensor
    """``[kv_heads, programs]`` int32, zeros between layers: how many have left their part of the
    row that begins in a program and goes on in the next."""


def share(rows: Rows, cut: Cut, multiprocessors: int) -> Shares:
    """Shares the step's blocks out; can be captured.

    Before the first :func:`attend` there must be a kernel in front that is not launched early.
    """
    count = len(rows.kv_lens)
    programs = max(1, multiprocessors * cut.tuning.programs // cut.kv_heads)
    size, bounds, first_rows, before, lasts = (
        torch.empty(length, dtype=torch.int32, device=rows.kv_lens.device)
        for length in (1, count + 1, programs, count, count)
    )
    arrived = torch.empty(cut.kv_heads, programs, dtype=torch.int32, device=size.device)
    # Rows and programs that an instance compares at once.
    planned_rows, planned_programs = (128, 64) if count <= _FEW_ROWS else (1024, 16)
    _share[(triton.cdiv(programs, planned_programs),)](
        rows.table_rows, rows.kv_lens, size, bounds, first_rows, before, lasts, arrived,
        count, programs, cut.window,
        BLOCK=cut.tuning.block, WINDOWED=cut.window >= 0, TILE=cut.tile,
        ROWS=planned_rows, PROGRAMS=planned_programs, KV_HEADS=cut.kv_heads,
        num_warps=4 if count <= _FEW_ROWS else 8, **chained(rows.kv_lens.device),
    )  # fmt: skip
    return Shares(cut, size, bounds, first_rows, before, lasts, arrived)


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
    how, group, programs = shares.cut.tuning, shares.cut.group, len(shares.first_rows)
    tile = shares.cut.tile
    parts = queries.new_empty((2 * programs * tile, heads, value_dim), dtype=torch.float32)
    sums = queries.new_empty((2 * programs * tile, heads), dtype=torch.float32)
    sinks = out if rule.sinks is None else rule.sinks
    # Scores are exponents of two; where capped, cap * tanh(score / cap).
    scale, cap = rule.scale * _LOG2E.value, 0.0
    if rule.cap:
        scale, cap = rule.scale / rule.cap, rule.cap * _LOG2E.value
    common = {
        "VALUE_DIM": value_dim,
        "VALUE_BLOCK": max(16, triton.next_power_of_2(value_dim)),
        "SINKS": rule.sinks is not None,
        "TILE": tile,
        **chained(queries.device),
    }
    _attend[(kv_heads, programs)](
        queries, keys, values, out, *rows, *shares[1:], parts, sums, sinks,
        scale, value_scale, cap, shares.cut.window, row_count,
        queries.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), rows.table.stride(0),
        GROUP=group, DIM=dim, PAGE=page_size, PAGES=_pages(how.block, page_size), BLOCK=how.block,
        GROUP_BLOCK=shares.cut.queries,
        DIM_BLOCK=max(16, triton.next_power_of_2(dim)),
        CAPPED=rule.cap > 0, WINDOWED=shares.cut.window >= 0, FOLDS=how.folds, **common,
        num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    if programs > 1 and not how.folds:
        _merge[(programs - 1, heads, triton.cdiv(tile, _MERGED_ROWS))](
            out, *shares[1:5], parts, sums, sinks, row_count, out.stride(0),
            PARTS=_MERGED_PARTS, **common,
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
    """What the last row of a tile knows: rows in front of it, else -1, and blocks, else none.

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
    return tl.where(ends, before, -1), tl.where(ends, blocks, 0), starts


@triton.jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["row_count", "program_count", "window"])  # type: ignore[untyped-decorator]
def _share(  # type: ignore[no-untyped-def]
    table_rows, kv_lens, size, bounds, first_rows, before, lasts, arrived, row_count,
    program_count, window,
    BLOCK: tl.constexpr, WINDOWED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr, KV_HEADS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Shares for `PROGRAMS` programs; each instance sums all rows, the first one keeps the sums."""
    if CHAINED:
        follow()
    lanes = tl.arange(0, ROWS)
    total = 0
    start = 0
    for first in range(0, row_count, ROWS):
        _, blocks, starts = _tiles(
            table_rows, kv_lens, first + lanes, row_count, start, window, BLOCK, WINDOWED, TILE
        )
        total += tl.sum(blocks)
        start = tl.max(starts)
    share = tl.cdiv(total, program_count)
    programs = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    keeps = tl.program_id(0) == 0
    tl.store(size, share, mask=keeps)
    tl.store(bounds, 0, mask=keeps)
    passed = 0
    start = 0
    # A program begins in the row whose number is that of the rows that end before.
    ended = tl.zeros([PROGRAMS], tl.int32)
    for first in range(0, row_count, ROWS):
        rows = first + lanes
        ahead, blocks, starts = _tiles(
            table_rows, kv_lens, rows, row_count, start, window, BLOCK, WINDOWED, TILE
        )
        ends = passed + tl.cumsum(blocks, 0)
        inside = rows < row_count
        tl.store(before + rows, ahead, mask=inside & keeps)
        tl.store(lasts + rows - ahead, rows, mask=(ahead >= 0) & keeps)
        tl.store(bounds + 1 + rows, ends, mask=inside & keeps)
        over = (ends[None, :] <= programs[:, None] * share) & inside[None, :]
        ended += tl.sum(over.to(tl.int32), 1)
        passed += tl.sum(blocks)
        start = tl.max(starts)
    tl.store(first_rows + programs, ended, mask=programs < program_count)
    for head in range(KV_HEADS):
        tl.store(arrived + head * program_count + programs, 0, mask=programs < program_count)


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
    queries, keys, values, out, table, table_rows, kv_lens, size, bounds, first_rows, before,
    lasts, arrived, parts, sums, sinks, scale, value_scale, cap, window, row_count,
    query_stride, key_slot_stride, key_head_stride, value_slot_stride, value_head_stride,
    out_stride, table_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr,
    GROUP_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, SINKS: tl.constexpr, FOLDS: tl.constexpr,
    TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A program's share of the blocks, with the heads of one KV head.

    Shares and the block table are read before the kernel in front has ended: it wrote neither.
    """
    program = tl.program_id(1)
    share = tl.load(size)
    row = tl.load(first_rows + program)
    start = program * share
    stop = tl.minimum(start + share, tl.load(bounds + row_count))
    begin = tl.load(bounds + row)
    ahead = tl.load(before + row, mask=row < row_count, other=0)
    end, kv_len, slots_row = _row(bounds, kv_lens, table_rows, table, table_stride, row, row_count)
    kv_head = tl.program_id(0)
    head_count = tl.num_programs(0) * GROUP
    group = tl.arange(0, GROUP_BLOCK)
    # The heads of the first row of the tile, then those of the second one.
    number = group // GROUP
    heads = kv_head * GROUP + group % GROUP
    dims = tl.arange(0, DIM_BLOCK)
    value_dims = tl.arange(0, VALUE_BLOCK)
    block = start
    last = tl.minimum(end, stop)
    seen = _span(block, last, begin, ahead, kv_len, window, BLOCK, WINDOWED)
    found = _look_up(slots_row, seen[0], seen[1], PAGE, PAGES, BLOCK)
    if CHAINED:
        follow()
    while block < stop:
        # One turn ahead: the first row of the next tile follows this one's last.
        next_row = tl.load(lasts + row + 1, mask=row + 1 < row_count, other=row_count)
        following = _row(bounds, kv_lens, table_rows, table, table_stride, next_row, row_count)
        asks = number <= ahead
        rows = (row - ahead + number).to(tl.int64)
        q = tl.load(
            queries + (rows * query_stride + heads * DIM)[:, None] + dims[None, :],
            mask=asks[:, None] & (dims[None, :] < DIM),
            other=0.0,
        )
        mixed, best, total = _attend_span(
            q, keys + kv_head * key_head_stride, values + kv_head * value_head_stride,
            slots_row, found, seen[0], seen[1], _first_seen(kv_len - ahead, window, WINDOWED),
            kv_len - ahead + number, scale, cap, window, key_slot_stride, value_slot_stride,
            DIM, VALUE_DIM, PAGE, PAGES, BLOCK, GROUP_BLOCK, DIM_BLOCK, VALUE_BLOCK,
            CAPPED, WINDOWED,
        )  # fmt: skip
        mixed = mixed * value_scale
        written = asks[:, None] & (value_dims[None, :] < VALUE_DIM)
        if (begin >= start) & (end <= stop):
            mixed = _finish(mixed, best, total, sinks, heads, asks, SINKS)
            row_out = out + (rows * out_stride + heads * VALUE_DIM)[:, None]
            tl.store(row_out + value_dims[None, :], mixed, mask=written)
        else:
            # Where the row begins the second of the program's two places, else the first.
            place = 2 * program + (begin >= start).to(tl.int32)
            place = (place * TILE + number) * head_count + heads
            tl.store(
                parts + place[:, None] * VALUE_DIM + value_dims[None, :],
                mixed / tl.where(total > 0, total, 1.0)[:, None],
                mask=written,
            )
            tl.store(sums + place, best + tl.log2(total), mask=asks)
            if FOLDS:
                # No warp says that its part is there before all warps' are.
                tl.debug_barrier()
                first, final = begin // share, (end - 1) // share
                count = arrived + kv_head * tl.num_programs(1) + first
                if tl.atomic_add(count, 1, sem="acq_rel") == final - first:
                    tl.store(count, 0)
                    mixed, best, total = _folded(
                        parts, sums, first, final, number, heads, head_count, asks,
                        VALUE_DIM, GROUP_BLOCK, VALUE_BLOCK, TILE,
                    )  # fmt: skip
                    mixed = _finish(mixed, best, total, sinks, heads, asks, SINKS)
                    row_out = out + (rows * out_stride + heads * VALUE_DIM)[:, None]
                    tl.store(row_out + value_dims[None, :], mixed, mask=written)
        block = last
        begin = end
        ahead = next_row - row - 1
        row = next_row
        end, kv_len, slots_row = following
        last = tl.minimum(end, stop)
        seen = _span(block, last, begin, ahead, kv_len, window, BLOCK, WINDOWED)
        found = _look_up(slots_row, seen[0], seen[1], PAGE, PAGES, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def _folded(  # type: ignore[no-untyped-def]
    parts, sums, first, final, number, heads, head_count, asks,
    VALUE_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """What programs `first` to `final` left of a tile's rows, as :func:`_attend_span`."""
    value_dims = tl.arange(0, VALUE_BLOCK)
    best = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    mixed = tl.zeros([GROUP_BLOCK, VALUE_BLOCK], tl.float32)
    for program in range(first, final + 1):
        place = 2 * program + (program == first).to(tl.int32)
        place = (place * TILE + number) * head_count + heads
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
def _span(  # type: ignore[no-untyped-def]
    block, last, begin, ahead, kv_len, window, BLOCK: tl.constexpr, WINDOWED: tl.constexpr
):
    """The first token of a tile's blocks up to `last`, and the end of those that one row sees."""
    skipped = _first_seen(kv_len - ahead, window, WINDOWED) // BLOCK - begin
    return (block + skipped) * BLOCK, tl.minimum((last + skipped) * BLOCK, kv_len)


@triton.jit
def _row(bounds, kv_lens, table_rows, table, table_stride, row, row_count):  # type: ignore[no-untyped-def]
    """Where a row's blocks end, its KV and its slots; nothing of use behind the last row."""
    known = row < row_count
    end = tl.load(bounds + row + 1, mask=known, other=0)
    kv_len = tl.load(kv_lens + row, mask=known, other=0).to(tl.int32)
    table_row = tl.load(table_rows + row, mask=known, other=0).to(tl.int64)
    return end, kv_len, table + table_row * table_stride


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, size, bounds, first_rows, before, parts, sums, sinks, row_count, out_stride,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr,
    TILE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """A row of those that begin in a program and go on in the next, if there are some."""
    first = tl.program_id(0)
    share = tl.load(size)
    row = tl.load(first_rows + first + 1)
    blocks = tl.load(bounds + row_count)
    begin = tl.load(bounds + row)
    end = tl.load(bounds + row + 1, mask=row < row_count, other=0)
    ahead = tl.load(before + row, mask=row < row_count, other=0)
    if CHAINED:
        follow()
    stop = (first + 1) * share
    if (stop >= blocks) | (begin >= stop) | (begin < first * share):
        return
    last = (end - 1) // share
    head = tl.program_id(1)
    for number in range(tl.program_id(2), ahead + 1, tl.num_programs(2)):
        mixed, best, total = _merged(
            parts, sums, first, last, number, head, VALUE_DIM, VALUE_BLOCK, PARTS, TILE
        )
        heads = head + tl.arange(0, 1)
        mixed = _finish(mixed, best, total, sinks, heads, heads >= 0, SINKS)
        value_dims = tl.arange(0, VALUE_BLOCK)
        place = (row - ahead + number).to(tl.int64) * out_stride + head * VALUE_DIM + value_dims
        tl.store(out + place[None, :], mixed, mask=value_dims[None, :] < VALUE_DIM)


@triton.jit  # type: ignore[untyped-decorator]
def _merged(  # type: ignore[no-untyped-def]
    parts, sums, first, last, number, head,
    VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What programs `first` to `last` left of a head of a tile's row, as :func:`_attend_span`."""
    head_count = tl.num_programs(1)
    value_dims = tl.arange(0, VALUE_BLOCK)
    in_value = value_dims < VALUE_DIM
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([1, VALUE_BLOCK], tl.float32)
    for start in range(first, last + 1, PARTS):
        programs = start + tl.arange(0, PARTS)
        known = programs <= last
        places = 2 * programs + (programs == first).to(tl.int32)
        places = (places * TILE + number) * head_count + head
        logs = tl.load(sums + places, mask=known, other=float("-inf"))
        part = tl.load(
            parts + places[:, None] * VALUE_DIM + value_dims[None, :],
            mask=known[:, None] & in_value[None, :],
            other=0.0,
        )
        largest = tl.maximum(best, tl.max(logs, 0))
        level = tl.where(largest == float("-inf"), 0.0, largest)
        shrink = tl.exp2(best - level)
        weights = tl.exp2(logs - level)
        total = total * shrink + tl.sum(weights, 0)
        mixed = mixed * shrink[:, None] + tl.sum(weights[:, None] * part, 0)[None, :]
        best = largest
    return mixed, best, total
