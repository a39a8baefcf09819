"""`pie-sglang serve --front gateway`: the smg gateway over our runtime, with real clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jsonschema
import psutil
import pytest

from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer
from support.models.reference import GAP, Reference
from support.models.tiny_models import POCKET
from support.process import fork_server
from support.process.inspection import command_line
from support.servers import sglang_test_kits
from support.servers.gateway_client import PROMPT, complete, openai_client, refusal, scrape
from support.servers.gateway_server import ADMIN, GatewayServer, running
from support.servers.many_streams import flood_completions
from support.servers.otel_collector import (
    STAGES,
    Collector,
    check_stages,
    collecting,
    parent_of,
    traced_request,
)
from support.servers.pie_server import wait_until
from support.servers.server_metrics import DASHBOARD
from support.servers.sglang_server import Server

pytest.importorskip("smg")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "count"],
    "additionalProperties": False,
}
TOOL: Final = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts things.",
        "parameters": SCHEMA,
    },
}
NO_THOUGHT: Final = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def frontend(
    collector: Collector, forked_python: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayServer]:
    flags = ["--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3"]
    flags += ["--enable-trace", "--otlp-traces-endpoint", collector.endpoint]
    flags += ["--gateway-arg=--load-monitor-interval", "--gateway-arg=1"]
    # With the command lines that a user's processes have.
    pythons = {"python": forked_python, "driver_python": forked_python}
    with running(tmp_path_factory.mktemp("gateway"), *flags, **pythons) as frontend:
        frontend.process = psutil.Process(fork_server.forks(frontend.process.pid)[0])
        yield frontend


@pytest.fixture(scope="module")
def client(frontend: GatewayServer) -> Iterator[Any]:
    with openai_client(frontend.url) as client:
        yield client


def chat(client: Any, text: str, tokens: int = 48, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    more = {"temperature": 0, "max_tokens": tokens, **more}
    return client.chat.completions.create(model="pocket", messages=messages, **more)


class TestText:
    def test_a_completion_is_that_of_the_model(self, client: Any) -> None:
        tokenizer = ModelTokenizer(POCKET)
        [prompt] = tokenizer.encode([PROMPT])
        tokens, gap = Reference(POCKET).greedy(prompt, 12)
        assert gap > GAP
        expected = tokenizer.decode(tokens)
        answer = complete(client)
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "length"
        usage = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
        assert usage == (len(prompt), 12)
        streamed = list(complete(client, stream=True))
        assert "".join(chunk.choices[0].text for chunk in streamed) == expected
        assert len(streamed) > 3
        assert streamed[-1].choices[0].finish_reason == "length"

    def test_several_prompts_and_samples(self, client: Any) -> None:
        prompts = [PROMPT, "class A:"]
        answer = client.completions.create(
            model="pocket", prompt=prompts, temperature=0, max_tokens=6, n=2
        )
        single = [complete(client, prompt, 6).choices[0].text for prompt in prompts]
        texts = {choice.index: choice.text for choice in answer.choices}
        assert [texts[index] for index in range(4)] == [single[0]] * 2 + [single[1]] * 2

    def test_chat_with_a_thought_that_is_split_off(self, client: Any) -> None:
        answer = chat(client, "Hello", extra_body=NO_THOUGHT)
        message = answer.choices[0].message
        assert message.content and "<think>" not in message.content
        chunks = list(chat(client, "Hello", extra_body=NO_THOUGHT, stream=True))
        streamed = "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        )
        assert streamed == message.content
        thinking = chat(client, "Hello")
        assert thinking.choices[0].message.reasoning_content is not None or (
            thinking.choices[0].message.content
        )
        assert thinking.usage.completion_tokens <= 48

    def test_usage_of_a_stream(self, client: Any) -> None:
        chunks = list(chat(client, "Hello", 5, stream=True, stream_options={"include_usage": True}))
        assert chunks[-1].usage.completion_tokens == 5

    def test_a_stop_string_ends_the_engine_too(self, client: Any) -> None:
        text = complete(client, tokens=40).choices[0].text
        stop = text[6:9]
        answer = complete(client, tokens=40, stop=[stop])
        assert answer.choices[0].text == text[: text.index(stop)]
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens < 40
        streamed = list(complete(client, tokens=40, stop=[stop], stream=True))
        assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(stop)]

    def test_a_seed_fixes_the_samples(self, client: Any) -> None:
        def sample(seed: int) -> str:
            answer = client.completions.create(
                model="pocket", prompt=PROMPT, temperature=1, max_tokens=16, seed=seed
            )
            text: str = answer.choices[0].text
            return text

        first = sample(1)
        assert sample(1) == first
        assert any(sample(seed) != first for seed in (2, 3, 4))

    def test_penalties_reach_the_sampler(self, client: Any) -> None:
        plain = complete(client, tokens=24).choices[0].text
        answer = complete(client, tokens=24, frequency_penalty=2.0)
        assert answer.choices[0].text != plain

    def test_responses(self, client: Any) -> None:
        answer = client.responses.create(
            model="pocket", input="Hello", max_output_tokens=16, temperature=0
        )
        assert answer.usage.output_tokens <= 16
        events = client.responses.create(
            model="pocket", input="Hello", max_output_tokens=16, temperature=0, stream=True
        )
        kinds = {event.type for event in events}
        assert any(kind.endswith(("completed", "incomplete")) for kind in kinds)


class TestGrammar:
    def test_a_schema_constrains_the_answer(self, client: Any) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
        answer = chat(client, "Count.", 120, response_format=form, extra_body=NO_THOUGHT)
        jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
        chunks = list(
            chat(client, "Count.", 120, response_format=form, extra_body=NO_THOUGHT, stream=True)
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        jsonschema.validate(json.loads(text), SCHEMA)

    def test_a_regular_expression(self, client: Any) -> None:
        answer = chat(client, "When?", 16, extra_body={"regex": "[0-9]{4}-[01][0-9]", **NO_THOUGHT})
        assert re.fullmatch("[0-9]{4}-[01][0-9]", answer.choices[0].message.content)

    def test_a_wrong_grammar_is_refused_with_the_reason(self, client: Any) -> None:
        status, message = refusal(lambda: chat(client, "When?", 16, extra_body={"regex": "[0-9"}))
        assert status == 400, message
        assert "regular expression" in message or "regex" in message

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_required_tool_is_called(self, client: Any, stream: bool) -> None:
        answer = chat(
            client,
            "Count three pears.",
            120,
            tools=[TOOL],
            tool_choice="required",
            extra_body=NO_THOUGHT,
            stream=stream,
        )
        if stream:
            calls = [
                call
                for chunk in answer
                if chunk.choices
                for call in chunk.choices[0].delta.tool_calls or ()
            ]
            name = "".join(call.function.name or "" for call in calls)
            arguments = "".join(call.function.arguments or "" for call in calls)
        else:
            [call] = answer.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
            assert answer.choices[0].finish_reason == "tool_calls"
        assert name == "count"
        jsonschema.validate(json.loads(arguments), SCHEMA)

    @pytest.mark.parametrize("stream", [False, True])
    def test_log_probabilities(self, client: Any, stream: bool) -> None:
        more = {"logprobs": True, "top_logprobs": 3, "extra_body": NO_THOUGHT, "stream": stream}
        answer = chat(client, "Hello", 16, **more)
        choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
        content = [entry for c in choices if c.logprobs for entry in c.logprobs.content]
        assert len(content) == 16
        for entry in content:
            top = [one.logprob for one in entry.top_logprobs]
            # The best one is drawn.
            assert top == sorted(top, reverse=True)
            assert (len(top), top[0]) == (3, entry.logprob)
            assert sum(map(math.exp, top)) <= 1 + 1e-4


class TestMetrics:
    def test_one_endpoint_has_the_gateways_and_the_runtimes(
        self, frontend: GatewayServer, client: Any
    ) -> None:
        """With the names that SGLang's own server shows, each once."""
        before = scrape(frontend.metrics)
        complete(client, tokens=12)
        wait_until(
            lambda: (
                scrape(frontend.metrics).total("smg_router_requests_total")
                > before.total("smg_router_requests_total")
            ),
            10,
            "the gateway counts it",
        )
        now = scrape(frontend.metrics)
        tokens = "sglang:realtime_tokens_total"
        assert now.total(tokens, mode="decode") - before.total(tokens, mode="decode") == 12
        for name in ("pie_runtime:steps_total", "pie_runtime:finished_total"):
            assert now.total(name) > before.total(name), name
        for name in ("sglang:max_total_num_tokens", "sglang:page_size", "sglang:context_len"):
            assert now.total(name, model_name="pocket", dp_rank="0") > 0, name
        assert "sglang:num_running_reqs" in now.names
        log = frontend.log.read_text(errors="replace")
        assert f"metrics at http://127.0.0.1:{frontend.metrics}/metrics" in log
        assert now.total("pie_runtime:active_info", layers="sglang", scheduler="pie") == 1
        assert "pie-sglang: scheduler: pie; grammar: llguidance; attention: torch_native (" in log

    def test_running_requests_are_shown_while_they_run(
        self, frontend: GatewayServer, client: Any
    ) -> None:
        stream = complete(client, tokens=1500, stream=True)
        next(iter(stream))
        wait_until(lambda: scrape(frontend.metrics).total("sglang:num_running_reqs") == 1, 60, "it")
        stream.close()
        wait_until(
            lambda: scrape(frontend.metrics).total("sglang:num_running_reqs") == 0, 60, "end"
        )

    def test_the_dashboard_serves_this_frontend_too(
        self, frontend: GatewayServer, client: Any
    ) -> None:
        """Each query has an alternative that there is; only SGLang's server measures the queue."""
        streamed(client, 8)
        known = scrape(frontend.metrics).names
        panels = json.loads(DASHBOARD.read_text())["panels"]
        for panel in panels:
            if panel["title"] == "Time in the queue":
                continue
            for target in panel.get("targets", ()):
                requested = target["expr"].split(" or ")
                names = [
                    re.findall(r"\b(?:sglang:|pie_runtime:|smg_)\w+", each) for each in requested
                ]
                assert any(found and set(found) <= known for found in names), target["expr"]


