"""Structured output through `pie-sglang serve`, by the `openai` client and by SGLang's own API."""

from __future__ import annotations

import json
import re
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

import jsonschema
import psutil
import pytest

from support.hostile.hostile_grammars import fatal_grammars
from support.process import fork_server
from support.process.inspection import command_line
from support.servers.pie_server import PROMPT, generate, refusal, running, state, wait_until
from support.servers.sglang_server import Server

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

THINK_END: Final = "4095"
"""The token `</think>` of the model."""
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
#: Without white space, of which the model is fond.
TIGHT: Final = {"x-guidance": {"whitespace_flexible": False}, **SCHEMA}
TOOLS: Final = [
    {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}
    for name, parameters in (
        ("add", {**TIGHT, "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}),
        ("say", {**TIGHT, "properties": {"t": {"enum": ["a"]}}, "required": ["t"]}),
    )
]
PLAIN: Final = {"chat_template_kwargs": {"enable_thinking": False}}
FLAGS: Final = ("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25")


@pytest.fixture(scope="module")
def served(
    forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, int]]:
    folder = tmp_path_factory.mktemp("structured")
    flags = ("--scheduler", "pie", *FLAGS)
    with running(folder, *flags, python=forked_python) as (found, process):
        yield found, process.pid


@pytest.fixture(scope="module")
def server(served: tuple[Server, int]) -> Server:
    return served[0]


@contextmanager
def without_compilers(pid: int) -> Iterator[None]:
    """A server whose compilers have been killed, and that can open nothing to start others."""
    family = fork_server.family(pid)
    compilers = [each for each in family if "run_grammar_compiler" in " ".join(command_line(each))]
    scheduler = compilers[0].parent()
    assert scheduler is not None
    for process in compilers:
        process.kill()
    limits = scheduler.rlimit(psutil.RLIMIT_NOFILE)
    scheduler.rlimit(psutil.RLIMIT_NOFILE, (8, limits[1]))
    try:
        yield
    finally:
        scheduler.rlimit(psutil.RLIMIT_NOFILE, limits)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


def chat(client: Any, **options: Any) -> Any:
    extra = {**PLAIN, **options.pop("extra_body", {})}
    messages = [{"role": "user", "content": "Who is it?"}]
    return client.chat.completions.create(
        model="m", messages=messages, max_tokens=200, extra_body=extra, **options
    )


def named(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, **more}}


def slow_schema(number: int) -> str:
    """A schema that takes a while to compile, and is like no other."""
    properties = {f"p{number}_{at}": {"enum": [at, f"x{at}"]} for at in range(1500)}
    return json.dumps({"type": "object", "properties": properties})


