"""docs/sglang-parity.md: every feature has its owner, a reason and a test."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Final

from support import REPOSITORY

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
    assert len(found) == 5
    for head, _rule, *rows in found:
        assert rows
        for row in rows:
            assert len(row) == len(head), row
            assert all(row), row
            assert row[head.index("who")] in WHO, row


def test_every_endpoint_of_sglang_is_listed() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    [folder] = spec.submodule_search_locations or ()
    server = Path(folder, "srt", "entrypoints", "http_server.py").read_text(encoding="utf-8")
    routes = re.findall(r"@app\.(?:\w+)\(\s*\"(/[^\"]*)\"", server)
    assert len(routes) > 70
    listed = PAGE.partition("\n## Endpoints")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(/[^` ]*)`", listed)) == set(routes)
