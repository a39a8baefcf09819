"""Paged decode attention in Triton's interpreter, against dense attention in float64.

Run with ``TRITON_INTERPRET=1``; prints the error of each case. Storage that no row may see holds
what is NaN, and the table's unused entries name no slot.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from pie_driver_sglang.kernels.attention.masked_reference import AttentionParams
from pie_driver_sglang.kernels.attention.paged_decode import attend_paged
from pie_driver_sglang.kernels.attention.prompt_rows import find_prompts
from pie_driver_sglang.kernels.attention.split_plan import (
    SKIP_ROW,
    DecodeRows,
    Prefixes,
    SplitPlan,
    SplitTuning,
    plan_splits,
)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Of the largest value of a row."""
NO_SLOT = 2**31 - 1
PADDING = 5
"""Rows after those of a case."""


class Case(NamedTuple):
    """A layer, a step and how it is cut."""

    lengths: tuple[int, ...]
    """KV of each row."""
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    value_dim: int = 16
    page: int = 16
    block: int = 16
    multiprocessors: int = 6
    dtype: torch.dtype = torch.float32
    pool: torch.dtype = torch.float32
    cap: float = 0.0
    window: int = -1
    sinks: bool = False
    value_scale: float = 1.0
    queries: int = 16
    shared: bool = False
    """All rows are one context's, as those of a draft."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Rows that begin with the same KV."""
    common: tuple[int, ...] = ()
    """How much of it, by group: whole blocks and pages."""


FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
RAGGED = (40, 0, 1, 15, 16, 17, 100, 0, 33)
# Without bfloat16, of which the interpreter multiplies no matrices.
CASES = [
    # Nothing to see anywhere, in the first row, in the last one.
    Case((0,)),
    Case((0, 0, 3)),
    Case((5, 0)),
    Case(RAGGED),
    # One program for everything; as many as blocks; far more.
    Case(RAGGED, multiprocessors=1),
    Case((160,), multiprocessors=20),
    Case((160,), multiprocessors=99),
    # A row over more programs than are merged at once.
    Case((16 * 37,), multiprocessors=74),
    # Pages of every size with blocks of every size.
    *(
        Case((70, 3, 48), page=page, block=block)
        for page, block in ((1, 16), (3, 32), (8, 16), (8, 128), (16, 64), (24, 16), (64, 32))
    ),
    # Head sizes that fill no power of two, and groups.
    *(
        Case((37, 5), heads, kv_heads, dim, value_dim)
        for heads, kv_heads, dim, value_dim in (
            (5, 1, 64, 64), (20, 1, 16, 16), (3, 3, 24, 40), (8, 8, 80, 80), (4, 2, 96, 64),
            (2, 1, 128, 128), (4, 1, 192, 128), (2, 2, 256, 256),
        )
    ),
    # Windows that end within a block, at its edge, that hide blocks, all but the row's own token.
    *(Case(RAGGED, window=window) for window in (0, 7, 15, 16, 40, 1000)),
    # Rows of one context whose KV is loaded once: in one tile, in several, in none.
    Case((37, 38, 39, 40, 41), shared=True),
    Case((0, 1, 2, 3, 4, 9, 10, 11, 11, 12, 30), shared=True),
    Case((41, 40, 39), shared=True),
    *(
        Case(tuple(range(first, 55)), heads, kv_heads, window=window, sinks=window == 5,
             multiprocessors=multiprocessors, shared=True)
        for first, heads, kv_heads, window, multiprocessors in (
            (0, 2, 2, -1, 6), (30, 2, 2, 5, 30), (30, 4, 2, 0, 30), (20, 5, 1, 30, 6),
            (1, 5, 1, -1, 40), (40, 16, 1, 5, 1), (40, 20, 1, 17, 6),
        )
    ),
    # Prompts together with decodes, in larger tiles.
    Case((*range(7, 60), 33, 60, *range(1, 40)), queries=64, shared=True),
    Case(tuple(range(120)), 2, 1, window=30, queries=64, multiprocessors=30, shared=True),
    # So many parts that one turn does not merge them, of one row and of several.
    Case((700, 701, 702), 6, 1, 128, 128, multiprocessors=60, queries=32, shared=True),
    Case((700, 300, 41), 6, 1, 128, 128, multiprocessors=60, sinks=True),
    Case((700, 701, 702, 703), 3, 1, 256, 256, multiprocessors=90, window=600, shared=True),
    Case(RAGGED, sinks=True),
    Case(RAGGED, sinks=True, multiprocessors=20),
    Case(RAGGED, cap=2.0),
    Case(RAGGED, cap=5.0, window=20, sinks=True, multiprocessors=20),
    Case(RAGGED, dtype=torch.float16, pool=torch.float16),
    # Groups: all rows, some of them, several; in one tile and in more; little to see alone.
    Case((49, 60, 100), groups=((0, 1, 2),), common=(48,)),
    Case((49, 7, 60, 100, 0, 33), groups=((3, 0, 2),), common=(48,)),
    Case((17, 34, 50, 18, 35, 70), groups=((5, 2, 1), (0, 3, 4)), common=(32, 16)),
    Case((90, 91, 92, 93, 40, 88, 90), groups=((0, 1, 2, 3, 6), (4, 5)), common=(80, 32)),
    Case(tuple(range(65, 105)), 6, 2, groups=(tuple(range(40)),), common=(64,)),
    *(
        Case((700, 701, 650, 30), 6, 1, 128, 128, multiprocessors=multiprocessors, sinks=sinks,
             cap=cap, groups=((0, 1, 2),), common=(640,))
        for multiprocessors, sinks, cap in ((1, False, 0.0), (60, True, 0.0), (9, False, 3.0))
    ),
    Case((100, 101, 99), queries=64, groups=((1, 0, 2),), common=(96,), dtype=torch.float16,
         pool=torch.float16),
    # A layer with a window reads all of its own.
    Case((49, 60, 100), window=20, groups=((0, 1, 2),), common=(48,)),
    *(
        Case(RAGGED, dtype=dtype, pool=pool, value_scale=0.75)
        for dtype, pool in itertools.product((torch.float32, torch.float16), FP8)
    ),
]  # fmt: skip


