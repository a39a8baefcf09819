"""The active components that serve a model, and why a faster one is not used."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import quoted, reason
from pie_driver_sglang.observability.start_spans import StartSpan

logger = logging.getLogger(__name__)

PIE: Final = "pie"
"""A component of this package; `sglang` is one of SGLang."""
SGLANG: Final = "sglang"
REASONS: Final = "reasons"
"""The key of the reasons."""
START: Final = "start"
"""The key of the driver's start spans: name, begin and end in seconds of `time.monotonic`."""
LLGUIDANCE: Final = "llguidance"
"""The grammar backend of the runtime."""
_OPTION: Final = "active_file"


class Active:
    """The active components of a driver, in the order of their selection."""

    def __init__(self) -> None:
        """No components."""
        self._parts: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    def choose(self, part: str, chosen: str, why: str | None = None) -> None:
        """Record a component.

        Args:
            part: Its kind, such as `layers`.
            chosen: The selected implementation.
            why: Why it is not the default; None if it is.
        """
        self._parts[part] = chosen
        if why:
            self._reasons[part] = why

    def as_dict(self) -> dict[str, Any]:
        """The components by kind, and `reasons` by kind."""
        return {**self._parts, REASONS: dict(self._reasons)}


def active_line(parts: Mapping[str, Any]) -> str:
    """The components of `Active.as_dict` as a log line."""
    reasons = parts.get(REASONS, {})
    named = [(name, chosen) for name, chosen in parts.items() if name != REASONS]
    return "; ".join(
        f"{name}: {chosen}" + (f" ({reasons[name]})" if name in reasons else "")
        for name, chosen in named
    )


def write_active(parts: Mapping[str, Any], path: str, spans: Sequence[StartSpan] = ()) -> None:
    """Write the components and the spans of the start to a file, as JSON.

    A failure is only logged.
    """
    try:
        Path(path).write_text(json.dumps({**parts, **({START: spans} if spans else {})}))
    except OSError as error:
        text = "option `%s`: cannot write %s: %s; name a file in a folder that exists"
        logger.warning(text, _OPTION, quoted(path), reason(error))


class ActiveFile:
    """An anonymous file (memfd) to which the drivers of a runtime write their active components.

    Drivers open it by this process's descriptor, so keep it as long as the runtime: a restarted
    driver writes it again.
    """

    def __init__(self, grammar: str = LLGUIDANCE) -> None:
        """Create it, empty; it is closed when this object is garbage-collected.

        Args:
            grammar: The grammar backend; `none` where requests with a grammar are rejected.
        """
        self._grammar = grammar
        self._file = os.memfd_create("active", os.MFD_CLOEXEC)
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        weakref.finalize(self, os.close, self._file)

    def runtime(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a `_core.Runtime`, with this file as the default `active_file`."""
        options = {_OPTION: self._path, **keywords["options"]}
        self._path = options[_OPTION]
        return {**keywords, "options": options}

    def read(self) -> dict[str, Any]:
        """The active components, with scheduler and grammar backend.

        Without the driver's while its file is empty or unreadable, of which it has warned.
        """
        found = self._content()
        found.pop(START, None)
        return {"scheduler": PIE, "grammar": self._grammar, **found}

    def start_spans(self) -> list[StartSpan]:
        """The spans of the driver's last start; with several replicas of one of them."""
        return [StartSpan(*each) for each in self._content().get(START, ())]

    def _content(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads(Path(self._path).read_text() or "{}"))
        return {}
