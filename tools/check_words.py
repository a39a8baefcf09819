"""Checks what people read: sentences, words, links and names; `docs/style.md` has the rules.

    python tools/check_words.py [FOLDER]

prints a line for each fault and exits with 1 if there is any. FOLDER is the repository.

- Documents: length of sentences, words that the style page rules out, links and their headings.
- Names in documents: options, commands and their flags, targets of `make`, environment variables,
  metrics, files. Each must exist.
- Docstrings, comments and messages of `python/`, `tools/`, `benches/` and `rust/`: words, and the
  length of sentences.
- Comments that cite a section (§) of the protocol: `docs/pie-protocol.md` must have it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

LONGEST: Final = 35
"""Most words of a sentence in a document."""
LONGEST_COMMENT: Final = 40
"""Most words of a sentence in a comment or docstring."""
MEAN: Final = 25
"""Most words of a document's sentences on average."""

DOCUMENTS: Final = (
    "*.md", "docs/*.md", "rust/*/README.md", "benches/*.md", "fuzz/*.md", "models/*/README.md",
    "tools/*/README.md",
)  # fmt: skip
NOTEBOOK: Final = "benches/notebook"
"""Records of past measurements: they stay as they were written, so only their links are checked."""
SOURCES: Final = (
    "python/**/*.py", "tools/**/*.py", "benches/**/*.py", "rust/**/*.rs", "benches/**/*.rs"
)  # fmt: skip
ELSEWHERE: Final = ("/tests/", "/tests.rs", "_tests.rs", "/target/", "config/server_args.py")
"""Parts of paths that are not checked: tests, and what is generated."""
RULES: Final = frozenset({"docs/style.md", "tools/check_words.py"})
"""They name the words that they rule out."""

BANNED: Final = {
    r"behind": "after",
    r"beside": "next to, compared with",
    r"nobody": "nothing, no request",
    r"whoever": "the one that",
    r"but for": "except",
    r"told|hears? of|heard of": "informed, learns",
    r"(?:is|are) no numbers?": "NaN",
    r"one behind the other": "one after the other",
    r"somebody|anybody|everybody": "a program, any, all",
    r"heard|hears": "received, learns",
    r"mends?|mended": "corrects",
    r"fast lane": "graph path",
    r"(?:is|are) no (?:eviction|scheduling|folder|clone|valid|array|descriptor|floats)": "is not a",
}
_BANNED: Final = {re.compile(rf"\b(?:{word})\b", re.I): use for word, use in BANNED.items()}


