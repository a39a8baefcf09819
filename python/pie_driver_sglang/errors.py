"""Error classes, and the formatting of their messages."""

from __future__ import annotations

import contextlib
import difflib
import re
import reprlib
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Final


class DriverError(Exception):
    """An error that the user can act on.

    Attributes:
        message: What happened, with the value and the limit.
        hint: What to do about it; may be empty.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        """Store message and hint; `str(error)` is the message."""
        super().__init__(message)
        self.message = message
        self.hint = hint

    @property
    def with_hint(self) -> str:
        """Message and hint in one line."""
        return "; ".join(filter(None, (self.message, self.hint)))


class ConfigError(DriverError):
    """An invalid configuration, snapshot or command line."""


class Unsupported(ConfigError):
    """A feature of SGLang that this package does not support."""


class StartError(DriverError):
    """The driver cannot start, although the configuration is valid."""


class LostError(DriverError):
    """A running driver has lost its device, or one of its ranks."""

    def __init__(self, message: str) -> None:
        """Store what happened; the hint is always the same."""
        super().__init__(
            message,
            "start the driver again; if it happens again, look for `Xid` in `dmesg`, and run with "
            "`PIE_DRIVER_LOG=debug` for a traceback",
        )


class AdapterError(DriverError):
    """An adapter cannot be read, or does not fit the model."""


class WeightsError(DriverError):
    """Weights cannot be replaced, read or released; the model is what it was."""


class LostWeightsError(DriverError):
    """A model has part of its old weights and part of its new ones, and cannot serve."""


class RingError(Exception):
    """The shared-memory region cannot be made, opened or used."""


class FrontEndError(ValueError):
    """A message of SGLang's frontend is invalid, or of an unsupported version."""


class WireError(ValueError):
    """Bytes that are not a valid frame, or a buffer that is too small for one."""


class StageError(ValueError):
    """A staging block or tokens that do not fit the plan."""


class PagesError(ValueError):
    """A page pool refuses a page, or has not enough of them."""


class RadixError(ValueError):
    """A prefix index refuses a node, a list of pages or a setting."""


def invalid_value(what: str, value: Any, expected: str) -> ConfigError:
    """The error for an argument with a value of the wrong type or range."""
    return ConfigError(
        f"{what} is {quoted(value)}, expected {expected}",
        f"set {what.rpartition(' ')[2]} to {expected}, or remove it",
    )


#: The hint of :func:`not_running`.
OTHER_SETTINGS: Final = "use another `attention_backend`, `activation_dtype`, device or model"


def not_running(device: str, error: BaseException) -> StartError:
    """The error for a model whose forward passes fail, for example for an unsupported dtype."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first, *others = lines or [type(error).__name__]
    # A compiler prints the location and its source first, and the error last.
    what = f"{first} {others[-1]}" if first.endswith(":") and others else first
    return StartError(
        f"the model loads but does not run on {device}: {what}",
        OTHER_SETTINGS,
    )


def quoted(value: Any) -> str:
    """A user's value in a message, on one line; truncated unless it is a path."""
    if isinstance(value, Path):
        return repr(str(value))
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = shortener.maxlong = 80
    try:
        return shortener.repr(value)
    except ValueError:  # Python refuses to print an integer of more than 4300 digits.
        return "a number of more than 4300 digits"


def reason(error: BaseException) -> str:
    """The reason of a failed file access, in a few words."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return " ".join(str(error).split())


def rename_options(text: str, names: Mapping[str, str]) -> str:
    """A text with `option` and `option = value` by other names.

    Args:
        text: With options between backquotes.
        names: The others, by those in the text; what is not among them stays.
    """
    return re.sub(r"`(\w+)(?=[ `=])", lambda match: f"`{names.get(match[1], match[1])}", text)


def install_command(*requirements: str, again: bool = False) -> str:
    """The shell command that installs packages into this interpreter's environment.

    Args:
        requirements: What to install, as pip names it.
        again: Whether a package that is there is replaced, even if its version fits.
    """
    if has_pip():
        words = [sys.executable, "-m", "pip", "install", *(["--force-reinstall"] * again)]
    else:
        words = ["uv", "pip", "install", "--python", sys.executable, *(["--reinstall"] * again)]
    return shlex.join([*words, *requirements])


def has_pip() -> bool:
    """Whether this interpreter's environment has pip; one of `uv venv` has none."""
    # `find_spec("pip")` would have the import hook of setuptools replace distutils.
    with contextlib.suppress(PackageNotFoundError):
        return bool(distribution("pip"))
    return False


def nearest(word: str, known: Iterable[str]) -> str:
    """A question that suggests similar names; empty if there is none."""
    names = sorted(known)
    longer = [name for name in names if len(word) > 2 and name.startswith(word)]
    matches = longer[:3] or difflib.get_close_matches(word[:100], names, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(f'`{match}`' for match in matches)}?" if matches else ""