class Step(NamedTuple):
    """Random inputs of a case."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rows: DecodeRows
    rule: AttentionParams
    slots: list[torch.Tensor]
    """Storage slot of each KV index, by row."""


def make_step(case: Case, generator: torch.Generator) -> Step:
    """Scattered pages, one of them unused."""
    counts = [-(-length // case.page) for length in case.lengths]
    order = torch.randperm(sum(counts) + 1, generator=generator)
    width = max(counts) * case.page + 7
    table = torch.full((len(counts) + 2, width), NO_SLOT, dtype=torch.int32)
    table_rows = torch.randperm(len(counts), generator=generator) + 1
    seen = torch.zeros((sum(counts) + 1) * case.page, dtype=torch.bool)
    slots = []
    if case.shared:
        table_rows[:] = table_rows[0]
    leaders = {row: (group[0], common) for group, common in pairs(case) for row in group[1:]}
    owned: list[torch.Tensor] = []
    for count in counts:
        owned.append(order[:count])
        order = order if case.shared else order[count:]
    for row, (leader, common) in leaders.items():
        owned[row][: common // case.page] = owned[leader][: common // case.page]
    for row, own, length in zip(table_rows, owned, case.lengths, strict=True):
        page_slots = (own[:, None] * case.page + torch.arange(case.page)).flatten()
        table[row, : len(page_slots)] = page_slots.int()
        slots.append(page_slots[:length])
        first = max(0, length - 1 - case.window) if case.window >= 0 else 0
        seen[slots[-1][first:]] = True
    # As the driver stages padding: it sees one token, which may be anything.
    table[0] = 0
    seen[0] = True
    storage = len(seen)

    def random_like(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def stored(dim: int) -> torch.Tensor:
        found = random_like(storage, case.kv_heads, dim)
        found[~seen] = math.nan
        return found.to(case.pool)

    padding = torch.zeros(PADDING, dtype=torch.int64)
    return Step(
        random_like(len(counts) + PADDING, case.heads, case.dim).to(case.dtype),
        stored(case.dim),
        stored(case.value_dim),
        DecodeRows(
            table,
            torch.cat([table_rows, padding]),
            torch.cat([torch.tensor(case.lengths), padding + 1]),
            prefixes(case) if case.groups else None,
        ),
        AttentionParams(
            case.dim**-0.5, case.cap, sinks=random_like(case.heads) if case.sinks else None
        ),
        slots,
    )


def pairs(case: Case) -> list[tuple[tuple[int, ...], int]]:
    """Each group and how much its rows have in common."""
    return list(zip(case.groups, case.common, strict=True))


def prefixes(case: Case) -> Prefixes:
    """As they are staged: what is not in use may be anything."""
    count = len(case.lengths) + PADDING
    lens = torch.zeros(count, dtype=torch.int32)
    indices, order, starts = (torch.full((count,), NO_SLOT, dtype=torch.int32) for _ in range(3))
    used = 0
    for group, common in pairs(case):
        lens[list(group)] = common
        order[used : used + len(group)] = torch.tensor(group)
        indices[list(group)] = torch.arange(used, used + len(group), dtype=torch.int32)
        starts[used : used + len(group)] = used
        used += len(group)
    return Prefixes(lens, indices, order, starts, torch.tensor([used], dtype=torch.int32))


def dense(case: Case, step: Step) -> torch.Tensor:
    """What the kernels must compute, in float64."""
    out = torch.zeros(len(case.lengths), case.heads, case.value_dim, dtype=torch.float64)
    for row, slots in enumerate(step.slots):
        if not len(slots):
            continue
        if case.window >= 0:
            slots = slots[max(0, len(slots) - 1 - case.window) :]
        group = case.heads // case.kv_heads
        keys, values = (
            part[slots].double().repeat_interleave(group, 1) for part in (step.keys, step.values)
        )
        scores = torch.einsum("hd,thd->ht", step.queries[row].double(), keys) * step.rule.scale
        if case.cap:
            scores = case.cap * torch.tanh(scores / case.cap)
        if step.rule.sinks is not None:
            scores = torch.cat([scores, step.rule.sinks.double()[:, None]], 1)
        weights = scores.softmax(1)[:, : len(slots)]
        out[row] = torch.einsum("ht,thd->hd", weights, values) * case.value_scale
    return out


def check_attention(
    case: Case, generator: torch.Generator, device: str = "cpu", how: SplitTuning | None = None
) -> bool:
    """Whether a case comes out right, on a GPU twice the same; `how` replaces the case's block."""
    step = make_step(case, generator)
    group = case.heads // case.kv_heads
    how = how or SplitTuning(case.block, 4, 3, 1, case.queries)
    cut = SplitPlan(how, case.kv_heads, group, case.window)
    # Queries come as a part of what one product gives for queries, keys and values.
    wide = torch.nn.functional.pad(step.queries.flatten(1), (16, 32)).to(device)
    queries = wide[:, 16:-32].view(step.queries.shape)
    keys, values = step.keys.to(device), step.values.to(device)
    groups = step.rows.prefixes
    rows = DecodeRows(
        *(part.to(device) for part in step.rows[:3]),
        None if groups is None else Prefixes(*(part.to(device) for part in groups)),
    )
    sinks = step.rule.sinks
    rule = step.rule._replace(sinks=None if sinks is None else sinks.to(device))
    outs = []
    for _ in range(1 if device == "cpu" else 2):
        shares = plan_splits(rows, cut, case.multiprocessors)
        out = queries.new_full((len(queries), case.heads, case.value_dim), math.nan)
        attend_paged(queries, keys, values, out, rows, shares, rule, case.page, case.value_scale)
        assert not shares.semaphores.any(), "a layer behind this one would be wrong"
        if groups is not None and not cut.windowed:
            assert not shares.half_semaphores.any(), "a layer behind this one would be wrong"
        assert out[len(case.lengths) :].isfinite().all(), "padding became no number"
        outs.append(out[: len(case.lengths)].cpu())
    expected = dense(case, step).flatten(1)
    largest = expected.abs().amax(1)
    errors = (outs[0].double().flatten(1) - expected).abs().amax(1)
    error = float((errors / torch.where(largest > 0, largest, 1.0)).max())
    right = error < TOLERANCES[case.dtype] and torch.equal(outs[0], outs[-1])
    print(f"{error:.1e} {'' if right else 'WRONG '}{case}")
    return right


