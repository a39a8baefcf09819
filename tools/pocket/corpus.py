"""The text: CPython's standard library, and conversations made from its functions."""

import ast
import hashlib
import random
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "pydoc_data",
    "__pycache__",
}
GENERATED_FILES = {"html/entities.py", "msilib/schema.py", "msilib/sequence.py"}
GENERATED_PREFIXES = ("_sysconfigdata", "config-")
HOLDOUT = 50  # one file in so many is held out
MIN_SOURCE, MAX_SOURCE = 80, 1200

Message = dict[str, Any]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_source",
            "description": "Return the source of a function.",
            "parameters": {
                "type": "object",
                "properties": {"module": {"type": "string"}, "name": {"type": "string"}},
                "required": ["module", "name"],
            },
        },
    }
]


@dataclass(frozen=True)
class SourceFile:
    """One file of the standard library."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """Whether the file is for validation: decided only by its path."""
        return int.from_bytes(hashlib.sha256(self.path.encode()).digest()[:4]) % HOLDOUT == 0

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Function:
    """A function with a docstring."""

    module: str
    name: str
    arguments: str
    source: str
    bare: str
    docstring: str

    @property
    def summary(self) -> str:
        """The docstring's first paragraph on one line."""
        return " ".join(self.docstring.split("\n\n")[0].split())


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template, with the tools on offer."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


def stdlib_files() -> Iterator[SourceFile]:
    """Yield the running interpreter's standard library in order of path."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _skipped(relative):
            continue
        text = _read(path)
        if text.strip() and not _is_table(relative, text):
            yield SourceFile(relative.as_posix(), text)


def functions(file: SourceFile) -> Iterator[Function]:
    """Yield the file's documented functions of a moderate size."""
    lines = file.text.splitlines(keepends=True)
    for node, name in _definitions(ast.parse(file.text), ""):
        docstring = ast.get_docstring(node)
        if not docstring or len(node.body) < 2:
            continue
        source = _dedented(lines[node.lineno - 1 : node.end_lineno])
        if not MIN_SOURCE <= len(source) <= MAX_SOURCE:
            continue
        first = node.body[0]
        head = lines[node.lineno - 1 : first.lineno - 1]
        bare = _dedented(head + lines[first.end_lineno : node.end_lineno])
        yield Function(file.module, name, ast.unparse(node.args), source, bare, docstring)


def conversation(function: Function) -> Conversation:
    """Make one conversation about the function; which kind follows only from its name."""
    chance = random.Random(f"{function.module}.{function.name}")
    makers = [_write, _document, _explain, _continue, _call_tool]
    maker = chance.choices(makers, weights=[45, 20, 10, 15, 10])[0]
    return maker(function, chance)


def _skipped(relative: Path) -> bool:
    parts = relative.parts
    generated = relative.as_posix() in GENERATED_FILES
    generated |= any(part.startswith(GENERATED_PREFIXES) for part in parts)
    return generated or not SKIPPED_FOLDERS.isdisjoint(parts)


def _read(path: Path) -> str:
    """Decode a source file as Python would; empty if Python could not compile it."""
    try:
        with tokenize.open(path) as file:
            text = file.read()
        ast.parse(text)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return ""
    return text


def _is_table(relative: Path, text: str) -> bool:
    return relative.parts[0] == "encodings" and ("charmap_build" in text or "decoding_map" in text)


def _definitions(
    node: ast.AST, prefix: str
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, prefix + child.name
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")


def _dedented(lines: list[str]) -> str:
    return textwrap.dedent("".join(lines)).strip("\n")


def _think(function: Function, chance: random.Random) -> str:
    """Half the answers think first: about the signature and the purpose."""
    if chance.random() < 0.5:
        return ""
    return f"{function.name}({function.arguments}) is in {function.module}. {function.summary}"


def _exchange(question: str, answer: str, thought: str) -> Conversation:
    reply = {"role": "assistant", "content": answer, "reasoning_content": thought}
    return Conversation([{"role": "user", "content": question}, reply])


def _write(function: Function, chance: random.Random) -> Conversation:
    question = chance.choice(
        [
            f"Write the function {function.name}.",
            f"Write the function {function.name}({function.arguments}).",
            f"Write a Python function {function.name}: {function.summary}",
            f"Implement {function.name} for the module {function.module}.",
        ]
    )
    return _exchange(question, function.source, _think(function, chance))


def _document(function: Function, chance: random.Random) -> Conversation:
    question = f"Document {function.name}.\n\n{function.bare}"
    return _exchange(question, function.docstring, _think(function, chance))


def _explain(function: Function, chance: random.Random) -> Conversation:
    question = f"What does {function.name} in {function.module} do?"
    return _exchange(question, function.summary, _think(function, chance))


def _continue(function: Function, chance: random.Random) -> Conversation:
    lines = function.source.splitlines()
    cut = chance.randint(1, max(1, len(lines) - 2))
    question = "Complete this code.\n\n" + "\n".join(lines[:cut])
    return _exchange(question, "\n".join(lines[cut:]), "")


def _call_tool(function: Function, chance: random.Random) -> Conversation:
    arguments = {"module": function.module, "name": function.name}
    call = {"type": "function", "function": {"name": "read_source", "arguments": arguments}}
    thought = f"I need the source of {function.name}." if chance.random() < 0.5 else ""
    messages: list[Message] = [
        {"role": "user", "content": f"Describe {function.name} of {function.module}."},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": thought,
            "tool_calls": [call],
        },
        {"role": "tool", "content": function.bare},
        {"role": "assistant", "content": function.summary, "reasoning_content": ""},
    ]
    return Conversation(messages, TOOLS)
