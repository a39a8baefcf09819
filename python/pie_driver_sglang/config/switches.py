"""Environment variables that are 0 or 1."""

from __future__ import annotations

import os

from pie_driver_sglang.errors import ConfigError, quoted


def read_switch(name: str, *, default: bool = False) -> bool:
    """Whether an environment variable is 1; empty is as unset.

    Raises:
        ConfigError: It is neither 0 nor 1.
    """
    value = os.environ.get(name) or str(int(default))
    if value not in ("0", "1"):
        raise ConfigError(f"`{name}` is {quoted(value)}", "set it to 0 or 1, or unset it")
    return value == "1"
