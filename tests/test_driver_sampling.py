"""Samplers of requests to a running driver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pie_driver_sglang import _core
from pie_driver_sglang._core import Request, Sampler
from support.process import drivers
from support.process import runtime_client as rc

PROMPT = [5, 17, 99, 200, 31, 77, 3]
PAGES = [3, 8]


def prompt_request(samplers: Sequence[Sampler], *, row: int = 6, **changed: Any) -> Request:
    """The prompt with several samplers on one of its rows."""
    return Request(
        PROMPT,
        list(range(len(PROMPT))),
        PAGES[:1],
        len(PROMPT),
        [(row, sampler) for sampler in samplers],
        **changed,
    )


@pytest.fixture(scope="module")
def client(either_driver: drivers.Driver) -> _core.Client:
    return either_driver.client()


@pytest.fixture(scope="module")
def exact_logits(served_snapshot: Path) -> torch.Tensor:
    """Logits of every row of the prompt, by the reference implementation."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        served_snapshot, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).logits[0]  # type: ignore[no-any-return]


def sample(client: _core.Client, *samplers: Sampler, **changed: Any) -> list[int]:
    (tokens,) = client.forward([prompt_request(samplers, **changed)]).tokens
    return tokens


@pytest.mark.engine
class TestDriver:
    """Draws of a driver."""

    @pytest.mark.parametrize(
        "sampler",
        [
            Sampler.greedy(),
            Sampler.multinomial(0.0, 7),
            Sampler.multinomial(-1.0),
            Sampler.multinomial(math.nan),
            Sampler.multinomial(9e-6),
            Sampler.top_k(0.0, 5),
            Sampler.top_k(1.0, 1),
            Sampler.top_p(0.0, 0.5),
            Sampler.top_p(1.0, 0.0),
            Sampler.top_p(1.0, -3.0),
            Sampler.min_p(0.0, 0.1),
            Sampler.min_p(1.0, 1.0),
            Sampler.min_p(1.0, math.inf),
            Sampler.top_k_top_p(0.0, 5, 0.5),
            Sampler.top_k_top_p(1.0, 300, 0.0),
        ],
    )
    def test_what_leaves_one_token_is_the_arg_max(
        self, client: _core.Client, exact_logits: torch.Tensor, sampler: Sampler
    ) -> None:
        assert sample(client, *[sampler] * 3) == [int(exact_logits[-1].argmax())] * 3

    @pytest.mark.parametrize("seed", [2, 7, 2**32 - 1])
    def test_a_seed_gives_the_same_token_in_every_pass_and_batch(
        self, client: _core.Client, seed: int
    ) -> None:
        seeded = [Sampler.multinomial(5.0, seed)] * 4
        alone = sample(client, *seeded)
        other = rc.Context([9] * 30, [20, 21], context_id=5)
        noisy = other.request(Sampler.multinomial(3.0), Sampler.top_k(2.0, 9))
        batches = [
            [prompt_request(seeded, context_id=77)],
            [noisy, prompt_request(seeded)],
            [prompt_request(seeded), noisy, noisy],
        ]
        for batch in batches:
            replies = client.forward(batch).tokens
            assert alone in replies

    def test_seeds_positions_and_slots_draw_independently(self, client: _core.Client) -> None:
        by_seed = sample(client, *[Sampler.multinomial(50.0, seed) for seed in range(2, 34)])
        by_slot = sample(client, *[Sampler.multinomial(50.0, 2)] * 32)
        rows = [(row, Sampler.multinomial(50.0, 2)) for row in range(len(PROMPT))]
        request = Request(PROMPT, list(range(7)), [3], 7, rows)
        (by_row,) = client.forward([request]).tokens
        assert len(set(by_seed)) > 20
        assert len(set(by_slot)) > 20
        assert len(set(by_row)) > 4

    @pytest.mark.parametrize("seed", [0, 1])
    def test_the_seeds_0_and_1_are_fresh_in_every_pass(
        self, client: _core.Client, seed: int
    ) -> None:
        samplers = [Sampler.multinomial(50.0, seed)] * 8
        draws = {tuple(sample(client, *samplers)) for _ in range(6)}
        assert len(draws) == 6

    @pytest.mark.parametrize(
        "sampler",
        [
            Sampler.multinomial(50.0, 1),
            Sampler.top_k(50.0, 200),
            Sampler.top_p(50.0, 0.9),
            Sampler.min_p(50.0, 0.1),
            Sampler.top_k_top_p(50.0, 200, 0.9),
        ],
    )
    def test_equal_requests_of_one_batch_are_sampled_independently(
        self, client: _core.Client, sampler: Sampler
    ) -> None:
        request = prompt_request([sampler] * 8, context_id=4)
        replies = client.forward([request] * 4).tokens
        assert len({tuple(tokens) for tokens in replies}) == 4

    def test_each_sampler_reads_its_own_row(
        self, client: _core.Client, exact_logits: torch.Tensor
    ) -> None:
        rows = [6, 0, 3, 3, 1, 6]
        slots = [(row, Sampler.greedy()) for row in rows]
        reply = client.forward([Request(PROMPT, list(range(7)), [3], 7, slots)])
        assert reply.tokens == [exact_logits[rows].argmax(-1).tolist()]

    def test_samplers_of_all_classes_keep_their_order(
        self, client: _core.Client, exact_logits: torch.Tensor
    ) -> None:
        best = exact_logits.argmax(-1)
        classes = [
            (0, Sampler.top_k(1.0, 1)),
            (1, Sampler.greedy()),
            (2, Sampler.multinomial(1e-4, 3)),
            (3, Sampler.min_p(1.0, 1.0)),
            (4, Sampler.greedy()),
            (5, Sampler.multinomial(1e-4)),
            (6, Sampler.top_p(1.0, 0.0)),
        ]
        request = Request(PROMPT, list(range(7)), [3], 7, classes)
        reply = client.forward([request, prompt_request([]), request])
        assert reply.tokens == [best.tolist(), [], best.tolist()]

    def test_more_slots_than_are_computed_at_once(
        self, client: _core.Client, exact_logits: torch.Tensor
    ) -> None:
        tokens = sample(client, *[Sampler.greedy(), Sampler.top_k(1.0, 1)] * 700)
        assert tokens == [int(exact_logits[-1].argmax())] * 1400

    def test_top_k_never_leaves_the_k_best(
        self, client: _core.Client, exact_logits: torch.Tensor
    ) -> None:
        sampled = sample(client, *[Sampler.top_k(100.0, 5)] * 400)
        assert set(sampled) == set(exact_logits[-1].topk(5).indices.tolist())

    @pytest.mark.parametrize("seeded", [True, False])
    def test_samples_follow_the_distribution(
        self, client: _core.Client, exact_logits: torch.Tensor, seeded: bool
    ) -> None:
        count = 4000
        seeds = range(2, count + 2) if seeded else [0] * count
        sampled = Counter(sample(client, *[Sampler.multinomial(2.0, seed) for seed in seeds]))
        exact = torch.softmax(exact_logits[-1].double() / 2.0, -1)
        likely = [token for token in range(300) if exact[token] * count >= 20]
        assert len(likely) >= 5
        for token in likely:
            expected = float(exact[token]) * count
            # Six standard deviations of the count: one run in millions fails by chance.
            assert abs(sampled[token] - expected) < 6 * math.sqrt(expected)

    def test_a_greedy_continuation_is_that_of_the_reference(
        self, client: _core.Client, served_snapshot: Path
    ) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(served_snapshot, dtype=torch.float32)
        tokens = list(PROMPT)
        with torch.no_grad():
            for _ in range(8):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        assert rc.greedy_tokens(client, PROMPT, 40, 8) == tokens[len(PROMPT) :]
