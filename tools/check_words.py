"""Checks links and names in documents and sources; exits with 1 if there is a fault.

    python tools/check_words.py [FOLDER]

FOLDER is the repository. One line is printed per fault.

- Links of documents: the file and the heading must exist.
- Names in documents: options, commands and their flags, targets of `make`, environment variables,
  metrics and files must exist.
- Sections (§) of the protocol that a document or a comment cites: `docs/pie-protocol.md` must have
  them.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

DOCUMENTS: Final = (
    "*.md", "docs/**/*.md", "rust/*/README.md", "benches/*.md", "fuzz/*.md", "models/*/README.md",
    "tools/*/README.md",
)  # fmt: skip
NOTEBOOK: Final = "benches/notebook"
"""Records of past measurements: they stay as they were written, so only their links are checked."""
SOURCES: Final = (
    "python/**/*.py", "tools/**/*.py", "benches/**/*.py", "rust/**/*.rs", "benches/**/*.rs"
)  # fmt: skip
ELSEWHERE: Final = ("/tests/", "/tests.rs", "_tests.rs", "/target/", "config/server_args.py")
"""Parts of paths that are not checked: tests, and what is generated."""


class Fault(NamedTuple):
    """A fault and where it is."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        """As compilers write it."""
        return f"{self.path}:{self.line}: {self.text}"


# Documents -----------------------------------------------------------------------------------

_FENCE: Final = re.compile(r"^\s*(```|~~~)")
_CODE: Final = re.compile(r"(`+)(.+?)\1")
_LINK: Final = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]*(?:\([^()]*\)[^()\s]*)*)\)")
_SOURCE: Final = re.compile(r"\b(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING: Final = re.compile(r"^(#{1,6}) +(.*?)\s*#*$")


def prose_lines(text: str) -> list[str]:
    """The lines of a document, with code and front matter as empty lines."""
    lines = text.splitlines()
    kept = [""] * len(lines)
    fenced = in_list = False
    first = 0
    if lines and lines[0] == "---":
        first = lines.index("---", 1) + 1
    for number, line in enumerate(lines[first:], first):
        if _FENCE.match(line):
            fenced = not fenced
            continue
        if fenced:
            continue
        if re.match(r"^\s*(?:[-*+]|\d+\.) ", line):
            in_list = True
        elif line and not line.startswith(" "):
            in_list = False
        if line.startswith("    ") and not in_list:
            continue
        kept[number] = line
    return kept


def anchors(text: str) -> set[str]:
    """The names of a document's headings, as GitHub makes them."""
    found: set[str] = set()
    for line in prose_lines(text):
        if match := _HEADING.match(line):
            plain = _LINK.sub(r"\1", match[2]).replace("`", "").lower()
            name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
            unique, count = name, 0
            while unique in found:
                count += 1
                unique = f"{name}-{count}"
            found.add(unique)
    return found


def links(text: str) -> Iterator[tuple[int, str]]:
    """The targets of a document's links and pictures, with their lines."""
    for number, line in enumerate(prose_lines(text), 1):
        plain = _CODE.sub(lambda match: "`" * len(match[0]), line)
        yield from ((number, match[2]) for match in _LINK.finditer(plain))
        yield from ((number, match[1]) for match in _SOURCE.finditer(plain))


def check_links(root: Path, path: str, text: str) -> Iterator[Fault]:
    """Links that lead nowhere: files, and headings of documents."""
    for line, target in links(text):
        if re.match(r"^(?:https?|mailto):", target):
            continue
        name, _, anchor = target.partition("#")
        file = (root / path).parent / name if name else root / path
        if name.startswith("/"):
            yield Fault(path, line, f"{target} is not relative")
        elif not file.exists():
            yield Fault(path, line, f"{target} does not exist")
        elif not file.resolve().is_relative_to(root.resolve()):
            yield Fault(path, line, f"{target} is outside of the repository")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield Fault(path, line, f"{target}: no such heading")


# Names ---------------------------------------------------------------------------------------


