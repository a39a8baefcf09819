"""Progress of a start: a bar on a terminal, now and then a log line elsewhere."""

from __future__ import annotations

import io
import logging
import sys
from typing import Any, Final

from tqdm import tqdm

logger = logging.getLogger(__name__)

_INTERVAL_S: Final = 5.0


class LoggedProgress(tqdm):  # type: ignore[misc]
    """A bar that logs how far it is every five seconds instead of drawing itself."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Takes what `tqdm` takes; where and how often it would be drawn is left out."""
        self._said = False
        own = {"file": io.StringIO(), "mininterval": _INTERVAL_S, "miniters": 1, "delay": 0}
        super().__init__(*arguments, **{**keywords, **own})

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Logs how far it is; an end that comes soon is not worth a line."""
        is_over = self.n == self.total
        if msg != "" and self.n and (self._said or not is_over):
            self._said = True
            total = "?" if self.total is None else f"{self.total:,}"
            name = self.desc.rstrip(": ") or "progress"
            logger.info("%s: %s of %s", name, f"{self.n:,}", total, extra={"kind": None})
        return True


def progress_type() -> type[tqdm]:
    """What shows progress on this process's stderr."""
    return tqdm if sys.stderr.isatty() else LoggedProgress
