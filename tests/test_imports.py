"""No product file imports itself through others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final

import pytest

from support import REPOSITORY

CRATES: Final = sorted(path.parent for path in REPOSITORY.glob("rust/*/src"))


def product_code(path: Path) -> str:
    """The text of a Rust file without comments and unit tests."""
    text = path.read_text().partition("\n#[cfg(test)]\nmod tests {")[0]
    return re.sub(r"//.*", "", text)


def crate_paths(code: str) -> Iterator[list[str]]:
    """Every path below `crate::`, as its segments; `crate::{a::B, c}` has two."""
    for match in re.finditer(r"\bcrate::(?:\{([^;]*)\}|([\w:]+))", code):
        grouped, single = match.groups()
        depth, part = 0, ""
        for character in f"{grouped}," if grouped else f"{single},":
            depth += (character == "{") - (character == "}")
            if character == "," and depth == 0:
                if part.strip():
                    yield re.split(r"::", re.sub(r"[{\s].*", "", part.strip(), flags=re.DOTALL))
                part = ""
            else:
                part += character


def file_of(source: Path, segments: list[str], exports: dict[str, list[str]]) -> Path | None:
    """The file that defines what a path names; a root's re-export leads to its module."""
    segments = exports.get(segments[0], segments)
    for end in range(len(segments), 0, -1):
        module = source.joinpath(*segments[:end])
        for file in (module.with_suffix(".rs"), module / "mod.rs"):
            if file.is_file():
                return file
    return None


def exports(source: Path) -> dict[str, list[str]]:
    """What the crate's root exports of its modules: name to path."""
    found = {}
    root = re.sub(r"//.*", "", (source / "lib.rs").read_text())
    for module, names in re.findall(r"\buse (\w+)::(\{[^}]*\}|\w+);", root):
        for name in re.findall(r"\w+", names):
            found[name] = [module, name]
    return found


def imports(source: Path) -> dict[Path, set[Path]]:
    """Each file of a crate but its root, and the files that it imports."""
    root, named = source / "lib.rs", exports(source)
    graph = {}
    for path in sorted(source.rglob("*.rs")):
        if path != root and path.name != "tests.rs":
            files = {file_of(source, parts, named) for parts in crate_paths(product_code(path))}
            graph[path] = {file for file in files if file and file not in (path, root)}
    return graph


@pytest.mark.parametrize("crate", CRATES, ids=lambda crate: crate.name)
def test_no_rust_file_imports_itself(crate: Path) -> None:
    graph = imports(crate / "src")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        names = [path.relative_to(crate).as_posix() for path in error.args[1]]
        pytest.fail(" imports ".join(reversed(names)))


def test_imports_are_seen() -> None:
    source = REPOSITORY / "rust" / "planner" / "src"
    found = imports(source)[source / "planner.rs"]
    assert {source / "plan.rs", source / "table.rs", source / "adapter.rs"} <= found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("use crate::a::B;", [["a", "B"]]),
        ("use crate::{a::B, c, d::{E, F}};", [["a", "B"], ["c"], ["d", ""]]),
        ("let x = crate::a::b();", [["a", "b"]]),
    ],
)
def test_every_form_of_a_path_is_seen(code: str, expected: list[list[str]]) -> None:
    assert list(crate_paths(code)) == expected
