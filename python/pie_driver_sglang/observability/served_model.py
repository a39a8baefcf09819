"""What the figures of a driver refer to."""

from __future__ import annotations

from typing import NamedTuple


class ServedModel(NamedTuple):
    """The model, and the pool that its KV is in."""

    name: str
    total_pages: int
    """Pages that the runtime may name."""
    page_size: int
    """Tokens of a page."""


def for_group(path: str | None, group: int) -> str | None:
    """The path of an option for one of several drivers: `{group}` becomes the group's number."""
    return None if path is None else path.replace("{group}", str(group))
