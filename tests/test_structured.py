"""Structured output of `Engine`: constrained answers, and others beside them."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from pie_driver_sglang.cli import engine_options
from pie_driver_sglang.config.reasoning_parsers import REASONING_ENDS, reasoning_end
from pie_driver_sglang.errors import ConfigError, Unsupported
from pie_driver_sglang.frontends.common.arguments import parse_arguments
from pie_driver_sglang.frontends.offline.engine import Engine
from pie_driver_sglang.frontends.offline.sampling import parse_sampling
from support import REPOSITORY
from support.hostile.hostile_grammars import fatal_grammars
from support.models.tiny_models import POCKET
from support.process import engines
from support.versions import IS_OLDEST

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]

SAMPLES = int(os.environ.get("PIE_STRUCTURED_SAMPLES", "100"))
"""Over all schemas; docs/structured-output.md has the command for 1,000."""


def text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def fields(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


#: Of bounded texts, so that every answer comes to its end. The last has white space as it likes.
SCHEMAS: list[dict[str, Any]] = [
    fields(name=text(10), age={"type": "integer", "minimum": 0, "maximum": 130}),
    fields(kind={"const": "point"}, x={"type": "boolean"}, y={"type": "null"}),
    {"enum": ["red", "green", {"mix": ["blue", 7]}]},
    {"type": "array", "items": {"enum": [1, 2, 30]}, "minItems": 2, "maxItems": 5},
    {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{1,3}$"},
    {"type": "string", "format": "date"},
    {"anyOf": [{"type": "boolean"}, text(5), {"type": "null"}]},
    {"type": "array", "prefixItems": [text(3), {"type": "boolean"}], "items": False, "minItems": 2},
    fields(a=fields(b=fields(c={"enum": ["deep"]})), d=text(4)),
    {"$defs": {"leaf": {"enum": [0, 1]}}, **fields(l={"$ref": "#/$defs/leaf"}, r=text(2))},
]
GREEDY = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 24}


def constrained(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    tight = {"x-guidance": {"whitespace_flexible": False}, **schema}
    return {"json_schema": json.dumps(tight), "max_new_tokens": 200, **more}


@pytest.fixture(scope="module")
def engine(forked_python: str) -> Iterator[Engine]:
    with engines.small(forked_python, 96, reasoning_parser="qwen3") as found:
        yield found


def test_every_sample_fits_its_schema(engine: Engine) -> None:
    prompts = [f"Sample {index}:" for index in range(SAMPLES)]
    requested = [
        constrained(SCHEMAS[index % len(SCHEMAS)], temperature=1.3) for index in range(SAMPLES)
    ]
    before = engine.get_server_info()["internal_states"][0]["forced_tokens"]
    answers = engine.generate(prompts, requested)
    for index, answer in enumerate(answers):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer
        jsonschema.validate(json.loads(answer["text"]), SCHEMAS[index % len(SCHEMAS)])
    # Names of properties have one way only, but not one tokenization.
    assert engine.get_server_info()["internal_states"][0]["forced_tokens"] > before


def test_forced_text_is_not_sampled(engine: Engine) -> None:
    """It is written as the tokenizer writes it, so that a step goes over all of it."""

    def counts() -> tuple[int, int]:
        state = engine.get_server_info()["internal_states"][0]
        return state["forced_tokens"], state["steps"]

    sentence = "The name of the function is parse_arguments, and it returns "
    before = counts()
    (answer,) = engine.generate(["It is"], [{"regex": sentence + "(True|None)", "temperature": 1}])
    forced, steps = (new - old for new, old in zip(counts(), before, strict=True))
    assert answer["text"] in {sentence + "True", sentence + "None"}
    assert engine.tokenizer is not None
    (written,) = engine.tokenizer.encode([answer["text"]])
    assert answer["output_ids"][: len(written) - 1] == written[:-1]
    assert forced >= len(written) - 3
    assert steps <= 6, "one for each token that is drawn, and one for the prompt"


def test_a_regex_an_ebnf_grammar_and_a_tag(engine: Engine) -> None:
    requested: list[dict[str, Any]] = [
        {"regex": "(cat|dog)s? [0-9]{2}"},
        {"ebnf": 'root ::= item ("," item){1,2}\nitem ::= [a-c] "=" [0-9]'},
        {"json_schema": '{"type": "object", "x-guidance": {"whitespace_flexible": false}}'},
    ]
    patterns = ["(cat|dog)s? [0-9]{2}", "[a-c]=[0-9](,[a-c]=[0-9]){1,2}", r"\{.*"]
    answers = engine.generate(["It is"] * 3, [{"temperature": 1.0, **one} for one in requested])
    for answer, pattern in zip(answers, patterns, strict=True):
        assert re.fullmatch(pattern, answer["text"], re.DOTALL), answer["text"]
    tag = {
        "triggers": ["<f"],
        "structures": [{"begin": "<f=one>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
    }
    (answer,) = engine.generate(
        ["<f"], [{"structural_tag": json.dumps(tag), "max_new_tokens": 30, "temperature": 1.0}]
    )
    for found in re.findall("<f(.*?)</f>", answer["text"], re.DOTALL):
        assert re.fullmatch("=one>[12]", found)


def test_samples_of_one_request_go_their_own_ways(engine: Engine) -> None:
    requested = {"regex": "[a-z]{12}", "n": 8, "temperature": 1.5}
    answers = engine.generate("Letters:", requested)
    texts = [answer["text"] for answer in answers]
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_wrong_grammar_fails_by_itself_with_its_reason(engine: Engine) -> None:
    good = {"regex": "[0-9]{3}"}
    requested = [good, {"regex": "("}, {"json_schema": '{"type": "strange"}'}, GREEDY, good]
    answers = engine.generate(["One", "Two", "Three", "Four", "Five"], requested)
    ends = [answer["meta_info"]["finish_reason"] for answer in answers]
    assert [end["type"] for end in ends] == ["stop", "abort", "abort", "length", "stop"]
    assert ends[1]["message"].startswith("the regular expression is wrong: ")
    assert "strange" in ends[2]["message"]
    assert re.fullmatch("[0-9]{3}", answers[0]["text"])
    assert len(answers[3]["output_ids"]) == 24


def test_grammars_that_end_their_compiler_end_nothing_else(engine: Engine) -> None:
    good = {"regex": "[0-9]{3}", "max_new_tokens": 8}
    alone = engine.generate("Four", GREEDY)
    requested = [*fatal_grammars(), *fatal_grammars(), GREEDY, good]
    answers = engine.generate(["Four"] * len(requested), requested)
    for answer in answers[:-2]:
        end = answer["meta_info"]["finish_reason"]
        assert end["type"] == "abort"
        assert re.match("the (JSON schema|EBNF grammar|regular expression) is ", end["message"])
        assert "\n" not in end["message"]
    assert answers[-2]["output_ids"] == alone["output_ids"]
    assert re.fullmatch("[0-9]{3}", answers[-1]["text"])


def test_other_requests_get_the_same_answers_as_alone(engine: Engine) -> None:
    words = (POCKET / "README.md").read_text().split()
    prompts = [" ".join(words[at : at + 12]) for at in range(0, 120, 15)]
    alone = engine.generate(prompts, GREEDY)
    constraints = [
        constrained(SCHEMAS[index % 10], temperature=1.0) for index in range(len(prompts))
    ]
    mixed = engine.generate([*prompts, *prompts], [GREEDY] * len(prompts) + constraints)
    for before, now in zip(alone, mixed, strict=False):
        assert before["output_ids"] == now["output_ids"]
    for index, answer in enumerate(mixed[len(prompts) :]):
        jsonschema.validate(json.loads(answer["text"]), SCHEMAS[index % 10])


def test_a_killed_driver_keeps_grammars(engine: Engine) -> None:
    schema = fields(**{f"field_{index}": text(8) for index in range(6)})
    requested = [constrained(schema, temperature=1.0, max_new_tokens=300)] * 8
    answers = engine.as_completed([f"Number {index}" for index in range(8)], requested)
    streamed = engine.generate("Stream", constrained(schema, max_new_tokens=300), stream=True)
    (pid,) = engine.get_server_info()["internal_states"][0]["driver_pids"]
    next(streamed)
    os.kill(pid, signal.SIGKILL)
    found = list(answers)
    assert len(found) == 8
    for answer in [*found, *list(streamed)[-1:]]:
        jsonschema.validate(json.loads(answer["text"]), schema)
    assert engine.get_server_info()["internal_states"][0]["restarts"] == 1


WORDS = ["日本", "😀😎", "é!", "👩‍👩‍👧", "ok "]
"""Of characters that several tokens share, and one of several characters."""


CHARACTERS = {"regex": f"({'|'.join(WORDS)}){{6}}", "max_new_tokens": 120, "temperature": 6.0}
SEEDS = range(16)


def generate_each(engine: Engine, stream: bool = False, **more: Any) -> list[list[dict[str, Any]]]:
    """What is said with each seed: all answers as they grew, the whole one last."""
    requested = [{**CHARACTERS, "sampling_seed": seed, **more} for seed in SEEDS]
    answers = engine.generate(["Say:"] * len(requested), requested, stream=stream)
    found: list[list[dict[str, Any]]] = [[] for _ in requested]
    for index, answer in enumerate(answers):
        found[answer.get("index", index)].append(answer)
    return found


@pytest.fixture(scope="module")
def unstopped(engine: Engine) -> list[dict[str, Any]]:
    """What is said without a stop."""
    found = [answers[-1] for answers in generate_each(engine)]
    assert all(re.fullmatch(CHARACTERS["regex"], answer["text"]) for answer in found)
    return found


@pytest.mark.parametrize("stop", ["本", "😎", "é", "\u200d", "k é", "!ok"])
def test_a_character_is_never_split(
    engine: Engine, unstopped: list[dict[str, Any]], stop: str
) -> None:
    for more in ({}, {"stream": True}, {"no_stop_trim": True}):
        ended = 0
        for whole, parts in zip(
            unstopped, generate_each(engine, **more, stop=["zz", stop]), strict=True
        ):
            before, found, _ = whole["text"].partition(stop)
            ended += bool(found)
            kept = found if "no_stop_trim" in more else ""
            assert parts[-1]["text"] == before + kept
            matched = parts[-1]["meta_info"]["finish_reason"].get("matched")
            assert (matched == stop) == bool(found)
            texts = ["", *(part["text"] for part in parts)]
            for earlier, later in itertools.pairwise(texts):
                assert later.startswith(earlier)
                assert "\ufffd" not in later
        assert ended > 0


@pytest.fixture(scope="module")
def vocabulary(engine: Engine) -> list[bytes]:
    return engine.tokenizer.vocabulary()


def text_of(vocabulary: list[bytes], tokens: list[int]) -> str | None:
    """The text of tokens, or None where it ends within a character."""
    try:
        return b"".join(vocabulary[token] for token in tokens).decode()
    except UnicodeDecodeError:
        return None


@pytest.mark.parametrize(
    "pattern", [r"[本é]", r"(?i)OK 日", r"\bok\b \S", "😎|\u200d", r"!\s*$", "[^o]{5}ok", "é!"]
)
def test_an_expression_ends_an_answer(
    engine: Engine, vocabulary: list[bytes], unstopped: list[dict[str, Any]], pattern: str
) -> None:
    streamed = generate_each(engine, stream=True, stop_regex=["zz+", pattern])
    collected = generate_each(engine, stop_regex=["zz+", pattern])
    ended = 0
    for whole, parts, (found,) in zip(unstopped, streamed, collected, strict=True):
        assert parts[-1]["text"] == found["text"]
        tokens, finish = found["output_ids"], found["meta_info"]["finish_reason"]
        assert whole["output_ids"][: len(tokens)] == tokens
        # It ends with the first token after which the text has a match and no cut character.
        texts = [text_of(vocabulary, tokens[:count]) for count in range(1, len(tokens) + 1)]
        matches = [text is not None and bool(re.search(pattern, text)) for text in texts]
        assert not any(matches[:-1])
        assert matches[-1] == (finish.get("matched") == pattern)
        if matches[-1]:
            ended += 1
            # A plain text is cut off, as a stop string is; what an expression matches is not.
            text = texts[-1] or ""
            assert found["text"] == (text.partition("é!")[0] if pattern == "é!" else text)
    assert ended > 0


def test_a_grammar_waits_for_the_end_of_thinking(engine: Engine) -> None:
    end = engine.tokenizer.token("</think>")
    requested = {
        "regex": "[0-9]{4}",
        "temperature": 1.0,
        "logit_bias": {end: 12.0},
        "max_new_tokens": 300,
        "skip_special_tokens": False,
        "n": 4,
    }
    for answer in engine.generate("Think:", requested, require_reasoning=True):
        tokens = answer["output_ids"]
        _thought, _, unstopped = answer["text"].partition("</think>")
        assert tokens.count(end) == 1
        assert len(tokens) == tokens.index(end) + 1 + 5
        assert re.fullmatch("[0-9]{4}", unstopped.removesuffix("<|im_end|>"))
    constrained = engine.generate("Think:", requested)
    assert all(re.match("[0-9]{4}", answer["text"]) for answer in constrained)
    # Thinking that takes all tokens, and thinking that the model ends its answer with.
    short = {**requested, "logit_bias": {end: -100.0}, "max_new_tokens": 5}
    for answer in engine.generate("Think:", short, require_reasoning=True):
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


def test_an_unknown_reasoning_parser_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no reasoning parser 'qwen4'"):
        parse_arguments({"model_path": str(POCKET), "device": "cpu", "reasoning_parser": "qwen4"})


NEWER_PARSERS = {
    *("beam", "deepseek-v41", "dots", "gigachat35", "granite_thinking_parser", "iquest_q1"),
    *("k2_horizon", "ling3", "muse", "nanbeige"),
}
"""Of SGLang 0.5.23 alone."""


def test_the_ends_of_thinking_are_those_of_sglang() -> None:
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    names = set(ReasoningParser.DetectorMap)
    found = {
        name: ReasoningParser(model_type=name, stream_reasoning=False).detector.think_end_token
        for name in names - {"response_template"}
    }
    newer = NEWER_PARSERS if IS_OLDEST else set()
    assert found == {name: REASONING_ENDS[name] for name in REASONING_ENDS.keys() - newer}
    assert names.isdisjoint(newer)


def test_the_end_of_thinking_in_a_template_is_not_read() -> None:
    with pytest.raises(Unsupported, match="'response_template' takes the end of reasoning from"):
        reasoning_end("response_template")


def test_one_grammar_of_one_kind() -> None:
    assert parse_sampling({"regex": "a"}).grammar == ("regex", "a")
    assert parse_sampling({"regex": None, "ebnf": ""}).grammar is None
    with pytest.raises(ConfigError, match="`json_schema` and `regex` are set: only one"):
        parse_sampling({"regex": "a", "json_schema": "{}"})
    with pytest.raises(ConfigError, match="`json_schema` is"):
        parse_sampling({"json_schema": {"type": "object"}})


def test_the_command_reads_grammars_from_files(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    engine_options.add_engine_options(parser)
    path = tmp_path / "schema.json"
    path.write_text('{"type": "null"}')
    given = engine_options.sampling_of(parser.parse_args(["--json-schema", str(path)]))
    assert given == {"json_schema": '{"type": "null"}'}
    given = engine_options.sampling_of(parser.parse_args(["--regex", "a+"]))
    assert given == {"regex": "a+"}
    missing = parser.parse_args(["--ebnf", str(tmp_path / "missing")])
    with pytest.raises(ConfigError, match="cannot read"):
        engine_options.sampling_of(missing)
    with pytest.raises(SystemExit):
        parser.parse_args(["--regex", "a", "--ebnf", "b"])


def test_documented_keywords(engine: Engine) -> None:
    """Of a schema: those that are enforced, and those that strict schemas are refused for."""
    values: dict[str, Any] = {
        "type": "object", "properties": {"a": {}}, "required": ["a"], "enum": [1], "const": 1,
        "additionalProperties": {}, "patternProperties": {"^a": {}}, "anyOf": [{}], "oneOf": [{}],
        "allOf": [{}], "$ref": "#/$defs/x", "$defs": {"x": {}}, "pattern": "^a$", "format": "date",
        "items": {}, "prefixItems": [{}], "not": {"type": "null"}, "if": {}, "then": {},
        "uniqueItems": True, "contains": {"type": "null"}, "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"a": False}, "propertyNames": {"maxLength": 1},
        "$dynamicRef": "#/$defs/x",
        "unevaluatedProperties": False, "unevaluatedItems": False, "$anchor": "x",
    }  # fmt: skip
    page = (REPOSITORY / "docs" / "structured-output.md").read_text()
    for kind in ("enforced", "relaxed"):
        [row] = re.findall(rf"^\| {kind} \| (.*) \|$", page, re.MULTILINE)
        for keyword in re.findall(r"`([^`]+)`", row):
            schema = {
                keyword: values.get(keyword, 1),
                **({"$defs": {"x": {}}} if keyword.endswith("Ref") or keyword == "$ref" else {}),
            }
            strict = {**schema, "x-guidance": {"lenient": False}}
            for asked, is_refused in ((schema, False), (strict, kind == "relaxed")):
                given = {"json_schema": json.dumps(asked), "max_new_tokens": 1}
                reason = engine.generate("x", given)["meta_info"]["finish_reason"]
                named = f'"#/{keyword}" cannot be enforced' in str(reason.get("message"))
                assert (reason["type"] == "abort", named) == (is_refused,) * 2, (keyword, reason)
