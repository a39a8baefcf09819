"""Shows answers: panels that grow on a terminal, plain text anywhere else."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from rich.console import RenderableType

_MOST_LINES: Final = 12
_WIDTH: Final = 110
"""Of a recording."""


@dataclass
class StreamedAnswer:
    """A streamed answer; `title` is its sampler.

    Attributes:
        tokens: Its length, known at the end.
        first_s: Seconds to its first text.
        is_cut: It ended at the limit of tokens.
    """

    title: str
    question: str
    text: str = ""
    tokens: int = 0
    first_s: float = 0.0
    is_cut: bool = False
    done: bool = False

    @property
    def shown(self) -> str:
        """The text so far, with dots where the limit of tokens cut it."""
        return f"{printable(self.text)} …" if self.is_cut else printable(self.text)


class PlainScreen:
    """Prints lines; each answer when all have ended."""

    def note(self, line: str) -> None:
        """Shows a line."""
        print(printable(line), flush=True)

    def waiting(self, elapsed_s: float, line: str) -> None:
        """Shows the progress of a start."""

    def growing(self, answers: Sequence[StreamedAnswer]) -> None:
        """Shows partial answers."""

    def answers(self, answers: Sequence[StreamedAnswer]) -> None:
        """Shows whole answers."""
        for answer in answers:
            print(f"\n--- {answer.title}: {answer.question}\n{answer.shown}", flush=True)

    def section(self, title: str, *lines: str) -> None:
        """Shows a heading and lines under it."""
        print("\n".join([f"\n--- {title}", *map(printable, lines)]), flush=True)

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Gives the terminal back."""


class RichScreen(PlainScreen):
    """Panels side by side, and a picture of all that was shown if one is wanted."""

    def __init__(self, picture: Path | None = None) -> None:
        """Draws on the standard output.

        Args:
            picture: The SVG file to write at the end.
        """
        from rich.console import Console
        from rich.live import Live

        self._picture = picture
        width = _WIDTH if picture else None
        # What it shows goes to a file as well, so it is drawn as for a terminal.
        terminal = True if picture else None
        self._console = Console(
            highlight=False, record=picture is not None, width=width, force_terminal=terminal
        )
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def note(self, line: str) -> None:
        """Prints a line above the panels."""
        self._console.print(printable(line), markup=False)

    def waiting(self, elapsed_s: float, line: str) -> None:
        """Draws one line with the time and the last line of the log."""
        if self._picture is None:
            text = f"{elapsed_s:5.1f} s  {printable(line)}"[: self._console.width - 1]
            self._live.update(_text(text, "dim"), refresh=True)

    def growing(self, answers: Sequence[StreamedAnswer]) -> None:
        """Draws the panels with the last lines of each answer."""
        if self._picture is None:
            self._live.update(self._panels(answers, _MOST_LINES), refresh=True)

    def answers(self, answers: Sequence[StreamedAnswer]) -> None:
        """Leaves the panels on the terminal."""
        self._live.update("", refresh=True)
        self._console.print(self._panels(answers, None))

    def section(self, title: str, *lines: str) -> None:
        """Prints a panel."""
        from rich.panel import Panel

        body = _text("\n".join(map(printable, lines)))
        self._console.print(Panel(body, title=_text(title, "bold"), title_align="left"))

    def __enter__(self) -> Self:
        """Begins to draw."""
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the terminal and write the picture."""
        self._live.update("")
        self._live.stop()
        if self._picture is not None and not any(exception):
            drawn = self._console.export_svg(title="pie-sglang demo")
            # A picture must not load fonts from a server.
            self._picture.write_text(re.sub(r"@font-face \{.*?\}\n", "", drawn, flags=re.DOTALL))

    def _panels(self, answers: Sequence[StreamedAnswer], most_lines: int | None) -> RenderableType:
        from rich.table import Table

        columns = 2 if self._console.width >= 72 else 1
        if most_lines is not None:
            rows = -(-len(answers) // columns)
            most_lines = min(most_lines, max(2, (self._console.height - 2) // rows - 2))
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        panels = [self._panel(each, most_lines, columns) for each in answers]
        for first in range(0, len(panels), columns):
            grid.add_row(*panels[first : first + columns])
        return grid

    def _panel(
        self, answer: StreamedAnswer, most_lines: int | None, columns: int
    ) -> RenderableType:
        from rich.panel import Panel

        text = _text("").append(f"{answer.question}\n", "dim").append(answer.shown)
        if most_lines is not None:
            wrapped = text.wrap(self._console, self._console.width // columns - 4)
            text = _text("\n").join(wrapped[-most_lines:])
        return Panel(
            text,
            title=_text(answer.title),
            title_align="left",
            border_style="green" if answer.done else "cyan",
            height=None if most_lines is None else most_lines + 2,
        )


def open_screen(picture: Path | None = None) -> PlainScreen:
    """Returns panels on a terminal that can draw them or for a picture, plain lines otherwise."""
    simple = os.environ.get("NO_COLOR") or os.environ.get("TERM", "dumb") == "dumb"
    if picture is None and (simple or not sys.stdout.isatty()):
        return PlainScreen()
    try:
        return RichScreen(picture)
    except ImportError:
        return PlainScreen()


def printable(text: str) -> str:
    """Returns the text without tabs and without characters that would control the terminal."""
    lines = text.expandtabs(4).split("\n")
    return "\n".join("".join(map(_visible, line)) for line in lines)


def _visible(character: str) -> str:
    if character.isprintable():
        return character
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"


def _text(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(text, style)
