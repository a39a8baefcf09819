"""Published checkpoints: answers are those of transformers in float32, through every frontend."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest import mock

import jsonschema
import pytest

from pie_driver_sglang.frontends.offline.engine import Engine
from support.models import published_models
from support.models.published_models import RealReference
from support.models.reference import GAP
from support.servers.pie_server import serving, wait_until
from support.servers.sglang_server import Server, free_ports

openai: Any = pytest.importorskip("openai")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOKENS: Final = 24
GREEDY: Final = {"temperature": 0, "max_new_tokens": TOKENS}
#: The questions of several conversations.
CHATS: Final = (
    ("What is the capital of France?", "And of Italy?"),
    ("My name is Ada. Who are you?", "What is my name?", "Spell it."),
    ("Count from 1 to 10, separated by commas.", "Count them again, and repeat the list."),
    ("Translate to French: good morning, my friend!", "And to Spanish?"),
)
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "capital": {"type": "boolean"},
    },
    "required": ["city", "population", "capital"],
    "additionalProperties": False,
}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "describe",
        "description": "Describes a city.",
        "parameters": SCHEMA,
        "strict": True,
    },
}


class Turn(NamedTuple):
    """A turn of a conversation as the engine answered it.

    Attributes:
        messages: What was asked.
        prompt: Its tokens.
        answer: The engine's answer.
        gap: The smallest gap between the two best logits.
    """

    messages: list[dict[str, str]]
    prompt: list[int]
    answer: dict[str, Any]
    gap: float


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return published_models.smollm2()


@pytest.fixture(scope="module")
def engine(smollm2: Path, forked_python: str) -> Iterator[Engine]:
    """With drafts, as the servers; the reference has none."""
    with mock.patch.object(sys, "executable", forked_python):
        found = Engine(
            model_path=str(smollm2),
            device="cpu",
            max_total_tokens=8192,
            speculative_algorithm="NGRAM",
        )
    with found:
        yield found


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> RealReference:
    return RealReference(smollm2)


@pytest.fixture(scope="module")
def turns(engine: Engine, reference: RealReference) -> list[Turn]:
    """All conversations, side by side; each answer has been compared with the reference's."""
    found: list[Turn] = []
    talks: list[list[dict[str, str]]] = [[] for _ in CHATS]
    for number in range(max(map(len, CHATS))):
        running = [
            (talk, chat[number])
            for talk, chat in zip(talks, CHATS, strict=True)
            if number < len(chat)
        ]
        for talk, question in running:
            talk.append({"role": "user", "content": question})
        requested = [list(talk) for talk, _ in running]
        prompts = [tokens_of(engine, messages) for messages in requested]
        answers = engine.generate(input_ids=prompts, sampling_params=GREEDY, return_logprob=True)
        for (talk, _), messages, prompt, answer in zip(
            running, requested, prompts, answers, strict=True
        ):
            talk.append({"role": "assistant", "content": answer["text"]})
            scored = reference.check_greedy(prompt, answer["output_ids"])
            given = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            assert given == pytest.approx(scored.logprobs, abs=2e-3)
            found.append(Turn(messages, prompt, answer, scored.gap))
    return found


def tokens_of(engine: Engine, messages: Sequence[dict[str, str]]) -> list[int]:
    assert engine.tokenizer is not None
    return list(engine.tokenizer.encode_plain(engine.tokenizer.chat(messages)))


