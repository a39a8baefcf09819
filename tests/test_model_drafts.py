"""What a step computes after sampling for an EAGLE head, by a head that adds up tokens."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch

from pie_driver_sglang.engine.backend import PassContext
from pie_driver_sglang.engine.block_table import BlockTable
from pie_driver_sglang.engine.model_drafts import ModelDrafter, last_accepted
from pie_driver_sglang.memory.batch_sizes import scratch_pages
from support.models.fake_backend import FakeBackend

VOCAB = 97
PAGE = 4
REQUESTS = 5
ROW_PAGES = 6
POOL_PAGES = 40
NUM_DRAFTS = 5
"""More than a page has: chains reach a second scratch page."""


class AddingHead:
    """Implements `DraftModel`: the next token is a sum over all tokens that the row attends to."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend, table = backend, backend.block_table
        self._table, self.scratch_page = table.slots, POOL_PAGES
        slots = POOL_PAGES * table.page_size
        scratch = scratch_pages(NUM_DRAFTS, table.page_size) * table.page_size
        self.tokens = torch.zeros(slots + scratch, dtype=torch.int64)
        self.features = torch.arange(slots)[:, None] % 13

    def forward(
        self, context: PassContext, features: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, _ = context.native
        assert bool((inputs.positions < self._backend.info.context_length).all())
        self.tokens[inputs.out_cache_loc] = inputs.input_ids
        found = []
        for row, length, position in zip(
            inputs.req_pool_indices, inputs.seq_lens, inputs.positions, strict=True
        ):
            seen = self.tokens[self._table[row, :length].long()]
            found.append(int((seen * torch.arange(1, length + 1)).sum() + position))
        return (torch.tensor(found) + features[:, 0]) % VOCAB, features + 1


def expected_chain(text: list[int], feature: int, count: int) -> list[int]:
    """The drafts after a whole text, by the same rule."""
    found: list[int] = []
    for draft in range(count):
        tokens = [*text, *found]
        total = sum(token * (index + 1) for index, token in enumerate(tokens))
        found.append((total + len(tokens) - 1 + feature + draft) % VOCAB)
    return found


class Step:
    """A step of prompts, decodes and drafts to verify in any mix, staged as Rust stages it."""

    def __init__(self, seed: int, row_pages: int = ROW_PAGES, context_length: int = 128) -> None:
        draw = random.Random(seed)
        self.backend = backend = FakeBackend()
        backend.info = backend.info._replace(context_length=context_length)
        self.table = table = BlockTable(REQUESTS, row_pages, PAGE, "cpu")
        backend.block_table = table
        self.page = page = table.page_size
        self.head = AddingHead(backend)
        pages = draw.sample(range(1, POOL_PAGES), REQUESTS * row_pages)
        rows: list[tuple[int, int, int, float]] = []
        tokens: list[int] = []
        self.last: dict[int, list[int]] = {}
        """By row: the text up to the token that is sampled there, of accepted ends."""
        self.features: dict[int, int] = {}
        for request in range(1, draw.randint(1, REQUESTS) + 1):
            own = [pages.pop() for _ in range(row_pages)]
            slots = torch.tensor([at * page + i for at in own for i in range(page)])
            table.slots[request, : len(slots)] = slots.int()
            text = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 3 * page))]
            drafts = draw.randint(0, 2)
            first = draw.randrange(len(text)) if not drafts else len(text) - 1
            accepted = draw.randint(0, drafts)
            for at, token in enumerate(text):
                self.head.tokens[slots[at]] = token
            inputs = list(text)
            for draft in range(drafts + 1):
                row = len(rows) + len(text) - 1 - first + draft
                sampled = draw.randrange(VOCAB)
                if draft < drafts:
                    # A draft that is accepted is the sampled token.
                    wrong = (sampled + 1) % VOCAB
                    inputs.append(sampled if draft < accepted else wrong)
                    self.head.tokens[slots[len(inputs) - 1]] = inputs[-1]
                if draft == accepted:
                    self.last[row] = [*inputs[: len(text) + draft], sampled]
                    self.features[row] = int(self.head.features[slots[len(text) + draft - 1], 0])
                tokens.append(sampled)
            for at in range(first, len(inputs)):
                samples = at >= len(text) - 1
                rows.append((request, at, inputs[at], 0.0 if samples else -1.0))
            # Tokens of rows that are not sampled are anything.
            unsampled = len(text) - 1 - first
            at = len(tokens) - drafts - 1
            tokens[at:at] = [draw.randrange(VOCAB) for _ in range(unsampled)]
        padding = draw.randint(0, 3)
        rows += [(0, 0, 0, -1.0)] * padding
        tokens += [0] * padding
        columns = list(zip(*rows, strict=True))
        requests, index, ids = (torch.tensor(column) for column in columns[:3])
        self.tokens = torch.tensor(tokens)
        self.fields = {
            "req_pool_indices": requests,
            "input_ids": ids,
            "positions": index,
            "seq_lens": index + 1,
            "out_cache_loc": table.slots[requests, index].long(),
            "temperatures": torch.tensor(columns[3]),
        }

    def draft(self, *, compacts: bool, numbered: bool = False) -> torch.Tensor:
        """Of each row its drafts."""
        drafter = ModelDrafter(self.backend, self.head, self.table, NUM_DRAFTS)  # type: ignore[arg-type]
        drafter._compacts = compacts

        @contextlib.contextmanager
        def planned(_: PassContext) -> Any:
            yield

        fields, tokens, rows = self.fields, self.tokens, None
        if numbered:
            # A graph with fewer slots than rows.
            rows = (fields["temperatures"] >= 0).nonzero().flatten()
            fields = {**fields, "temperatures": fields["temperatures"][rows]}
            tokens = tokens[rows]
        found = drafter.draft(fields, rows, tokens, planned)
        if rows is None:
            return found
        spread = torch.full((len(self.tokens), NUM_DRAFTS), -1, dtype=torch.int32)
        spread[rows] = found
        return spread


