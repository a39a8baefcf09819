"""Samplers and logit masks, against float64 distributions of transformers' logits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from pie_driver_sglang.kernels.sampling.reference import Outputs, SlotParams, apply_masks, run_group
from support.models.reference import Reference, random_tokens
from support.process import drivers

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4
PAGE = 16
UNBOUNDED = 2**32 - 1


@pytest.fixture
def client(each_driver: drivers.Driver) -> _core.Client:
    return each_driver.client()


def prompt(reference: Reference, length: int, *seed: object) -> list[int]:
    return random_tokens(reference.vocab_size, length, *seed)


def request(
    tokens: Sequence[int],
    samplers: Sequence[tuple[int, Sampler]],
    *,
    page: int = 0,
    mask: Sequence[int] | None = None,
    drafts: Sequence[int] = (),
) -> Request:
    """A whole context in one request."""
    count = -(-(len(tokens) + len(drafts)) // PAGE)
    return Request(
        list(tokens),
        list(range(len(tokens))),
        list(range(page, page + count)),
        (len(tokens) - 1) % PAGE + 1,
        list(samplers),
        logit_mask=None if mask is None else list(mask),
        drafts=list(drafts),
    )


def expand(runs: Sequence[int], size: int) -> torch.Tensor:
    """The first bits of a run-length bit string, false first."""
    bits: list[bool] = []
    for number, run in enumerate(runs):
        bits += [number % 2 == 1] * min(run, size - len(bits))
    return torch.tensor(bits + [False] * (size - len(bits)))


def row_of(
    reference: Reference, tokens: Sequence[int], row: int, mask: Sequence[int] | None = None
) -> torch.Tensor:
    """Reference logits in float64, masked."""
    logits = reference.logits(tokens)[row].double()
    if mask is not None:
        logits = logits.masked_fill(~expand(mask, len(logits)), -math.inf)
    return logits


def assert_distribution(
    found: tuple[Sequence[int], Sequence[float]],
    logits: torch.Tensor,
    temperature: float,
    count: int,
) -> None:
    """Checks ids and probabilities against `softmax(logits / temperature)` in descending order."""
    ids, probs = found
    expected = (logits / temperature).softmax(-1)
    wanted = expected.sort(descending=True).values[:count]
    assert len(ids) == len(set(ids)) == len(wanted)
    got = torch.tensor(probs, dtype=torch.float64)
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(got, expected[torch.tensor(ids)], rtol=0, atol=TOLERANCE)
    assert list(probs) == sorted(probs, reverse=True)


def assert_close(found: Sequence[float], expected: torch.Tensor) -> None:
    got = torch.tensor(found, dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


MASKS = {
    "none": None,
    "some": [3, 5, 100, 60, 7, 40],
    "rest of the vocabulary": [200, UNBOUNDED],
    "empty runs": [0, 0, 64, 32, 0, 32, 1, 1],
    "one token": [77, 1],
}


class TestProbes:
    """Probes return what float64 says, for any mask."""

    @pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
    def test_every_kind_in_one_request(
        self, client: _core.Client, reference: Reference, mask: list[int] | None
    ) -> None:
        tokens = prompt(reference, 20, "kinds")
        vocabulary = reference.vocab_size
        labels = [9, 9, 0, vocabulary - 1, vocabulary, UNBOUNDED, 77]
        samplers = [
            (19, Sampler.entropy()),
            (19, Sampler.greedy()),
            (2, Sampler.dist(1.0, 5)),
            (7, Sampler.raw_logits()),
            (19, Sampler.embedding()),
            (19, Sampler.logprobs(labels)),
            (1, Sampler.logprob(77)),
            (1, Sampler.logprobs([])),
            (0, Sampler.dist(0.5, 0)),
            (7, Sampler.dist(0.0, 3)),
            (7, Sampler.top_k(0.0, 4)),
            (3, Sampler.entropy()),
        ]
        reply = client.forward([request(tokens, samplers, mask=mask)])
        assert not reply.fast

        def row(index: int) -> torch.Tensor:
            return row_of(reference, tokens, index, mask)

        assert reply.tokens == [[int(row(19).argmax()), int(row(7).argmax())]]
        [five, everything, point] = reply.dists[0]
        assert_distribution(five, row(2), 1.0, 5)
        assert_distribution(everything, row(0), 0.5, vocabulary)
        best = int(row(7).argmax())
        others = [token for token in range(3) if token != best][:2]
        assert (list(point[0]), list(point[1])) == ([best, *others], [1.0, 0.0, 0.0])
        [raw] = reply.logits[0]
        assert len(raw) == vocabulary
        assert_close(raw, row(7))
        [several, single, none] = reply.logprobs[0]
        logs = row(19).log_softmax(-1)
        known = [float(logs[token]) if token < vocabulary else -math.inf for token in labels]
        assert_close(several, torch.tensor(known, dtype=torch.float64))
        assert_close(single, row(1).log_softmax(-1)[[77]])
        assert none == []
        entropies = [torch.special.entr(row(index).softmax(-1)).sum() for index in (19, 3)]
        assert_close(reply.entropies[0], torch.stack(entropies))

    def test_any_mix_of_requests(self, client: _core.Client, reference: Reference) -> None:
        """Each request's outputs are those that it gets alone."""
        kinds = [
            Sampler.greedy(),
            Sampler.dist(0.8, 3),
            Sampler.raw_logits(),
            Sampler.logprobs([1, 2, 3]),
            Sampler.entropy(),
            Sampler.multinomial(1.0, 42),
            Sampler.top_k_top_p(0.7, 5, 0.9),
        ]
        generator = random.Random(7)
        requests, masks = [], list(MASKS.values())
        for number in range(12):
            tokens = prompt(reference, generator.choice([1, 5, 17]), "mix", number)
            chosen = generator.choices(kinds[:6], k=generator.randrange(5))
            samplers = [(generator.randrange(len(tokens)), kind) for kind in chosen]
            mask = generator.choice(masks)
            requests.append(request(tokens, samplers, page=2 * number, mask=mask))
        together = client.forward(requests)
        for number, one in enumerate(requests):
            alone = client.forward([one])
            assert together.tokens[number] == alone.tokens[0]
            for kind in ("dists", "logits", "logprobs", "entropies"):
                ours, theirs = getattr(together, kind), getattr(alone, kind)
                expected = theirs[0] if theirs else []
                assert repr_close(ours[number] if ours else [], expected), kind

    def test_probes_beside_drafts(self, client: _core.Client, reference: Reference) -> None:
        tokens = prompt(reference, 9, "drafts")
        first = reference.rows(tokens)[-1][0]
        samplers = [(8, Sampler.greedy()), (8, Sampler.entropy()), (0, Sampler.logprob(3))]
        reply = client.forward([request(tokens, samplers, drafts=[first, 5])])
        [drafted] = reply.tokens
        reference.check([*tokens, first, 5], drafted, rows=range(8, 8 + len(drafted)))
        assert drafted[0] == first
        probabilities = row_of(reference, tokens, 8).softmax(-1)
        assert_close(reply.entropies[0], torch.special.entr(probabilities).sum()[None])
        assert_close(reply.logprobs[0][0], row_of(reference, tokens, 0).log_softmax(-1)[[3]])

    def test_a_response_that_cannot_fit_empties_the_largest_request(
        self, each_driver: drivers.Driver, client: _core.Client, reference: Reference
    ) -> None:
        tokens = prompt(reference, 3, "large")
        rows = [(2, Sampler.raw_logits())] * 4000
        small = request(tokens, [(2, Sampler.entropy()), (2, Sampler.greedy())], page=4)
        reply = client.forward([request(tokens, rows), small])
        assert [len(entries) for entries in reply.logits] == [0, 0]
        assert len(reply.entropies[1]) == len(reply.tokens[1]) == 1
        assert client.forward([small]).tokens == [reply.tokens[1]]
        each_driver.logged("do not fit the response")