def counts(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return found


def test_conversations_are_those_of_transformers(engine: Engine, turns: list[Turn]) -> None:
    assert len(turns) == sum(map(len, CHATS))
    assert "Paris" in turns[0].answer["text"]
    # A turn finds the one before it in the cache.
    later = [turn for turn in turns if len(turn.messages) > 1]
    assert all(turn.answer["meta_info"]["cached_tokens"] >= 16 for turn in later)


def test_an_answer_ends_where_the_model_ends_it(engine: Engine, turns: list[Turn]) -> None:
    found = engine.generate(
        input_ids=turns[0].prompt, sampling_params={**GREEDY, "max_new_tokens": 200}
    )
    assert found["meta_info"]["finish_reason"]["type"] == "stop"
    assert found["text"].startswith(turns[0].answer["text"])
    assert "<|im_end|>" not in found["text"]


def test_a_stop_string_cuts_the_answer(engine: Engine, turns: list[Turn]) -> None:
    turn = turns[0]
    text = turn.answer["text"]
    stop = text[len(text) // 3 : len(text) // 3 + 4]
    found = engine.generate(input_ids=turn.prompt, sampling_params={**GREEDY, "stop": [stop]})
    assert found["text"] == text[: text.index(stop)]
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_drafts_are_accepted(engine: Engine, turns: list[Turn]) -> None:
    """The drafter offers tokens where they pay, which a busy machine may deny for a while."""
    repeats = next(turn for turn in turns if "repeat the list" in turn.messages[-1]["content"])

    def some_are_accepted() -> bool:
        found = engine.generate(input_ids=[repeats.prompt] * 4, sampling_params=GREEDY)
        assert all(each["output_ids"] == repeats.answer["output_ids"] for each in found)
        return bool(counts(engine)["accepted"] > 0)

    wait_until(some_are_accepted, 120, "drafts are accepted")


def test_samples_and_sessions(engine: Engine, turns: list[Turn]) -> None:
    turn = turns[0]
    same = engine.generate(input_ids=turn.prompt, sampling_params={**GREEDY, "n": 2})
    assert [each["output_ids"] for each in same] == [turn.answer["output_ids"]] * 2
    warm = {"temperature": 1.5, "max_new_tokens": 12, "n": 3}
    drawn = engine.generate(input_ids=turn.prompt, sampling_params=warm)
    assert len({tuple(each["output_ids"]) for each in drawn}) > 1
    first = engine.generate(input_ids=turn.prompt, sampling_params=GREEDY, session_id="s")
    follow = turns[len(CHATS)]
    assert follow.messages[0] == turn.messages[0]
    second = engine.generate(input_ids=follow.prompt, sampling_params=GREEDY, session_id="s")
    engine.end_session("s")
    assert first["output_ids"] == turn.answer["output_ids"]
    assert second["output_ids"] == follow.answer["output_ids"]
    assert second["meta_info"]["cached_tokens"] >= len(turn.prompt)


def test_json_by_a_schema(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Describe Paris as JSON."}]
    prompt = tokens_of(engine, messages)
    params = {"max_new_tokens": 120, "json_schema": json.dumps(SCHEMA)}
    found = engine.generate(input_ids=prompt, sampling_params={**params, "temperature": 0})
    found = [found, *engine.generate(input_ids=prompt, sampling_params={**params, "n": 3})]
    # A sample may add white space until its tokens are used up.
    ended = [each["text"] for each in found if each["meta_info"]["finish_reason"]["type"] == "stop"]
    assert found[0]["text"] in ended
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)


class Frontend(NamedTuple):
    """A server: a client of its OpenAI API, and its own API."""

    name: str
    client: Any
    server: Server


@pytest.fixture(scope="module", params=["sglang", "gateway"])
def frontend(
    request: pytest.FixtureRequest,
    smollm2: Path,
    forked_python: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Frontend]:
    """Each frontend, with drafts."""
    if request.param == "gateway":
        pytest.importorskip("smg")
    [port] = free_ports(1)
    words = ["smollm2", "--front", request.param, "--device", "cpu", "--port", str(port)]
    words += ["--tool-call-parser", "qwen25" if request.param == "sglang" else "qwen"]
    words += ["--speculative-algorithm", "NGRAM"]
    if request.param == "sglang":
        words += ["--scheduler", "pie"]
    folder, url = tmp_path_factory.mktemp(request.param), f"http://127.0.0.1:{port}"
    with serving(folder, *words, python=forked_python):
        assert "drafts: ngram" in (folder / "log").read_text(errors="replace")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
        yield Frontend(request.param, client, Server(url, folder / "log"))


@pytest.fixture
def client(frontend: Frontend) -> Any:
    return frontend.client


def chat(client: Any, messages: Sequence[dict[str, str]], **more: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": TOKENS, **more}
    return client.chat.completions.create(model="smollm2", messages=list(messages), **fields)


def test_frontends_answer_as_the_engine(client: Any, turns: list[Turn]) -> None:
    decided = [turn for turn in turns if turn.gap > GAP]
    assert len(decided) >= len(turns) - 2
    with ThreadPoolExecutor(len(decided)) as pool:
        wanted = {"logprobs": True, "top_logprobs": 2}
        answers = pool.map(lambda turn: chat(client, turn.messages, **wanted), decided)
    for turn, found in zip(decided, answers, strict=True):
        choice = found.choices[0]
        assert choice.message.content == turn.answer["text"]
        assert found.usage.prompt_tokens == len(turn.prompt)
        ours = [entry[0] for entry in turn.answer["meta_info"]["output_token_logprobs"]]
        given = [entry.logprob for entry in choice.logprobs.content]
        # The token that ends an answer is in one list, and not in the other.
        assert given == pytest.approx(ours[: len(given)], abs=2e-3)
        assert len(given) >= len(ours) - 1
        best = [entry.top_logprobs[0].logprob for entry in choice.logprobs.content]
        assert best == pytest.approx(given, abs=2e-3)


def test_frontends_stream_and_stop(client: Any, turns: list[Turn]) -> None:
    turn = turns[0]
    parts = list(chat(client, turn.messages, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == turn.answer["text"]
    stop = text[len(text) // 3 : len(text) // 3 + 4]
    found = chat(client, turn.messages, stop=[stop], n=2)
    assert [choice.message.content for choice in found.choices] == [text[: text.index(stop)]] * 2
    assert {choice.finish_reason for choice in found.choices} == {"stop"}


def test_frontends_draw_several_samples(client: Any, turns: list[Turn]) -> None:
    found = chat(client, turns[0].messages, n=3, temperature=1.5, max_tokens=12)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in found.choices}) > 1


@pytest.mark.parametrize("frontend", ["sglang"], indirect=True)
def test_a_session_of_the_server(frontend: Frontend, turns: list[Turn]) -> None:
    """The second turn of a conversation sends only what is new."""
    server, turn, follow = frontend.server, turns[0], turns[len(CHATS)]
    said = [*turn.prompt, *turn.answer["output_ids"]]
    assert follow.prompt[: len(said)] == said
    session = json.loads(server.fetch("/open_session", {"capacity_of_str_len": 1000}))
    first = server.body(turn.prompt, TOKENS, session_params={"id": session})
    first["sampling_params"]["ignore_eos"] = False
    answer = json.loads(server.fetch("/generate", first))
    assert answer["output_ids"] == turn.answer["output_ids"]
    place = {"id": session, "rid": answer["meta_info"]["id"]}
    second = server.body(follow.prompt[len(said) :], TOKENS, session_params=place)
    second["sampling_params"]["ignore_eos"] = False
    answer = json.loads(server.fetch("/generate", second))
    assert answer["output_ids"] == follow.answer["output_ids"]


def test_frontends_constrain_json_and_calls(client: Any) -> None:
    messages = [{"role": "user", "content": "Describe Paris."}]
    shape = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    found = chat(client, messages, response_format=shape, max_tokens=120)
    jsonschema.validate(json.loads(found.choices[0].message.content), SCHEMA)
    chosen = {"type": "function", "function": {"name": "describe"}}
    found = chat(client, messages, tools=[TOOL], tool_choice=chosen, max_tokens=160)
    [call] = found.choices[0].message.tool_calls
    assert call.function.name == "describe"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_gemma(forked_python: str) -> None:
    """By ids, and by a text whose tokens its rebuilt tokenizer finds."""
    folder = published_models.gemma()
    reference = RealReference(folder)
    # The last one is longer than the window of 512 tokens.
    texts = ([2, 818, 5279, 529, 7001, 563], [2, *range(1000, 1040)], [2, *range(5000, 5560)])
    with mock.patch.object(sys, "executable", forked_python):
        engine = Engine(model_path=str(folder), device="cpu", max_total_tokens=4096)
    with engine:
        assert engine.tokenizer is not None
        assert engine.tokenizer.encode(["The capital of France is"]) == [list(texts[0])]
        params = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        prompts = [list(text) for text in texts]
        first = engine.generate(input_ids=prompts, sampling_params=params)
        for text, found in zip(texts, first, strict=True):
            assert len(found["output_ids"]) == 16
            reference.check_greedy(text, found["output_ids"])
        text = engine.generate("The capital of France is", params)
        assert text["output_ids"] == first[0]["output_ids"]
        assert " France" in text["text"]
        # From the cache.
        again = engine.generate(input_ids=prompts, sampling_params=params)
        assert again[-1]["meta_info"]["cached_tokens"] >= 512
        for text, found, before in zip(texts, again, first, strict=True):
            if found["output_ids"] != before["output_ids"]:
                reference.check_greedy(text, found["output_ids"])
