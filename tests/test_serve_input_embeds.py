"""Prompts of embeddings at SGLang's HTTP server on our scheduler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.models.reference import Reference, random_tokens
from support.models.tiny_models import POCKET
from support.servers.pie_server import refusal, running
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(forked_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--scheduler", "pie", "--disable-radix-cache", "--chunked-prefill-size", "48"]
    flags += ["--option", "request_limits={input_embeds_bytes=131072}"]
    with running(tmp_path_factory.mktemp("serve"), *flags, python=forked_python) as (found, _):
        yield found


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(POCKET)


def prompts(reference: Reference) -> list[list[int]]:
    lengths = (1, 9, 100)
    return [random_tokens(reference.vocab_size, length, "served", length) for length in lengths]


def body(embeds: Any, **more: Any) -> dict[str, Any]:
    return {"input_embeds": embeds, "sampling_params": GREEDY, **more}


def test_prompts_alone_and_in_a_batch(server: Server, reference: Reference) -> None:
    tokens = prompts(reference)
    embeds = [reference.embeddings[each].tolist() for each in tokens]
    wanted = [reference.after_embeddings(reference.embeddings[each], 6) for each in tokens]
    answers = json.loads(server.fetch("/generate", body(embeds)))
    assert [answer["output_ids"] for answer in answers] == wanted
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 9, 100]
    ids = json.loads(server.fetch("/generate", {"input_ids": tokens, "sampling_params": GREEDY}))
    assert [answer["text"] for answer in answers] == [answer["text"] for answer in ids]
    lines = server.fetch("/generate", body(embeds[2], stream=True))
    parts = [line[6:] for line in lines.splitlines() if line.startswith("data: {")]
    assert len(parts) == 6
    assert json.loads(parts[-1])["output_ids"] == wanted[2]


def test_what_is_refused(server: Server, reference: Reference) -> None:
    width = reference.embeddings.shape[1]
    for embeds, words in (
        ([], "`input_embeds` is empty, it must have a row of numbers for each token"),
        ([[]], "`input_embeds` is empty"),
        ([[[0.5] * width], []], "`input_embeds`"),
        ([[0.5] * 3], f"has 3 numbers, and this model's have {width}: give {width} numbers"),
        ([[0.5] * (width - 1) + [1e300]], f"number {width - 1} of embedding 0"),
        ([[0.5] * width] * 129, "`input_embeds` has 132096 bytes, 131072 is the most"),
    ):
        status, text = refusal(server, body(embeds))
        message = json.loads(text)["error"]["message"]
        assert status == 400
        assert words in message
        assert "\n" not in message
