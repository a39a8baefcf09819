"""Errors of the engine as its callers see them: with the hint as a note."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pie_driver_sglang.errors import ConfigError, DriverError

_Error = TypeVar("_Error", bound=DriverError)


def config_error(error: Exception) -> ConfigError:
    """An error of the native runtime as a `ConfigError`."""
    message, _, hint = str(error).partition("\n\nhint: ")
    return ConfigError(message, hint)


def with_hint(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function, whose errors get their hints as notes."""
    try:
        return function(*arguments)
    except DriverError as error:
        raise with_note(error) from None


def with_note(error: _Error) -> _Error:
    """Add the hint as a note, which tracebacks show."""
    if error.hint:
        error.add_note(f"hint: {error.hint}")
    return error
