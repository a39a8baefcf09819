"""Custom logit processors and hidden states at SGLang's HTTP server on our scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.models.reference import Reference
from support.models.tiny_models import POCKET
from support.servers.pie_server import PROMPT, refusal, running
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

SOURCE = """
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

class Forces(CustomLogitProcessor):
    def __call__(self, logits, custom_param_list):
        [params] = custom_param_list
        if len(params["__req__"].output_ids) == params.get("fails_at"):
            raise ValueError("as asked")
        logits[:] = -float("inf")
        logits[:, params.get("token", 9)] = 0.0
        return logits
"""


@pytest.fixture(scope="module")
def allowing(forked_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--scheduler", "pie", "--enable-custom-logit-processor"]
    flags += [
        "--enable-return-hidden-states",
        "--option",
        "request_limits={hidden_state_bytes=131072}",
    ]
    folder = tmp_path_factory.mktemp("serve")
    with running(folder, *flags, python=forked_python) as (server, _):
        yield server


@pytest.fixture(scope="module")
def processor() -> str:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE, namespace)
    text: str = namespace["Forces"].to_str()
    return text


def body(processor: str | None, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    found = {"text": PROMPT, "sampling_params": {**sampling, "custom_params": params}}
    return found if processor is None else {**found, "custom_logit_processor": processor}


class TestServer:
    def test_it_forces_tokens_and_streams(self, allowing: Server, processor: str) -> None:
        answer = json.loads(allowing.fetch("/generate", body(processor, token=9)))
        assert answer["output_ids"] == [9] * 6
        lines = allowing.fetch("/generate", {**body(processor, token=9), "stream": True})
        parts = [line[6:] for line in lines.splitlines() if line.startswith("data: {")]
        assert json.loads(parts[-1])["output_ids"] == [9] * 6
        # An empty object has the request in it, too.
        answer = json.loads(allowing.fetch("/generate", body(processor)))
        assert answer["output_ids"] == [9] * 6

    def test_a_chat_has_one(self, allowing: Server, processor: str) -> None:
        chat = {
            "model": "m",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 4,
            "ignore_eos": True,
            "custom_logit_processor": processor,
            "custom_params": {"token": 9},
        }
        answer = json.loads(allowing.fetch("/v1/chat/completions", chat))
        [once] = {
            json.loads(allowing.fetch("/detokenize", {"model": "m", "tokens": [9] * 4}))["text"]
        }
        assert answer["choices"][0]["message"]["content"] == once

    def test_one_that_raises_fails_its_request_alone(
        self, allowing: Server, processor: str
    ) -> None:
        plain = json.loads(allowing.fetch("/generate", body(None)))["output_ids"]
        status, text = refusal(allowing, body(processor, token=9, fails_at=2))
        assert (status, "processor failed: ValueError: as asked" in text) == (400, True), text
        assert json.loads(allowing.fetch("/generate", body(None)))["output_ids"] == plain

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            ({"custom_logit_processor": "x"}, "is not JSON"),
            ({"custom_logit_processor": '{"callable": "8"}'}, "no hexadecimal text"),
            ({"custom_logit_processor": "8" * (1 << 21)}, "`logit_processor_bytes`"),
            ({"sampling_params": {"custom_params": {"a": 1}}}, "there is none"),
            ({"text": ["x", "y"], "custom_logit_processor": ["x"]}, "there are 2 prompts"),
        ],
    )
    def test_what_is_wrong_is_named(
        self, allowing: Server, asked: dict[str, Any], words: str
    ) -> None:
        status, text = refusal(allowing, {"text": "x", **asked})
        assert (status, words in text) == (400, True), text


class TestHiddenStates:
    def test_in_sglangs_shapes(self, allowing: Server) -> None:
        reference = Reference(POCKET)
        ids = json.loads(allowing.fetch("/tokenize", {"model": "m", "prompt": PROMPT}))["tokens"]
        asked = {**body(None), "return_hidden_states": True, "extra_key": "states"}
        answer = json.loads(allowing.fetch("/generate", asked))
        first, *rest = answer["meta_info"]["hidden_states"]
        expected = reference.states([*ids, *answer["output_ids"][:-1]]).tolist()
        assert (len(first), len(rest)) == (len(ids), 5)
        for row, wanted in zip([*first, *rest], expected, strict=True):
            assert row == pytest.approx(wanted, abs=2e-4)
        last = {**asked, "return_hidden_states": "last", "extra_key": "last"}
        [found] = json.loads(allowing.fetch("/generate", last))["meta_info"]["hidden_states"]
        assert found == pytest.approx(expected[-1], abs=2e-4)
        plain = json.loads(allowing.fetch("/generate", body(None)))
        assert "hidden_states" not in plain["meta_info"]

    def test_a_stream_has_all_so_far(self, allowing: Server) -> None:
        asked = {**body(None), "return_hidden_states": True, "stream": True}
        lines = allowing.fetch("/generate", asked).splitlines()
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        for part in parts:
            states = part["meta_info"]["hidden_states"]
            assert len(states) == part["meta_info"]["completion_tokens"]

    def test_a_completion_has_the_last_one(self, allowing: Server) -> None:
        asked = {"model": "m", "prompt": PROMPT, "max_tokens": 3, "return_hidden_states": True}
        answer = json.loads(allowing.fetch("/v1/completions", {**asked, "ignore_eos": True}))
        assert len(answer["choices"][0]["hidden_states"]) == 256

    @pytest.mark.parametrize(
        ("asked", "words"),
        [
            ({"return_hidden_states": "first"}, "return_hidden_states"),
            (
                {"return_hidden_states": True, "sampling_params": {"max_new_tokens": 300}},
                "`hidden_state_bytes`",
            ),
        ],
    )
    def test_what_is_wrong_is_named(
        self, allowing: Server, asked: dict[str, Any], words: str
    ) -> None:
        status, text = refusal(allowing, {"text": "x", **asked})
        assert (status, words in text) == (400, True), text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/classify", {"model": "m", "input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y", "z"]}),
    ],
)
def test_a_model_that_generates_has_no_classes(
    allowing: Server, path: str, body: dict[str, Any]
) -> None:
    status, text = refusal(allowing, body, path)
    assert (status, f"`{path}` needs a model with a classification" in text) == (400, True), text
    assert "generates text" in text


def test_sglangs_own_classify_refuses_a_model_that_generates(allowing: Server) -> None:
    status, text = refusal(allowing, {"text": "x"}, "/classify")
    assert (status, "does not appear to be an embedding model" in text) == (400, True), text


def test_a_model_that_generates_scores_by_log_probabilities(allowing: Server) -> None:
    body = {"model": "m", "query": "x", "items": ["y", "z"], "label_token_ids": [5, 9]}
    assert len(json.loads(allowing.fetch("/v1/score", body))["scores"]) == 2


@pytest.mark.parametrize("value", ["3", 2.5, True])
def test_a_thinking_budget_is_an_integer(allowing: Server, value: Any) -> None:
    from sglang.srt.sampling.custom_logit_processor import Qwen3ThinkingBudgetLogitProcessor

    text = Qwen3ThinkingBudgetLogitProcessor.to_str()
    status, reason = refusal(allowing, body(text, thinking_budget=value))
    assert (status, "`thinking_budget` of `custom_params` is" in reason) == (400, True), reason
    assert "expected an integer" in reason
