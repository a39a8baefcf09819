"""The model that the metrics of a driver refer to."""

from __future__ import annotations

from typing import NamedTuple


class ServedModel(NamedTuple):
    """The name of the model, and the size of its KV pool."""

    name: str
    total_pages: int
    """KV pages."""
    page_size: int
    """Tokens per page."""


def for_group(path: str | None, group: int) -> str | None:
    """An option's path with `{group}` replaced by the driver's group."""
    return None if path is None else path.replace("{group}", str(group))
