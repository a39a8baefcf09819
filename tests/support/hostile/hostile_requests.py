"""Hostile requests: a table that `test_hostile.py` sends once, and `soak.py` repeatedly.

A row is written once, in the words of SGLang's `/generate`, and sent to SGLang's HTTP frontend, to
the gateway by OpenAI's API, and to `Engine.generate`. None may end a process, change the answer of
another client, or stay without an answer: see `attack_clients` for what is checked.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from support.hostile.hostile_grammars import grammars, object_chain

VOCABULARY: Final = 4096
"""Tokens of `models/pocket`."""
PROMPT: Final = "def f(x):"
LONG_PROMPT: Final = PROMPT * 500
"""2,000 of the 2,048 tokens of `models/pocket`, so that an answer without a limit is short."""

SGLANG, GATEWAY, ENGINE = "sglang", "gateway", "engine"
ALL: Final = frozenset([SGLANG, GATEWAY, ENGINE])
OURS: Final = frozenset([SGLANG, ENGINE])
"""What OpenAI's API has no word for."""


class Json(NamedTuple):
    """A value that :func:`json.dumps` cannot write.

    Attributes:
        text: It in JSON.
        value: It in Python.
    """

    text: str
    value: Any


@dataclass(frozen=True)
class Row:
    """A request of `/generate`.

    Attributes:
        name: Of the test.
        params: Its sampling parameters.
        fields: What else it has.
        at: The frontends that have these fields.
        copies: Requests that are sent at once.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    at: frozenset[str] = ALL
    copies: int = 1


class Call(NamedTuple):
    """A request over HTTP, whose body is made when it is sent."""

    name: str
    path: str
    body: Callable[[], bytes]
    copies: int = 1


def nested(depth: int, *, lists: bool = False) -> Json:
    """Maps, or lists, in each other."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if lists else {"a": value}
    begin, end = ("[", "]") if lists else ('{"a":', "}")
    return Json(begin * depth + "1" + end * depth, value)


def number(text: str) -> Json:
    """A number that JSON may not have, or that overflows a double."""
    value = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(text)
    return Json(text, float(text) if value is None else value)


# ---------------------------------------------------------------------------------------------
# Numbers, types, sizes
# ---------------------------------------------------------------------------------------------

_ANY_NUMBER: Final = {
    "2^31": 2**31,
    "2^32-1": 2**32 - 1,
    "2^63": 2**63,
    "2^64": 2**64,
    "-1": -1,
    "-2^63": -(2**63),
    "1e308": 1e308,
    "1e999": number("1e999"),
    "NaN": number("NaN"),
    "digits": Json("9" * 4000, 10**4000 - 1),
}
_COUNTS: Final = ("max_new_tokens", "min_new_tokens", "top_k", "sampling_seed", "n")
_REALS: Final = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty")
_WRONG_TYPES: Final = {
    "list": [[]],
    "map": {"a": {"b": []}},
    "text": "é\u0000\U0010ffff",
    "flag": True,
    "deep": nested(300),
}


def _numbers() -> Iterator[Row]:
    long = {"text": LONG_PROMPT}
    for name in (*_COUNTS, *_REALS):
        for text, value in _ANY_NUMBER.items():
            yield Row(f"{name}-{text}", {name: value}, long if name == "max_new_tokens" else {})
    for text, value in {"2^32-1": 2**32 - 1, "2^31": 2**31}.items():
        limits = {"max_new_tokens": value, "min_new_tokens": value}
        yield Row(f"both-limits-{text}", limits, long)
    yield Row("n-1024", {"n": 1024, "max_new_tokens": 1})
    for text, value in _ANY_NUMBER.items():
        yield Row(f"top-logprobs-{text}", {}, {"return_logprob": True, "top_logprobs_num": value})
        yield Row(
            f"logprob-start-{text}", {}, {"return_logprob": True, "logprob_start_len": value}, OURS
        )
        yield Row(f"priority-{text}", {}, {"priority": value}, OURS)
        yield Row(f"stop-token-{text}", {"stop_token_ids": [value]})
        yield Row(f"bias-{text}", {"logit_bias": {"7": value}})
        yield Row(
            f"session-offset-{text}", {}, {"session_params": {"id": "x", "offset": value}}, OURS
        )
    yield Row("prompt-token-2^40", {}, {"input_ids": [5, 2**40]}, OURS)
    yield Row("prompt-token-minus-1", {}, {"input_ids": [-1]}, OURS)
    yield Row("prompt-token-half", {}, {"input_ids": [0.5]}, OURS)


