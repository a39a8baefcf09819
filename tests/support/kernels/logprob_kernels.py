"""The logprob kernels in Triton's interpreter, against float64 and torch.

Run with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pie_driver_sglang.kernels.sampling import token_logprobs as kernels
from pie_driver_sglang.kernels.sampling.logprobs_reference import (
    MIN_LOGPROB,
    LogprobRequests,
    logprob_words,
)
from pie_driver_sglang.kernels.sampling.slot_params import STEP_RECORD_WORDS

SLOTS = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = 2e-5
UNTOUCHED = -77


class Case(NamedTuple):
    """Rows of which something is asked, or nothing."""

    logits: torch.Tensor
    tokens: torch.Tensor
    tops: Sequence[int]
    given: Sequence[Sequence[int]]
    divisors: torch.Tensor
    requested: Sequence[bool]

    def records(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The records of the slots, their words, and how many words are answered."""
        words = [5, 5]
        records, end = torch.zeros(SLOTS, STEP_RECORD_WORDS, dtype=torch.int32), 3
        bits = self.divisors.view(torch.int32).tolist()
        for slot in range(SLOTS):
            if self.requested[slot]:
                given = self.given[slot]
                record = [1, end, self.tops[slot], len(given), len(words), bits[slot]]
                records[slot] = torch.tensor(record, dtype=torch.int32)
                words.extend(given)
                end += 1 + 2 * self.tops[slot] + len(given)
        return records, torch.tensor(words, dtype=torch.int32), end

    def expected(self, slot: int) -> torch.Tensor:
        """Log-probabilities of the vocabulary, by float64."""
        scaled = (self.logits[slot].float() / self.divisors[slot]).double()
        return torch.log_softmax(scaled, dim=-1).clamp(min=MIN_LOGPROB)

    def check(self, slot: int, words: torch.Tensor, *, ties: bool) -> None:
        """Compares the words of a position."""
        top, expected = self.tops[slot], self.expected(slot)
        token = int(self.tokens[slot]) & 0xFFFFFFFF
        ids = words[1 : 1 + top].long()
        found = words.view(torch.float32).double()
        named = torch.tensor([token, *ids.tolist(), *self.given[slot]])
        values = torch.cat((found[:1], found[1 + top :]))
        torch.testing.assert_close(values, expected[named], rtol=1e-5, atol=TOLERANCE)
        order = torch.argsort(self.logits[slot].float(), descending=True, stable=True)[:top]
        best = self.logits[slot]
        assert torch.equal(best[ids], best[order])
        assert not ties or torch.equal(ids, order), "of equal ones the lower id comes first"
        assert len(set(ids.tolist())) == top


def cases() -> Iterator[Case]:
    """Vocabularies of one block and of several, equal logits, and tokens that cannot come."""
    generator = torch.Generator().manual_seed(8)
    for number, vocab in enumerate((1, 40, 2053, 8192, 8193, 20_000)):
        wide = torch.randn(SLOTS, vocab + 5, generator=generator) * 3
        if number % 2:
            wide = wide.round()
        logits = wide.to(DTYPES[number % 3])[:, :vocab]
        if vocab > 3:
            logits[1, 2:] = -torch.inf
            logits[2, : vocab // 2] = -torch.inf
            logits[4] = 0.0
            logits[4, 1::2] = -0.0
        tops = [min(count, vocab) for count in (0, 5, 20, 7, 32, 1)]
        given = [
            torch.randint(0, vocab, (count,), generator=generator).tolist()
            for count in (0, 3, 1, 300, 0, 2)
        ]
        tokens = torch.randint(0, vocab, (SLOTS,), generator=generator)
        # The step stands in the upper half.
        tokens |= torch.arange(SLOTS) << 33
        requested = [slot != number for slot in range(SLOTS)]
        divisors = torch.tensor([1.0, 0.7, 1.0, 2.5, 1e-3, 1.0])
        yield Case(logits, tokens, tops, given, divisors, requested)


def check_positions() -> None:
    """The kernels write what is asked and nothing else; plain torch gives the same."""
    for case in cases():
        records, words, end = case.records()
        out = torch.full((end + 4,), UNTOUCHED, dtype=torch.int32)
        kernels.compute_logprobs(case.logits, case.tokens, records, words, out, 32)
        assert (out[:3] == UNTOUCHED).all()
        assert (out[end:] == UNTOUCHED).all()
        requested = [slot for slot in range(SLOTS) if case.requested[slot]]
        for slot, following in itertools.zip_longest(requested, requested[1:]):
            last = end if following is None else int(records[following, 1])
            case.check(slot, out[int(records[slot, 1]) : last], ties=True)
        plain = logprob_words(
            case.logits, LogprobRequests.of_step(records, words), case.tokens & 0xFFFFFFFF
        )
        first = 0
        for slot in requested:
            length = 1 + 2 * case.tops[slot] + len(case.given[slot])
            case.check(slot, plain[first : first + length], ties=False)
            first += length
        assert first == len(plain)


def check_slots_that_draw_nothing() -> None:
    """A token outside of the vocabulary: nothing is written."""
    records = torch.tensor([[1, 0, 2, 0, 0, 0]] * 2, dtype=torch.int32)
    records[:, 5] = torch.ones(1).view(torch.int32)
    records[1, 1] = 5
    out = torch.full((10,), UNTOUCHED, dtype=torch.int32)
    tokens = torch.tensor([40, 3])
    kernels.compute_logprobs(torch.zeros(2, 40), tokens, records, torch.zeros(1).int(), out, 2)
    assert (out[:5] == UNTOUCHED).all()
    assert out[6:8].tolist() == [0, 1]


if __name__ == "__main__":
    check_positions()
    check_slots_that_draw_nothing()
    print("positions found")
