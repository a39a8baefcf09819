"""The same requests to our scheduler and to SGLang's own: equal answers."""

from __future__ import annotations

import json
import random
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import filterfalse
from typing import Any, Final, NamedTuple

import pytest

from support.models.tiny_models import POCKET
from support.servers import sglang_server
from support.servers.pie_server import PROMPT, running, state
from support.servers.sglang_server import Server
from support.versions import IS_OLDEST

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

# SGLang's penalties are a token late when steps overlap, and a CPU has no graphs.
FLAGS: Final = ("--dtype", "float32", "--context-length", "512")
SGLANGS: Final = (
    *("--model-path", str(POCKET), "--device", "cpu", "--skip-server-warmup", *FLAGS),
    *("--attention-backend", "torch_native", "--disable-overlap-schedule"),
    *("--disable-cuda-graph", "--max-total-tokens", "8192"),
)
OF_A_RUN: Final = frozenset({"id", "created", "cached_tokens", "cached_tokens_details"})
TOLERANCE: Final = 1e-3
IS_NEXT: Final = {"logit_bias": {"317": 100}}
"""The next token is ` is`."""
STOPS: Final = ({"stop": "is"}, {"stop_token_ids": [317]}, {"stop_regex": "[s-z]"})


class Servers(NamedTuple):
    """Both, with the same model."""

    ours: Server
    sglangs: Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, forked_python: str) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("alike")
    with (
        running(folder, "--scheduler", "pie", *FLAGS, python=forked_python) as (ours, _),
        sglang_server.serve(*SGLANGS) as sglangs,
    ):
        yield Servers(ours, sglangs)


