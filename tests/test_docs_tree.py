"""The tree of documents: all pages are reachable, and *Start* is in order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from support import REPOSITORY

DOCS: Final = REPOSITORY / "docs"
PAGES: Final = sorted(path for path in DOCS.rglob("*.md") if path != DOCS / "README.md")
TREE: Final = (DOCS / "README.md").read_text()


def linked(text: str, folder: Path) -> list[Path]:
    """The documents that a text links to, in their order."""
    targets = re.findall(r"\]\(([^)#\s]+\.md)", text)
    return [(folder / each).resolve() for each in targets if "://" not in each]


def test_the_tree_has_every_page_once() -> None:
    found = [page for page in linked(TREE, DOCS) if page.is_relative_to(DOCS)]
    assert sorted(found) == PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_begins_with_a_sentence(page: Path) -> None:
    """After its title, and before any code, table or heading."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    title, first, *_ = [line for line in text.splitlines() if line]
    assert title.startswith("# ")
    assert re.match(r"(?:[A-Z]|`\w)", first), first


def test_start_pages_lead_to_each_other() -> None:
    start = [page for page in linked(TREE, DOCS) if page.parent == DOCS / "start"]
    assert len(start) == len(list((DOCS / "start").glob("*.md")))
    for number, page in enumerate(start):
        last = page.read_text().rstrip().splitlines()[-1]
        before = re.search(r"Previous: (\[.*?\)\.)", last)
        after = re.search(r"Next: (.*)", last)
        if number:
            assert before is not None, page
            assert linked(before[1], page.parent)[0] == start[number - 1], page
        if number + 1 < len(start):
            assert after is not None, page
            assert linked(after[1], page.parent)[0] == start[number + 1], page
