"""`pie-sglang serve --front gateway`: the real gateway over our runtime, asked by real clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import jsonschema
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import forking
import kits
from flood import flood_completions
from gateway_server import ADMIN, GatewayServer, running
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer
from pie_server import START_S, wait_until
from reference import GAP, Reference
from serve_metrics import DASHBOARD
from sglang_server import Server, free_ports
from span_collector import STAGES, Collector, ask_traced, check_stages, collecting, parent_of
from tiny_models import POCKET

openai: Any = pytest.importorskip("openai")
pytest.importorskip("smg")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT: Final = "def f(x):"
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
    collector: Collector, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayServer]:
    flags = ["--tool-call-parser", "qwen25", "--reasoning-parser", "qwen3"]
    flags += ["--enable-trace", "--otlp-traces-endpoint", collector.endpoint]
    flags += ["--gateway-arg=--load-monitor-interval", "--gateway-arg=1"]
    with running(tmp_path_factory.mktemp("gateway"), *flags) as frontend:
        yield frontend


@pytest.fixture(scope="module")
def client(frontend: GatewayServer) -> Iterator[Any]:
    with asking(frontend.url) as client:
        yield client


@contextlib.contextmanager
def asking(url: str, key: str = "none") -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=120) as client:
        yield client


def complete(client: Any, prompt: str = PROMPT, tokens: int = 12, **more: Any) -> Any:
    return client.completions.create(
        model="pocket", prompt=prompt, temperature=0, max_tokens=tokens, **more
    )


def chat(client: Any, text: str, tokens: int = 48, **more: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    more = {"temperature": 0, "max_tokens": tokens, **more}
    return client.chat.completions.create(model="pocket", messages=messages, **more)


def refusal(call: Callable[[], Any]) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as error:
        call()
    return error.value.status_code, str(error.value)


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

    def test_a_seed_fixes_what_is_drawn(self, client: Any) -> None:
        def draw(seed: int) -> str:
            answer = client.completions.create(
                model="pocket", prompt=PROMPT, temperature=1, max_tokens=16, seed=seed
            )
            text: str = answer.choices[0].text
            return text

        first = draw(1)
        assert draw(1) == first
        assert any(draw(seed) != first for seed in (2, 3, 4))

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
    def test_a_schema_binds_the_answer(self, client: Any) -> None:
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
        wait_until(lambda: scrape(frontend.metrics).total("sglang:num_running_reqs") == 1, 30, "it")
        stream.close()
        wait_until(
            lambda: scrape(frontend.metrics).total("sglang:num_running_reqs") == 0, 30, "end"
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
                asked = target["expr"].split(" or ")
                names = [re.findall(r"\b(?:sglang:|pie_runtime:|smg_)\w+", each) for each in asked]
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
        wait_until(lambda: requests(frontend) == 1, 30, "it runs")
        wait_until(lambda: any(map(used, frontend.loads())), 30, "it has pages")
        stream.close()
        wait_until(lambda: requests(frontend) == 0, 30, "it ends")
        wait_until(lambda: not any(map(used, frontend.loads())), 30, "a cache is left only")

    def test_many_streams_with_one_that_is_slow(self, frontend: GatewayServer, client: Any) -> None:
        expected = complete(client, tokens=200).choices[0].text
        slow = complete(client, tokens=200, stream=True)
        first = next(iter(slow)).choices[0].text
        with ThreadPoolExecutor(16) as pool:
            texts = pool.map(lambda _: streamed(client, 40), range(32))
        assert set(texts) == {complete(client, tokens=40).choices[0].text}
        rest = "".join(chunk.choices[0].text for chunk in slow)
        assert first + rest == expected
        wait_until(lambda: requests(frontend) == 0, 30, "all have ended")

    def test_the_frontend_says_how_it_is(self, frontend: GatewayServer) -> None:
        frontend.ask("/health")
        frontend.ask("/readiness")
        wait_until(lambda: not any(map(used, frontend.loads())), 30, "a cache is left only")
        [worker] = json.loads(frontend.ask("/workers"))["workers"]
        assert worker["runtime_type"] == "vllm"


class TestTraces:
    @pytest.mark.parametrize("samples", [1, 2])
    def test_a_request_is_traced_from_its_client_to_its_end(
        self, frontend: GatewayServer, collector: Collector, samples: int
    ) -> None:
        body = {"model": "pocket", "prompt": PROMPT, "max_tokens": 6, "n": samples}
        answer = ask_traced(frontend, samples, "/v1/completions", body)
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
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
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
        [kit] = [kit for kit in kits.KITS if kit.module == module]
        named = {"model": "pocket", "served_model_name": "pocket"}
        kit.run(test, {**kits.attributes(frontend, frontend.process, POCKET), **named})

    def test_many_streams_some_of_which_are_given_up(self, frontend: GatewayServer) -> None:
        """`make conformance` has a thousand of them."""
        streams = 1000 if os.environ.get("PIE_CONFORMANCE") else 60
        ends = flood_completions(frontend.url, "pocket", streams)
        assert ends["left"] >= streams // 40
        wait_until(lambda: requests(frontend) == 0, 60, "every request has ended")
        wait_until(lambda: not any(map(used, frontend.loads())), 30, "a cache is left only")
        assert len(frontend.drivers()) == 1


class Scrape(NamedTuple):
    """What an endpoint shows: values by name and labels. No name is declared twice."""

    values: dict[tuple[str, frozenset[tuple[str, str]]], float]

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.values}

    def total(self, name: str, **labels: str) -> float:
        """The sum of what has these labels."""
        wanted = labels.items()
        return sum(
            value for (key, has), value in self.values.items() if key == name and wanted <= has
        )


def scrape(port: int) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    declared = Counter(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert [name for name, count in declared.items() if count > 1] == []
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    values = {(each.name, frozenset(each.labels.items())): each.value for each in samples}
    assert len(values) == len(samples)
    assert all(family.type != "unknown" and family.samples for family in families)
    return Scrape(values)


def requests(frontend: GatewayServer) -> int:
    """Requests that the runtime has, by its own word."""
    return int(sum(load["num_total_reqs"] for load in frontend.loads()))


def used(load: dict[str, Any]) -> float:
    return float(load["token_usage"] + load["num_used_tokens"])


def streamed(client: Any, tokens: int) -> str:
    chunks = complete(client, tokens=tokens, stream=True)
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_two_replicas_share_the_work_by_what_they_have_cached(
    forked_python: str, tmp_path: Path
) -> None:
    """Each family of prompts stays with the replica that has its beginning; drivers may die.

    The gateway is started by the line that the command prints.
    """
    log, gateway_log = tmp_path / "log", tmp_path / "gateway.log"
    port, metrics = free_ports(2)
    command = [forked_python, "-m", "pie_driver_sglang", "serve", "--front=gateway"]
    command += ["--model-path", str(POCKET), "--served-model-name", "pocket", "--device", "cpu"]
    command += ["--dp-size", "2", "--grpc-contract", "sglang", "--no-gateway"]
    # A driver that starts again has as much, whatever other tests have taken meanwhile.
    command += ["--max-total-tokens", "16384"]
    command += ["--port", str(port), "--api-key", "secret", "--prometheus-port", str(metrics)]
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(started(command, log))
        wait_until(
            lambda: b"smg launch" in log.read_bytes() or process.poll() is not None,
            START_S,
            "start",
        )
        [line] = re.findall(r"^  smg (launch .+)$", log.read_text(), re.MULTILINE)
        words = shlex.split(line)
        assert len([word for word in words if word.startswith("grpc://")]) == 2
        # The key is not printed.
        assert words[-2:] == ["--api-key", "***"]
        gateway = [sys.executable, "-m", "smg", *words[:-1], "secret"]
        url = f"http://127.0.0.1:{port}"
        smg = stack.enter_context(started(gateway, gateway_log))
        wait_until(lambda: is_ready(url) or smg.poll() is not None, 60, "the gateway starts")
        stranger = stack.enter_context(asking(url, "wrong"))
        assert refusal(lambda: complete(stranger))[0] == 401
        client = stack.enter_context(asking(url, "secret"))
        share_by_family(client)
        show_each_replica(metrics, gateway=True)
        lose_the_drivers(process, client)
        smg.kill()
        smg.wait()
        assert show_each_replica(metrics, gateway=False).total("pie_runtime:restarts_total") == 2
        family = forking.family(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert psutil.wait_procs(family, 10)[1] == []


def test_control_needs_the_admin_key_which_is_in_no_list(frontend: GatewayServer) -> None:
    for key in (None, "wrong"):
        stranger = Server(frontend.url, frontend.log, key)
        for path, body in (("/workers", None), ("/workers", {"url": "grpc://127.0.0.1:1"})):
            with pytest.raises(urllib.error.HTTPError) as error:
                stranger.ask(path, body)
            assert error.value.code in (401, 403)
    family = [frontend.process, *forking.family(frontend.process.pid)]
    assert any("smg" in " ".join(each.cmdline()) for each in family)
    assert not [each for each in family if ADMIN in " ".join(each.cmdline())]
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


def show_each_replica(port: int, *, gateway: bool) -> Scrape:
    """Both replicas have worked by the metrics; those of the gateway come while it runs."""
    found = scrape(port)
    for rank in ("0", "1"):
        for name in ("sglang:max_total_num_tokens", "sglang:kv_evictable_tokens"):
            assert found.total(name, dp_rank=rank, model_name="pocket") > 0, name
        assert found.total("sglang:realtime_tokens_total", dp_rank=rank, mode="decode") > 0
    assert any(name.startswith("smg_") for name in found.names) == gateway
    return found


def share_by_family(client: Any) -> None:
    """Asks prompts of several families: both replicas have some, each family has one of them.

    The gateway draws lots over a family that is new, so more than four are asked if one has all.
    """
    places: dict[str, Counter[str]] = {}

    def ask(family: str, turn: int) -> None:
        answer = client.completions.with_raw_response.create(
            model="pocket", prompt=f"{family} " * 60 + str(turn), max_tokens=4, temperature=0
        )
        places.setdefault(family, Counter())[answer.headers["x-smg-routed-worker-id"]] += 1

    while len(places) < 4 or len({worker for seen in places.values() for worker in seen}) < 2:
        assert len(places) < 32, places
        ask(f"{len(places)} family", 0)
    for turn in range(1, 5):
        for family in list(places):
            ask(family, turn)
    assert all(max(seen.values()) >= 4 for seen in places.values()), places


def lose_the_drivers(process: subprocess.Popen[bytes], client: Any) -> None:
    """Kills the drivers of two replicas while they stream: every stream goes on."""

    def drivers() -> set[psutil.Process]:
        return {each for each in forking.family(process.pid) if "--config" in each.cmdline()}

    expected = complete(client, tokens=300).choices[0].text
    before = drivers()
    assert len(before) == 2
    parts: list[list[str]] = [[] for _ in range(8)]

    def stream(mine: list[str]) -> None:
        for chunk in complete(client, tokens=300, stream=True):
            mine.append(chunk.choices[0].text)  # noqa: PERF401 (read while it grows)

    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(stream, mine) for mine in parts]
        wait_until(lambda: min(map(len, parts)) > 3, 30, "they stream")
        for driver in before:
            driver.kill()
        for each in streams:
            each.result(200)
    assert {"".join(mine) for mine in parts} == {expected}
    wait_until(lambda: len(drivers() - before) == 2, 60, "there are two others")


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield process
    except BaseException:
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
