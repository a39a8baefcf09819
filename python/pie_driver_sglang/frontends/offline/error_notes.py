"""Errors of the engine as its callers see them: with the hint as a note."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pie_driver_sglang.errors import ConfigError, DriverError, quoted

_Error = TypeVar("_Error", bound=DriverError)


def config_error(error: Exception) -> ConfigError:
    """An error of the native runtime as a `ConfigError`."""
    message, _, hint = str(error).partition("\n\nhint: ")
    return ConfigError(message, hint)


def refuse_argument(call: str, name: str, value: Any, refused: Mapping[str, str]) -> None:
    """Raise for an argument of SGLang's that a call does not have, unless its value is neutral.

    Args:
        call: Name of the method.
        name: Name of the argument.
        value: None and False are neutral.
        refused: Reasons by the names of those that SGLang's method has.

    Raises:
        ConfigError: SGLang's method has no such argument, or it has a value.
    """
    if name not in refused:
        raise with_note(
            ConfigError(f"`{call}` has no argument {quoted(name)}", f"remove {quoted(name)}")
        )
    if value is not None and value is not False:
        raise with_note(ConfigError(f"`{name}` is not served: {refused[name]}", f"remove `{name}`"))


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
