"""docs/sglang-parity.md: every feature has its owner, a reason and a test."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Final

from support import REPOSITORY, versions

PAGE: Final = (REPOSITORY / "docs" / "sglang-parity.md").read_text(encoding="utf-8")
WHO: Final = {"ours", "front", "SGLang's", "not"}


def tables() -> list[list[list[str]]]:
    """Cells of the rows of each table, its head first."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        rows = [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in block.splitlines()]
        found.append([[cell.strip() for cell in row] for row in rows])
    return found


def test_no_cell_is_empty() -> None:
    found = tables()
    assert len(found) == 6
    for head, _rule, *rows in found:
        assert rows
        for row in rows:
            assert len(row) == len(head), row
            assert all(row), row
            assert row[head.index("who")] in WHO, row


#: Rows without a test here: SGLang's own code does the work, or there is none.
UNTESTED: Final = {"SGLang", "none", "—"}


@functools.cache
def defined_names() -> frozenset[str]:
    """The functions and classes of all tests, in Python and in Rust."""
    found: set[str] = set()
    for path in (REPOSITORY / "tests").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"^\s*(?:async )?(?:def|class) (\w+)", text, re.MULTILINE))
    for path in (REPOSITORY / "rust").rglob("*.rs"):
        found |= set(re.findall(r"^\s*fn (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return frozenset(found)


def missing_tests(cell: str) -> list[str]:
    """Of a cell in the column of tests, the files and names that do not exist."""
    missing, file = [], ""
    for word in re.findall(r"`([^`]+)`", cell):
        if "/" in word:
            path = REPOSITORY / word
            file = path.read_text(encoding="utf-8") if path.is_file() else ""
            missing += [] if path.is_file() else [word]
        elif not re.search(rf"\b(?:def|class|fn) {word}\b", file) and word not in defined_names():
            missing.append(word)
    return missing


def test_every_named_test_exists() -> None:
    named = 0
    for head, _rule, *rows in tables():
        for row in rows:
            cell = row[head.index("test")]
            if cell in UNTESTED:
                continue
            assert re.findall(r"`([^`]+)`", cell), row
            assert re.sub(r"`[^`]+`|[, ]", "", cell) == "", row
            assert missing_tests(cell) == [], row
            named += 1
    assert named > 90
    assert missing_tests("`tests/test_nothing.py` `test_nothing_at_all`") == [
        "tests/test_nothing.py",
        "test_nothing_at_all",
    ]


def test_older_names_are_those_that_sglang_no_longer_has() -> None:
    renamed = PAGE.partition("\n## Renamed")[2].partition("\n## ")[0]
    old = [row.split("|")[1] for row in renamed.splitlines() if row.startswith("| `")]
    names = [name for cell in old for name in re.findall(r"`(/[\w/]+)", cell)]
    assert {"/function_call", "/add_worker"} <= {*names}
    endpoints = PAGE.partition("\n## Endpoints")[2].partition("\n## ")[0]
    assert not {*names} & {*re.findall(r"`(/[^` ]*)`", endpoints)}


def test_every_endpoint_of_sglang_is_listed() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    [folder] = spec.submodule_search_locations or ()
    server = Path(folder, "srt", "entrypoints", "http_server.py").read_text(encoding="utf-8")
    routes = re.findall(r"@app\.(?:\w+)\(\s*\"(/[^\"]*)\"", server)
    assert len(routes) > 70
    listed = PAGE.partition("\n## Endpoints")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(/[^` ]*)`", listed)) - set(routes) == versions.MISSING_ROUTES
    assert set(routes) <= set(re.findall(r"`(/[^` ]*)`", listed))