class Names(NamedTuple):
    """What exists, for names in documents."""

    options: frozenset[str]
    """Keys of `[model.driver.options]`, and SGLang's fields that pass through."""
    keys: frozenset[str]
    """Other keys of the configuration, and arguments and parameters of `Engine`."""
    commands: frozenset[str]
    targets: frozenset[str]
    flags: frozenset[str]
    variables: frozenset[str]
    metrics: frozenset[str]
    """Empty until the driver has any."""


@cache
def known_names(root: Path) -> Names:
    """Collects the names from the sources."""
    sources = str(root / "python")
    sys.path.insert(0, sources)
    options = importlib.import_module("pie_driver_sglang.config.options")
    server_args = importlib.import_module("pie_driver_sglang.config.server_args")
    program = importlib.import_module("pie_driver_sglang.cli.main")
    # Processes of a test that calls this would look there for the native module, too.
    sys.path.remove(sources)
    python = {
        path: path.read_text(encoding="utf-8") for path in sorted((root / "python").rglob("*.py"))
    }
    words = {word for text in python.values() for word in re.findall(r"\b[a-z]\w*\b", text)}
    scripts = [*python.values(), *_texts(root, "tools/**/*.py"), *_texts(root, "benches/**/*.py")]
    scripts += [*_texts(root, "benches/**/*.rs"), (root / "Makefile").read_text()]
    return Names(
        options=frozenset(options.OPTIONS) | _strings(server_args) | {"venv", "python"},
        keys=frozenset(words),
        commands=frozenset(program.COMMANDS),
        targets=frozenset(
            re.findall(r"^([a-z][\w-]*):", (root / "Makefile").read_text(), re.MULTILINE)
        ),
        flags=frozenset(flag for text in scripts for flag in re.findall(r"--[a-z][\w-]+", text))
        # `pie-sglang serve` takes those of SGLang's server.
        | {"--" + name.replace("_", "-") for name in _strings(server_args)},
        variables=frozenset(
            name
            for text in [*python.values(), *_texts(root, "rust/**/*.rs"), *_texts(root, "Makefile")]
            for name in re.findall(r"\bPIE_\w+", text)
        ),
        metrics=_metrics(),
    )


def _texts(root: Path, pattern: str) -> list[str]:
    return [
        path.read_text(encoding="utf-8")
        for path in sorted(root.glob(pattern))
        if "/target/" not in str(path)
    ]


def _strings(value: object) -> frozenset[str]:
    """All text in a module's collections, however deep."""
    if isinstance(value, str):
        return frozenset({value})
    if isinstance(value, Mapping):
        return _strings(tuple(value)) | _strings(tuple(value.values()))
    if isinstance(value, tuple | list | set | frozenset):
        return frozenset(text for each in value for text in _strings(each))
    if hasattr(value, "__dict__") and hasattr(value, "__file__"):
        public = {name: each for name, each in vars(value).items() if not name.startswith("__")}
        return _strings(tuple(public.values()))
    return frozenset()


def _metrics() -> frozenset[str]:
    try:
        module = importlib.import_module("pie_driver_sglang.observability.driver_metrics")
    except ModuleNotFoundError:
        return frozenset()
    return frozenset(metric.name for metric in module.METRICS) | {module.READY}


def check_names(root: Path, path: str, text: str) -> Iterator[Fault]:
    """Options, commands, flags, variables, metrics and files that do not exist."""
    names = known_names(root)
    table = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("["):
            table = line.strip()
        if _FENCE.match(line):
            table = None
        for code in [*(match[2] for match in _CODE.finditer(line)), *_code_line(line)]:
            faults = _unknown(root, names, code, (root / path).parent)
            yield from (Fault(path, number, each) for each in faults)
        key = re.match(r"^(\w+) *= ", line)
        if key and table == "[model.driver.options]" and key[1] not in names.options:
            yield Fault(path, number, f"there is no option {key[1]}")


def _code_line(line: str) -> list[str]:
    return [line] if line.startswith(("    ", "pie-sglang ", "make ", "~/")) else []