class TestOpenai:
    @pytest.mark.parametrize("strict", [True, False])
    def test_a_schema(self, client: Any, strict: bool) -> None:
        answer = chat(client, response_format=named(TIGHT, strict=strict), temperature=1.2)
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)

    def test_a_streamed_schema(self, client: Any) -> None:
        chunks = list(chat(client, response_format=named(TIGHT), temperature=0, stream=True))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        jsonschema.validate(json.loads(text), SCHEMA)
        whole = chat(client, response_format=named(TIGHT), temperature=0)
        assert whole.choices[0].message.content == text

    def test_any_object(self, client: Any) -> None:
        # It may write a long one: an end token is what it should draw wherever it can.
        answer = chat(
            client, response_format={"type": "json_object"}, logit_bias={"4089": 80}, temperature=1
        )
        assert isinstance(json.loads(answer.choices[0].message.content), dict)

    def test_expressions_and_rules(self, client: Any) -> None:
        requested = {"regex": "(yes|no){2}[0-9]", "ebnf": 'root ::= ("ab" | "cd"){3}'}
        for name, text in requested.items():
            answer = client.completions.create(
                model="m", prompt=PROMPT, max_tokens=40, temperature=1, extra_body={name: text}
            )
            pattern = text if name == "regex" else "(ab|cd){3}"
            assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0].text

    def test_a_tool_must_be_called(self, client: Any) -> None:
        answer = chat(client, tools=TOOLS, tool_choice="required", temperature=1)
        first = answer.choices[0].message.tool_calls[0].function
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
        jsonschema.validate(json.loads(first.arguments), parameters[first.name])

    @pytest.mark.parametrize("number", [0, 1])
    def test_a_named_tool(self, client: Any, number: int) -> None:
        # With a parser of this kind SGLang's server binds the answer to all tools that are listed.
        tool = TOOLS[number]["function"]
        choice = {"type": "function", "function": {"name": tool["name"]}}
        answer = chat(client, tools=[TOOLS[number]], tool_choice=choice, temperature=1)
        call = answer.choices[0].message.tool_calls[0].function
        assert call.name == tool["name"]
        jsonschema.validate(json.loads(call.arguments), tool["parameters"])

    def test_a_grammar_applies_after_the_thinking(self, client: Any) -> None:
        # The model does not end its thinking by itself within reason.
        answer = chat(
            client,
            response_format=named(TIGHT),
            logit_bias={THINK_END: 12},
            temperature=1,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
        message = answer.choices[0].message
        jsonschema.validate(json.loads(message.content), SCHEMA)
        assert answer.usage.completion_tokens > answer.usage.reasoning_tokens > 0

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_wrong_schema_is_a_bad_request(self, client: Any, stream: bool) -> None:
        import openai

        wrong = named({"type": "strange"})
        with pytest.raises(openai.APIError, match=r"the JSON schema is wrong: .*strange") as error:
            answer = chat(client, response_format=wrong, stream=stream)
            # An open stream would lock the client's connections whenever it is collected.
            with answer:
                list(answer)
        if not stream:
            assert error.value.status_code == 400

    def test_a_stop_expression(self, client: Any, server: Server) -> None:
        whole = generate(server, max_new_tokens=40)["text"]
        found = re.search(r"[^a-z\s]{1,2}\s", whole)
        assert found is not None
        for stream in (False, True):
            answer = client.completions.create(
                model="m",
                prompt=PROMPT,
                temperature=0,
                max_tokens=40,
                extra_body={"stop_regex": [r"zzz\d", r"[^a-z\s]{1,2}\s"]},
                stream=stream,
            )
            choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
            text = "".join(choice.text for choice in choices)
            assert whole.startswith(text)
            assert found.end() <= len(text) < len(whole)
            last = choices[-1]
            assert (last.finish_reason, last.matched_stop) == ("stop", r"[^a-z\s]{1,2}\s")


class TestGenerate:
    def test_every_kind(self, server: Server) -> None:
        tag = {
            "triggers": ["<tool_call>"],
            "at_least_one": True,
            "structures": [
                {"begin": "<tool_call>[", "schema": {"enum": [1, 2]}, "end": "]</tool_call>"}
            ],
        }
        requested = {
            "json_schema": (json.dumps(TIGHT), r'\{"name": ?"(Ada|Bo)", ?"ok": ?(true|false)\}'),
            "regex": ("[a-c]{3}-[0-9]", "[a-c]{3}-[0-9]"),
            "ebnf": ('root ::= "x" [0-9]{1,9} "y"', "x[0-9]+y"),
            "structural_tag": (json.dumps(tag), r"<tool_call>\[[12]\]</tool_call>(?s:.*)"),
        }
        for name, (text, pattern) in requested.items():
            found = generate(
                server, **{name: text}, temperature=1, max_new_tokens=80, skip_special_tokens=False
            )
            assert re.fullmatch(pattern, found["text"].removesuffix("<|im_end|>")), found["text"]

    def test_grammars_that_end_their_compiler_end_nothing_else(self, server: Server) -> None:
        whole = generate(server, max_new_tokens=8)["text"]

        def status(bomb: dict[str, str]) -> int:
            return refusal(server, {"text": PROMPT, "sampling_params": bomb})[0]

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(status, fatal_grammars())) == [400] * len(fatal_grammars())
        found = generate(server, regex="[0-9]{3}", max_new_tokens=8)
        assert re.fullmatch("[0-9]{3}", found["text"])
        assert generate(server, max_new_tokens=8)["text"] == whole

    def test_a_lack_of_compilers_is_no_bad_request(self, served: tuple[Server, int]) -> None:
        server, pid = served
        generate(server, regex="[0-9]{3}")
        body = {"text": PROMPT, "sampling_params": {"regex": "[0-9]{4}", "max_new_tokens": 8}}
        with without_compilers(pid):
            with pytest.raises(urllib.error.HTTPError) as error:
                server.fetch("/generate", body)
            text = error.value.read().decode()
            assert (error.value.code, "try again later" in text) == (503, True), text
            assert error.value.headers["Retry-After"] == "1"
        assert re.fullmatch("[0-9]{4}", json.loads(server.fetch("/generate", body))["text"])

    def test_reasoning_is_free_until_it_ends(self, server: Server) -> None:
        body = {
            "text": PROMPT,
            "require_reasoning": True,
            "sampling_params": {
                "regex": "[0-9]{4}",
                "temperature": 1,
                "max_new_tokens": 400,
                "logit_bias": {THINK_END: 12},
                "skip_special_tokens": False,
            },
        }
        found = json.loads(server.fetch("/generate", body))
        _thought, end, answer = found["text"].partition("</think>")
        assert end
        assert re.fullmatch("[0-9]{4}", answer.removesuffix("<|im_end|>"))
        reasoning = found["meta_info"]["reasoning_tokens"]
        assert found["meta_info"]["completion_tokens"] == reasoning + 5
        # The same request without the thinking is bound at once.
        body["require_reasoning"] = False
        found = json.loads(server.fetch("/generate", body))
        assert re.fullmatch("[0-9]{4}", found["text"].removesuffix("<|im_end|>"))

    @pytest.mark.parametrize(
        ("params", "words"),
        [
            ({"regex": "("}, "the regular expression is wrong: "),
            ({"ebnf": "root ::= other"}, "`other`, which is not a rule"),
            ({"json_schema": "{"}, "the JSON schema is wrong: it is not JSON"),
            ({"structural_tag": "{}"}, "the structural tag is wrong: "),
            ({"regex": "a", "ebnf": "b"}, "Only one of json_schema, regex, ebnf"),
            ({"stop_regex": "(?=a)b"}, "look-around"),
        ],
    )
    def test_what_is_wrong_costs_its_request(
        self, server: Server, params: dict[str, Any], words: str
    ) -> None:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(generate, server, regex="[0-9]{30}", max_new_tokens=40)
            body = {"text": PROMPT, "sampling_params": {"max_new_tokens": 8, **params}}
            status, text = refusal(server, body)
            assert status == 400
            assert words in text
            assert re.fullmatch("[0-9]{30}", other.result()["text"])

    def test_an_abort_while_a_grammar_is_compiled(self, server: Server) -> None:
        def send(number: int) -> tuple[int, str]:
            params = {"json_schema": slow_schema(number), "max_new_tokens": 4}
            body = {"text": PROMPT, "sampling_params": params}
            try:
                return 200, server.fetch("/generate", body)
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        with ThreadPoolExecutor(64) as pool:
            answers = [pool.submit(send, number) for number in range(64)]
            wait_until(lambda: state(server)["waiting"] >= 24, 60, "they wait")
            server.fetch("/abort_request", {"abort_all": True})
            found = [answer.result(60) for answer in answers]
        aborted = [text for status, text in found if status == 400 and "Aborted by" in text]
        # Some may have been compiled before the abort came.
        assert len(aborted) >= 12, [(status, text[-200:]) for status, text in found]
        wait_until(lambda: state(server)["waiting"] == 0, 60, "none waits")
        started = time.monotonic()
        assert re.fullmatch("[0-9]{3}", generate(server, regex="[0-9]{3}")["text"])
        # What was aborted is not compiled first.
        assert time.monotonic() - started < 30