def _types() -> Iterator[Row]:
    names = (*_COUNTS, *_REALS, "stop", "stop_token_ids", "stop_regex", "logit_bias", "json_schema")
    for name in (*names, "ignore_eos", "skip_special_tokens", "stream_interval"):
        for text, value in _WRONG_TYPES.items():
            yield Row(f"{name}-{text}", {name: value}, at=OURS if "stream" in name else ALL)
    for name in (
        "rid",
        "priority",
        "session_params",
        "lora_path",
        "extra_key",
        "stream",
        "input_ids",
    ):
        for text, value in _WRONG_TYPES.items():
            yield Row(f"{name}-{text}", {}, {name: value}, OURS)


def _sizes() -> Iterator[Row]:
    whole = {str(token): -1.5 for token in range(VOCABULARY)}
    yield Row("biases-of-the-vocabulary-64-at-once", {"logit_bias": whole}, copies=64)
    yield Row("biases-beyond-the-vocabulary", {"logit_bias": {str(2**40): 1.0, "-1": 1.0}})
    yield Row("biases-no-tokens", {"logit_bias": {"": 1.0, "x": 1.0, "\ud800": 1.0}}, at=OURS)
    yield Row("biases-200000", {"logit_bias": {str(at): 1.0 for at in range(200_000)}})
    yield Row(
        "forbidden-vocabulary",
        {"stop_token_ids": list(range(VOCABULARY)), "min_new_tokens": 8, "max_new_tokens": 8},
        copies=16,
    )
    yield Row("stop-tokens-200000", {"stop_token_ids": [at % VOCABULARY for at in range(200_000)]})
    yield Row("stop-strings-100000", {"stop": [f"{at:x}!" for at in range(100_000)]})
    yield Row("stop-string-of-5000", {"stop": ["a" * 5_000]})
    # smg builds an automaton of it before it calls the service (docs/gateway.md).
    yield Row("stop-string-of-a-million", {"stop": ["a" * 1_000_000]}, at=OURS)
    yield Row("stop-strings-empty", {"stop": [""] * 1000})
    yield Row("stop-regexes-10000", {"stop_regex": [f"a{at}b*" for at in range(10_000)]}, at=OURS)
    yield Row("stop-regex-bomb", {"stop_regex": ["((a{1,1000}){1,1000}){1,1000}"]}, at=OURS)
    yield Row("stop-regex-groups", {"stop_regex": ["(" * 5000 + "a" + ")" * 5000]}, at=OURS)
    given = {"return_logprob": True, "logprob_start_len": 0}
    yield Row(
        "logprobs-of-the-vocabulary",
        {"max_new_tokens": 2},
        {**given, "token_ids_logprob": list(range(VOCABULARY))},
        OURS,
        copies=16,
    )
    yield Row("logprobs-beyond", {}, {**given, "token_ids_logprob": [2**40, -1]}, OURS)
    yield Row("logprobs-top-4096", {"max_new_tokens": 2}, {**given, "top_logprobs_num": VOCABULARY})
    yield Row("prompt-empty", {}, {"text": ""})
    yield Row("prompt-of-no-tokens", {}, {"input_ids": []}, OURS)
    yield Row("prompt-of-a-million", {}, {"text": "x " * 500_000})
    yield Row("prompt-of-one-word", {}, {"text": "x" * 300_000})
    yield Row("prompt-of-100000-tokens", {}, {"input_ids": [5] * 100_000}, OURS)
    yield Row("prompts-2000", {"max_new_tokens": 1}, {"text": ["a"] * 2000})
    yield Row("prompts-of-mixed-kinds", {}, {"input_ids": [[1], 2, "a", None, [[]]]}, OURS)
    yield Row("name-of-a-million", {}, {"rid": "r" * 1_000_000}, OURS)
    yield Row("name-of-lines", {}, {"rid": "a\nb\r\n\x1b[31m"}, OURS)
    yield Row("one-name-for-all", {"max_new_tokens": 4}, {"rid": "same"}, OURS, copies=8)
    yield Row("extra-key-of-a-million", {}, {"extra_key": "k" * 1_000_000}, OURS)
    yield Row("adapter-of-nobody", {}, {"lora_path": "nobody"}, OURS)
    yield Row("session-of-nobody", {}, {"session_params": {"id": "nobody"}}, frozenset([SGLANG]))
    yield Row("custom-params-1000-entries", {"custom_params": {f"k{at}": at for at in range(1000)}})
    for depth in (250, 300, 600, 900):
        yield Row(f"custom-params-{depth}-deep", {"custom_params": nested(depth)})
        yield Row(f"custom-params-{depth}-lists", {"custom_params": nested(depth, lists=True)})
        yield Row(
            f"session-{depth}-deep",
            {},
            {"session_params": Json(f'{{"id":"x","a":{nested(depth).text}}}', {"id": "x"})},
            frozenset([SGLANG]),
        )
    yield Row("image-of-nobody", {}, {"image_data": "data:image/png;base64,AAAA"}, OURS)
    yield Row("image-file", {}, {"image_data": "file:///etc/passwd"}, OURS)
    yield Row("image-metadata", {}, {"image_data": "http://169.254.169.254/latest"}, OURS)
    yield Row("processor", {}, {"custom_logit_processor": "gASVAAAA"}, OURS)
    yield Row("unknown-parameter", {"no_such_parameter": nested(5)})


