"""The first table of docs/supported-models.md agrees with its other tables."""

from __future__ import annotations

import re
from typing import Final

from support import REPOSITORY

TEXT: Final = (REPOSITORY / "docs" / "supported-models.md").read_text()


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a part's first table, by their first cell."""
    table = text.partition("\n|")[2].partition("\n\n")[0]
    lines = [line.split("|") for line in table.splitlines()[2:]]
    return {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in lines}


def test_names_of_checkpoints_and_what_runs() -> None:
    names = rows(TEXT)
    cpu = rows(TEXT.partition("\n## On the CPU")[2])
    gpu = rows(TEXT.partition("\n## On a GPU")[2])
    assert list(names) == list(cpu)
    assert gpu.keys() <= names.keys()
    for name, (checkpoint, fused, on_gpu, on_cpu) in names.items():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", checkpoint), name
        # tests/test_models.py finds out which.
        assert fused in ("yes", "no"), name
        assert on_cpu == cpu[name][0], name
        assert on_gpu == (gpu[name][0] if name in gpu else "not tried"), name


def test_reasons_are_sentences() -> None:
    """A fragment of a message is quoted, with words that explain it."""
    for name, cells in rows(TEXT.partition("\n## On the CPU")[2]).items():
        refused, reason = cells[0] == "refused", cells[-1]
        assert refused == bool(reason), name
        assert not refused or len(re.sub(r"`[^`]*`", "", reason).split()) >= 5, name
