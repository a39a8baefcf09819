"""The kernels of a graph step in Triton's interpreter, against float64.

Run with ``TRITON_INTERPRET=1``. A token that rounding may exchange, because its share of the mass
ends within 1e-4 of the uniform number or of top-p, counts as close.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import NamedTuple
from unittest import mock

import torch
import triton.language as tl

from pie_driver_sglang.kernels.sampling import sampler, small_filters
from pie_driver_sglang.kernels.sampling.logit_rows import LogitRows
from pie_driver_sglang.kernels.sampling.reference import SlotParams
from pie_driver_sglang.kernels.sampling.sampler import (
    fetch,
    fetch_programs,
    mask_logits,
    publish,
    sample_step,
    update_table,
)

ROWS = 8
CAPS = (None, 30.0, 3.0)
EDGE = 1e-5
"""What float32 may move the mass at which top-p ends."""
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


class Exact(NamedTuple):
    """What float64 says about a row."""

    token: int
    distance: float
    """Between the uniform number and the nearest edge of a kept token."""
    kept: torch.Tensor


def exact(
    logits: torch.Tensor, params: SlotParams, row: int, cap: float | None, *, shift: float = 0.0
) -> Exact:
    """One row by sorting; `shift` moves the top-p edge."""
    temperature, top_k, top_p, min_p, uniform = (float(field[row]) for field in params)
    of_all = top_p < 0
    top_p = abs(top_p) + (shift if top_p < 1 else 0.0)
    values = logits[row].double()
    vocab = len(values)
    nobody = torch.zeros(vocab, dtype=torch.bool)
    if temperature < 0 or values.isnan().any():
        return Exact(vocab, 1.0, nobody)
    if temperature == 0:
        return Exact(int(logits[row].float().argmax()), 1.0, nobody)
    if cap is not None:
        values = cap * torch.tanh(values / cap)
    order = torch.argsort(values, descending=True, stable=True)
    weights = torch.exp((values - values.max()) / temperature)[order]
    whole = weights.sum()
    weights[int(top_k) :] = 0.0
    whole = whole if of_all else weights.sum()
    before = weights.cumsum(0) - weights
    dropped = (weights < min_p) | ((before >= top_p * whole) if top_p < 1 else nobody)
    dropped[0] = False
    weights = weights.masked_fill(dropped, 0.0)
    by_id = torch.zeros(vocab, dtype=torch.float64)
    by_id[order] = weights
    shares = by_id.cumsum(0) / by_id.sum()
    return Exact(
        int((shares > uniform).nonzero()[0, 0]),
        float((shares - uniform).abs().min()),
        by_id > 0,
    )


def cases(generator: torch.Generator) -> Iterator[tuple[torch.Tensor, SlotParams, float | None]]:
    """Rows of all kinds: ties, masked tokens, no numbers, vocabularies of any size.

    Filters have more of their cases in `benches/gpu/sampler_check.py`, which is tested, too.
    """
    for number in range(12):
        size = (1, 300) if number % 4 else (8000, 17000)
        vocab = int(torch.randint(*size, (1,), generator=generator))
        scale = (1.0, 5.0, 0.1)[number % 3]
        logits = torch.randn(ROWS, vocab, generator=generator) * scale
        if number % 5 == 0:
            logits = torch.randint(-2, 3, (ROWS, vocab), generator=generator).float()
        if vocab > 3:
            logits[0, ::2] = -torch.inf
            logits[3, vocab // 2] = torch.nan if number % 7 == 3 else 0.0
        top_ks = [vocab, max(1, vocab // 3), vocab, 1, vocab, max(1, vocab // 2), vocab, vocab]
        params = SlotParams(
            torch.tensor([0.0, 1.0, 0.6, 1.0, 1.5, 0.8, -1.0, 1e-3]),
            torch.tensor(top_ks, dtype=torch.int32),
            torch.tensor([1.0, 1.0, 0.9, 0.5, 0.0, 0.7, 1.0, 0.3]),
            torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.05, 0.0, 0.0]),
            torch.rand(ROWS, generator=generator),
        )
        if number % 2:
            # Shares of the whole distribution.
            restricted = (params.top_ps > 0) & (params.top_ps < 1)
            top_ps = torch.where(restricted, -params.top_ps, params.top_ps)
            top_ks = (params.top_ks // 2).clamp(min=1)
            params = params._replace(top_ps=top_ps, top_ks=top_ks)
        turn = torch.randperm(ROWS, generator=generator)
        params = SlotParams(*(field[turn] for field in params[:4]), params.uniforms)
        yield logits.to(DTYPES[number % 3]), params, CAPS[number % 3]


def check_sampler(spans: int | None = None) -> int:
    """Returns how many tokens are wrong.

    With few `spans` most rows are left to the search, and some rows lie at another offset.
    """
    with contextlib.ExitStack() as stack:
        for module in (sampler, small_filters) if spans else ():
            stack.enter_context(mock.patch.object(module, "MAX_SEGMENTS", tl.constexpr(spans)))
        return _check_sampler(parted=spans is not None)


def parted_rows(logits: torch.Tensor) -> LogitRows:
    """Every other row in float32 at another offset, and nonsense where it is not to be read."""
    is_changed = torch.arange(len(logits), dtype=torch.int32) % 2
    there = is_changed[:, None] == 1
    changed = logits.float().masked_fill(~there, 50.0)
    return LogitRows(logits.masked_fill(there, 50.0), changed, is_changed)


def _check_sampler(*, parted: bool) -> int:
    wrong = close = total = 0
    for number, (logits, params, cap) in enumerate(cases(torch.Generator().manual_seed(3)), 1):
        results = torch.zeros(ROWS, dtype=torch.int64)
        step = torch.tensor([number], dtype=torch.int32)
        rows = parted_rows(logits) if parted and cap is None else LogitRows(logits)
        sample_step(rows, params, results, step, cap)
        assert (results >> 32 == number).all()
        for row, token in enumerate((results & 0xFFFFFFFF).tolist()):
            total += 1
            if token == exact(logits, params, row, cap).token:
                continue
            near = any(
                token == edge.token
                or (edge.distance < 1e-4 and bool(edge.kept[token : token + 1].any()))
                for shift in (-EDGE, 0.0, EDGE)
                for edge in [exact(logits, params, row, cap, shift=shift)]
            )
            close += near
            wrong += not near
    print(f"{total} tokens, {close} close, {wrong} wrong")
    return wrong


def check_masks() -> None:
    """Masks as bits and as edges, in a vocabulary that fills no word and more than one block."""
    vocab = 2053
    allowed = torch.rand(2, vocab) < 0.5
    bits = torch.nn.functional.pad(allowed[0], (0, -vocab % 32)).view(-1, 32).long()
    packed = (bits << torch.arange(32)).sum(-1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed)
    closed = torch.nn.functional.pad(allowed[1], (1, 1))
    edges = (closed[1:] != closed[:-1]).nonzero()[:, 0]
    source = torch.cat([packed, edges, torch.tensor([7])]).int()
    words = torch.zeros_like(source)
    fetch(source, words, torch.tensor([len(source) - 1], dtype=torch.int32))
    assert torch.equal(words[:-1], source[:-1])
    assert words[-1] == 0, "more words than announced"
    for expected in (1, len(source)):
        again = torch.zeros_like(source)
        fetch(source, again, torch.tensor([len(source) - 1], dtype=torch.int32), expected)
        assert torch.equal(again, words), "not all words, or more, whatever the grid is sized for"
    logits = torch.randn(4, vocab)
    entries = [[len(packed), len(edges)], [0, 0], [0, -1], [len(packed), len(edges)]]
    expected = logits.clone()
    for row, mask in ((0, 1), (2, 0), (3, 1)):
        expected[row, ~allowed[mask]] = -torch.inf
    slot_masks = torch.tensor(entries, dtype=torch.int32)
    parted = parted_rows(logits)
    mask_logits(LogitRows(logits), slot_masks, words)
    assert torch.equal(logits, expected)
    mask_logits(parted, slot_masks, words)
    for row, found in enumerate((parted.logits, parted.changed) * 2):
        assert found is not None
        assert torch.equal(found[row], expected[row])
        assert found[(row + 1) % 4].eq(50).all(), "a row is masked where it is not read"


def check_fetch() -> None:
    """The grid follows the graph's slots, and the words need not fit its first turn."""
    masks = {slots: fetch_programs(slots * -(-151_936 // 32)) for slots in (1, 8, 64, 256, 4096)}
    assert masks == {1: 4, 8: 10, 64: 64, 256: 64, 4096: 64}
    source = torch.randint(-(2**31), 2**31, (4 * 4096 + 5000,)).int()
    for count in (0, 1, 4096, 4 * 4096, len(source) - 1):
        target = torch.zeros_like(source)
        fetch(source, target, torch.tensor([count], dtype=torch.int32), 1)
        assert torch.equal(target[:count], source[:count])
        assert not target[count:].any(), "more words than announced"


def check_results() -> None:
    """More results than a block has, all of their bits."""
    results = torch.randint(-(2**62), 2**62, (259,))
    target = torch.zeros(260, dtype=torch.int64)
    publish(results, target[:259])
    assert torch.equal(target[:259], results)
    assert target[259] == 0, "more results than there are"


def check_table() -> None:
    """Only the announced entries change, those outside of the block, too."""
    capacity, most = 40, 400
    # A block that is no multiple of what a program takes; words after the changes are masks.
    for count in (0, 17, capacity, capacity + 1, 130, most):
        table = torch.zeros(most, 5, dtype=torch.int32)
        updates = torch.stack([torch.randperm(most), torch.randint(0, 1000, (most,))], dim=1)
        further = updates[capacity:].flatten().int()
        further = torch.cat([further, torch.full((9,), -1, dtype=torch.int32)])
        further[2 * max(0, count - capacity) :] = -1
        update_table(table, updates[:capacity], further, torch.tensor([count], dtype=torch.int32))
        expected = torch.zeros_like(table)
        for entry, slot in updates[:count].tolist():
            expected[entry] = torch.arange(slot, slot + 5)
        assert torch.equal(table, expected), count


if __name__ == "__main__":
    check_masks()
    check_fetch()
    check_results()
    check_table()
    sys.exit(check_sampler() + check_sampler(spans=2) > 0)