def _all() -> Iterator[tuple[str, tuple[Row, ...]]]:
    bound = [
        Row(name, params, at=ALL if everywhere else OURS) for name, params, everywhere in grammars()
    ]
    kinds = {"grammars": bound, "numbers": _numbers(), "types": _types(), "sizes": _sizes()}
    for kind, rows in kinds.items():
        yield kind, tuple(rows)


ROWS: Final = dict(_all())


# ---------------------------------------------------------------------------------------------
# A row at each frontend
# ---------------------------------------------------------------------------------------------

_OPENAI: Final[Mapping[str, str | None]] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs_num": "logprobs",
    "text": "prompt",
    "return_logprob": None,
    "logprob_start_len": None,
}
"""OpenAI's names of parameters; None for what goes without saying."""


def written(value: Any) -> str:
    if isinstance(value, Json):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{written(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list) and any(isinstance(each, Json) for each in value):
        return "[" + ",".join(map(written, value)) + "]"
    return json.dumps(value)


def plain(value: Any) -> Any:
    """A value as Python has it."""
    if isinstance(value, Json):
        return value.value
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


def for_sglang(row: Row) -> Call:
    def body() -> bytes:
        params = {"temperature": 0, "max_new_tokens": 8, **row.params}
        prompt = {} if "input_ids" in row.fields else {"text": PROMPT}
        return written({**prompt, "sampling_params": params, **row.fields}).encode()

    return Call(row.name, "/generate", body, row.copies)


def for_gateway(row: Row) -> Call:
    grammar = next((name for name in ("json_schema", "regex", "ebnf") if name in row.params), None)

    def body() -> bytes:
        requested = {"model": "pocket", "temperature": 0, "max_tokens": 8}
        for name, value in {**row.params, **row.fields}.items():
            if name == "json_schema":
                schema = Json(value, None) if isinstance(value, str) else value
                named = {"name": "it", "schema": schema}
                requested["response_format"] = {"type": "json_schema", "json_schema": named}
            elif (known := _OPENAI.get(name, name)) is not None:
                requested[known] = value
        if grammar is None:
            return written({"prompt": PROMPT, **requested}).encode()
        return written({"messages": [{"role": "user", "content": "Go."}], **requested}).encode()

    path = "/v1/completions" if grammar is None else "/v1/chat/completions"
    return Call(row.name, path, body, row.copies)


def for_engine(row: Row) -> dict[str, Any]:
    """The arguments of `Engine.generate`."""
    requested = {} if "input_ids" in row.fields else {"prompt": PROMPT}
    fields = {("prompt" if key == "text" else key): plain(v) for key, v in row.fields.items()}
    params = {"temperature": 0, "max_new_tokens": 8, **plain(dict(row.params))}
    return {**requested, **fields, "sampling_params": params}


# ---------------------------------------------------------------------------------------------
# Other endpoints
# ---------------------------------------------------------------------------------------------


class _Called:
    """Pickled, a call of any function; made by names that a deny list of modules lets through."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __call__(self) -> None:
        raise NotImplementedError

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced


def harmful_pickle(folder: str) -> str:
    """A pickle, in base64, that makes a folder where it is read."""
    mkdir = _Called(getattr, _Called(__import__, "os"), "mkdir")
    return base64.b64encode(pickle.dumps(_Called(mkdir, folder))).decode()


def _json(**body: Any) -> Callable[[], bytes]:
    return lambda: written(body).encode()


def _chat(**requested: Any) -> Callable[[], bytes]:
    usual = {"model": "pocket", "max_tokens": 8, "temperature": 0}
    messages = [{"role": "user", "content": "Hello"}]
    return _json(**{**usual, "messages": messages, **requested})


def _tool(parameters: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "parameters": parameters, "strict": True}
    return [{"type": "function", "function": function}]


_ENDLESS: Final = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
"""A template that is filled in for years."""


_LONG_TURN: Final = {"role": "user", "content": "a b " * 4000}


def chat_calls() -> list[Call]:
    """Chats of OpenAI's API, which both HTTP frontends have."""
    path = "/v1/chat/completions"
    text = [{"role": "user", "content": "x" * 300_000}]
    deep = _tool(Json(object_chain(300), None))
    image = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        }
    ]
    bodies = {
        "no-messages": _chat(messages=[]),
        "messages-text": _chat(messages="Hello"),
        "messages-deep": _chat(messages=nested(500)),
        "messages-5000": _chat(messages=[{"role": "user", "content": "a"}] * 5000),
        "message-long": _chat(messages=text),
        "role-unknown": _chat(messages=[{"role": "nobody", "content": "a"}]),
        "content-null": _chat(messages=[{"role": "user", "content": None}]),
        "content-number": _chat(messages=[{"role": "user", "content": 5}]),
        "surrogates": lambda: _chat()().replace(b"Hello", b"\\ud800\\udfff\\udc00"),
        "tool-deep": _chat(tools=deep, tool_choice="required"),
        "tools-1000": _chat(tools=_tool({"type": "object"}) * 1000, tool_choice="required"),
        "tool-schema-wrong": _chat(tools=_tool({"type": "nothing"}), tool_choice="required"),
        "tool-of-nobody": _chat(tool_choice={"type": "function", "function": {"name": "x"}}),
        "format-unknown": _chat(response_format={"type": "poem"}),
        "format-deep": _chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": nested(500)},
            }
        ),
        "template-arguments": _chat(chat_template_kwargs={"messages": 5, "tools": 7}),
        "template-endless": _chat(chat_template_kwargs={"chat_template": _ENDLESS}),
        "template-deep": _chat(chat_template_kwargs=nested(500)),
        "top-logprobs": _chat(logprobs=True, top_logprobs=2**31),
        "image-file": _chat(messages=image),
        "stream-options": _chat(stream=True, stream_options=nested(400)),
        "n": _chat(n=2**31),
        "stop-null": _chat(stop=[None]),
    }
    return [Call(f"chat-{name}", path, body) for name, body in bodies.items()]