def random_cases() -> Iterator[Case]:
    """Mixes of everything."""
    draw = random.Random(5)
    for _ in range(24):
        starts = [draw.choice((0, 1, 7, 16, 31, 64, 90)) for _ in range(draw.randint(1, 9))]
        lengths = tuple(start + n for start in starts for n in range(draw.choice((1, 1, 4))))
        kv_heads = draw.choice((1, 2, 3))
        page = draw.choice((1, 2, 8, 16, 24, 32, 64))
        long = [row for row, length in enumerate(lengths) if length > 64 and 64 % page == 0]
        draw.shuffle(long)
        halves = [tuple(long[first::2]) for first in range(2)]
        groups = tuple(half for half in halves if len(half) > 1 and draw.random() < 0.8)
        yield Case(
            lengths,
            kv_heads * draw.choice((1, 2, 5)),
            kv_heads,
            draw.choice((16, 24, 40)),
            draw.choice((16, 24, 40)),
            page,
            draw.choice((16, 32, 64)),
            draw.choice((1, 3, 7, 20, 60)),
            cap=draw.choice((0.0, 0.0, 3.0)),
            window=draw.choice((-1, -1, 0, 9, 30)),
            sinks=draw.random() < 0.4,
            value_scale=draw.choice((1.0, 0.5)),
            shared=draw.random() < 0.3,
            queries=draw.choice((16, 16, 32)),
            groups=groups,
            common=(64,) * len(groups),
        )


