"""Logprobs against SGLang's sampler and its prompt logprobs."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pie_driver_sglang.kernels.sampling.logprobs_reference import LogprobRequests, logprob_words
from support import versions

VOCAB = 40
TOLERANCE = 1e-4


class Row(NamedTuple):
    """One request and one row of logits."""

    temperature: float
    """0 for the arg-max."""
    top: int
    given: list[int] | None
    token: int
    allowed: int
    """The first so many tokens may come."""
    seed: int

    @property
    def logits(self) -> torch.Tensor:
        """``[vocabulary]`` float32, of which a mask may have taken some."""
        generator = torch.Generator().manual_seed(self.seed)
        logits = torch.randn(VOCAB, generator=generator) * 4
        logits[self.allowed :] = -torch.inf
        return logits

    @property
    def tokens(self) -> list[int]:
        """Those whose log-probabilities are wanted by name."""
        return self.given or []


ROWS = st.lists(
    st.builds(
        Row,
        # Colder, probabilities underflow in SGLang, which takes their logarithms; ours do not.
        temperature=st.sampled_from([0.0]) | st.floats(0.5, 2.0, width=32),
        top=st.integers(0, VOCAB),
        given=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        token=st.integers(0, VOCAB - 1),
        allowed=st.integers(1, VOCAB),
        seed=st.integers(0, 2**31),
    ),
    min_size=1,
    max_size=5,
)


class Found(NamedTuple):
    """Of one position."""

    own: float
    top: list[float]
    ids: list[int]
    given: list[float]

    def equals(self, other: Found, logits: torch.Tensor) -> None:
        """Equal log-probabilities; tokens may differ where their logits are equal."""
        assert self.own == pytest.approx(other.own, abs=TOLERANCE)
        assert self.top == pytest.approx(other.top, abs=TOLERANCE)
        assert self.given == pytest.approx(other.given, abs=TOLERANCE)
        assert torch.equal(logits[self.ids], logits[other.ids])


@pytest.fixture(scope="module")
def sglang() -> SimpleNamespace:
    """SGLang's modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.layers import logprob_processor, sampler
    return SimpleNamespace(sampler=sampler, processor=logprob_processor)


def sampler(sglang: SimpleNamespace, rows: list[Row]) -> Any:
    """SGLang's sampler, which draws the tokens that the rows say."""
    found = sglang.sampler.Sampler.__new__(sglang.sampler.Sampler)
    torch.nn.Module.__init__(found)
    found.rl_on_policy_target = None
    found.use_log_softmax_logprob = found.enable_deterministic = found.use_ascend_backend = False
    found.output_logprob_processor = sglang.processor.OutputLogprobProcessor()
    drawn = torch.tensor([row.token for row in rows])
    # Newer versions return what masks of the sampler are made of, too.
    found._sample_from_probs = lambda *_: drawn if versions.IS_OLDEST else (drawn, None)
    found._sync_token_ids_across_tp = lambda *_: None
    return found


def outputs_of(sglang: SimpleNamespace, rows: list[Row], *, original: bool) -> list[Found]:
    """What SGLang answers for tokens that are drawn; `original` is its environment variable."""
    # As its `SamplingParams` has requests for the arg-max.
    temperatures = torch.tensor([[row.temperature or 1.0] for row in rows])
    info = SimpleNamespace(
        temperatures=temperatures,
        is_all_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        has_custom_logit_processor=False,
        return_sampling_masks=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )
    output = SimpleNamespace(next_token_logits=torch.stack([row.logits for row in rows]))
    with mock.patch.object(sglang.sampler, "SGLANG_RETURN_ORIGINAL_LOGPROB", original):
        sampler(sglang, rows).forward(
            output,
            info,
            True,
            [row.top for row in rows],
            [row.given for row in rows],
            torch.zeros(len(rows)),
        )
    # SGLang leaves these out where no row asks.
    top = getattr(output, "next_token_top_logprobs_val", [[]] * len(rows))
    ids = getattr(output, "next_token_top_logprobs_idx", [[]] * len(rows))
    named = getattr(output, "next_token_token_ids_logprobs_val", [[]] * len(rows))
    own = output.next_token_logprobs
    return [
        Found(float(own[n]), _listed(top[n]), _listed(ids[n]), _listed(named[n]))
        for n in range(len(rows))
    ]


