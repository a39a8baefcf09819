"""The server without a tokenizer, and with drafts: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.servers.pie_server import refusal, running, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

#: The model continues as they began.
PROMPTS = [[40 + number, 7, 300, 11] * 8 for number in range(6)]
TOKENS = 48


@pytest.fixture(scope="module", params=["NGRAM", "SUFFIX"])
def server(
    request: pytest.FixtureRequest, forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    flags = ("--skip-tokenizer-init", "--speculative-algorithm", request.param)
    folder = tmp_path_factory.mktemp("tokens")
    with running(folder, "--scheduler", "pie", *flags, python=forked_python) as (found, _):
        yield found


def test_drafts_are_accepted_and_change_no_token(server: Server) -> None:
    """The drafter offers tokens where they pay, which a busy machine may deny for a while."""
    before = state(server)["accepted"]
    reference = Reference(POCKET)

    def some_are_accepted() -> bool:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers = list(pool.map(lambda prompt: server.generate(prompt, TOKENS)[0], PROMPTS))
        for prompt, tokens in zip(PROMPTS, answers, strict=True):
            assert len(tokens) == TOKENS
            assert reference.check([*prompt, *tokens[:-1]], tokens) > TOKENS // 2
        return bool(state(server)["accepted"] > before)

    wait_until(some_are_accepted, 120, "drafts are accepted")


def test_a_stream_has_tokens_too(server: Server) -> None:
    parts = list(server.stream(PROMPTS[0], TOKENS))
    assert len(parts) > 1
    assert parts[-1] == server.generate(PROMPTS[0], TOKENS)[0]


def test_what_needs_a_tokenizer_is_refused(server: Server) -> None:
    status, text = refusal(server, {"text": "def f(x):"})
    assert (status, "skip_tokenizer_init" in text) == (400, True), text
    body = server.body(PROMPTS[0], 4)
    body["sampling_params"]["stop"] = ["x"]
    status, text = refusal(server, body)
    assert (status, "stop" in text) == (400, True), text
