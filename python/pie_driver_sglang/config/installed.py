"""Versions of installed packages, from their metadata."""

from __future__ import annotations

from importlib import metadata


def installed_version(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