def repr_close(ours: object, theirs: object) -> bool:
    """Nested lists of numbers that differ by rounding at most."""
    if isinstance(ours, list | tuple):
        assert isinstance(theirs, list | tuple)
        assert len(ours) == len(theirs)
        return all(repr_close(a, b) for a, b in zip(ours, theirs, strict=True))
    assert isinstance(ours, int | float)
    assert isinstance(theirs, int | float)
    return ours == theirs or abs(ours - theirs) < TOLERANCE


class TestLogitMasks:
    """Masked samplers draw what the mask allows."""

    SAMPLERS = (
        Sampler.greedy(),
        Sampler.multinomial(2.0),
        Sampler.top_k(2.0, 7),
        Sampler.top_p(2.0, 0.9),
        Sampler.min_p(2.0, 0.05),
        Sampler.top_k_top_p(2.0, 9, 0.8),
    )

    @pytest.mark.parametrize("mask", [mask for mask in MASKS.values() if mask is not None], ids=str)
    def test_only_allowed_tokens_are_sampled(
        self, client: _core.Client, reference: Reference, mask: list[int]
    ) -> None:
        tokens = prompt(reference, 6, "draws")
        samplers = [(5, sampler) for sampler in self.SAMPLERS] * 20
        free = request(tokens, samplers, page=2)
        masked, unmasked = client.forward([request(tokens, samplers, mask=mask), free]).tokens
        allowed = expand(mask, reference.vocab_size)
        assert all(allowed[token] for token in masked)
        best = int(row_of(reference, tokens, 5, mask).argmax())
        assert masked[:: len(self.SAMPLERS)] == [best] * 20
        # The other request is none of the mask's business.
        assert not all(allowed[token] for token in unmasked)
        assert unmasked[0] == int(row_of(reference, tokens, 5).argmax())

    @pytest.mark.parametrize("runs", [[300], [5, 0, 7], [UNBOUNDED, 4], [0]], ids=str)
    def test_a_mask_that_forbids_everything_gives_the_unmasked_arg_max(
        self, client: _core.Client, reference: Reference, runs: list[int]
    ) -> None:
        tokens = prompt(reference, 6, "nothing")
        samplers = [(5, sampler) for sampler in self.SAMPLERS]
        [found] = client.forward([request(tokens, samplers, mask=runs)]).tokens
        assert found == [int(row_of(reference, tokens, 5).argmax())] * len(samplers)

    def test_drafts_are_verified_under_the_mask(
        self, client: _core.Client, reference: Reference
    ) -> None:
        tokens = prompt(reference, 6, "verify")
        first = reference.rows(tokens)[-1][0]
        mask = [0, first, 1, UNBOUNDED]
        best = int(row_of(reference, tokens, 5, mask).argmax())
        sampler = [(5, Sampler.greedy())]
        [found] = client.forward([request(tokens, sampler, mask=mask, drafts=[first])]).tokens
        assert found == [best]
        [found] = client.forward([request(tokens, sampler, mask=mask, drafts=[best])]).tokens
        second = int(row_of(reference, [*tokens, best], 6, mask).argmax())
        assert found == [best, second]

    def test_each_of_many_requests_has_its_own_mask(
        self, client: _core.Client, reference: Reference
    ) -> None:
        tokens = prompt(reference, 4, "many")
        requests = [
            request(tokens, [(3, Sampler.greedy())], page=number, mask=[number * 5, 3])
            for number in range(40)
        ]
        found = client.forward(requests).tokens
        logits = row_of(reference, tokens, 3)
        starts = range(0, 200, 5)
        expected = [start + int(logits[start : start + 3].argmax()) for start in starts]
        assert [one for [one] in found] == expected