class TestRefusals:
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_prompt_that_is_too_long(self, client: Any, stream: bool) -> None:
        status, message = refusal(lambda: complete(client, "x " * 4000, stream=stream))
        assert status == 400
        assert "2048" in message

    def test_a_parameter_out_of_range(self, client: Any) -> None:
        status, message = refusal(lambda: complete(client, top_p=1.5))
        assert status == 400
        assert "top_p" in message

    def test_a_model_that_is_not_there(self, client: Any) -> None:
        messages = [{"role": "user", "content": "Hello"}]
        create = client.chat.completions.create
        status, _ = refusal(lambda: create(model="other", messages=messages))
        assert status == 404


class TestEnds:
    def test_a_client_that_goes_leaves_nothing_behind(
        self, frontend: GatewayServer, client: Any
    ) -> None:
        stream = complete(client, tokens=1500, stream=True)
        next(iter(stream))
        wait_until(lambda: requests(frontend) == 1, 60, "it runs")
        wait_until(lambda: any(map(used, frontend.loads())), 60, "it has pages")
        stream.close()
        wait_until(lambda: requests(frontend) == 0, 60, "it ends")
        wait_until(lambda: not any(map(used, frontend.loads())), 60, "a cache is left only")

    def test_many_streams_with_one_that_is_slow(self, frontend: GatewayServer, client: Any) -> None:
        expected = complete(client, tokens=200).choices[0].text
        slow = complete(client, tokens=200, stream=True)
        first = next(iter(slow)).choices[0].text
        with ThreadPoolExecutor(16) as pool:
            texts = pool.map(lambda _: streamed(client, 40), range(32))
        assert set(texts) == {complete(client, tokens=40).choices[0].text}
        rest = "".join(chunk.choices[0].text for chunk in slow)
        assert first + rest == expected
        wait_until(lambda: requests(frontend) == 0, 60, "all have ended")

    def test_the_frontend_reports_its_health(self, frontend: GatewayServer) -> None:
        frontend.fetch("/health")
        frontend.fetch("/readiness")
        wait_until(lambda: not any(map(used, frontend.loads())), 60, "a cache is left only")
        [worker] = json.loads(frontend.fetch("/workers"))["workers"]
        assert worker["runtime_type"] == "vllm"