class Fault(NamedTuple):
    """Something to mend."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        """As compilers write it."""
        return f"{self.path}:{self.line}: {self.text}"


class Sentence(NamedTuple):
    """A sentence of a document, without its markup."""

    line: int
    text: str

    @property
    def words(self) -> int:
        """How many words it has; a name in backquotes is one."""
        return len(re.findall(r"[^\s]*\w[^\s]*", self.text))


# Documents -----------------------------------------------------------------------------------

_FENCE: Final = re.compile(r"^\s*(```|~~~)")
_CODE: Final = re.compile(r"(`+)(.+?)\1")
_LINK: Final = re.compile(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]*(?:\([^()]*\)[^()\s]*)*)\)")
_SOURCE: Final = re.compile(r"\b(?:src|srcset|href)=\"([^\"]+)\"")
_HEADING: Final = re.compile(r"^(#{1,6}) +(.*?)\s*#*$")
_END: Final = re.compile(r"(?<=[.!?])[)*_\"]*\s+(?=[\"'(*_`§]*[A-Z0-9§`\[])")
_ABBREVIATION: Final = re.compile(r"\b(?:e\.g|i\.e|etc|vs|cf|No)\.$")


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


def sentences(text: str) -> list[Sentence]:
    """The sentences of a document: of paragraphs, items of lists, and cells of tables."""
    found: list[Sentence] = []
    block: list[str] = []
    start = 0

    def close() -> None:
        if block:
            found.extend(Sentence(start, each) for each in split(" ".join(block)))
        block.clear()

    for number, line in enumerate(prose_lines(text), 1):
        stripped = re.sub(r"^(?:>\s*)+", "", line.strip())
        begins = re.match(r"^(?:[-*+]|\d+\.)\s+", stripped)
        if not stripped or begins or stripped.startswith(("#", "|", "<")):
            close()
        if not stripped or stripped.startswith("<"):
            continue
        if stripped.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", stripped.strip("|")):
                if not re.fullmatch(r"[\s:-]*", cell):
                    found.extend(Sentence(number, each) for each in split(cell))
            continue
        if stripped.startswith("#"):
            continue
        if not block:
            start = number
        block.append(stripped[begins.end() :] if begins else stripped)
    close()
    return found


def split(text: str) -> list[str]:
    """Cuts plain text into sentences."""
    plain = _CODE.sub(lambda match: "CODE" if match[2].strip() else " ", text)
    # A list of names is read as one thing.
    plain = re.sub(r"CODE(?:(?:,| and| or|, and) CODE)+", "CODE", plain)
    plain = _LINK.sub(r"\1", plain)
    plain = re.sub(r"<[^>]+>", "", plain).replace("**", "")
    parts: list[str] = []
    for part in _END.split(plain):
        if parts and _ABBREVIATION.search(parts[-1]):
            parts[-1] += " " + part
        else:
            parts.append(part)
    return [part.strip() for part in parts if re.search(r"\w", part)]


def check_sentences(path: str, text: str) -> Iterator[Fault]:
    """Sentences that are too long, and a mean that is too high."""
    found = sentences(text)
    for each in found:
        if each.words > LONGEST:
            yield Fault(path, each.line, f"{each.words} words in a sentence: {each.text[:60]} ...")
    # Cells of tables are often a word or two, and would hide long sentences.
    counts = [each.words for each in found if each.words > 3]
    if counts and sum(counts) / len(counts) > MEAN:
        yield Fault(path, 1, f"{sum(counts) / len(counts):.1f} words a sentence on average")


def check_words(path: str, line: int, text: str) -> Iterator[Fault]:
    """Words that the style page rules out. Names in backquotes may be any."""
    plain = _CODE.sub("CODE", text)
    for pattern, use in _BANNED.items():
        for match in pattern.finditer(plain):
            at = line + plain.count("\n", 0, match.start())
            yield Fault(path, at, f"'{match[0]}': write {use}")


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
    program = importlib.import_module("pie_driver_sglang.cli.program")
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
    if isinstance(value, dict):
        return _strings(tuple(value)) | _strings(tuple(value.values()))
    if isinstance(value, tuple | list | set | frozenset):
        return frozenset(text for each in value for text in _strings(each))
    if hasattr(value, "__dict__") and hasattr(value, "__file__"):
        public = {name: each for name, each in vars(value).items() if not name.startswith("__")}
        return _strings(tuple(public.values()))
    return frozenset()


def _metrics() -> frozenset[str]:
    try:
        module = importlib.import_module("pie_driver_sglang.observe.metrics")
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


# Sources -------------------------------------------------------------------------------------


def python_texts(text: str) -> Iterator[tuple[int, str]]:
    """Comments and text constants, docstrings among them, of a Python file."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def rust_texts(text: str) -> Iterator[tuple[int, str]]:
    """Comments and string literals of a Rust file, a line each."""
    for number, line in enumerate(text.splitlines(), 1):
        code, slashes, comment = line.partition("//")
        if slashes and not code.count('"') % 2:
            yield number, comment
        for literal in re.findall(r'"((?:[^"\\]|\\.)*)"', code):
            yield number, literal


def python_prose(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, and comments whose lines follow each other, of a Python file."""
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield node.lineno, inspect.cleandoc(value.value)
    yield from _runs(text, r"^\s*#:? ?(.*)")


def rust_prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments whose lines follow each other, of a Rust file."""
    yield from _runs(text, r"^\s*//[/!]? ?(.*)")


def _runs(text: str, pattern: str) -> Iterator[tuple[int, str]]:
    """What lines that follow each other have in common with a pattern's group."""
    run: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if match := re.match(pattern, line):
            run.append(match[1])
        elif run:
            yield number - len(run), "\n".join(run)
            run = []


def check_source(path: str, text: str) -> Iterator[Fault]:
    """Words in comments, docstrings and messages, and sentences of the first two."""
    python = path.endswith(".py")
    for line, each in python_texts(text) if python else rust_texts(text):
        yield from check_words(path, line, each)
    for line, each in python_prose(text) if python else rust_prose(text):
        # Rows of a reStructuredText table are not sentences.
        kept = re.sub(r"^(?:``(?!`)|==).*$", "", each, flags=re.MULTILINE)
        for sentence in sentences(kept):
            if sentence.words > LONGEST_COMMENT:
                at = line + sentence.line - 1
                yield Fault(
                    path, at, f"{sentence.words} words in a sentence: {sentence.text[:60]} ..."
                )


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
    yield from check_sentences(path, text)
    yield from check_names(root, path, text)
    if path not in RULES:
        yield from check_words(path, 1, "\n".join(prose_lines(text)))


def documents(root: Path) -> list[Path]:
    """The documents of the repository."""
    found = {path for pattern in DOCUMENTS for path in root.glob(pattern)}
    return sorted(found | set((root / NOTEBOOK).glob("*.md")))


def sources(root: Path) -> list[Path]:
    """The sources whose words are checked."""
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
        if name not in RULES:
            faults += check_sections(name, text, protocol)
    for file in sources(root):
        name, text = str(file.relative_to(root)), file.read_text(encoding="utf-8")
        if name not in RULES:
            faults += check_source(name, text)
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