def sglang_calls(folder: str) -> list[Call]:
    """Endpoints of SGLang's server.

    Args:
        folder: Made by a pickle that is read.
    """
    code, chats = harmful_pickle(folder), "/v1/chat/completions"
    bodies: dict[str, tuple[str, Callable[[], bytes]]] = {
        "abort-of-nobody": ("/abort_request", _json(rid="nobody")),
        "abort-of-the-empty-name": ("/abort_request", _json(rid="")),
        "abort-of-a-list": ("/abort_request", _json(rid=["a", 5])),
        "abort-of-a-flag": ("/abort_request", _json(rid="x", abort_all="perhaps")),
        "close-of-nobody": ("/close_session", _json(session_id="nobody")),
        "close-of-a-list": ("/close_session", _json(session_id=[1])),
        "open-negative": ("/open_session", _json(capacity_of_str_len=-1)),
        "open-huge": ("/open_session", _json(capacity_of_str_len=2**63, session_id="s" * 100_000)),
        "open-for-ever": ("/open_session", _json(capacity_of_str_len=1, timeout=1e300)),
        "flush": ("/flush_cache", lambda: b""),
        "adapter-pickle": (
            "/load_lora_adapter_from_tensors",
            _json(lora_name="x", config_dict={"r": 8}, serialized_tensors=code),
        ),
        "weights-pickle": (
            "/update_weights_from_tensor",
            _json(serialized_named_tensors=[code], load_format=None, flush_cache=False),
        ),
        "adapter-of-nobody": ("/load_lora_adapter", _json(lora_name="x", lora_path="/nowhere")),
        "adapter-device": ("/load_lora_adapter", _json(lora_name="z", lora_path="/dev/zero")),
        "unload-of-nobody": ("/unload_lora_adapter", _json(lora_name="nobody")),
        "tokenize-number": ("/tokenize", _json(model="m", prompt=5)),
        "detokenize-beyond": ("/detokenize", _json(model="m", tokens=[2**40, -1])),
        "encode": ("/encode", _json(text="a")),
        "score": ("/v1/score", _json(query="a", items=["b"] * 1000, label_token_ids=[2**40])),
        "embeddings": ("/v1/embeddings", _json(model="m", input="a")),
        "rerank": ("/v1/rerank", _json(query="a", documents=["b"])),
        "responses-deep": ("/v1/responses", _json(model="m", input=nested(500))),
        "ollama-long": ("/api/chat", _json(model="m", messages=[_LONG_TURN])),
        # smg repeats what it cannot read.
        "field-long": (chats, _chat(temperature="x" * 100_000)),
        "fields-long": (chats, _chat(tools=[["x" * 100_000]] * 20, stream=True)),
        "tokenize-format": ("/v1/tokenize", _chat(response_format="x")),
        "ollama-deep": ("/api/chat", _json(model="m", messages=nested(500), stream=False)),
        "function-calls": (
            "/parse_function_call",
            _json(text="<" * 100_000, tools=[], tool_call_parser="x"),
        ),
        "reasoning": ("/separate_reasoning", _json(text="<think>" * 20_000, reasoning_parser="x")),
        "classify": ("/classify", _json(text="a")),
    }
    return [Call(name, path, body) for name, (path, body) in bodies.items()]


