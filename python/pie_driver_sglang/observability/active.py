"""What serves a model: the parts that were chosen, and why where a faster one was not."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import quoted, reason

logger = logging.getLogger(__name__)

PIE: Final = "pie"
"""Names a part of this package; `sglang` names SGLang's."""
SGLANG: Final = "sglang"
REASONS: Final = "reasons"
"""The key of the reasons among the parts."""
_GRAMMARS: Final = "llguidance"
"""What constrains output, in the runtime."""
_OPTION: Final = "active_file"


class Active:
    """The parts of a driver, in the order in which they were chosen."""

    def __init__(self) -> None:
        """None is chosen yet."""
        self._parts: dict[str, str] = {}
        self._reasons: dict[str, str] = {}

    def choose(self, part: str, chosen: str, why: str | None = None) -> None:
        """Notes a choice.

        Args:
            part: `layers`, for example.
            chosen: What does it.
            why: Why it is not what this package would choose; None where it is.
        """
        self._parts[part] = chosen
        if why:
            self._reasons[part] = why

    def as_dict(self) -> dict[str, Any]:
        """Each part by its name, and `reasons` by the names of parts."""
        return {**self._parts, REASONS: dict(self._reasons)}


def active_line(parts: Mapping[str, Any]) -> str:
    """The parts as a log shows them.

    Args:
        parts: As `Active.as_dict` gives them.
    """
    reasons = parts.get(REASONS, {})
    named = [(name, chosen) for name, chosen in parts.items() if name != REASONS]
    return "; ".join(
        f"{name}: {chosen}" + (f" ({reasons[name]})" if name in reasons else "")
        for name, chosen in named
    )


def write_active(parts: Mapping[str, Any], path: str) -> None:
    """Writes the parts to a file, as JSON. A file that cannot be written ends nothing."""
    try:
        Path(path).write_text(json.dumps(parts))
    except OSError as error:
        text = "option `%s`: cannot write %s: %s; name a file in a folder that exists"
        logger.warning(text, _OPTION, quoted(path), reason(error))


class ActiveFile:
    """A file in memory, in which the drivers of a runtime write what serves the model.

    It has no name that could be left over. Drivers reach it by this process's descriptor, so keep
    it as long as their runtime: a driver that is started again writes once more.
    """

    def __init__(self) -> None:
        """Creates it, empty. It is closed when this object is garbage-collected."""
        self._file = os.memfd_create("active", os.MFD_CLOEXEC)
        self._path = f"/proc/{os.getpid()}/fd/{self._file}"
        weakref.finalize(self, os.close, self._file)

    def runtime(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The keywords of a `_core.Runtime` whose drivers write here, unless the user names a file.

        Args:
            keywords: As the user's arguments come to.
        """
        options = {_OPTION: self._path, **keywords["options"]}
        self._path = options[_OPTION]
        return {**keywords, "options": options}

    def read(self) -> dict[str, Any]:
        """What serves the model, the scheduler and grammars included.

        Of the driver's parts nothing, while its file has none or cannot be read: it has warned.
        """
        found: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(Path(self._path).read_text() or "{}")
        return {"scheduler": PIE, "grammar": _GRAMMARS, **found}
