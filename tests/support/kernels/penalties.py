"""The kernels of penalties and logit biases in Triton's interpreter, against torch.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import torch

from pie_driver_sglang.kernels.sampling.penalties import (
    apply_penalties,
    cast_modified_rows,
    record_tokens,
)
from pie_driver_sglang.kernels.sampling.slot_params import STEP_RECORD_WORDS
from pie_driver_sglang.kernels.sampling.token_history import Records, TokenHistory

VOCAB = 1500
CONTEXT = 2600
SLOTS = 7


def records(generator: torch.Generator) -> Records:
    """Slots of all kinds: without anything, long, with a token that is biased and suppressed."""
    ends = torch.tensor([0, 1, 40, CONTEXT, 1025, 7, 300])
    starts = torch.tensor([0, 0, 3, 1, 1, 7, 290])
    counts = torch.tensor([0, 2, 0, 1100, 3, 5, 1])
    penalties = torch.rand(SLOTS, 3, generator=generator) * 2 - 0.5
    penalties[:, 2] = penalties[:, 2].abs() + 0.5
    ids = torch.cat([torch.randperm(VOCAB, generator=generator)[:count] for count in counts])
    values = torch.randn(len(ids), generator=generator)
    values[::5] = -torch.inf
    ids[-3:-1] = ids[-2]
    words = torch.stack([ids.int(), values.view(torch.int32)], dim=1).flatten()
    rows = torch.arange(SLOTS).flip(0)
    firsts = 2 * (counts.cumsum(0) - counts)
    bits = penalties.view(torch.int32)
    columns = [rows, starts, ends, *bits.unbind(1), firsts, counts]
    return Records(torch.stack([column.int() for column in columns], dim=1), words)


def check_adjusted() -> None:
    """More slots than are counted at once, and the counts are zeros again."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randint(1, 9000, (SLOTS, CONTEXT), generator=generator, dtype=torch.int32)
    history = TokenHistory(table, 9000, VOCAB)
    tokens = torch.randint(0, VOCAB, (9000,), generator=generator)
    # Some of them often.
    tokens[::3] = 17
    history.record(torch.arange(9000), tokens)
    requested = records(generator)
    wide = torch.randn(SLOTS, VOCAB + 3, generator=generator)
    logits, expected = wide.clone()[:, :VOCAB], wide.clone()[:, :VOCAB]
    history.apply_penalties(expected, requested)
    counts = torch.zeros(3, VOCAB, dtype=torch.int32)
    apply_penalties(logits, table, history.tokens, requested.slots, requested.words, counts)
    assert not counts.any(), "counts are left"
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    changed = (expected != wide[:, :VOCAB]).sum(dim=1).tolist()
    assert changed[0] == 0, changed
    assert all(changed[1:]), changed


def check_cast() -> None:
    """Rows that are not contiguous, of more than one block, with a soft cap and without."""
    generator = torch.Generator().manual_seed(6)
    for dtype in (torch.bfloat16, torch.float32):
        logits = (20 * torch.randn(5, 8500, generator=generator)).to(dtype)[:, :8400]
        logits[1, ::3] = -torch.inf
        records = torch.zeros(5, 8, dtype=torch.int32)
        logprobs = torch.zeros(5, STEP_RECORD_WORDS, dtype=torch.int32)
        # Tokens that count, none, a bias, a log-probability, an empty range.
        records[0, 1:3] = torch.tensor([3, 4])
        records[2, 7] = 1
        logprobs[3, 0] = 1
        records[4, 1:3] = 7
        rows = cast_modified_rows(logits, records, logprobs)
        assert rows.logits is logits
        assert rows.is_changed is not None
        assert rows.is_changed.tolist() == [1, 0, 1, 1, 0]
        for row in (0, 2, 3):
            assert torch.equal(rows.latest()[row], logits[row].float())
        capped = 30 * torch.tanh(logits.float() / 30)
        capped[1, ::3] = -torch.inf
        rows = cast_modified_rows(logits, records, logprobs, 30.0)
        assert rows.is_changed is not None
        assert rows.is_changed.all()
        torch.testing.assert_close(rows.latest(), capped, rtol=1e-5, atol=1e-5)


def check_recorded() -> None:
    """The rows of a step and further pairs, each where it belongs."""
    generator = torch.Generator().manual_seed(6)
    for rows, count in ((1, 0), (300, 5), (16, 2500)):
        slots = torch.randperm(4000, generator=generator)
        ids = torch.randint(0, 1000, (rows + count,), generator=generator)
        own, further = slots[:rows], slots[rows : rows + count]
        words = torch.stack([further, ids[rows:]], dim=1).int().flatten()
        words = torch.cat([torch.full((3,), -7, dtype=torch.int32), words, words[:2]])
        tokens = torch.full((4000,), -1, dtype=torch.int32)
        pairs = torch.tensor([3, count], dtype=torch.int32)
        record_tokens(tokens, own, ids[:rows], words, pairs)
        expected = torch.full((4000,), -1, dtype=torch.int32)
        expected[own] = ids[:rows].int()
        expected[further] = ids[rows:].int()
        assert torch.equal(tokens, expected), (rows, count)


if __name__ == "__main__":
    check_adjusted()
    check_cast()
    check_recorded()
    print("adjusted and recorded")
