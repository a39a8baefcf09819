"""Requests of every kind with known answers.

Each function takes the address of a server, asks greedily, and returns all that must be the same
each time: `soak.py` compares it with what the same request was answered alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from support.hostile.attack_clients import Address, Reply, send

LONG: Final = 120
"""Tokens of the longest answer."""
SCHEMA: Final = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bo"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
Ask = Callable[[Address], Any]


class Lost(Exception):
    """A request that was not answered as it should be."""


def served(address: Address, path: str, body: Mapping[str, Any]) -> Reply:
    """The answer of a server, which is asked again for as long as it says that it has no capacity.

    Raises:
        Lost: It refuses, or does not answer.
    """
    data = json.dumps(body).encode()
    until = time.monotonic() + 120
    while True:
        reply = send(address, path, data)
        if reply.status == 200:
            return reply
        if reply.status != 503 or time.monotonic() > until:
            raise Lost(f"{path}: status {reply.status}: {reply.text[:300]}")
        time.sleep(float(reply.headers.get("retry-after", 1)))


def _parsed(path: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Lost(f"{path}: an answer has {text[:300]!r}") from error


def whole(address: Address, path: str, body: Mapping[str, Any]) -> Any:
    return _parsed(path, served(address, path, body).text)


def streamed(address: Address, path: str, body: Mapping[str, Any]) -> list[Any]:
    """The events of a stream.

    Raises:
        Lost: It ends before its end.
    """
    text = served(address, path, {**body, "stream": True}).text
    # Comments, such as smg's `: ping` of a stream that waits, are no events.
    lines = [line for line in text.splitlines() if line and not line.startswith(":")]
    lines = [line.removeprefix("data: ") for line in lines]
    if not lines or lines[-1] != "[DONE]":
        raise Lost(f"{path}: a stream ends with {text[-200:]!r}")
    return [_parsed(path, line) for line in lines[:-1]]


def _greedy(tokens: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **more}


def _tokens(answer: Any, tokens: int) -> list[int]:
    found: list[int] = answer["output_ids"]
    if len(found) != tokens:
        raise Lost(f"{len(found)} of {tokens} tokens: {answer['meta_info']['finish_reason']}")
    return found


# ---------------------------------------------------------------------------------------------
# SGLang's own API
# ---------------------------------------------------------------------------------------------


def tokens_at_once(address: Address) -> Any:
    body = {"input_ids": list(range(40, 90)), "sampling_params": _greedy(16)}
    return _tokens(whole(address, "/generate", body), 16)


def long_stream(address: Address) -> Any:
    body = {"input_ids": [31, 32, 33], "sampling_params": _greedy(LONG)}
    return _tokens(streamed(address, "/generate", body)[-1], LONG)


def batch_of_prompts(address: Address) -> Any:
    prompts = [[5, 9, 77], [8], list(range(200, 260))]
    answers = whole(address, "/generate", {"input_ids": prompts, "sampling_params": _greedy(8)})
    return [_tokens(answer, 8) for answer in answers]


def log_probabilities(address: Address) -> Any:
    requested = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 6]}
    body = {"input_ids": [11, 12, 13], "sampling_params": _greedy(12), **requested}
    answer = whole(address, "/generate", body)
    top = answer["meta_info"]["output_top_logprobs"]
    return _tokens(answer, 12), [[token for _, token, _ in row] for row in top]


def penalties(address: Address) -> Any:
    bias = {str(token): -0.5 for token in range(0, 4000, 3)}
    params = _greedy(16, frequency_penalty=0.5, logit_bias=bias, min_new_tokens=16)
    params["stop_token_ids"] = list(range(100, 400))
    body = {"input_ids": [61, 62], "sampling_params": params}
    return _tokens(whole(address, "/generate", body), 16)


def session(address: Address) -> Any:
    """Two turns, of which the second continues from the first."""
    name = whole(address, "/open_session", {"capacity_of_str_len": 1000})
    turns = []
    requested = {"id": name}
    for prompt in (list(range(300, 330)), [7, 8]):
        body = {"input_ids": prompt, "sampling_params": _greedy(6), "session_params": requested}
        answer = whole(address, "/generate", body)
        turns.append(_tokens(answer, 6))
        requested = {"id": name, "rid": answer["meta_info"]["id"]}
    served(address, "/close_session", {"session_id": name})
    return turns


def adapter(address: Address) -> Any:
    body = {"input_ids": [21, 22, 23], "sampling_params": _greedy(12), "lora_path": "linear"}
    return _tokens(whole(address, "/generate", body), 12)


def bound_by_a_regex(address: Address) -> Any:
    params = {"temperature": 0, "max_new_tokens": 24, "regex": "[0-9]{4}-[01][0-9] (yes|no)"}
    return whole(address, "/generate", {"text": "When?", "sampling_params": params})["text"]


# ---------------------------------------------------------------------------------------------
# OpenAI's API
# ---------------------------------------------------------------------------------------------


def _completion(prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    requested = {"model": "pocket", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    return {**requested, "ignore_eos": True, **more}


def _chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    requested = {"model": "pocket", "messages": messages, "max_tokens": 24, "temperature": 0}
    return {**requested, "chat_template_kwargs": {"enable_thinking": False}, **more}


def completion(address: Address) -> Any:
    answer = whole(address, "/v1/completions", _completion("import os\n", 16))
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def completion_stream(address: Address) -> Any:
    parts = streamed(address, "/v1/completions", _completion("class A:\n", LONG))
    choices = [choice for part in parts for choice in part["choices"]]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def samples(address: Address) -> Any:
    answer = whole(address, "/v1/completions", _completion("def g():", 8, n=3))
    return sorted((choice["index"], choice["text"]) for choice in answer["choices"])


def seeded(address: Address) -> Any:
    requested = _completion("x =", 8, temperature=1.0, seed=7)
    return whole(address, "/v1/completions", requested)["choices"][0]["text"]


def stop_strings(address: Address) -> Any:
    stops = ["e", "zzz", "\n\n"]
    answer = whole(address, "/v1/completions", _completion("def f(x):", 40, stop=stops))
    return answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]


def chat(address: Address) -> Any:
    return whole(address, "/v1/chat/completions", _chat("Hello"))["choices"][0]["message"]


def chat_log_probabilities(address: Address) -> Any:
    requested = _chat("Count.", logprobs=True, top_logprobs=2, max_tokens=8)
    content = whole(address, "/v1/chat/completions", requested)["choices"][0]["logprobs"]["content"]
    return [(each["token"], [top["token"] for top in each["top_logprobs"]]) for each in content]


def structured(address: Address) -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    requested = _chat("Who is it?", response_format=form, max_tokens=120)
    choice = whole(address, "/v1/chat/completions", requested)["choices"][0]
    return choice["message"]["content"], choice["finish_reason"]


OPENAI: Final[tuple[Ask, ...]] = (
    completion,
    completion_stream,
    samples,
    seeded,
    stop_strings,
    chat,
    chat_log_probabilities,
    structured,
)
"""What every frontend serves."""
SGLANG: Final[tuple[Ask, ...]] = (
    *OPENAI,
    tokens_at_once,
    long_stream,
    batch_of_prompts,
    log_probabilities,
    penalties,
    session,
    adapter,
    bound_by_a_regex,
)
