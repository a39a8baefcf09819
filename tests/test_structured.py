"""Answers that a grammar binds: what they are, and that others do not notice."""

from __future__ import annotations

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
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.offline.engine import Engine
from pie_driver_sglang.offline.sampling import parse_sampling
from tiny_models import POCKET

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


def bound(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    tight = {"x-guidance": {"whitespace_flexible": False}, **schema}
    return {"json_schema": json.dumps(tight), "max_new_tokens": 200, **more}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = Engine(
        model_path=str(POCKET),
        device="cpu",
        max_total_tokens=16 * 96,
        chunked_prefill_size=48,
        schedule_conservativeness=0.0,
    )
    with found:
        yield found


def test_every_sample_fits_its_schema(engine: Engine) -> None:
    prompts = [f"Sample {index}:" for index in range(SAMPLES)]
    asked = [bound(SCHEMAS[index % len(SCHEMAS)], temperature=1.3) for index in range(SAMPLES)]
    before = engine.get_server_info()["internal_states"][0]["forced_tokens"]
    answers = engine.generate(prompts, asked)
    for index, answer in enumerate(answers):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer
        jsonschema.validate(json.loads(answer["text"]), SCHEMAS[index % len(SCHEMAS)])
    # Names of properties have one way only, but not one tokenization.
    assert engine.get_server_info()["internal_states"][0]["forced_tokens"] > before


def test_a_regex_an_ebnf_grammar_and_a_tag(engine: Engine) -> None:
    asked: list[dict[str, Any]] = [
        {"regex": "(cat|dog)s? [0-9]{2}"},
        {"ebnf": 'root ::= item ("," item){1,2}\nitem ::= [a-c] "=" [0-9]'},
        {"json_schema": '{"type": "object", "x-guidance": {"whitespace_flexible": false}}'},
    ]
    patterns = ["(cat|dog)s? [0-9]{2}", "[a-c]=[0-9](,[a-c]=[0-9]){1,2}", r"\{.*"]
    answers = engine.generate(["It is"] * 3, [{"temperature": 1.0, **one} for one in asked])
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
    asked = {"regex": "[a-z]{12}", "n": 8, "temperature": 1.5}
    answers = engine.generate("Letters:", asked)
    texts = [answer["text"] for answer in answers]
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_wrong_grammar_fails_by_itself_with_its_reason(engine: Engine) -> None:
    good = {"regex": "[0-9]{3}"}
    asked = [good, {"regex": "("}, {"json_schema": '{"type": "strange"}'}, GREEDY, good]
    answers = engine.generate(["One", "Two", "Three", "Four", "Five"], asked)
    ends = [answer["meta_info"]["finish_reason"] for answer in answers]
    assert [end["type"] for end in ends] == ["stop", "abort", "abort", "length", "stop"]
    assert ends[1]["message"].startswith("the regular expression is wrong: ")
    assert "strange" in ends[2]["message"]
    assert re.fullmatch("[0-9]{3}", answers[0]["text"])
    assert len(answers[3]["output_ids"]) == 24


def test_others_say_what_they_say_alone(engine: Engine) -> None:
    words = (POCKET / "README.md").read_text().split()
    prompts = [" ".join(words[at : at + 12]) for at in range(0, 120, 15)]
    alone = engine.generate(prompts, GREEDY)
    bounds = [bound(SCHEMAS[index % 10], temperature=1.0) for index in range(len(prompts))]
    mixed = engine.generate([*prompts, *prompts], [GREEDY] * len(prompts) + bounds)
    for before, now in zip(alone, mixed, strict=False):
        assert before["output_ids"] == now["output_ids"]
    for index, answer in enumerate(mixed[len(prompts) :]):
        jsonschema.validate(json.loads(answer["text"]), SCHEMAS[index % 10])


def test_a_killed_driver_keeps_what_binds(engine: Engine) -> None:
    schema = fields(**{f"field_{index}": text(8) for index in range(6)})
    asked = [bound(schema, temperature=1.0, max_new_tokens=300)] * 8
    answers = engine.as_completed([f"Number {index}" for index in range(8)], asked)
    streamed = engine.generate("Stream", bound(schema, max_new_tokens=300), stream=True)
    next(streamed)
    found = [next(answers)]
    (pid,) = engine.get_server_info()["internal_states"][0]["driver_pids"]
    os.kill(pid, signal.SIGKILL)
    found += answers
    assert len(found) == 8
    for answer in [*found, *list(streamed)[-1:]]:
        jsonschema.validate(json.loads(answer["text"]), schema)
    assert engine.get_server_info()["internal_states"][0]["restarts"] == 1


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
