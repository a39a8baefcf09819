"""Custom logit processors at SGLang's HTTP server on our scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

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
        logits[:, params["token"]] = 0.0
        return logits
"""


@pytest.fixture(scope="module")
def allowing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--scheduler", "pie", "--enable-custom-logit-processor"]
    with running(tmp_path_factory.mktemp("serve"), *flags) as (server, _):
        yield server


@pytest.fixture(scope="module")
def processor() -> str:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(SOURCE, namespace)
    text: str = namespace["Forces"].to_str()
    return text


def body(processor: str | None, **params: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    found = {"text": PROMPT, "sampling_params": {**sampling, "custom_params": params or None}}
    return found if processor is None else {**found, "custom_logit_processor": processor}


class TestServer:
    def test_it_forces_tokens_and_streams(self, allowing: Server, processor: str) -> None:
        answer = json.loads(allowing.fetch("/generate", body(processor, token=9)))
        assert answer["output_ids"] == [9] * 6
        lines = allowing.fetch("/generate", {**body(processor, token=9), "stream": True})
        parts = [line[6:] for line in lines.splitlines() if line.startswith("data: {")]
        assert json.loads(parts[-1])["output_ids"] == [9] * 6

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
        ],
    )
    def test_what_is_wrong_is_named(
        self, allowing: Server, asked: dict[str, Any], words: str
    ) -> None:
        status, text = refusal(allowing, {"text": "x", **asked})
        assert (status, words in text) == (400, True), text