def rows_before(table_rows: list[int], lengths: list[int], most: int) -> list[int]:
    """Rows in front of the last one of each tile, -1 for others."""
    before, first = [-1] * len(lengths), 0
    for row, (own, length) in enumerate(zip(table_rows, lengths, strict=True)):
        follows = table_rows[row + 1 : row + 2] == [own]
        # Padding goes together.
        follows &= own == 0 or lengths[row + 1 : row + 2] == [length + 1]
        if not follows or row - first + 1 == most:
            before[row], first = row - first, row + 1
    return before


def check_shares() -> bool:
    """Every block of every row has one program, and none has more than its share."""
    draw = random.Random(7)
    right = True
    for rows, programs, window in itertools.product((1, 127, 200, 1500), (1, 130), (-1, 100)):
        lengths = [draw.choice((0, 1, 64, 65, 500, 3000)) for _ in range(rows)]
        owners = [draw.randrange(3) for _ in range(rows)]
        for row in range(1, rows):
            if draw.random() < 0.8:
                owners[row], lengths[row] = owners[row - 1], lengths[row - 1] + 1
        step = DecodeRows(torch.empty(0), torch.tensor(owners), torch.tensor(lengths))
        # A product has room for four heads of four rows.
        shares = plan_splits(step, SplitPlan(SplitTuning(64, 4, 3, 1), 2, 4, window), 2 * programs)
        before = rows_before(owners, lengths, 4)
        hidden = [
            max(0, length - ahead - 1 - window) // 64 if window >= 0 else 0
            for length, ahead in zip(lengths, before, strict=True)
        ]
        blocks = [
            max(1, -(-length // 64) - gone) if ahead >= 0 else 0
            for length, ahead, gone in zip(lengths, before, hidden, strict=True)
        ]
        bounds = [0, *itertools.accumulate(blocks)]
        size = -(-bounds[-1] // programs)
        expected = [
            [row, ahead, bounds[row + 1], lengths[row], owners[row]]
            for row, ahead in enumerate(before)
            if ahead >= 0
        ]
        ends = [tile[2] for tile in expected]
        tile_ranges = [
            [sum(end <= program * size for end in ends) for program in range(programs)],
            [
                sum(begin < (program + 1) * size for begin in [0, *ends[:-1]])
                for program in range(programs)
            ],
        ]
        right &= shares.totals.tolist() == [size, bounds[-1], len(expected)]
        right &= shares.tiles[:5, : len(expected)].T.tolist() == expected
        right &= shares.tile_ranges.tolist() == tile_ranges
    return right


def check_grouped_shares() -> bool:
    """Tiles of groups stand in front of their last rows', which begin where the groups' end."""
    lengths = [700, 300, 701, 400, 64, 702, 260]
    case = Case(tuple(lengths), groups=((5, 2, 0), (1, 3, 6)), common=(640, 256))
    lengths += [1] * PADDING
    rows = torch.arange(1, len(lengths) + 1)
    step = DecodeRows(torch.empty(0), rows, torch.tensor(lengths), prefixes(case))
    # A product has room for two heads of two rows.
    shares = plan_splits(step, SplitPlan(SplitTuning(64, 4, 3, 1, queries=4), 2, 2, -1), 8)
    elsewhere = [640, 256, 640, 256, 0, 640, 256] + [0] * PADDING
    # By row: the entry that a tile of its group ends with, those in front, and blocks.
    of_groups = {2: (1, 1, 10), 0: (2, 0, 10), 3: (4, 1, 4), 6: (5, 0, 4)}
    expected, end = [], 0
    for row, (length, gone) in enumerate(zip(lengths, elsewhere, strict=True)):
        if row in of_groups:
            entry, ahead, blocks = of_groups[row]
            end += blocks
            expected.append([entry, ahead, end, gone, row + 1, -1])
        end += -(-length // 64) - gone // 64
        expected.append([row, 0, end, length, row + 1, gone])
    found = shares.tiles[:, : len(expected)].T.tolist()
    return found == expected and shares.totals.tolist()[1:] == [end, len(expected)]


class Context(NamedTuple):
    """Rows of a context, one after the other."""

    table_row: int
    rows: int
    kv_len: int
    """Of the last one."""


def random_contexts(draw: random.Random) -> list[Context]:
    """Decodes, prompts and what continues from stored KV."""
    owners = draw.sample(range(1, 30), draw.randint(1, 12))
    found = []
    for owner in owners:
        rows = draw.choice((1, 1, 2, 3, draw.randint(2, 40)))
        found.append(Context(owner, rows, rows + draw.choice((0, 0, 1, 16, 50))))
    return found


def staged(contexts: list[Context], padding: int, table: torch.Tensor) -> DecodeRows:
    """Their rows, then padding."""
    owners = [context.table_row for context in contexts for _ in range(context.rows)]
    lengths = [
        length
        for context in contexts
        for length in range(context.kv_len - context.rows + 1, context.kv_len + 1)
    ]
    return DecodeRows(
        table,
        torch.tensor([*owners, *[0] * padding]),
        torch.tensor([*lengths, *[1] * padding]),
    )


def check_prompts() -> bool:
    """Every prompt is a segment, nothing else reads KV, and only their rows are elsewhere."""
    draw = random.Random(11)
    right = True
    for _ in range(200):
        contexts, padding, page = random_contexts(draw), draw.choice((0, 1, 7)), 16
        table = torch.randint(0, 9, (30, 128 // page)).repeat_interleave(page, 1) * page
        rows = staged(contexts, padding, table.int() + torch.arange(128).int() % page)
        prompts, left = find_prompts(rows, len(contexts) + draw.randrange(3), page)
        expected, owners, start = [], [], 0
        for context in contexts:
            if context.rows > 1:
                pages = (table[context.table_row, ::page] // page).tolist()
                expected.append((start, start + context.rows, context.kv_len, pages))
            owners += [SKIP_ROW if context.rows > 1 else context.table_row] * context.rows
            start += context.rows
        bounds = prompts.starts.tolist()
        found = [
            (first, end, kv_len, pages)
            for first, end, kv_len, pages in zip(
                bounds, bounds[1:], prompts.kv_lens.tolist(), prompts.pages.tolist(), strict=False
            )
            if end > first and kv_len > 0
        ]
        right &= found == expected and bounds == sorted(bounds) and bounds[-1] == start + padding
        right &= bounds[0] == 0 and left.table_rows.tolist() == [*owners, *[SKIP_ROW] * padding]
    return right


def check_rows_elsewhere() -> bool:
    """Rows of prompts are left as they are, all others come out as if there were none."""
    draw = random.Random(13)
    right = True
    mixed, alone = random_contexts(draw), [Context(3, 20, 30), Context(9, 2, 2)]
    for queries, contexts, padding in ((16, mixed, PADDING), (64, mixed, 0), (64, alone, 0)):
        count = sum(context.rows for context in contexts) + padding
        slots = torch.arange(1, 31)[:, None] * 128 + torch.arange(128)
        rows = staged(contexts, padding, slots.int())
        _, left = find_prompts(rows, len(contexts), 16)
        requested, keys, values = (torch.randn(size, 2, 16) for size in (count, 32 * 128, 32 * 128))
        outs = []
        for each in (rows, left):
            plan = plan_splits(each, SplitPlan(SplitTuning(16, 4, 3, 1, queries), 2, 1, -1), 6)
            outs.append(torch.full_like(requested, 7.0))
            attend_paged(requested, keys, values, outs[-1], each, plan, AttentionParams(0.25), 16)
        kept = left.table_rows == SKIP_ROW
        whole, part = outs
        right &= bool(kept.any()) and bool((part[kept] == 7.0).all())
        right &= torch.allclose(part[~kept], whole[~kept], atol=1e-5)
    return right


if __name__ == "__main__":
    seeded = torch.Generator().manual_seed(3)
    cases = itertools.chain(CASES, random_cases())
    found = [check_attention(case, seeded) for case in cases]
    results = [*found, check_shares(), check_grouped_shares()]
    results += [check_prompts(), check_rows_elsewhere()]
    print(f"{len(results)} checks, {results.count(False)} wrong")
    sys.exit(not all(results))
