"""The sampler against exact probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang._core import SlotGroup
from pie_driver_sglang.kernels.sampling.reference import (
    SlotParams,
    sample_filtered,
    sample_group,
    sample_plain,
)

GRID = 20_000
"""Evenly spaced uniforms: the share of a token is then exact to one step of the grid."""


class Filter(NamedTuple):
    """Parameters of one sampler."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def params_of(filters: Sequence[Filter], uniforms: Sequence[float], vocabulary: int) -> SlotParams:
    return SlotParams(
        torch.tensor([item.temperature for item in filters], dtype=torch.float32),
        torch.tensor([item.top_k or vocabulary for item in filters], dtype=torch.int32),
        torch.tensor([item.top_p for item in filters], dtype=torch.float32),
        torch.tensor([item.min_p for item in filters], dtype=torch.float32),
        torch.tensor(uniforms, dtype=torch.float32),
    )


def same_params(item: Filter, uniforms: torch.Tensor, vocabulary: int) -> SlotParams:
    """One parameter set for every uniform number."""
    one = params_of([item], [0.0], vocabulary)
    rows = SlotParams(*(field.expand(len(uniforms)) for field in one))
    return rows._replace(uniforms=uniforms)


def even_uniforms(count: int = GRID) -> torch.Tensor:
    return ((torch.arange(count, dtype=torch.float64) + 0.5) / count).float()


def frequencies(row: torch.Tensor, item: Filter, *, plain: bool = False) -> torch.Tensor:
    """Share of each token over evenly spaced uniforms."""
    params = same_params(item, even_uniforms(), len(row))
    logits = row.expand(GRID, -1)
    tokens = sample_plain(logits, params) if plain else sample_filtered(logits, params)
    assert tokens.dtype == torch.int64
    return torch.bincount(tokens, minlength=len(row)).double() / GRID


def support(row: torch.Tensor, item: Filter) -> set[int]:
    return set(frequencies(row, item).nonzero()[:, 0].tolist())


def reference(row: torch.Tensor, item: Filter) -> torch.Tensor:
    """The distribution of the protocol's definition, in float64 and one token after the other."""
    logits = row.double()
    weights = ((logits - logits.max()) / item.temperature).exp()
    order = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))
    kept = order[: item.top_k or len(row)]
    probabilities = weights / weights[kept].sum()
    if item.top_p < 1.0:
        kept = head_of_mass(probabilities, kept, item.top_p)
    least = item.min_p * float(probabilities[order[0]])
    kept = [token for token in kept if probabilities[token] >= least or token == order[0]]
    exact = torch.zeros_like(weights)
    exact[kept] = weights[kept]
    return exact / exact.sum()


def head_of_mass(probabilities: torch.Tensor, order: Sequence[int], mass: float) -> list[int]:
    head: list[int] = []
    before = 0.0
    for token in order:
        if before >= mass and head:
            break
        head.append(token)
        before += float(probabilities[token])
    return head


def random_row(seed: int, vocabulary: int = 50, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, generator=generator) * scale


def row_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


class TestDistribution:
    """Shares of tokens over all uniforms, against the exact probabilities."""

    TOLERANCE = 2.0 / GRID

    @pytest.mark.parametrize("temperature", [0.05, 0.3, 0.7, 1.0, 1.7, 10.0])
    @pytest.mark.parametrize("seed", [0, 1, 2])
    def test_plain(self, seed: int, temperature: float) -> None:
        row, item = random_row(seed), Filter(temperature)
        shares = frequencies(row, item, plain=True)
        torch.testing.assert_close(
            shares, reference(row, item), rtol=0, atol=self.TOLERANCE, check_dtype=False
        )

    @pytest.mark.parametrize("seed", [3, 4])
    @pytest.mark.parametrize(
        "item",
        [
            Filter(),
            Filter(0.8, top_k=1),
            Filter(0.8, top_k=5),
            Filter(1.3, top_k=49),
            Filter(1.3, top_k=50),
            Filter(0.7, top_p=0.1),
            Filter(0.7, top_p=0.9),
            Filter(1.5, top_p=0.999),
            Filter(0.8, min_p=0.01),
            Filter(0.8, min_p=0.3),
            Filter(2.0, min_p=1.0),
            Filter(0.8, top_k=20, top_p=0.9),
            Filter(1.2, top_k=7, top_p=0.5),
            Filter(1.0, top_k=10, top_p=0.8, min_p=0.2),
        ],
        ids=str,
    )
    def test_filtered(self, seed: int, item: Filter) -> None:
        row = random_row(seed)
        expected = reference(row, item)
        shares = frequencies(row, item)
        torch.testing.assert_close(shares, expected, rtol=0, atol=self.TOLERANCE)
        assert not shares[expected == 0].any()

    def test_a_large_vocabulary(self) -> None:
        row, item = random_row(5, 20_000, 3.0), Filter(0.9, top_k=40, top_p=0.95)
        params = same_params(item, even_uniforms(500), len(row))
        tokens = sample_filtered(row.expand(500, -1), params)
        shares = torch.bincount(tokens, minlength=len(row)).double() / 500
        expected = reference(row, item)
        assert not shares[expected == 0].any()
        torch.testing.assert_close(shares, expected, rtol=0, atol=2.1 / 500)

    def test_an_unfiltered_slot_has_the_same_distribution_in_both_groups(self) -> None:
        row = random_row(6)
        torch.testing.assert_close(
            frequencies(row, Filter(0.9)),
            frequencies(row, Filter(0.9), plain=True),
            rtol=0,
            atol=self.TOLERANCE,
        )


