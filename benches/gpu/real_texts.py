"""Real text and requests, built from what ships with Python: documentation and source code.

Nothing is random: one Python version always gives the same texts. :func:`documentation` is plain
text for perplexities. :func:`make_requests` gives the user messages of four workloads, which differ
in how much of an answer is in its prompt: summaries, code edits, translations and free chat.
"""

from __future__ import annotations

import ast
import itertools
import re
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Final

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.tokenizer import ModelTokenizer

KINDS: Final = ("summary", "edit", "translation", "chat")
"""Workloads of :func:`make_requests`."""
_LANGUAGES: Final = ("French", "German", "Spanish", "Italian")
_EDITS: Final = (
    "Rename the first parameter to `value`",
    "Add type annotations",
    "Shorten the docstring to one line",
    "Raise ValueError if the first argument is None",
)
_CHATS: Final = (
    "Explain {title} in Python to a beginner.",
    "What are common mistakes with {title} in Python?",
    "Give me an example of {title} in Python, and explain it step by step.",
    "When should I use {title}, and when not?",
)
_TOPIC_TITLES: Final = re.compile(r"^[a-z-]{4,}$")


def documentation() -> Iterator[str]:
    """Texts of Python's reference manual, then docstrings of its standard library."""
    yield from _topics().values()
    for path in _modules():
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node)
                if docstring and len(docstring) > 200:
                    yield docstring


def make_requests(kind: str, count: int) -> list[str]:
    """User messages of a workload.

    Args:
        kind: One of `KINDS`.
        count: How many, all different; at most 150.

    Raises:
        ValueError: Python's documentation has fewer.
    """
    found = list(itertools.islice(_REQUESTS[kind](), count))
    if len(found) < count:
        raise ValueError(f"{count} requests of {kind}, and there are {len(found)}")
    return found


def encode_chats(tokenizer: ModelTokenizer, requests: Sequence[str]) -> list[list[int]]:
    """Token ids of conversations of one turn; of the plain requests without a chat template."""
    found = []
    for request in requests:
        try:
            text = tokenizer.chat([{"role": "user", "content": request}])
        except ConfigError:
            [ids] = tokenizer.encode([request])
        else:
            ids = tokenizer.encode_plain(text)
        found.append(ids)
    return found


def _summaries() -> Iterator[str]:
    for text in _paragraphs(400, 1200):
        yield f"Summarize this text in a few sentences:\n\n{text}"


def _edits() -> Iterator[str]:
    for source, edit in zip(_functions(), itertools.cycle(_EDITS), strict=False):
        yield f"{edit}, and repeat the whole function:\n\n```python\n{source}\n```"


def _translations() -> Iterator[str]:
    for text, language in zip(_paragraphs(150, 400), itertools.cycle(_LANGUAGES), strict=False):
        yield f"Translate this text to {language}:\n\n{text}"


def _chats() -> Iterator[str]:
    for question in _CHATS:
        for name, text in _topics().items():
            if _TOPIC_TITLES.match(name):
                title = text.strip().splitlines()[0].strip().lower()
                yield question.format(title=f"{name.replace('-', ' ')} ({title})")


_REQUESTS: Final = {
    "summary": _summaries,
    "edit": _edits,
    "translation": _translations,
    "chat": _chats,
}


def _paragraphs(least: int, most: int) -> Iterator[str]:
    """Paragraphs of prose of so many characters, each on one line."""
    seen = set()
    for text in documentation():
        for part in re.split(r"\n\s*\n", text):
            line = " ".join(part.split())
            prose = line[:1].isupper() and line.endswith(".") and ">>>" not in line
            if prose and least <= len(line) <= most and line not in seen:
                seen.add(line)
                yield line


def _functions() -> Iterator[str]:
    """Sources of functions of 300 to 1,200 characters that have a parameter and a docstring."""
    for path in _modules():
        text = path.read_text(encoding="utf-8")
        for node in _parsed(path).body:
            if not isinstance(node, ast.FunctionDef) or not node.args.args:
                continue
            source = ast.get_source_segment(text, node)
            if source and ast.get_docstring(node) and 300 <= len(source) <= 1200:
                yield source


@cache
def _topics() -> dict[str, str]:
    """The reference manual as `help()` shows it, by topic."""
    from pydoc_data.topics import topics

    return {name: topics[name] for name in sorted(topics)}


@cache
def _modules() -> list[Path]:
    """Source files at the top of the standard library, sorted."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
