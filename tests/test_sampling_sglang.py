"""Samplers and penalties against SGLang's penalizers, logit bias and sampler."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang.kernels.sampling.reference import filtered_weights, sample_plain
from pie_driver_sglang.kernels.sampling.slot_params import SlotParams
from pie_driver_sglang.kernels.sampling.token_history import RECORD_WORDS, Records, TokenHistory

VOCAB = 40
EOS = 3


class Row(NamedTuple):
    """One request: its parameters, its output so far, its logits."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    logit_bias: dict[int, float]
    output: list[int]
    seed: int

    @property
    def logits(self) -> torch.Tensor:
        """``[vocabulary]`` float32."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(VOCAB, generator=generator) * 3

    @property
    def suppresses(self) -> bool:
        """Whether no stop token may come yet."""
        return len(self.output) < self.min_new_tokens


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


ROWS = st.lists(
    st.builds(
        Row,
        temperature=floats(0.125, 2.0),
        top_k=st.sampled_from([1, 2, 5, 20, VOCAB, 2**30]),
        top_p=st.sampled_from([1.0]) | floats(0.0625, 1.0),
        min_p=st.sampled_from([0.0]) | floats(0.0, 0.5),
        frequency_penalty=st.sampled_from([0.0]) | floats(-2.0, 2.0),
        presence_penalty=st.sampled_from([0.0]) | floats(-2.0, 2.0),
        repetition_penalty=st.sampled_from([1.0]) | floats(0.25, 2.0),
        min_new_tokens=st.integers(0, 6),
        logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), floats(-100.0, 100.0), max_size=5),
        output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
        seed=st.integers(0, 2**31),
    ),
    min_size=1,
    max_size=5,
)


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    """SGLang's sampling modules."""
    torch.compiler.set_stance("force_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers import sampler
        from sglang.srt.sampling import penaltylib, sampling_batch_info
    return SimpleNamespace(sampler=sampler, penaltylib=penaltylib, info=sampling_batch_info)


def theirs(sglang: SimpleNamespace, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits after SGLang's penalties and biases, and the probabilities that it draws with."""
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS)
    fields = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens")
    reqs = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(
                stop_token_ids=None, **{name: getattr(row, name) for name in fields}
            ),
            tokenizer=tokenizer,
            eos_token_ids=None,
        )
        for row in rows
    ]
    batch = SimpleNamespaceWithReference(reqs=reqs, device="cpu")
    library = sglang.penaltylib
    orchestrator = library.BatchedPenalizerOrchestrator(
        VOCAB,
        batch,
        {
            library.BatchedFrequencyPenalizer,
            library.BatchedMinNewTokensPenalizer,
            library.BatchedPresencePenalizer,
            library.BatchedRepetitionPenalizer,
        },
    )
    logits = []
    # Each request has an output of its own length, and they are counted token by token together.
    for number, row in enumerate(rows):
        alone = SimpleNamespaceWithReference(reqs=[reqs[number]], device="cpu")
        orchestrator = library.BatchedPenalizerOrchestrator(
            VOCAB, alone, set(orchestrator.penalizers)
        )
        for token in row.output:
            orchestrator.cumulate_output_tokens(torch.tensor([token]))
        bias = torch.zeros(1, VOCAB)
        for token, value in row.logit_bias.items():
            bias[0, token] = value
        info = sglang.info.SamplingBatchInfo(
            temperatures=torch.tensor([[row.temperature]]),
            top_ps=torch.tensor([row.top_p]),
            top_ks=torch.tensor([row.top_k], dtype=torch.int32),
            min_ps=torch.tensor([row.min_p]),
            is_all_greedy=False,
            is_any_greedy=False,
            need_top_p_sampling=True,
            need_top_k_sampling=True,
            need_min_p_sampling=True,
            vocab_size=VOCAB,
            penalizer_orchestrator=orchestrator,
            device="cpu",
            logit_bias=bias,
        )
        info.update_penalties()
        info.penalizer_orchestrator = None
        own = row.logits[None].clone()
        info.apply_logits_bias(own)
        logits.append(own[0])
    adjusted = torch.stack(logits)
    temperatures = torch.tensor([row.temperature for row in rows])
    probs = torch.softmax(adjusted / temperatures[:, None], dim=-1)
    return adjusted, _drawn_with(sglang, probs, rows)


class SimpleNamespaceWithReference(SimpleNamespace):
    """One that can be referred to weakly, as the orchestrator does."""