class TestSupport:
    """Which tokens can be drawn at all."""

    EQUAL = torch.zeros(6)
    STEPS = row_of(0.4, 0.3, 0.2, 0.1)

    @pytest.mark.parametrize("k", [1, 2, 3, 4])
    def test_top_k_keeps_the_k_most_probable(self, k: int) -> None:
        assert support(self.STEPS, Filter(top_k=k)) == set(range(k))

    @pytest.mark.parametrize("k", [1, 3, 6])
    def test_top_k_keeps_the_lowest_ids_of_equal_ones(self, k: int) -> None:
        assert support(self.EQUAL, Filter(top_k=k)) == set(range(k))

    def test_a_tie_at_the_edge_of_top_k_goes_to_the_lower_id(self) -> None:
        row = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0])
        assert support(row, Filter(top_k=3)) == {3, 1, 0}

    @pytest.mark.parametrize(
        ("p", "kept"),
        [(0.0, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.89, 3), (0.91, 4), (1.0, 4)],
    )
    def test_top_p_keeps_the_smallest_head_of_that_mass(self, p: float, kept: int) -> None:
        assert support(self.STEPS, Filter(top_p=p)) == set(range(kept))

    def test_top_p_stops_at_exactly_the_mass(self) -> None:
        # Quarters are exact in binary: two of them make one half.
        assert support(torch.zeros(4), Filter(top_p=0.5)) == {0, 1}

    def test_top_p_of_equal_ones_takes_the_lowest_ids(self) -> None:
        assert support(torch.zeros(8), Filter(top_p=0.3)) == {0, 1, 2}

    @pytest.mark.parametrize(
        ("p", "kept"), [(0.0, 4), (0.24, 4), (0.26, 3), (0.49, 3), (0.51, 2), (0.76, 1), (1.0, 1)]
    )
    def test_min_p_compares_with_the_largest_probability(self, p: float, kept: int) -> None:
        assert support(self.STEPS, Filter(min_p=p)) == set(range(kept))

    def test_min_p_one_keeps_every_one_that_is_as_probable_as_the_best(self) -> None:
        assert support(torch.tensor([0.0, 1.0, 1.0]), Filter(min_p=1.0)) == {1, 2}

    def test_min_p_looks_at_the_tempered_probabilities(self) -> None:
        # The ratio of the two is e^-2; at temperature 4 it is e^-0.5, about 0.61.
        row = torch.tensor([2.0, 0.0])
        assert support(row, Filter(1.0, min_p=0.5)) == {0}
        assert support(row, Filter(4.0, min_p=0.5)) == {0, 1}

    def test_top_p_applies_to_the_rest_after_top_k(self) -> None:
        # Of 0.4, 0.3 and 0.2 the first is 44 % and the first two are 78 % of what is left.
        assert support(self.STEPS, Filter(top_k=3, top_p=0.44)) == {0}
        assert support(self.STEPS, Filter(top_k=3, top_p=0.45)) == {0, 1}
        assert support(self.STEPS, Filter(top_k=3, top_p=0.79)) == {0, 1, 2}

    @pytest.mark.parametrize(("p", "kept"), [(0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.95, 3)])
    def test_a_share_below_0_is_one_of_the_whole_distribution(self, p: float, kept: int) -> None:
        assert support(self.STEPS, Filter(top_k=3, top_p=-p)) == set(range(kept))

    def test_ids_are_those_of_the_vocabulary_not_ranks(self) -> None:
        row = torch.tensor([-9.0, 5.0, -9.0, 4.0, 6.0])
        assert support(row, Filter(top_k=2)) == {4, 1}

    @pytest.mark.parametrize("item", [Filter(top_k=1), Filter(top_p=0.0), Filter(min_p=1.0)])
    def test_one_token_is_always_left(self, item: Filter) -> None:
        assert support(random_row(7), item) == {int(random_row(7).argmax())}

    def test_a_vocabulary_of_one(self) -> None:
        assert support(torch.zeros(1), Filter(top_k=1, top_p=0.5, min_p=0.5)) == {0}


