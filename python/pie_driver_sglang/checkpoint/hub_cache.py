"""Models in the cache of the Hugging Face hub, found without the network."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def cached_snapshot(repository: str) -> Path | None:
    """The folder of a downloaded repository's snapshot; None where it is not in the cache."""
    package: Any = import_module("huggingface_hub")
    try:
        path = package.try_to_load_from_cache(repository, "config.json")
    except package.errors.HFValidationError:  # It is not a repository's name.
        return None
    return Path(path).parent if isinstance(path, str) else None
