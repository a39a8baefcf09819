"""Environment variables that are 0 or 1."""

from __future__ import annotations

import os
from typing import Final

from pie_driver_sglang.errors import ConfigError, quoted

EXPERIMENTAL_RANKS: Final = "PIE_EXPERIMENTAL_RANKS"
"""The environment variable with which several GPUs run what was measured on one GPU only: prompts
in CUDA graphs, the GEMMs of small steps, and batch-invariant layers; off by default."""


def read_switch(name: str, *, default: bool = False) -> bool:
    """Whether an environment variable is 1; empty is as unset.

    Raises:
        ConfigError: It is neither 0 nor 1.
    """
    value = os.environ.get(name) or str(int(default))
    if value not in ("0", "1"):
        raise ConfigError(f"`{name}` is {quoted(value)}", "set it to 0 or 1, or unset it")
    return value == "1"


def graphs_take_prompts(ranks: int) -> bool:
    """Whether so many GPUs capture steps with more rows than there are requests."""
    return ranks == 1 or read_switch(EXPERIMENTAL_RANKS)
