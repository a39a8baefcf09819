"""`enable_deterministic_inference` on the CPU: an answer is a function of its request."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from unittest import mock

import pytest

from pie_driver_sglang import Engine
from support.models.tiny_models import POCKET

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REQUESTS: Final = 32
LENGTHS: Final = (1, 2, 15, 16, 17, 33, 60, 100, 190)
SAMPLERS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
)


class Answer(NamedTuple):
    """What must not depend on the other requests of a batch."""

    tokens: list[int]
    logprobs: list[float]
    alternatives: list[list[tuple[float, int]]]


def prompts() -> list[list[int]]:
    """Token ids; every third prompt begins as another does."""
    chosen = random.Random(1)
    found = [
        [chosen.randrange(5, 4000) for _ in range(chosen.choice(LENGTHS))] for _ in range(REQUESTS)
    ]
    for at in range(0, REQUESTS, 3):
        found[at] = found[at - 1][:40] + found[at][:50]
    return found


PROMPTS: Final = prompts()


def parameters(request: int) -> dict[str, Any]:
    sampler = SAMPLERS[request % len(SAMPLERS)]
    return {"max_new_tokens": 16, "ignore_eos": True, "sampling_seed": request, **sampler}


def ask(engine: Engine, requests: Sequence[int], *, kill: bool = False) -> dict[int, Answer]:
    """The answers to some requests at once; the driver may be killed after the first of them."""
    answers = engine.as_completed(
        input_ids=[PROMPTS[request] for request in requests],
        sampling_params=[parameters(request) for request in requests],
        return_logprob=True,
        top_logprobs_num=3,
    )
    found = [next(answers)]
    if kill:
        (pid,) = engine.get_server_info()["internal_states"][0]["driver_pids"]
        os.kill(pid, signal.SIGKILL)
    found += list(answers)
    return {requests[answer["index"]]: read(answer) for answer in found}


def read(answer: dict[str, Any]) -> Answer:
    info = answer["meta_info"]
    top = [[entry[:2] for entry in each] for each in info["output_top_logprobs"]]
    return Answer(answer["output_ids"], [entry[0] for entry in info["output_token_logprobs"]], top)


Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def start(forked_python: str) -> Start:
    """Starts an engine with further options."""

    def start_engine(**options: Any) -> Engine:
        with mock.patch.object(sys, "executable", forked_python):
            return Engine(
                model_path=str(POCKET), device="cpu", skip_tokenizer_init=True,
                enable_deterministic_inference=True, **options,
            )  # fmt: skip

    return start_engine


@pytest.fixture(scope="module")
def engine(start: Start) -> Iterator[Engine]:
    with start() as found:
        active = found.get_server_info()["active"]
        assert active["attention"] == "pie, batch-invariant"
        yield found


@pytest.fixture(scope="module")
def expected(engine: Engine) -> dict[int, Answer]:
    """All requests at once, with an empty prefix cache."""
    found = ask(engine, range(REQUESTS))
    assert len({tuple(answer.tokens) for answer in found.values()}) > REQUESTS // 2
    return found


def test_cached_prompts(engine: Engine, expected: dict[int, Answer]) -> None:
    assert ask(engine, range(REQUESTS)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_random_batches(engine: Engine, expected: dict[int, Answer], seed: int) -> None:
    """In random order, with a random part of the prompts cached."""
    chosen = random.Random(seed)
    engine.flush_cache()
    ask(engine, chosen.sample(range(REQUESTS), 5))
    requests = chosen.sample(range(REQUESTS), chosen.randint(1, REQUESTS))
    found = ask(engine, requests)
    assert found == {request: expected[request] for request in requests}


def test_alone(engine: Engine, expected: dict[int, Answer]) -> None:
    engine.flush_cache()
    for request in range(2 * len(SAMPLERS)):
        assert ask(engine, [request]) == {request: expected[request]}


def test_without_logprobs(engine: Engine, expected: dict[int, Answer]) -> None:
    answers = engine.generate(
        input_ids=PROMPTS, sampling_params=[parameters(each) for each in range(REQUESTS)]
    )
    found = [answer["output_ids"] for answer in answers]
    assert found == [expected[request].tokens for request in range(REQUESTS)]


def check_in_a_small_pool(start: Start, expected: dict[int, Answer], **options: Any) -> None:
    """Short chunks, KV for some of the requests only, drafts, and a driver that is killed."""
    small = {"chunked_prefill_size": 48, "max_running_requests": 7, "max_total_tokens": 1024}
    small |= {"schedule_conservativeness": 0.0, "speculative_algorithm": "NGRAM"}
    with start(**small, **options) as other:
        requests = random.Random(9).sample(range(REQUESTS), REQUESTS)
        assert ask(other, requests, kill=True) == expected
        [state] = other.get_server_info()["internal_states"]
        assert state["restarts"] == 1
        assert state["retractions"] > 0


def test_other_options_and_a_driver_that_is_killed(
    start: Start, expected: dict[int, Answer]
) -> None:
    check_in_a_small_pool(start, expected)


@pytest.mark.parametrize(
    "options",
    [{"tp_size": 2, "dtype": "bfloat16"}, {"dtype": "bfloat16", "page_size": 1}],
    ids=str,
)
def test_answers_repeat_with(options: dict[str, Any], start: Start) -> None:
    """Two ranks and another dtype have other bits, of which the same is true."""
    with start(**options) as other:
        found = ask(other, range(REQUESTS))
        assert ask(other, range(REQUESTS)) == found, "prompts cached"
        other.flush_cache()
        requests = random.Random(3).sample(range(REQUESTS), 10)
        assert ask(other, requests) == {request: found[request] for request in requests}
        other.flush_cache()
        for request in range(len(SAMPLERS)):
            assert ask(other, [request]) == {request: found[request]}
    check_in_a_small_pool(start, found, **options)