class TestExtremes:
    """Values at which a careless computation overflows or leaves the vocabulary."""

    FILTERS = (Filter(), Filter(top_k=3), Filter(top_p=0.9), Filter(min_p=0.1))

    @pytest.mark.parametrize("item", FILTERS, ids=str)
    @pytest.mark.parametrize("temperature", [1.0001e-5, 1e-4, 1e-3])
    def test_a_tiny_temperature_is_the_arg_max(self, item: Filter, temperature: float) -> None:
        row = random_row(8, scale=30.0)
        item = item._replace(temperature=temperature)
        assert support(row, item) == {int(row.argmax())}

    @pytest.mark.parametrize("temperature", [1e10, torch.finfo(torch.float32).max])
    def test_a_huge_temperature_is_uniform(self, temperature: float) -> None:
        shares = frequencies(random_row(9), Filter(temperature), plain=True)
        torch.testing.assert_close(shares, torch.full_like(shares, 1 / 50), rtol=0, atol=2 / GRID)

    def test_top_k_counts_logits_that_a_huge_temperature_makes_equal(self) -> None:
        row = torch.tensor([1.0, 4.0, 2.0, 3.0])
        assert support(row, Filter(1e30, top_k=2)) == {1, 3}

    @pytest.mark.parametrize("item", FILTERS, ids=str)
    def test_minus_infinity_is_never_sampled(self, item: Filter) -> None:
        row = torch.tensor([-math.inf, 1.0, -math.inf, 0.5, 0.7, -math.inf])
        assert support(row, item._replace(temperature=5.0)) == {1, 3, 4}
        assert frequencies(row, Filter(5.0), plain=True)[[0, 2, 5]].sum() == 0

    @pytest.mark.parametrize("item", FILTERS, ids=str)
    def test_one_finite_logit_is_always_sampled(self, item: Filter) -> None:
        row = torch.full((6,), -math.inf)
        row[4] = -1e30
        assert support(row, item) == {4}
        assert frequencies(row, Filter(), plain=True)[4] == 1

    @pytest.mark.parametrize("item", FILTERS, ids=str)
    def test_the_largest_floats(self, item: Filter) -> None:
        largest = torch.finfo(torch.float32).max
        row = torch.tensor([-largest, largest, 0.0, -largest])
        assert support(row, item) == {1}

    @pytest.mark.parametrize("uniform", [0.0, 1 - 2**-24, math.nextafter(1.0, 0.0)])
    @pytest.mark.parametrize("item", FILTERS, ids=str)
    def test_the_ends_of_the_uniforms_stay_within_the_support(
        self, item: Filter, uniform: float
    ) -> None:
        rows = torch.stack([random_row(seed, 1000, 0.5) for seed in range(64)])
        rows[:, 900:] = -math.inf
        params = params_of([item] * 64, [min(uniform, 1 - 2**-24)] * 64, 1000)
        assert bool((sample_plain(rows, params) < 900).all())
        assert bool((sample_filtered(rows, params) < 900).all())

    def test_the_first_uniform_samples_the_first_possible_token(self) -> None:
        row = torch.tensor([[-math.inf, 0.0, 0.0]])
        assert sample_plain(row, params_of([Filter()], [0.0], 3)).tolist() == [1]