def _unknown(root: Path, names: Names, code: str, folder: Path) -> Iterator[str]:
    for match in re.finditer(r"(?:\bpie-sglang|-m pie_driver_sglang) ([a-z][a-z-]*)\b", code):
        if match[1] not in names.commands | {"version", "help"}:
            yield f"there is no command pie-sglang {match[1]}"
    if re.search(r"\bpie-sglang ", code):
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]+", code):
            if flag not in names.flags | {"--help", "--version"}:
                yield f"there is no flag {flag}"
    if (match := re.match(r"^\s*make ([a-z][\w-]*)", code)) and match[1] not in names.targets:
        yield f"there is no target {match[1]} in the Makefile"
    for variable in re.findall(r"\bPIE_DRIVER_\w+", code):
        if variable not in names.variables:
            yield f"there is no variable {variable}"
    if (match := re.fullmatch(r"([a-z]\w*) = .+", code)) and match[1] not in (
        names.options | names.keys
    ):
        yield f"there is no option {match[1]}"
    if names.metrics:
        shared = _common_prefix(names.metrics)
        # A page may show the form of a name.
        known = {re.sub(r"_total$", "", each) for each in names.metrics} | {f"{shared}word"}
        for metric in re.findall(rf"\b{re.escape(shared)}[\w:]+", code) if shared else ():
            if re.sub(r"_(?:total|bucket|sum|count)$", "", metric) not in known:
                yield f"there is no metric {metric}"
    if re.fullmatch(r"(?:docs|tests|tools|benches|rust|python|models|fuzz)/[\w./-]+", code):
        produced = code.endswith("/") or "target" in code
        if not produced and not (root / code).exists() and not (folder / code).exists():
            yield f"{code} does not exist"


def _common_prefix(names: frozenset[str]) -> str:
    """What all names of metrics begin with, up to a separator; empty if that is too short."""
    shortest, longest = min(names), max(names)
    length = next(
        (at for at, pair in enumerate(zip(shortest, longest, strict=False)) if len(set(pair)) > 1),
        len(shortest),
    )
    prefix = re.match(r".*[:_]", shortest[:length])
    return prefix[0] if prefix and len(prefix[0]) > 4 else ""


def check_sections(path: str, text: str, sections: frozenset[str]) -> Iterator[Fault]:
    """Sections of the protocol that a source cites and the page lacks."""
    for number, line in enumerate(text.splitlines(), 1):
        for section in re.findall(r"§ ?(\d+(?:\.\d+)*)", line):
            if section not in sections:
                yield Fault(path, number, f"docs/pie-protocol.md has no §{section}")


def sections_of(text: str) -> frozenset[str]:
    """The numbers of a document's headings."""
    return frozenset(re.findall(r"^#{2,4} (\d+(?:\.\d+)*) ", text, re.MULTILINE))


# All -----------------------------------------------------------------------------------------


def check_document(root: Path, path: str, text: str) -> Iterator[Fault]:
    """All faults of one document."""
    yield from check_links(root, path, text)
    if path.startswith(NOTEBOOK):
        return
    yield from check_names(root, path, text)


def documents(root: Path) -> list[Path]:
    """The documents of the repository."""
    found = {path for pattern in DOCUMENTS for path in root.glob(pattern)}
    return sorted(found | set((root / NOTEBOOK).glob("*.md")))


def sources(root: Path) -> list[Path]:
    """The sources whose citations of the protocol are checked."""
    found = {path for pattern in SOURCES for path in root.glob(pattern)}
    return sorted(
        path
        for path in found
        if not any(part in f"/{path.relative_to(root)}" for part in ELSEWHERE)
    )


def check(root: Path) -> list[Fault]:
    """All faults of the repository."""
    faults: list[Fault] = []
    protocol = sections_of((root / "docs" / "pie-protocol.md").read_text(encoding="utf-8"))
    for file in documents(root):
        name, text = str(file.relative_to(root)), file.read_text(encoding="utf-8")
        faults += check_document(root, name, text)
        faults += check_sections(name, text, protocol)
    for file in sources(root):
        name, text = str(file.relative_to(root)), file.read_text(encoding="utf-8")
        faults += check_sections(name, text, protocol)
    return sorted(set(faults))


def main() -> int:
    """Prints the faults."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).resolve()
    root = root if root.is_dir() else root.parents[1]
    faults = check(root)
    for fault in faults:
        print(fault)
    print(f"{len(faults)} faults" if faults else "no faults", file=sys.stderr)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