class TestTraces:
    @pytest.mark.parametrize("samples", [1, 2])
    def test_a_request_is_traced_from_its_client_to_its_end(
        self, frontend: GatewayServer, collector: Collector, samples: int
    ) -> None:
        body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 6, "n": samples}
        answer = traced_request(frontend, samples, "/v1/completions", body)
        found = collector.trace(samples, {"Scheduler", *STAGES, "http_request", "grpc_execute"})
        assert found["http_request"].parent == parent_of(samples)[1]
        check_stages(found, found["grpc_execute"])
        whole = found["Scheduler"]
        assert (whole.service, whole.attributes["gen_ai.response.model"]) == (
            "pie-sglang",
            "pocket",
        )
        usage = answer["usage"]
        assert whole.attributes["gen_ai.request.id"].startswith(answer["id"])
        assert whole.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert whole.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        # The gateway lists them in the order in which they end.
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        reasons = [choice["finish_reason"] for choice in choices]
        assert whole.attributes["gen_ai.response.finish_reasons"] == reasons


GATEWAY_KITS: Final = {
    "basic_api_contract_kit": ("test_openai_chat_completion", "test_openai_completion"),
    "matched_stop_kit": ("test_finish_stop_str",),
}
"""What SGLang's kits ask by OpenAI's API. The rest is asked by SGLang's own, of which the gateway
has a part; and a completion that ends by its length has no `matched_stop` there, not even null."""


