"""Prompts of embeddings in `Engine`: those of token ids, and those of transformers."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.offline.engine import Engine
from support.models.reference import Reference, random_tokens
from support.process import engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

CHUNK = 48
LENGTHS = (1, 2, 16, 17, 33, 70, 100)
BUDGET = 40 * 4 * 256
"""Bytes of a step: fewer embeddings than tokens fit one."""


def greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}


@pytest.fixture(scope="module")
def engine(forked_python: str) -> Iterator[Engine]:
    with engines.small(
        forked_python,
        48,
        chunked_prefill_size=CHUNK,
        max_step_ms=0,
        max_input_embeds_bytes=BUDGET,
        enable_return_hidden_states=True,
        request_limits={"input_embeds_bytes": 1 << 20},
        speculative_algorithm="NGRAM",
    ) as found:
        yield found


@pytest.fixture(scope="module")
def table(reference: Reference) -> Any:
    """The model's embeddings ``[vocabulary, hidden]``."""
    return reference.embeddings


def prompt_of(reference: Reference, length: int, *name: Any) -> list[int]:
    return random_tokens(reference.vocab_size, length, "embeds", *name)


def mixed(table: Any, length: int, seed: int) -> Any:
    """Embeddings of no token: each lies between two of the model's."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(len(table), (length,), generator=generator) for _ in "ab")
    share = torch.rand(length, 1, generator=generator)
    return share * table[first] + (1 - share) * table[second]


def test_the_models_own_embeddings_are_its_tokens(
    engine: Engine, reference: Reference, table: Any
) -> None:
    prompts = [prompt_of(reference, length) for length in LENGTHS]
    wanted = engine.generate(input_ids=prompts, sampling_params=greedy(12))
    before = engine.get_server_info()["internal_states"][0]["retractions"]
    # More than fit the pages, and long enough that they run at once on a busy machine.
    rounds = [table[prompt] for prompt in prompts] * 3
    found = engine.generate(input_embeds=rounds, sampling_params=greedy(120), return_logprob=True)
    assert engine.get_server_info()["internal_states"][0]["retractions"] > before
    for number, answer in enumerate(found):
        prompt, other = prompts[number % len(prompts)], wanted[number % len(prompts)]
        assert answer["output_ids"][:12] == other["output_ids"]
        assert answer["meta_info"]["prompt_tokens"] == len(prompt)
        assert len(answer["meta_info"]["output_token_logprobs"]) == 120


def test_embeddings_of_no_token(engine: Engine, reference: Reference, table: Any) -> None:
    """Beside prompts of tokens, streamed and not, with a cached prefix and without one."""
    embeds = [mixed(table, length, length) for length in LENGTHS]
    tokens = [reference.after_embeddings(each, 8) for each in embeds]
    prompt = prompt_of(reference, 30, "beside")
    beside = engine.generate(input_ids=prompt, sampling_params=greedy(8))["output_ids"]
    cached = []
    for _ in range(2):
        stream = engine.generate(input_ids=prompt, sampling_params=greedy(60), stream=True)
        next(stream)
        answers = engine.generate(input_embeds=embeds, sampling_params=greedy(8))
        assert [answer["output_ids"] for answer in answers] == tokens
        cached.append(answers[-1]["meta_info"]["cached_tokens"])
        *_, last = stream
        assert last["output_ids"][:8] == beside
    # Whole blocks of equal embeddings are found again; others are not.
    assert cached == [0, 96]
    other = embeds[-1].clone()
    other[5, 7] += 0.5
    answer = engine.generate(input_embeds=other, sampling_params=greedy(8))
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == reference.after_embeddings(other, 8)
    parts = list(engine.generate(input_embeds=embeds[3], sampling_params=greedy(8), stream=True))
    assert len(parts) > 1
    assert parts[-1]["output_ids"] == tokens[3]


def test_forms(engine: Engine, reference: Reference, table: Any) -> None:
    import torch

    embeds = mixed(table, 9, 1)
    wanted = reference.after_embeddings(embeds, 6)
    forms = (embeds, embeds.numpy(), embeds.tolist(), embeds.double())
    for form in forms:
        answer = engine.generate(input_embeds=form, sampling_params=greedy(6))
        assert answer["output_ids"] == wanted
    for batch in (torch.stack([embeds] * 2), [embeds.tolist()] * 2, [embeds] * 2):
        answers = engine.generate(input_embeds=batch, sampling_params=greedy(6))
        assert [answer["output_ids"] for answer in answers] == [wanted] * 2
    half = embeds.bfloat16()
    answer = engine.generate(input_embeds=half, sampling_params=greedy(6))
    assert answer["output_ids"] == reference.after_embeddings(half.float(), 6)
    answers = engine.generate(input_embeds=embeds, sampling_params={**greedy(6), "n": 2})
    assert [answer["output_ids"] for answer in answers] == [wanted] * 2


def test_hidden_states_and_penalties(engine: Engine, reference: Reference, table: Any) -> None:
    prompt = prompt_of(reference, 20, "states")
    parameters = {**greedy(10), "repetition_penalty": 1.5, "frequency_penalty": 0.5}
    options: dict[str, Any] = {"sampling_params": parameters, "return_hidden_states": True}
    wanted = engine.generate(input_ids=prompt, extra_key="tokens", **options)
    found = engine.generate(input_embeds=table[prompt], **options)
    assert found["output_ids"] == wanted["output_ids"]
    for one, other in zip(*(each["meta_info"]["hidden_states"] for each in (found, wanted)),
                          strict=True):  # fmt: skip
        assert np.allclose(one, other, atol=2e-4)


def test_a_killed_driver(engine: Engine, reference: Reference, table: Any) -> None:
    embeds = mixed(table, 90, 3)
    wanted = reference.after_embeddings(embeds, 12)
    stream = engine.generate(input_embeds=embeds, sampling_params=greedy(300), stream=True)
    next(stream)
    [pid] = engine.get_server_info()["internal_states"][0]["driver_pids"]
    os.kill(pid, signal.SIGKILL)
    *_, last = stream
    assert last["output_ids"][:12] == wanted
    assert len(last["output_ids"]) == 300


def test_two_ranks(forked_python: str, reference: Reference, table: Any) -> None:
    embeds = [mixed(table, length, length) for length in (1, 17, 70)]
    with engines.small(forked_python, 48, chunked_prefill_size=CHUNK, tp_size=2) as found:
        answers = found.generate(input_embeds=embeds, sampling_params=greedy(6))
    for each, answer in zip(embeds, answers, strict=True):
        assert answer["output_ids"] == reference.after_embeddings(each, 6)


@pytest.mark.parametrize(
    ("embeds", "words"),
    [
        ([[0.5] * 3], "is 1 x 3, and an embedding of this model has"),
        ([], "`input_embeds` is"),
        ([0.5], "`input_embeds` is"),
        ([["a"]], "`input_embeds` is"),
        ([[[0.5], [0.5, 0.5]]], "rows of different lengths"),
        ("hidden", "`input_embeds` is 'hidden'"),
    ],
)
def test_what_is_no_matrix_is_refused(engine: Engine, embeds: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine.generate(input_embeds=embeds)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value).partition("\n\nhint")[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_numbers_that_are_not_finite(engine: Engine, table: Any, value: float) -> None:
    embeds = table[:20].double().numpy().copy()
    embeds[17, 3] = value
    with pytest.raises(ConfigError, match="number 3 of embedding 17 of `input_embeds` is"):
        engine.generate(input_embeds=embeds)


def test_other_arguments_that_do_not_fit(engine: Engine, table: Any) -> None:
    for other in ({"prompt": "a"}, {"input_ids": [1]}):
        with pytest.raises(ConfigError, match="give exactly one"):
            engine.generate(input_embeds=table[:2], **other)
    wanted = {"return_logprob": True, "logprob_start_len": 0}
    answer = engine.generate(input_embeds=table[:9], **wanted)
    assert "with images or `input_embeds`" in answer["meta_info"]["finish_reason"]["message"]
    many = np.zeros((1 + (1 << 20) // (4 * table.shape[1]), table.shape[1]), np.float32)
    with pytest.raises(ConfigError, match=r"`input_embeds` has .* bytes, 1048576 is the most"):
        engine.generate(input_embeds=many)


def test_a_driver_without_them(forked_python: str, table: Any) -> None:
    options = {"max_input_embeds_bytes": 0}
    with (
        engines.small(forked_python, 48, **options) as found,
        pytest.raises(ConfigError, match="this model and driver take none"),
    ):
        found.generate(input_embeds=table[:2])
