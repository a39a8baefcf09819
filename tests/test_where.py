"""docs/where.md names files, functions and tests that exist."""

from __future__ import annotations

import re
from typing import Final

import pytest

from support import REPOSITORY

DOCUMENT: Final = (REPOSITORY / "docs" / "where.md").read_text()
ROWS: Final = [line for line in DOCUMENT.splitlines() if line.startswith("| ")][1:]
QUESTIONS: Final = [row.split("|")[1].strip() for row in ROWS]
RECIPES: Final = (
    "sampling parameter", "sampler", "option", "model family", "kernel", "staged array", "GPU check"
)  # fmt: skip


def test_there_are_enough_rows() -> None:
    assert len(set(QUESTIONS)) == len(ROWS) >= 25


@pytest.mark.parametrize("row", ROWS, ids=QUESTIONS)
def test_what_a_row_names_exists(row: str) -> None:
    _, _, files, tests, _ = row.split("|")
    named = [found_in(files), found_in(tests)]
    # A row may answer by a document's section, which has a test of its own.
    assert named[0] or "](" in files
    assert named[1]


def found_in(cell: str) -> list[tuple[str, str]]:
    """The definitions that a cell names: each belongs to the file before it."""
    found: list[tuple[str, str]] = []
    path = ""
    for name in re.findall(r"`([^`]+)`", cell):
        if "/" in name:
            path = name
            assert (REPOSITORY / path).is_file(), path
            continue
        defines = rf"\b(?:def|class|fn|struct|enum|const|type) {re.escape(name)}\b"
        variant = rf"^    {re.escape(name)}\b"
        source = (REPOSITORY / path).read_text()
        is_there = re.search(defines, source) or re.search(variant, source, re.MULTILINE)
        is_there = is_there or re.search(rf"^{re.escape(name)}\b.* = ", source, re.MULTILINE)
        assert is_there, f"{path} does not define {name}"
        found.append((path, name))
    return found


def test_the_recipes_are_there() -> None:
    contributing = (REPOSITORY / "CONTRIBUTING.md").read_text()
    recipes = contributing.partition("\n## Recipes\n")[2]
    headings = re.findall(r"^### To add an? (.+)$", recipes, re.MULTILINE)
    assert headings == list(RECIPES)
