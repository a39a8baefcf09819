"""Live panels on a terminal, one per context."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pie_driver_sglang.demo.display import Display, heading, printable
from pie_driver_sglang.demo.report import Grid
from pie_driver_sglang.demo.runtime import AT_END, AT_LIMIT, RUNNING, WAITING, Context

#: Drawing takes time from the decoding loop, and faster updates cannot be read.
_FRAME_S: Final = 0.1
_BORDERS: Final = {WAITING: "dim", RUNNING: "cyan", AT_END: "green", AT_LIMIT: "green"}
_SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_MOST_LINES: Final = 16


class LiveDisplay(Display):
    """Panels whose texts grow while they are decoded."""

    def __init__(self) -> None:
        """Draws on the standard output."""
        super().__init__()
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._drawn_at = 0.0

    def note(self, line: str) -> None:
        """Prints a line above the panels."""
        self._console.print(Text(line))

    def loading(self, elapsed_s: float, log_line: str) -> None:
        """Draws one line with a spinner, the time and the driver's last word."""
        mark = _SPINNER[int(elapsed_s / _FRAME_S) % len(_SPINNER)]
        line = Text(f"{mark} {elapsed_s:.1f} s  ", no_wrap=True, overflow="ellipsis")
        self._live.update(line.append(log_line, "dim"), refresh=True)

    def show(self, contexts: Sequence[Context]) -> None:
        """Draws the panels, but not more often than is worth it."""
        now = time.monotonic()
        if now - self._drawn_at >= _FRAME_S:
            self._drawn_at = now
            self._live.update(self._panels(contexts, whole=False), refresh=True)

    def finish(self, contexts: Sequence[Context], grids: Sequence[Grid]) -> None:
        """Leaves the whole texts on the terminal, and the tables below them."""
        self._live.stop()
        self._console.print(self._panels(contexts, whole=True))
        for grid in grids:
            self._console.print(_table(grid))

    def __enter__(self) -> Self:
        """Starts to draw."""
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Gives the terminal back."""
        self._live.stop()

    def _panels(self, contexts: Sequence[Context], whole: bool) -> RenderableType:
        columns = 2 if self._console.width >= 60 else 1
        rows = -(-len(contexts) // columns)
        lines = min(_MOST_LINES, max(1, (self._console.height - 2) // rows - 2))
        width = self._console.width // columns - 4
        grid = Table.grid(expand=True)
        for _ in range(columns):
            grid.add_column(ratio=1)
        panels = [self._panel(context, width, None if whole else lines) for context in contexts]
        for first in range(0, len(panels), columns):
            grid.add_row(*panels[first : first + columns])
        return grid

    def _panel(self, context: Context, width: int, lines: int | None) -> Panel:
        """Returns a panel with the whole text, or with its last lines."""
        text = (
            Text(overflow="fold")
            .append(printable(context.prompt), "dim")
            .append(printable(context.text))
        )
        if lines is not None:
            wrapped = text.wrap(self._console, width)
            text = Text("\n").join(wrapped[-lines:])
        return Panel(
            text,
            title=Text(heading(context)),
            title_align="left",
            border_style=_BORDERS[context.state],
            height=None if lines is None else lines + 2,
        )


def _table(grid: Grid) -> Table:
    table = Table(title=grid.title, title_justify="left")
    for header in grid.headers:
        table.add_column(header, justify="left" if header in grid.text else "right")
    for row in grid.rows:
        table.add_row(*row)
    return table
