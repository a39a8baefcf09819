"""Grammars that exhaust the stack, memory or time of their compiler."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def object_chain(length: int) -> str:
    """Objects, each of whose property is the next one by reference."""
    links: dict[str, Any] = {
        f"d{at}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{at + 1}"}}}
        for at in range(length)
    }
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


def reference_chain(length: int) -> str:
    """References to references."""
    links: dict[str, Any] = {f"d{at}": {"$ref": f"#/$defs/d{at + 1}"} for at in range(length)}
    return json.dumps({"$defs": {**links, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


def deep_schema(depth: int, begin: str, end: str) -> str:
    return begin * depth + '{"type":"null"}' + end * depth


def gbnf_chain(length: int, *, reverse: bool = False) -> str:
    """Rules, each of which is the next one."""
    rules = [f'r{at} ::= "a" r{at + 1}' for at in range(length)] + [f'r{length} ::= "b"']
    return "\n".join(["root ::= r0", *(reversed(rules) if reverse else rules)])


def structural_tag(structures: int, schema: Any, begin: str = "<f{}>") -> str:
    parts = [
        {"begin": begin.format(at), "schema": schema, "end": "</f>"} for at in range(structures)
    ]
    return json.dumps({"type": "structural_tag", "structures": parts, "triggers": ["<f"]})


def grammars() -> Iterator[tuple[str, dict[str, str], bool]]:
    """Each by its name, as parameters, and whether OpenAI's API has words for it."""
    object_ = '{"type":"object","properties":{"a":', "}}"
    schemas: dict[str, str] = {
        "object-chain-300": object_chain(300),
        "object-chain-5000": object_chain(5000),
        "reference-chain-5000": reference_chain(5000),
        "objects-nested-100": deep_schema(100, *object_),
        "objects-nested-20000": deep_schema(20_000, *object_),
        "arrays-nested-20000": deep_schema(20_000, '{"type":"array","items":', "}"),
        "not-nested-5000": deep_schema(5000, '{"not":', "}"),
        "any-of-nested-2000": deep_schema(2000, '{"anyOf":[', "]}"),
        "all-of-nested-2000": deep_schema(2000, '{"allOf":[', "]}"),
        "enum-20000": json.dumps({"enum": [f"{at:x}" for at in range(20_000)]}),
        "properties-1000": json.dumps({"properties": {f"p{at}": {} for at in range(1000)}}),
        "string-of-a-billion": '{"type":"string","minLength":1000000000}',
        "array-of-a-billion": '{"type":"array","minItems":1000000000}',
        "arrays-of-arrays": '{"type":"array","minItems":99,"items":{"type":"array","minItems":99,'
        '"items":{"type":"array","minItems":99,"items":{"type":"string","minLength":99}}}}',
        "number-1e99": '{"type":"integer","minimum":1e99}',
        "numbers-reversed": '{"type":"integer","minimum":5,"maximum":1}',
        "nothing-allowed": '{"type":[],"enum":[]}',
        "pattern-bomb": '{"type":"string","pattern":"((a{1,1000}){1,1000}){1,1000}"}',
        "itself": '{"$ref":"#"}',
        "itself-by-two": '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},'
        '"$ref":"#/$defs/a"}',
        "remote": '{"$ref":"http://127.0.0.1:9/schema"}',
        "file": '{"$ref":"file:///etc/passwd"}',
        "no-json": "{",
        "a-list": "[]",
    }
    for name, schema in schemas.items():
        yield f"schema-{name}", {"json_schema": schema}, True
    regexes = {
        "repetitions": "((a{1,1000}){1,1000}){1,1000}",
        "groups-20000": "(" * 20_000 + "a" + ")" * 20_000,
        "stars": "(a*)*" * 500 + "b",
        "words-20000": "|".join(f"w{at}" for at in range(20_000)),
        "look-around": r"(?=a)\1",
        "unclosed": "[0-9",
        "counted": ".{1000000}",
        "classes": r"[\p{L}\p{N}]{500}" * 20,
        "determinised": "(a|b)*a(a|b){40}",
    }
    for name, regex in regexes.items():
        yield f"regex-{name}", {"regex": regex}, True
    rules = {
        "chain-2000": gbnf_chain(2000),
        "chain-30000-reversed": gbnf_chain(30_000, reverse=True),
        "left-recursion": 'root ::= root "a" | "b"',
        "only-itself": "root ::= root",
        "groups-20000": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000,
        "repetitions": 'root ::= ("a"{1000000}){1000000}',
        "doubled": "\n".join(
            ["root ::= d0", *(f"d{at} ::= d{at + 1} d{at + 1}" for at in range(60)), 'd60 ::= "a"']
        ),
        "no-root": 'a ::= "b"',
        "no-text": "\0",
    }
    for name, text in rules.items():
        yield f"ebnf-{name}", {"ebnf": text}, True
    tags = {
        "many": structural_tag(1000, {"type": "object"}),
        "deep": structural_tag(1, json.loads(object_chain(300))),
        "lark-chain": structural_tag(
            1, "start: T0\n" + "\n".join(f"T{at}: T{at + 1}" for at in range(3000)) + '\nT3000: "a"'
        ),
        "no-trigger": structural_tag(1, {"type": "object"}, begin="x{}"),
        "nested-format": '{"type":"structural_tag","format":'
        + '{"type":"sequence","elements":[' * 900
        + "]}" * 900
        + "}",
    }
    for name, text in tags.items():
        yield f"tag-{name}", {"structural_tag": text}, False
    yield "three-grammars", {"json_schema": "{}", "regex": "a", "ebnf": "b"}, False


def fatal_grammars() -> list[dict[str, str]]:
    """Grammars that end the process which compiles them, as parameters of a request."""
    links = {
        f"d{at}": {"type": "object", "properties": {"p": {"$ref": f"#/$defs/d{at + 1}"}}}
        for at in range(5000)
    }
    chain = {"$defs": {**links, "d5000": {"type": "null"}}, "$ref": "#/$defs/d0"}
    tokens = "".join(f'T{at}: "a" T{at + 1}\n' for at in range(30_000))
    rules = "".join(f"r{at} ::= r{at + 1}\n" for at in reversed(range(40_000)))
    return [
        {"json_schema": json.dumps(chain)},
        {"ebnf": f'start: T0\n{tokens}T30000: "b"\n'},
        {"ebnf": f'root ::= r0\n{rules}r40000 ::= "b"\n'},
        {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    ]