@pytest.mark.parametrize("seed", range(60))
def test_drafts_follow_the_last_accepted_token(seed: int) -> None:
    step = Step(seed)
    ends = last_accepted(step.fields, torch.arange(len(step.tokens)), step.tokens)
    assert set(ends.nonzero().flatten().tolist()) == set(step.last)
    before = step.table.slots.clone()
    pool = step.head.tokens[: POOL_PAGES * step.page].clone()
    found = step.draft(compacts=True)
    assert torch.equal(step.table.slots, before)
    for row, drafts in enumerate(found.tolist()):
        if row not in step.last:
            assert drafts == [-1] * NUM_DRAFTS
            continue
        text = step.last[row]
        assert drafts == expected_chain(text, step.features[row], NUM_DRAFTS)
    # What lies before the drafts of a context, and the padding's page apart, is as before.
    changed = (step.head.tokens[: len(pool)] != pool).nonzero().flatten().tolist()
    allowed = {
        int(slot)
        for row, text in step.last.items()
        for slot in step.table.slots[int(step.fields["req_pool_indices"][row]), len(text) - 1 :]
    }
    assert set(changed) <= allowed


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_a_graph_computes_the_drafts_of_an_eager_step(seed: int, numbered: bool) -> None:
    """Captured, every slot is a row of the head's passes."""
    assert torch.equal(
        Step(seed).draft(compacts=True), Step(seed).draft(compacts=False, numbered=numbered)
    )


@pytest.mark.parametrize("compacts", [True, False])
@pytest.mark.parametrize("limit", ["row_pages", "context_length"])
def test_there_are_no_drafts_beyond_the_block_table_and_the_context(
    limit: str, compacts: bool
) -> None:
    """`AddingHead` asserts that no row, wanted or not, has a position outside of the context."""
    drafted = set()
    most, limits = 4 * PAGE, {"row_pages": 4} if limit == "row_pages" else {"context_length": 16}
    for seed in range(20):
        step = Step(seed, **limits)
        found = step.draft(compacts=compacts)
        for row, text in step.last.items():
            fits = len(text) - 1 + NUM_DRAFTS <= most
            drafted.add(fits)
            drafts = found[row].tolist()
            if fits:
                assert drafts == expected_chain(text, step.features[row], NUM_DRAFTS)
            else:
                assert drafts == [-1] * NUM_DRAFTS
    assert drafted == {True, False}
