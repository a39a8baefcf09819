"""Grammars that end the process which compiles them."""

from __future__ import annotations

import json


def bombs() -> list[dict[str, str]]:
    """One of each kind, as parameters of a request."""
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
