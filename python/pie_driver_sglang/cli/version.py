"""Version and commit of the build."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

import pie_driver_sglang
from pie_driver_sglang import __version__, _core

_GIT_TIMEOUT_S: Final = 5.0


def version_line() -> str:
    """The version, the commit where it is known, and the build's profile and target.

    For example `pie-driver-sglang 0.2.0 (3f2c1ab, release, x86_64)`.
    """
    build = _core.build_info()
    parts = [commit(), build["profile"], build["target"]]
    return f"pie-driver-sglang {__version__} ({', '.join(part for part in parts if part)})"


def commit() -> str:
    """The commit of the build (`PIE_DRIVER_COMMIT` of the Makefile) or checkout; empty if unknown.

    In a checkout `+` marks uncommitted changes.
    """
    return _core.build_info()["commit"] or _checkout_commit(Path(pie_driver_sglang.__file__))


def _checkout_commit(package: Path) -> str:
    root = package.parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