def answer(server: Server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """The status and what is said; of a stream its events."""
    try:
        text = server.fetch(path, body)
    except urllib.error.HTTPError as error:
        # Which words a refusal has is each scheduler's.
        return error.code, sorted(json.loads(error.read()))
    if not body.get("stream"):
        return 200, json.loads(text)
    assert text.rstrip().endswith("data: [DONE]")
    events = [sglang_server.event(line.encode()) for line in text.splitlines()]
    return 200, joined([found for found in events if found is not None])


def joined(events: list[dict[str, Any]]) -> Any:
    """A stream without where it is cut: the last event, or all text of each choice."""
    if "choices" not in events[0]:
        return events[-1]
    texts: dict[int, str] = {}
    ends = []
    for choice in (choice for event in events for choice in event["choices"]):
        part = choice.get("text") or choice.get("delta", {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + part
        if choice["finish_reason"]:
            ends.append((choice["index"], choice["finish_reason"], choice["matched_stop"]))
    return (
        sorted(texts.items()),
        sorted(ends),
        [event["usage"] for event in events if event.get("usage")][-1:],
    )


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where two answers differ; times and names only by whether they are there."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        # Of a stream's last event SGLang's front end leaves out a time now and then.
        for name in sorted(filterfalse(is_of_time, ours.keys() ^ theirs.keys())):
            yield f"{path}.{name}: {ours.get(name)!r} and {theirs.get(name)!r}"
        for name in sorted(ours.keys() & theirs.keys()):
            if name not in OF_A_RUN and not is_of_time(name):
                yield from differences(ours[name], theirs[name], f"{path}.{name}")
    elif isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        if len(ours) != len(theirs):
            yield f"{path}: {ours!r} and {theirs!r}"
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(one, other, f"{path}[{index}]")
    elif isinstance(ours, float) and isinstance(theirs, float):
        if ours != pytest.approx(theirs, abs=TOLERANCE):
            yield f"{path}: {ours} and {theirs}"
    elif type(ours) is not type(theirs) or ours != theirs:
        yield f"{path}: {ours!r} and {theirs!r}"


def is_of_time(name: str) -> bool:
    """Whether a field says when something was, or how fast."""
    return name.endswith(("_ts", "_time", "_latency", "_throughput"))


def generate(params: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 8, **params}}
    return "/generate", {**body, **more}


def chosen() -> Iterator[tuple[str, dict[str, Any]]]:
    """What every release should say alike."""
    for stream in (False, True):
        requested = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
        yield generate({}, **requested, token_ids_logprob=[5, 9], stream=stream)
        yield generate({}, return_logprob=True, return_text_in_logprobs=True, stream=stream)
        yield generate({"stop": " is"}, stream=stream)
        yield generate({"stop": [" is", "zz"], "no_stop_trim": True}, stream=stream)
        yield generate({"stop_token_ids": [317], "min_new_tokens": 6}, stream=stream)
        yield generate({"stop_regex": "[a-z] [a-z]+"}, stream=stream)
        for stop in STOPS:
            yield generate({**IS_NEXT, "max_new_tokens": 1, **stop}, stream=stream)
        yield generate({"logit_bias": {"4089": 100}}, stream=stream)
        model = {"model": "m", "temperature": 0, "max_tokens": 6, "stream": stream}
        yield "/v1/completions", {**model, "prompt": [PROMPT, "a"], "n": 2, "echo": True}
        hello = [{"role": "user", "content": "Hello"}]
        yield "/v1/chat/completions", {**model, "messages": hello, "stop": "\n"}
    completion = {"model": "m", "prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    yield "/v1/completions", {**completion, "logprobs": 2, "echo": True}
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    yield "/v1/chat/completions", {**chat, "max_tokens": 4, "logprobs": True, "top_logprobs": 2}
    score = {"model": "m", "query": [5, 6], "items": [[7], [8, 9]], "label_token_ids": [5, 9]}
    yield "/v1/score", {**score, "apply_softmax": True}
    yield generate({"max_new_tokens": 0})
    yield generate({"n": 3})
    yield generate({}, text=[PROMPT, "import os"])


def refused() -> Iterator[tuple[str, dict[str, Any]]]:
    """What neither of them takes, by the same status."""
    if IS_OLDEST:
        # It ends SGLang's own server of 0.5.23.
        yield generate({}, text="")
    yield generate({}, text="hello " * 600)
    yield generate({"max_new_tokens": 600})
    yield generate({"min_new_tokens": 9})
    for name, value in (("temperature", -1), ("top_p", 0), ("top_k", -2), ("min_p", 2)):
        yield generate({name: value})
    yield generate({"logit_bias": {"4096": 1}})
    yield generate({}, return_logprob=True, logprob_start_len=9)
    yield generate({}, session_params={"id": "none"})
    yield generate({}, lora_path="none")


def sampled_request(seed: int) -> tuple[str, dict[str, Any]]:
    """A mix of parameters."""
    source = random.Random(seed)
    params: dict[str, Any] = {"max_new_tokens": source.randrange(1, 12)}
    # Without `min_new_tokens`: SGLang's lets an end through, now and then.
    values: dict[str, list[Any]] = {
        "frequency_penalty": [-0.5, 1.5],
        "presence_penalty": [0.7, -1.0],
        "repetition_penalty": [0.8, 1.4],
        "logit_bias": [{"77": 6}, {"198": -100, "220": 3}],
        "ignore_eos": [True, False],
        "stop": ["\n", " x", [")", "return"]],
        "stop_token_ids": [[317], [198, 8]],
        "skip_special_tokens": [False],
        "spaces_between_special_tokens": [False],
        "no_stop_trim": [True],
    }
    for name in source.sample(sorted(values), source.randrange(5)):
        params[name] = source.choice(values[name])
    if "repetition_penalty" in params:
        # SGLang keeps penalties in a set: which of them it applies first is not the same each time.
        params.pop("frequency_penalty", None)
        params.pop("presence_penalty", None)
    if source.random() < 0.5:
        # It is greedy, by another parameter.
        params |= {"temperature": source.choice([0.5, 2]), "top_k": 1}
    prompt = [source.randrange(4000) for _ in range(source.choice([1, 7, 40, 200]))]
    more: dict[str, Any] = {"stream": source.random() < 0.3}
    if source.random() < 0.5:
        more |= {"return_logprob": True, "top_logprobs_num": source.randrange(4)}
        more["logprob_start_len"] = source.choice([-1, 0, len(prompt) - 1])
    path, body = generate(params, input_ids=prompt, **more)
    del body["text"]
    return path, body


def test_answers_are_sglangs(servers: Servers) -> None:
    requests = [*chosen(), *refused(), *map(sampled_request, range(40))]
    found: list[tuple[str, dict[str, Any], str]] = []
    with ThreadPoolExecutor(2) as pool:
        for path, body in requests:
            ours, theirs = pool.map(answer, servers, (path, path), (body, body))
            found += [(path, body, each) for each in differences(ours, theirs)]
    assert found == []
    for server in servers:
        server.fetch("/health_generate")
    assert state(servers.ours)["open_requests"] == 0


def test_a_stop_in_the_last_token_ends_as_the_version_says(servers: Servers) -> None:
    end, text = ("length", " is") if IS_OLDEST else ("stop", " ")
    for server in servers:
        for stream in (False, True):
            path, body = generate({**IS_NEXT, "max_new_tokens": 1, **STOPS[0]}, stream=stream)
            _, said = answer(server, path, body)
            assert (said["meta_info"]["finish_reason"]["type"], said["text"]) == (end, text)


def test_an_answer_without_a_limit_fills_the_context(servers: Servers) -> None:
    """As long as one that asks for all there is. SGLang's is two tokens shorter."""
    prompt = list(range(500))
    params = {"temperature": 0, "ignore_eos": True}
    for limit in (None, 12):
        body = {"input_ids": prompt, "sampling_params": {**params, "max_new_tokens": limit}}
        status, said = answer(servers.ours, "/generate", body)
        assert (status, said["meta_info"]["completion_tokens"]) == (200, 12)