class TestNumbers:
    """The tensor operations alone."""

    @staticmethod
    def params(count: int, vocabulary: int, temperature: float = 1.0) -> SlotParams:
        ones = torch.ones(count)
        top_ks = torch.full((count,), vocabulary, dtype=torch.int32)
        return SlotParams(ones * temperature, top_ks, ones, ones * 0, ones * 0.5)

    @pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 1000])
    def test_packed_masks(self, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(vocabulary)
        allowed = torch.rand(5, vocabulary, generator=generator) < 0.5
        width = -(-vocabulary // 32)
        padded = torch.nn.functional.pad(allowed, (0, 32 * width - vocabulary)).long()
        words = (padded.view(5, width, 32) << torch.arange(32)).sum(-1)
        words = torch.where(words >= 2**31, words - 2**32, words).int()
        logits = torch.randn(5, vocabulary, generator=generator)
        expected = logits.masked_fill(~allowed, -math.inf)
        entries = torch.tensor([[row * width, -1] for row in range(5)], dtype=torch.int32)
        apply_masks(logits, entries, words.flatten())
        assert torch.equal(logits, expected)

    @pytest.mark.parametrize("edges", [[0, 1], [0, 9], [8, 9], [2, 4, 5, 7], [0, 1, 8, 9]])
    def test_masks_by_their_edges(self, edges: list[int]) -> None:
        logits = torch.zeros(3, 9)
        entries = torch.tensor([[4, len(edges)], [0, 0], [4, 2]], dtype=torch.int32)
        apply_masks(logits, entries, torch.tensor([3, 3, 3, 3, *edges], dtype=torch.int32))
        pairs = list(zip(edges[::2], edges[1::2], strict=True))
        allowed = {token for start, end in pairs for token in range(start, end)}
        assert set(logits[0].isfinite().nonzero()[:, 0].tolist()) == allowed
        assert bool(logits[1].isfinite().all())
        assert logits[2].isfinite().nonzero()[:, 0].tolist() == list(range(*pairs[0]))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_row_of_no_numbers_gives_no_token(self, bad: float) -> None:
        logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
        logits[[1, 3, 5], 7] = bad
        params = self.params(6, 50)
        params.top_ks[4:] = 5
        tokens = run_group(logits, _core.SlotGroup(2, 2, 2), params).tokens.tolist()
        assert all(token < 50 for token in tokens[::2])
        # An infinite arg-max is one.
        assert tokens[1] == (50 if math.isnan(bad) else 7)
        assert tokens[3] == tokens[5] == 50

    def test_an_infinitely_improbable_token_adds_no_entropy(self) -> None:
        logits = torch.tensor([[0.0, 0.0, -math.inf], [0.0, -math.inf, -math.inf]])
        outputs = run_group(logits, _core.SlotGroup(entropies=2), self.params(2, 3))
        assert outputs.entropies is not None
        torch.testing.assert_close(outputs.entropies, torch.tensor([math.log(2), 0.0]))
        assert outputs == Outputs(outputs.tokens, entropies=outputs.entropies)

    def test_ties_of_a_distribution_go_to_the_lower_id(self) -> None:
        logits = torch.zeros(1, 400)
        logits[0, [399, 5]] = 1.0
        outputs = run_group(logits, _core.SlotGroup(dists=1), self.params(1, 400))
        assert outputs.dist_ids is not None
        rest = [token for token in range(400) if token not in (5, 399)]
        assert outputs.dist_ids.tolist() == [5, 399, *rest]
