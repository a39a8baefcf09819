"""docs/sglang-parity.md: every feature says who serves it, why not us, and which test holds it."""

from __future__ import annotations

import re
from typing import Final

from tiny_models import REPOSITORY

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
    assert len(found) == 4
    for head, _rule, *rows in found:
        assert rows
        for row in rows:
            assert len(row) == len(head), row
            assert all(row), row
            assert row[head.index("who")] in WHO, row
