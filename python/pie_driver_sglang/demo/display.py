"""What the demo shows: plain lines here, live panels in `live`."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from pie_driver_sglang.demo.report import Grid
from pie_driver_sglang.demo.runtime import WAITING, Context


class Display:
    """Prints plain lines: each context when it is done."""

    def __init__(self) -> None:
        """Prints to the standard output."""
        self._printed: set[int] = set()
        self._log_line = ""

    def note(self, line: str) -> None:
        """Shows a line of information."""
        print(line, flush=True)

    def loading(self, elapsed_s: float, log_line: str) -> None:
        """Shows each new line of the driver's log while it loads; called many times."""
        if log_line != self._log_line:
            self._log_line = log_line
            print(f"{elapsed_s:5.1f} s  {printable(log_line).strip()}", flush=True)

    def show(self, contexts: Sequence[Context]) -> None:
        """Shows the state of all contexts; called after every step."""
        for context in contexts:
            if context.done and context.number not in self._printed:
                self._printed.add(context.number)
                body = printable(context.prompt + context.text)
                print(f"\n--- {heading(context)} ---\n{body}", flush=True)

    def finish(self, contexts: Sequence[Context], grids: Sequence[Grid]) -> None:
        """Shows the whole texts, unless that is done already, and the tables."""
        for grid in grids:
            print(f"\n{plain_table(grid)}")

    def __enter__(self) -> Self:
        """Returns the display itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the terminal back."""


def heading(context: Context) -> str:
    """Returns the title of a context: its number, its sampler and how far it is."""
    title = f"{context.number}: {context.sampling.label}"
    if context.state == WAITING:
        return f"{title}, {WAITING}"
    stopped = f", {context.state}" if context.done else ""
    return f"{title}, {len(context.tokens)} tokens{stopped}"


def printable(text: str) -> str:
    """Returns the text without tabs and without characters that would steer the terminal."""
    lines = text.expandtabs(4).split("\n")
    return "\n".join("".join(map(_visible, line)) for line in lines)


def plain_table(grid: Grid) -> str:
    """Returns a table of aligned columns."""
    rows = [grid.headers, *grid.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(header: str, text: str, width: int) -> str:
        return text.ljust(width) if header in grid.text else text.rjust(width)

    lines = ["  ".join(map(cell, grid.headers, row, widths)).rstrip() for row in rows]
    return "\n".join([f"{grid.title}:", *lines])


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"
