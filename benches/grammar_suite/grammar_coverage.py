"""Counts the JSON schemas that compile, and the documents that masks get wrong, next to xgrammar.

    make grammar-coverage ARGS="--bench FOLDER"
    python benches/grammar_suite/grammar_coverage.py BINARY [--bench FOLDER] [--json FILE]

The schemas are those of the JSON schema test suite, in the source package of `jsonschema`, and of
JSONSchemaBench with the documents of MaskBench: FOLDER is a checkout of
`guidance-ai/jsonschemabench`, of which `maskbench/data` is read. None of them is kept here.
`BINARY` is `grammar_coverage` of `benches`. Tokens are bytes, which change neither side's verdicts.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import run
import torch
import xgrammar

Case = dict[str, Any]
Outcome = dict[str, Any]

SPLITS = (
    "Github_trivial",
    "Github_easy",
    "Github_medium",
    "Github_hard",
    "Github_ultra",
    "Glaiveai2K",
    "JsonSchemaStore",
    "Kubernetes",
    "Snowplow",
    "WashingtonPost",
)
GROUPS = {
    "suite": "the suite's required tests",
    "optional": "its optional tests",
    "bench": "JSONSchemaBench",
}
#: Of the schemas that llguidance or xgrammar compile.
SHARE = 0.95
LIMIT_S = 30
LIMIT_BYTES = 8 << 30
END = 256
#: References that are followed to order a document.
DEPTH = 64


def dumps(value: Any) -> str:
    """A document as it is written."""
    return json.dumps(value, ensure_ascii=False)


def read_suite(source: Path) -> Iterator[Case]:
    """Schemas that some document fits."""
    for name, kind, group in run.suite_groups(source):
        case = _case(name, group["schema"], group["tests"])
        if case["valid"]:
            yield {**case, "group": kind}


def read_bench(folder: Path) -> Iterator[Case]:
    """The schemas of JSONSchemaBench; some have no documents."""
    for split in SPLITS:
        for path in sorted((folder / "maskbench" / "data").glob(f"{split}---*.json")):
            found = json.loads(path.read_text())
            tests = found.get("tests") or []
            yield {**_case(path.name, found["schema"], tests), "group": "bench"}


def _case(name: str, schema: Any, tests: Sequence[Mapping[str, Any]]) -> Case:
    texts: dict[bool, list[str]] = {True: [], False: []}
    for test in tests:
        texts[test["valid"]].append(dumps(ordered(test["data"], schema, schema)))
    return {
        "name": name,
        "schema": json.dumps(schema),
        "valid": texts[True],
        "invalid": texts[False],
    }


def ordered(value: Any, schema: Any, root: Any, depth: int = DEPTH) -> Any:
    """The document with properties in the order of the schema, which is that of both sides."""
    schema = _resolved(schema, root)
    if depth == 0 or not isinstance(schema, dict):
        return value
    if isinstance(value, list):
        items = schema.get("items")
        items = items if isinstance(items, dict) else None
        return [ordered(item, items, root, depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    named = schema.get("properties")
    named = named if isinstance(named, dict) else {}
    keys = [key for key in named if key in value] + [key for key in value if key not in named]
    return {key: ordered(value[key], named.get(key), root, depth - 1) for key in keys}


def _resolved(schema: Any, root: Any) -> Any:
    for _ in range(DEPTH):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target = root
        for part in reference[2:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            target = target.get(key) if isinstance(target, dict) else None
        schema = target
    return schema


def run_ours(binary: Path, cases: Path) -> list[Outcome]:
    """What `grammar_coverage` says of each case."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "outcomes.jsonl"
        subprocess.run([binary, cases, result], check=True)
        return [json.loads(line) for line in result.read_text().splitlines()]


def _try_xgrammar(compiler: Any, case: Case) -> Outcome:
    """Verdicts of xgrammar, as SGLang has it, in a process with limits."""
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        compiled = compiler.compile_json_schema(case["schema"])
    except Exception as error:
        return {"error": str(error)}

    def allows(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        return bool(matcher.accept_string(text)) and bool(matcher.accept_token(END))

    verdicts = {kind: [allows(text) for text in case[kind]] for kind in ("valid", "invalid")}
    return {"error": None, **verdicts}


def summarize(group: str, side: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One row of the record."""
    good = [outcome for outcome in outcomes if not outcome["error"]]
    relaxed = [outcome for outcome in good if outcome.get("relaxed")]

    def wrong(found: Sequence[Outcome], kind: str, verdict: bool) -> int:
        return sum(outcome[kind].count(verdict) for outcome in found)

    return {
        "schemas": GROUPS[group],
        "side": side,
        "given": len(outcomes),
        "compiled": len(good),
        "relaxed": len(relaxed),
        "invalid": sum(len(outcome["invalid"]) for outcome in good),
        "invalid_allowed": wrong(good, "invalid", True),
        "invalid_allowed_unrelaxed": wrong(good, "invalid", True) - wrong(relaxed, "invalid", True),
        "valid": sum(len(outcome["valid"]) for outcome in good),
        "valid_refused": wrong(good, "valid", False),
    }


def rows_of(group: str, ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Rows of llguidance alone, ours, and xgrammar."""
    alone = [
        {**outcome, "relaxed": []} if outcome["alone"] else {"error": "refused"} for outcome in ours
    ]
    sides = {"llguidance": alone, "ours": ours, "xgrammar": theirs}
    rows = [summarize(group, side, outcomes) for side, outcomes in sides.items()]
    either = [
        mine
        for mine, other in zip(ours, theirs, strict=True)
        if mine["alone"] or not other["error"]
    ]
    rows[1]["either"] = len(either)
    rows[1]["of_either"] = sum(not mine["error"] for mine in either)
    return rows


def main() -> None:
    """Counts both and writes the record."""
    arguments = run.parser(__doc__, "grammar_coverage")
    arguments.add_argument("--bench", type=Path, help="a checkout of `guidance-ai/jsonschemabench`")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        source, *_ = run.fetch(given.files or Path(temporary), run.PACKAGES[:1])
        cases = list(read_suite(source))
        cases += read_bench(given.bench) if given.bench else []
        path = Path(temporary) / "cases.jsonl"
        path.write_text("".join(json.dumps(case) + "\n" for case in cases))
        ours = run_ours(given.binary.resolve(), path)
        words = [bytes([byte]) for byte in range(END)] + [b""]
        theirs = run.run_xgrammar(words, END, cases, _try_xgrammar)
    rows = []
    for group in GROUPS:
        found = [at for at, case in enumerate(cases) if case["group"] == group]
        if found:
            rows += rows_of(group, [ours[at] for at in found], [theirs[at] for at in found])
    shares = [row for row in rows if "either" in row]
    bars = [
        {
            "name": f"{row['schemas']}: share of what llguidance or xgrammar compile",
            "value": round(row["of_either"] / row["either"], 4),
            "bar": f">= {SHARE}",
            "ok": row["of_either"] >= SHARE * row["either"],
        }
        for row in shares
    ]
    run.write_record("grammar_coverage", bars, rows, given.json)


if __name__ == "__main__":
    main()