@pytest.mark.interpreted("benches/gpu/sampler_check.py", "--device", "cpu")
def test_both_implementations_agree_with_exact_distributions(interpreted: str) -> None:
    """Hostile rows and filters over several blocks; the GPU's kernel in Triton's interpreter."""
    assert interpreted.count("ok  ") == 16


class TestGroup:
    """Slots of all classes together."""

    def test_greedy_slots_take_the_arg_max_and_the_lowest_id_of_a_tie(self) -> None:
        logits = torch.tensor([[1.0, 7.0, 7.0], [5.0, 5.0, 5.0], [-3.0, -2.0, -1.0]])
        params = params_of([Filter(0.0)] * 3, [0.9] * 3, 3)
        assert sample_group(logits, SlotGroup(greedy=3), params).tolist() == [1, 0, 2]

    @pytest.mark.parametrize("width", [31, 1000, 30_000])
    def test_a_greedy_tie_goes_to_the_lowest_id_in_any_width(self, width: int) -> None:
        logits = torch.zeros(2, width)
        logits[1, [width // 3, width // 2, width - 1]] = 1.0
        params = params_of([Filter(0.0)] * 2, [0.5] * 2, width)
        tokens = sample_group(logits, SlotGroup(greedy=2), params)
        assert tokens.tolist() == [0, width // 3]

    def test_each_sampler_group_uses_its_own_logits(self) -> None:
        logits = torch.full((6, 8), -math.inf)
        for slot in range(6):
            logits[slot, slot + 1] = 0.0
        items = [Filter(0.0)] * 2 + [Filter()] * 2 + [Filter(top_k=2)] * 2
        tokens = sample_group(logits, SlotGroup(2, 2, 2), params_of(items, [0.5] * 6, 8))
        assert tokens.tolist() == [1, 2, 3, 4, 5, 6]

    @pytest.mark.parametrize("counts", [(3, 0, 0), (0, 3, 0), (0, 0, 3), (1, 0, 2), (0, 2, 1)])
    def test_classes_may_be_missing(self, counts: tuple[int, int, int]) -> None:
        logits = torch.stack([random_row(seed) for seed in range(3)])
        items = [Filter(0.0)] * counts[0] + [Filter()] * counts[1] + [Filter(top_p=0.5)] * counts[2]
        tokens = sample_group(logits, SlotGroup(*counts), params_of(items, [0.3] * 3, 50))
        assert tokens.shape == (3,)
        assert tokens.dtype == torch.int64

    @settings(max_examples=30, deadline=None)
    @given(data=st.data())
    def test_a_token_does_not_depend_on_the_other_slots(self, data: st.DataObject) -> None:
        counts = data.draw(st.tuples(*[st.integers(0, 4)] * 3).filter(any))
        seeds = data.draw(st.lists(st.integers(0, 2**20), min_size=12, max_size=12))
        total = sum(counts)
        logits = torch.stack([random_row(seed, 333) for seed in seeds[:total]])
        items = self.mixed_filters(counts, seeds)
        params = params_of(items, [(seed % 997) / 997 for seed in seeds[:total]], 333)
        together = sample_group(logits, SlotGroup(*counts), params)
        for slot in range(total):
            alone = sample_group(
                logits[slot : slot + 1], self.class_of(slot, counts), params.rows(slot, slot + 1)
            )
            assert alone.tolist() == [int(together[slot])]

    @staticmethod
    def mixed_filters(counts: tuple[int, ...], seeds: Sequence[int]) -> list[Filter]:
        filtered = [
            Filter(0.5 + seed % 3, 1 + seed % 100, (seed % 11) / 10, (seed % 5) / 10)
            for seed in seeds
        ]
        items = [Filter(0.0)] * counts[0] + [Filter(0.3 + seeds[0] % 4)] * counts[1]
        return items + filtered[: counts[2]]

    @staticmethod
    def class_of(slot: int, counts: tuple[int, ...]) -> SlotGroup:
        if slot < counts[0]:
            return SlotGroup(greedy=1)
        return SlotGroup(plain=1) if slot < counts[0] + counts[1] else SlotGroup(filtered=1)

    def test_logits_stay_as_they_are(self) -> None:
        logits = torch.stack([random_row(seed) for seed in range(3)])
        before = logits.clone()
        items = [Filter(0.0), Filter(), Filter(top_k=4)]
        sample_group(logits, SlotGroup(1, 1, 1), params_of(items, [0.5] * 3, 50))
        assert torch.equal(logits, before)