def inputs_of(sglang: SimpleNamespace, rows: list[Row], length: int, chunk: int) -> list[Found]:
    """What SGLang answers for prompts of `length` positions, whose logits come in chunks.

    Every position of a prompt has the same logits and token.
    """
    states = torch.cat([row.logits.expand(length, -1) for row in rows])
    samples, positions = range(length - 1, len(states), length), range(len(states))
    metadata = SimpleNamespace(
        extend_return_top_logprob=any(row.top for row in rows),
        extend_token_ids_logprob=any(row.given for row in rows),
        top_logprobs_nums=[row.top for row in rows],
        token_ids_logprobs=[row.given for row in rows],
        extend_logprob_pruned_lens_cpu=[length] * len(rows),
        extend_input_logprob_token_ids_gpu=torch.tensor(
            [row.token for row in rows]
        ).repeat_interleave(length),
        # Newer versions do not read them of the tensors.
        sample_indices_cpu=list(samples),
        input_logprob_indices_cpu=list(positions),
    )
    sizes = () if versions.IS_OLDEST else (VOCAB,)
    processor = sglang.processor.InputLogprobProcessor(*sizes)
    processor.enable_logprobs_chunk, processor.logprobs_chunk_size = True, chunk
    result, _ = processor.forward(
        states,
        torch.tensor(samples),
        torch.tensor(positions),
        [n for n in range(len(rows)) for _ in range(length)],
        None,
        lambda part, *_, **__: part.clone(),
        metadata,
    )
    found = []
    for n, row in enumerate(rows):
        for position in range(length):
            top = result.top_logprobs_val[n][position] if metadata.extend_return_top_logprob else []
            ids = result.top_logprobs_idx[n][position] if metadata.extend_return_top_logprob else []
            named = result.token_ids_logprobs_val[n][position] if row.given else []
            own = float(result.token_logprobs[n * length + position])
            found.append(Found(own, top, ids, named))
    return found


def _listed(values: Any) -> list[Any]:
    return values.tolist() if isinstance(values, torch.Tensor) else list(values)


def ours(rows: list[Row], divisors: list[float], *, drawn: bool) -> list[Found]:
    """The same of our words; `drawn` says where the tokens come from."""
    tokens = torch.tensor([row.token for row in rows])
    given = [(n, token) for n, row in enumerate(rows) for token in row.tokens]
    requests = LogprobRequests(
        torch.arange(len(rows)),
        torch.full_like(tokens, -1) if drawn else tokens,
        torch.tensor([row.top for row in rows]),
        torch.tensor(divisors),
        torch.tensor(given, dtype=torch.int64).view(-1, 2),
    )
    logits = torch.stack([row.logits for row in rows])
    words = logprob_words(logits, requests, tokens if drawn else tokens[:0])
    floats, found = words.view(torch.float32).tolist(), []
    starts = requests.starts().tolist()
    assert starts[-1] == len(words)
    for row, first in zip(rows, starts, strict=False):
        middle, end = first + 1 + row.top, first + 1 + 2 * row.top
        found.append(
            Found(
                floats[first],
                floats[middle:end],
                words[first + 1 : middle].tolist(),
                floats[end : end + len(row.tokens)],
            )
        )
    return found


@settings(max_examples=80, deadline=None)
@given(rows=ROWS, original=st.booleans())
def test_sampled_tokens_have_the_logprobs_of_sglang(
    sglang: SimpleNamespace, rows: list[Row], original: bool
) -> None:
    divisors = [1.0 if original else row.temperature or 1.0 for row in rows]
    found = ours(rows, divisors, drawn=True)
    theirs = outputs_of(sglang, rows, original=original)
    for row, own, other in zip(rows, found, theirs, strict=True):
        own.equals(other, row.logits)


@settings(max_examples=80, deadline=None)
@given(rows=ROWS, length=st.integers(1, 4), chunk=st.integers(1, 7))
def test_tokens_of_prompts_have_the_log_probabilities_of_sglang(
    sglang: SimpleNamespace, rows: list[Row], length: int, chunk: int
) -> None:
    """Temperatures change nothing. Of a prompt no mask takes tokens."""
    rows = [row._replace(allowed=VOCAB) for row in rows]
    each = [row for row in rows for _ in range(length)]
    found = ours(each, [1.0] * len(each), drawn=False)
    for row, own, other in zip(each, found, inputs_of(sglang, rows, length, chunk), strict=True):
        own.equals(other, row.logits)