def body_calls(path: str) -> list[Call]:
    """Bodies that are no request of an endpoint that takes JSON."""
    request = json.dumps({"model": "pocket", "prompt": PROMPT, "text": PROMPT}).encode()
    bodies: dict[str, Callable[[], bytes]] = {
        "empty": lambda: b"",
        "null": lambda: b"null",
        "a-number": lambda: b"5",
        "cut": lambda: request[:-4],
        "no-utf-8": lambda: request.replace(b"def", b"\xff\xfe\x80"),
        "byte-order-mark": lambda: b"\xef\xbb\xbf" + request,
        "nul": lambda: b"\0" * 1000,
        "arrays-100000": lambda: b"[" * 100_000,
        "arrays-closed-100000": lambda: b"[" * 100_000 + b"]" * 100_000,
        "maps-100000": lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "unknown-field-deep": lambda: (
            request[:-1] + b',"x":' + nested(100_000).text.encode() + b"}"
        ),
        "keys-100000": lambda: json.dumps({f"k{at}": at for at in range(100_000)}).encode(),
        "one-key-100000-times": lambda: b"{" + b",".join([b'"text":"a"'] * 100_000) + b"}",
        "digits-a-million": lambda: b'{"text":' + b"9" * 1_000_000 + b"}",
        "text-of-80-megabytes": lambda: (
            b'{"model":"pocket","prompt":"a","text":"' + b"a" * 80_000_000 + b'"}'
        ),
        "blanks-of-80-megabytes": lambda: b" " * 80_000_000 + request,
    }
    return [Call(f"body-{name}", path, body) for name, body in bodies.items()]
