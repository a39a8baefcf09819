"""What sections of both pages are made of: cells, tables, pictures, sources, bars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

Results = dict[str, Any]
"""The records by the names of their files."""


def cell(value: object) -> str:
    """A number as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, int | float):
        size = abs(value)
        if size >= 100 or isinstance(value, int):
            return f"{value:,.0f}"
        return f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    return str(value).replace("|", "\\|")


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [names, ["---"] * len(names), *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def picture(name: str, text: str, folder: str = "plots") -> str:
    """A chart of `benches/gpu/plots.py`, for a page next to whose folder `folder` is."""
    return f"![{text}]({folder}/{name}.svg)"


def source(record: Results, whole: Results | None = None) -> str:
    """Device, date, commit and command of a table.

    Args:
        record: The part of a file that has the figures.
        whole: The file, for what the part does not say by itself.
    """
    whole = whole or {}
    both = {**{key: whole.get(key, "") for key in ("device", "date", "commit")}, **record}
    command = record.get("script") or record.get("command", "")
    # A few records have remarks after their command, in brackets.
    line, _, remark = str(command).partition(" (")
    commit = re.sub(r"\b[0-9a-f]{7,40}\b", r"`\g<0>`", str(both["commit"]))
    where = f"{both['device']}; {str(both['date'])[:10]}; commit {commit}."
    if remark:
        where += f" Note of the record: {remark.removesuffix(')')}."
    return f"{where}\n\n    {with_python(line)}"


def with_python(command: str) -> str:
    """A command line for a script."""
    return f"python {command}" if command.startswith("benches/") else command


def bars(found: Iterable[Results]) -> str:
    """The thresholds of a check, met or not."""
    rows = [[bar["name"], bar["value"], bar["bar"], bar["ok"]] for bar in found]
    return table(["check", "measured", "threshold", "met"], rows)
