"""Writes a version into every file that has it.

    python tools/set_version.py 0.3.0

Cargo.toml, pyproject.toml, the package, the lock files of all workspaces, and documents that show
it. `tests/test_project.py` holds them together.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
VERSIONS: Final = {
    "Cargo.toml": r'^(version = ")[^"]+(")',
    "pyproject.toml": r'^(version = ")[^"]+(")',
    "python/pie_driver_sglang/__init__.py": r'^(__version__ = ")[^"]+(")',
    "docs/commands.md": r"(pie-driver-sglang )\d+\.\d+\.\d+( \()",
}
LOCKS: Final = ("Cargo.lock", "benches/Cargo.lock", "fuzz/libfuzzer/Cargo.lock")
"""Of workspaces that use the product's crates."""


def replace(text: str, pattern: str, version: str) -> str:
    """A text with its version replaced.

    Raises:
        ValueError: It has no version, or several.
    """
    text, count = re.subn(pattern, rf"\g<1>{version}\g<2>", text, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"{count} matches of {pattern}, expected one")
    return text


def local_packages(lock: str) -> dict[str, str]:
    """The versions of a lock file's packages that are in this repository."""
    found = re.findall(r'^name = "(.+)"\nversion = "(.+)"\n(source = )?', lock, re.MULTILINE)
    return {name: version for name, version, source in found if not source}


def replace_locked(text: str, names: Iterable[str], version: str) -> str:
    """A lock file with the version of these packages replaced."""
    listed = "|".join(map(re.escape, names))
    return re.sub(
        rf'^(name = "(?:{listed})"\nversion = ")[^"]+', rf"\g<1>{version}", text, flags=re.MULTILINE
    )


def main() -> None:
    """Replaces all."""
    [version] = sys.argv[1:]
    names = local_packages((ROOT / LOCKS[0]).read_text())
    for name, pattern in VERSIONS.items():
        path = ROOT / name
        path.write_text(replace(path.read_text(), pattern, version))
    for name in LOCKS:
        path = ROOT / name
        path.write_text(replace_locked(path.read_text(), names, version))


if __name__ == "__main__":
    main()
