"""The driver's log: on stderr, one line per record, rate-limited per kind.

Standard output is the runtime's, for the output of programs.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TextIO

from pie_driver_sglang.errors import ConfigError, DriverError, quoted

#: Environment variable with the log level; `info` if unset.
LEVEL_VARIABLE: Final = "PIE_DRIVER_LOG"
LEVELS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "debug": logging.DEBUG,
        "info": logging.INFO,
        "warning": logging.WARNING,
        "error": logging.ERROR,
    }
)
_QUIET_LIBRARIES: Final = ("sglang", "torch", "transformers")
#: Warnings of SGLang on every start on a CPU.
_IRRELEVANT: Final = (
    "Cuda graph is disabled because of using torch native attention backend",
    "init_cpu_threads_env and shared memory based AllReduce is disabled",
)
_MAX_KINDS: Final = 1024


class RateLimitFilter(logging.Filter):
    """Lets the first few records of a kind through, then at most one per interval.

    The kind of a record is `extra={"kind": ...}` if given, else its level and its format string.
    `extra={"kind": None}` exempts a record, e.g. a line of a progress report. The record that
    ends a silence says how many were left out. Safe for several threads.
    """

    def __init__(
        self,
        first: int = 5,
        interval_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allow `first` records of a kind, then one per `interval_s` seconds of `clock`."""
        super().__init__()
        self._first = first
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, _Count] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to print the record; adds the number of suppressed ones."""
        kind = getattr(record, "kind", f"{record.levelname} {record.msg}")
        if kind is None:
            return True
        with self._lock:
            note = self._admit(str(kind))
        if note:
            record.msg = f"{record.msg}{note}"
        return note is not None

    def _admit(self, kind: str) -> str | None:
        """Return the suffix of an admitted message; None to suppress it."""
        now = self._clock()
        count = self._kinds.setdefault(kind, _Count())
        if len(self._kinds) > _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        if count.seen >= self._first and now - count.printed_at < self._interval_s:
            count.left_out += 1
            return None
        left_out, count.left_out = count.left_out, 0
        count.seen, count.printed_at = count.seen + 1, now
        if left_out:
            return f" ({left_out} more like this left out)"
        if count.seen == self._first:
            return f" (from now on at most once in {self._interval_s:g} s)"
        return ""


class _Count:
    """Printed and suppressed records of one kind."""

    __slots__ = ("left_out", "printed_at", "seen")

    def __init__(self) -> None:
        self.seen = 0
        self.left_out = 0
        self.printed_at = 0.0


class LogSource(NamedTuple):
    """The process of a log line."""

    group: int
    rank: int
    device: str

    def __str__(self) -> str:
        """The form in a text line."""
        return f"[group {self.group} rank {self.rank} {self.device}]"


class Formatter(logging.Formatter):
    """`YYYY-MM-DD HH:MM:SS.mmm [source] LEVEL package: message` in local time."""

    def __init__(self, color: bool = False, source: LogSource | None = None) -> None:
        """Color the level if `color`."""
        named = f"{source} " if source else ""
        super().__init__(f"%(asctime)s.%(msecs)03d {named}%(shown_level)s %(package)s: %(message)s")
        self.datefmt = "%Y-%m-%d %H:%M:%S"
        self._color = color

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, with a traceback below it if it has one."""
        paint = {logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31"}
        color = paint.get(record.levelno) if self._color else None
        level = record.levelname
        record.shown_level = f"\x1b[{color}m{level}\x1b[0m" if color else level
        record.package = record.name.partition(".")[0]
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line.

    The keys: `time` (ISO 8601 with the offset from UTC), `level`, `logger` and `message`; `group`,
    `rank` and `device` once they are known; what the record brings as `extra={"fields": {...}}`;
    and `traceback`.
    """

    def __init__(self, source: LogSource | None = None) -> None:
        """Name the process in each line, if it is known."""
        super().__init__()
        self._source = {} if source is None else source._asdict()

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's object, without a line break."""
        time_of = datetime.fromtimestamp(record.created).astimezone()
        line: dict[str, Any] = {
            "time": time_of.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name.partition(".")[0],
            "message": record.getMessage(),
            **self._source,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _IrrelevantFilter(logging.Filter):
    """Suppresses warnings of libraries that do not concern the driver."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether to print the record."""
        return not str(record.msg).startswith(_IRRELEVANT)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """The handler that `configure_logging` installs, so that a second call replaces it."""

    _has_ended = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the log has ended."""
        if not self._has_ended:
            super().emit(record)

    def end(self, limit_s: float) -> None:
        """Wait for a record that a thread is writing; see `end_logging`."""
        self._has_ended = True
        # Held while a record is formatted and written.
        if self.lock is not None and self.lock.acquire(timeout=limit_s):
            self.lock.release()


def configure_logging(
    level: str | None = None, *, source: LogSource | None = None, log_format: str = "text"
) -> None:
    """Send every log record to stderr; call it before anything is loaded.

    The driver logs at `level`, libraries at `warning` or above. Calling it again replaces what the
    first call set up.

    Args:
        level: A key of `LEVELS`; None to take it from the environment variable PIE_DRIVER_LOG.
        source: Shown in each line; None while it is not known.
        log_format: `text` or `json`.

    Raises:
        ConfigError: The level is not one of `LEVELS`.
    """
    number = _level_number(level)
    handler = _StderrHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter(source))
    else:
        handler.setFormatter(Formatter(_wants_color(sys.stderr), source))
    if number > logging.DEBUG:
        handler.addFilter(_IrrelevantFilter())
    handler.addFilter(RateLimitFilter())
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, _StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    logging.getLogger(__package__).setLevel(number)


def end_logging(limit_s: float) -> None:
    """Stop logging, so that the next output of the process is its last.

    Args:
        limit_s: How long to wait for a record that another thread is writing.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _StderrHandler):
            handler.end(limit_s)


def last_line(source: LogSource, log_format: str) -> str:
    """Return the format of the native half's last log line: `{text}` and `{time}` or `{iso}`."""
    if log_format == "text":
        return f"{{time}} {source} INFO {__package__}: {{text}}"
    named = {"time": "{iso}", "level": "INFO", "logger": __package__, "message": "{text}"}
    return json.dumps({**named, **source._asdict()}, ensure_ascii=False)


def format_failure(error: DriverError) -> str:
    """Return the output of a failed start: message and hint; one object with JSON logs."""
    message = " ".join(str(error).split())
    handlers = logging.getLogger().handlers
    own = next((handler for handler in handlers if isinstance(handler, _StderrHandler)), None)
    if own is not None and isinstance(own.formatter, JsonFormatter):
        record = logging.LogRecord(__package__, logging.ERROR, "", 0, "%s", (message,), None)
        record.fields = {"hint": error.hint}
        return own.formatter.format(record)
    line = f"{__package__}: {message}"
    return f"{line}\n\nhint: {error.hint}" if error.hint else line


def _level_number(level: str | None) -> int:
    source = "log level"
    if level is None:
        source, level = f"environment variable {LEVEL_VARIABLE}", os.environ.get(LEVEL_VARIABLE)
    name = (level or "info").strip().lower()
    if name not in LEVELS:
        raise ConfigError(
            f"{source} is {quoted(level)}, expected one of {', '.join(LEVELS)}",
            f"set {LEVEL_VARIABLE} to one of {', '.join(LEVELS)}, or unset it",
        )
    return LEVELS[name]


def _wants_color(stream: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return not plain and stream.isatty()
