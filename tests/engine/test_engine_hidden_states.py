"""Hidden states of the public engine: equal to those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.offline.engine import Engine
from support.models.expected_logprobs import LogprobParams, check_answer
from support.models.reference import Reference, random_tokens
from support.process import engines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 6}
CHUNK = 48
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def returning(forked_python: str) -> Iterator[Engine]:
    with engines.small(
        forked_python,
        48,
        chunked_prefill_size=CHUNK,
        max_step_ms=0,
        enable_return_hidden_states=True,
        request_limits={"hidden_state_bytes": 1 << 17},
        speculative_algorithm="NGRAM",
    ) as found:
        yield found


def prompt_of(reference: Reference, tokens: int, *name: Any) -> list[int]:
    return random_tokens(reference.vocab_size, tokens, "states", *name)


def check(answer: dict[str, Any], prompt: list[int], reference: Reference) -> None:
    """Rows of the prompt that are not cached in a list, then one of each token but the last."""
    import torch

    states, output = answer["meta_info"]["hidden_states"], answer["output_ids"]
    cached = answer["meta_info"]["cached_tokens"]
    assert len(states) == max(1, len(output))
    first, *rest = states
    assert len(first) == len(prompt) - cached
    expected = reference.states([*prompt, *output[:-1]])[cached:]
    assert torch.allclose(torch.tensor([*first, *rest]), expected, atol=TOLERANCE, rtol=TOLERANCE)


class TestHiddenStates:
    def test_many_at_once(self, returning: Engine, reference: Reference) -> None:
        """Prompts in parts, shared prefixes, retracted requests, neighbours without, drafts."""
        shared = prompt_of(reference, 40, "shared")
        prompts = [
            [*(shared if n % 3 else ()), *prompt_of(reference, 70, "own", n)][:70]
            for n in range(18)
        ]
        wanted: list[Any] = [n % 4 != 3 for n in range(18)]
        wanted[5] = "last"
        kind = LogprobParams(20, 2, (5,))
        before = returning.get_server_info()["internal_states"][0]["retractions"]
        found = returning.generate(
            input_ids=prompts,
            sampling_params={**GREEDY, "max_new_tokens": 40},
            return_hidden_states=wanted,
            return_logprob=[n % 2 == 0 for n in range(18)],
            logprob_start_len=20,
            top_logprobs_num=2,
            token_ids_logprob=[5],
        )
        assert returning.get_server_info()["internal_states"][0]["retractions"] > before
        for number, (answer, prompt) in enumerate(zip(found, prompts, strict=True)):
            if number % 2 == 0:
                check_answer(answer, kind, prompt, reference)
            if not wanted[number]:
                assert "hidden_states" not in answer["meta_info"]
            elif wanted[number] is True:
                check(answer, prompt, reference)
            else:
                [last] = answer["meta_info"]["hidden_states"]
                expected = reference.states([*prompt, *answer["output_ids"][:-1]])[-1]
                assert last == pytest.approx(expected.tolist(), abs=TOLERANCE)

    def test_a_cached_prefix_has_none(self, returning: Engine, reference: Reference) -> None:
        returning.flush_cache()
        prompt = prompt_of(reference, 60, "cached")
        for cached in (0, 48):
            answer = returning.generate(
                input_ids=prompt, sampling_params=GREEDY, return_hidden_states=True
            )
            assert answer["meta_info"]["cached_tokens"] == cached
            check(answer, prompt, reference)

    def test_of_a_prompt_alone(self, returning: Engine, reference: Reference) -> None:
        for tokens in (1, 50):
            prompt = prompt_of(reference, tokens, "alone")
            answer = returning.generate(
                input_ids=prompt,
                sampling_params={**GREEDY, "max_new_tokens": 0},
                return_hidden_states=True,
            )
            assert answer["output_ids"] == []
            check(answer, prompt, reference)

    def test_a_stream_has_all_so_far(self, returning: Engine, reference: Reference) -> None:
        prompt = prompt_of(reference, 20, "stream")
        stream = returning.generate(
            input_ids=prompt, sampling_params=GREEDY, return_hidden_states=True, stream=True
        )
        for answer in stream:
            check(answer, prompt, reference)
        assert len(answer["output_ids"]) == 6

    def test_samples(self, returning: Engine, reference: Reference) -> None:
        prompt = prompt_of(reference, 20, "samples")
        sampling = {**GREEDY, "temperature": 1.0, "n": 2}
        found = returning.generate(
            input_ids=prompt, sampling_params=sampling, return_hidden_states=True
        )
        for answer in found:
            states = answer["meta_info"]["hidden_states"]
            expected = reference.states([*prompt, *answer["output_ids"][:-1]])
            # A second sequence may find pages of the prompt computed.
            rows = [*states[0], *states[1:]]
            assert rows[-1] == pytest.approx(expected[-1].tolist(), abs=TOLERANCE)
            assert len(states) == 6


class TestRefusals:
    def test_the_operator_has_to_allow_it(self, engine: Engine) -> None:
        with pytest.raises(ConfigError, match="--enable-return-hidden-states"):
            engine.generate(input_ids=[5], return_hidden_states=True)

    @pytest.mark.parametrize("value", [1, "first", 0.5, [True, False], [None, 3]])
    def test_a_wrong_value_is_named(self, returning: Engine, value: Any) -> None:
        with pytest.raises(ConfigError, match="return_hidden_states"):
            returning.generate(input_ids=[5], return_hidden_states=value)

    def test_a_request_has_a_budget(self, returning: Engine) -> None:
        with pytest.raises(ConfigError, match=r"131072 is the most.*`hidden_state_bytes`"):
            returning.generate(
                input_ids=[5],
                sampling_params={**GREEDY, "max_new_tokens": 500},
                return_hidden_states=True,
            )


def test_their_size_is_the_drivers(forked_python: str, reference: Reference) -> None:
    """Not that of the files, which may name it in another way or not at all."""
    size = "pie_driver_sglang.frontends.common.arguments.hidden_size"
    with (
        mock.patch(size, lambda _: 7),
        engines.running(forked_python, enable_return_hidden_states=True) as engine,
    ):
        assert engine.get_server_info()["capabilities"]["hidden_size"] == 256
        prompt = prompt_of(reference, 20, "size")
        answer = engine.generate(
            input_ids=prompt, sampling_params=GREEDY, return_hidden_states=True
        )
        check(answer, prompt, reference)