class TestOthersTests:
    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize(
        ("module", "test"), [(name, test) for name, tests in GATEWAY_KITS.items() for test in tests]
    )
    def test_kit(self, frontend: GatewayServer, module: str, test: str) -> None:
        [kit] = [kit for kit in sglang_test_kits.KITS if kit.module == module]
        named = {"model": "pocket", "served_model_name": "pocket"}
        kit.run(test, {**sglang_test_kits.attributes(frontend, frontend.process, POCKET), **named})

    def test_many_streams_some_of_which_are_given_up(self, frontend: GatewayServer) -> None:
        """`make conformance` has a thousand of them."""
        streams = 1000 if os.environ.get("PIE_CONFORMANCE") else 60
        ends = flood_completions(frontend.url, "pocket", streams)
        assert ends["left"] >= streams // 40
        wait_until(lambda: requests(frontend) == 0, 60, "every request has ended")
        wait_until(lambda: not any(map(used, frontend.loads())), 60, "a cache is left only")
        assert len(frontend.drivers()) == 1


def requests(frontend: GatewayServer) -> int:
    """Requests that the runtime has, by its own word."""
    return int(sum(load["num_total_reqs"] for load in frontend.loads()))


def used(load: dict[str, Any]) -> float:
    return float(load["token_usage"] + load["num_used_tokens"])


def streamed(client: Any, tokens: int) -> str:
    chunks = complete(client, tokens=tokens, stream=True)
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_control_needs_the_admin_key_which_is_in_no_list(frontend: GatewayServer) -> None:
    for key in (None, "wrong"):
        stranger = Server(frontend.url, frontend.log, key)
        for path, body in (("/workers", None), ("/workers", {"url": "grpc://127.0.0.1:1"})):
            with pytest.raises(urllib.error.HTTPError) as error:
                stranger.fetch(path, body)
            assert error.value.code in (401, 403)
    family = [frontend.process, *fork_server.family(frontend.process.pid)]
    assert any("smg" in " ".join(command_line(each)) for each in family)
    assert not [each for each in family if ADMIN in " ".join(command_line(each))]
    assert ADMIN not in frontend.log.read_text(errors="replace")


def test_hostile_bodies_are_answered(frontend: GatewayServer, client: Any) -> None:
    expected = complete(client).choices[0].text
    deep = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    for body, codes in (
        (b" " * (80 << 20), {413}),
        (deep, {400, 422}),
        (b"[" * 100_000, {400, 422}),
        (b'{"model": "pocket", "prompt": "x", "custom": ' + deep + b"}", {400, 422}),
    ):
        code = raw_status(frontend.url, "/v1/completions", body)
        assert code in codes, body[:60]
    with contextlib.ExitStack() as stack:
        host, port = frontend.url.removeprefix("http://").split(":")
        for _ in range(200):
            stack.enter_context(socket.create_connection((host, int(port)), 60))
        assert complete(client).choices[0].text == expected


def raw_status(url: str, path: str, body: bytes) -> int:
    host = url.removeprefix("http://")
    with contextlib.closing(http.client.HTTPConnection(host, timeout=60)) as connection:
        connection.putrequest("POST", path)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders()
        with contextlib.suppress(ConnectionError):
            connection.send(body)
        return connection.getresponse().status
