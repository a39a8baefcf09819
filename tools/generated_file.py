"""What the generators of files have in common: rows of settings, and `--check`."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def literal(value: Any) -> str:
    """A value as the formatter writes it."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def render_setting(
    name: str,
    described: str,
    owner: str | None,
    choices: Sequence[str] = (),
    *,
    open_choices: bool = False,
    default: Any = None,
) -> str:
    """The row of a field in `server_args.py` or `engine_args.py`."""
    arguments = [f'"{described}"']
    if owner:
        arguments.append(f'"{owner}"')
    if choices:
        words = ", ".join(f'"{word}"' for word in choices) + ("," if len(choices) == 1 else "")
        arguments.append(f"choices=({words})")
        if open_choices:
            arguments.append("open_choices=True")
    if default is not None:
        arguments.append(f"default={literal(default)}")
    line = f'        "{name}": ServerArg({", ".join(arguments)}),\n'
    if len(line) <= 101:
        return line
    # Fills long lists of choices to the line length, as no formatter would.
    lines = [f'        "{name}": ServerArg(']
    for argument in arguments:
        lines += textwrap.wrap(
            f"{argument},", 100, initial_indent=" " * 12, subsequent_indent=" " * 16,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return "\n".join([*lines, "        ),", ""])


def write_or_check(doc: str | None, target: Path, render: Callable[[], str], remedy: str) -> int:
    """Write a file, or compare it with `--check`. Returns the exit status."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    check = parser.parse_args().check
    text = render()
    if not check:
        target.write_text(text, encoding="utf-8")
    elif text != target.read_text(encoding="utf-8"):
        print(f"{target} is stale: run {remedy}", file=sys.stderr)
        return 1
    return 0
