"""Output of commands: findings, and files or stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TextIO

from pie_driver_sglang.errors import ConfigError, quoted, reason

Status = Literal["ok", "warn", "fail"]

_COLORS: Final[Mapping[str, str]] = MappingProxyType({"ok": "32", "warn": "33", "fail": "31"})


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        name: Of the check.
        status: `fail` prevents a start, `warn` costs speed or is uncertain.
        text: One sentence or a list of values.
        hint: What to do; may be empty.
        values: JSON values, for programs.
    """

    name: str
    status: Status
    text: str
    hint: str = ""
    values: Mapping[str, Any] = MappingProxyType({})


def exit_status(findings: Sequence[Finding]) -> int:
    """1 if one of the findings is a failure, else 0."""
    return int(any(finding.status == "fail" for finding in findings))


def print_findings(findings: Sequence[Finding], as_json: bool, stream: TextIO | None = None) -> int:
    """Print findings, or one JSON object with `ok` and `findings`; returns the exit status."""
    stream = stream or sys.stdout
    status = exit_status(findings)
    if as_json:
        listed = [{**f._asdict(), "values": dict(f.values)} for f in findings]
        stream.write(json.dumps({"ok": status == 0, "findings": listed}, indent=2) + "\n")
        return status
    paints = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    width = max((len(finding.name) for finding in findings), default=0)
    for finding in findings:
        stream.write(_shown(finding, width, paints))
    stream.write(f"\n{_summary(findings)}\n")
    return status


def _shown(finding: Finding, width: int, paints: bool) -> str:
    word = f"{finding.status:<4}"
    if paints:
        word = f"\x1b[{_COLORS[finding.status]}m{word}\x1b[0m"
    indent = " " * (4 + 2 + width + 2)
    text = finding.text.replace("\n", f"\n{indent}")
    lines = f"{word}  {finding.name:<{width}}  {text}\n"
    return lines + (f"{indent}hint: {finding.hint}\n" if finding.hint else "")


def _summary(findings: Sequence[Finding]) -> str:
    failed = sum(finding.status == "fail" for finding in findings)
    warned = sum(finding.status == "warn" for finding in findings)
    counts = [_counted(failed, "problem"), _counted(warned, "warning")]
    return ", ".join(filter(None, counts)) or "no problem found"


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count > 1)}" if count else ""


def open_output(path: str | None) -> contextlib.AbstractContextManager[TextIO]:
    """A file to write; stdout for None.

    Raises:
        ConfigError: It cannot be written.
    """
    if path is None:
        return contextlib.nullcontext(sys.stdout)
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def write_output(path: str | None, text: str) -> None:
    """Write a text to a file, to stdout for `-`, or nowhere for None.

    Raises:
        ConfigError: The file cannot be written.
    """
    if path == "-":
        sys.stdout.write(text)
    elif path is not None:
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write {quoted(path)}: {reason(error)}", "name a file that can be written"
    )