def _drawn_with(sglang: SimpleNamespace, probs: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """What SGLang's sampler gives to `torch.multinomial`, in the order of the ids."""
    given: list[torch.Tensor] = []

    def multinomial(weights: torch.Tensor, num_samples: int) -> torch.Tensor:
        given.append(weights)
        return torch.zeros(len(weights), num_samples, dtype=torch.int64)

    order = probs.sort(dim=-1, descending=True)[1]
    with mock.patch.object(torch, "multinomial", multinomial):
        sglang.sampler.top_k_top_p_min_p_sampling_from_probs_torch(
            probs.clone(),
            torch.tensor([row.top_k for row in rows]),
            torch.tensor([row.top_p for row in rows]),
            torch.tensor([row.min_p for row in rows]),
            True,
            None,
            torch.zeros(len(rows)),
        )
    weights = torch.zeros_like(probs).scatter_(-1, order, given[0])
    return weights / weights.sum(dim=-1, keepdim=True)


def ours(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by a history of tokens, records and slot parameters, as the planner stages them."""
    width = max(1, *(len(row.output) for row in rows))
    table = torch.arange(1, 1 + len(rows) * width, dtype=torch.int32).view(len(rows), width)
    history = TokenHistory(table, 1 + len(rows) * width, VOCAB)
    records, words = [], []
    for number, row in enumerate(rows):
        history.record(table[number, : len(row.output)].long(), torch.tensor(row.output).long())
        biases = [*row.logit_bias.items(), *([(EOS, float("-inf"))] if row.suppresses else [])]
        penalties = (row.frequency_penalty, row.presence_penalty, row.repetition_penalty)
        bits = torch.tensor(penalties).view(torch.int32).tolist()
        records.append([number, 0, len(row.output), *bits, len(words), len(biases)])
        for token, value in biases:
            words += [token, int(torch.tensor([value]).view(torch.int32))]
    slots = torch.tensor(records, dtype=torch.int32).view(-1, RECORD_WORDS)
    logits = torch.stack([row.logits for row in rows])
    history.apply_penalties(logits, Records(slots, torch.tensor(words, dtype=torch.int32)))
    params = SlotParams(
        torch.tensor([row.temperature for row in rows]),
        torch.tensor([min(row.top_k, VOCAB) for row in rows], dtype=torch.int32),
        # As `SamplerParams::combined` has it.
        torch.tensor([row.top_p if row.top_p == 1 else -row.top_p for row in rows]),
        torch.tensor([row.min_p for row in rows]),
        torch.zeros(len(rows)),
    )
    weights = filtered_weights(logits, params)
    return logits, weights / weights.sum(dim=-1, keepdim=True)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS)
def test_any_mix_of_parameters_has_the_same_probabilities(
    sglang: SimpleNamespace, rows: list[Row]
) -> None:
    their_logits, their_probs = theirs(sglang, rows)
    our_logits, our_probs = ours(rows)
    torch.testing.assert_close(our_logits, their_logits, rtol=1e-5, atol=1e-5)
    for row, own, other in zip(rows, our_probs, their_probs, strict=True):
        if torch.allclose(own, other, rtol=0, atol=1e-5):
            continue
        # Rounding may put one token on the other side of an edge.
        near = [
            ours([row._replace(**changed)])[1][0]
            for changed in (
                {"top_p": min(1.0, row.top_p * (1 + 1e-5))},
                {"top_p": row.top_p * (1 - 1e-5)},
                {"min_p": row.min_p * (1 + 1e-5)},
                {"min_p": row.min_p * (1 - 1e-5)},
            )
        ]
        assert any(torch.allclose(one, other, rtol=0, atol=1e-5) for one in near), row


@pytest.mark.parametrize("seed", range(3))
def test_samples_have_the_distribution(sglang: SimpleNamespace, seed: int) -> None:
    """Chi-square over 20,000 draws of all parameters together; 1 of 10,000 right ones fails."""
    row = Row(0.9, 12, 0.95, 0.01, 0.5, 0.2, 1.1, 2, {4: 1.0, 9: -2.0}, [1, 1, 5, 7], seed)
    probs = theirs(sglang, [row])[1][0].double()
    weights = torch.log(ours([row])[1])
    draws = 20_000
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(draws, generator=generator)
    one = torch.ones(draws)
    params = SlotParams(one, one.int() * VOCAB, one, one * 0, uniforms)
    counts = torch.bincount(sample_plain(weights.expand(draws, -1), params), minlength=VOCAB)
    kept = probs > 0
    assert not counts[~kept].any()
    expected = probs[kept] * draws
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    # Wilson and Hilferty's approximation of the quantile at 1 - 1e-4.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * (2 / (9 * freedom)) ** 0.5) ** 3
    assert freedom > 1
    assert statistic < limit


class TestTransformers:
    """Greedy tokens under each penalty and bias equal those of transformers' processors."""

    LOGITS = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(9)) * 2

    def greedy(self, **parameters: Any) -> list[int]:
        plain = {"logit_bias": {}, "min_new_tokens": 0, "repetition_penalty": 1.0}
        tokens: list[int] = []
        for logits in self.LOGITS:
            row = Row(
                temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, frequency_penalty=0.0,
                presence_penalty=0.0, output=list(tokens), seed=0, **(plain | parameters),
            )  # fmt: skip
            with mock.patch.object(Row, "logits", logits):
                tokens.append(int(ours([row])[1][0].argmax()))
        return tokens

    def processed(self, make: Any) -> list[int]:
        tokens: list[int] = []
        for logits in self.LOGITS:
            ids = torch.tensor([tokens], dtype=torch.int64)
            tokens.append(int(make(ids, logits[None].clone())[0].argmax()))
        return tokens

    @pytest.mark.parametrize("penalty", [0.5, 1.3, 3.0])
    def test_repetition(self, penalty: float) -> None:
        from transformers import RepetitionPenaltyLogitsProcessor

        expected = self.processed(RepetitionPenaltyLogitsProcessor(penalty))
        assert self.greedy(repetition_penalty=penalty) == expected
        assert expected != self.greedy()

    def test_bias(self) -> None:
        from transformers import SequenceBiasLogitsProcessor

        biases = {2: 2.5, 7: -9.0, 30: 1.5}
        processor = SequenceBiasLogitsProcessor({(key,): value for key, value in biases.items()})
        expected = self.processed(processor)
        assert self.greedy(logit_bias=biases) == expected
        assert expected != self.greedy()

    def test_minimum_of_new_tokens(self) -> None:
        from transformers import MinNewTokensLengthLogitsProcessor

        # So that the stop token would come first.
        biases = {EOS: 20.0}
        processor = MinNewTokensLengthLogitsProcessor(0, 6, EOS)

        def make(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            logits[0, EOS] += biases[EOS]
            return torch.as_tensor(processor(ids, logits))

        expected = self.processed(make)
        assert self.greedy(logit_bias=biases, min_new_tokens=6) == expected
        assert expected.index(EOS) == 6
