"""NVTX ranges around what the engine does, for Nsight Systems."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

_CALLS: Final = ("forward", "sample", "copy_pages", "copy_states")


def mark_calls(engine: object) -> None:
    """Has each of the engine's calls open a range `pie.<name>`, from now on.

    Args:
        engine: It has the methods `forward`, `sample`, `copy_pages` and `copy_states`.
    """
    for name in _CALLS:
        setattr(engine, name, _marked(getattr(engine, name), f"pie.{name}"))


def _marked(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def marked(*arguments: Any, **keywords: Any) -> Any:
        with torch.cuda.nvtx.range(name):
            return call(*arguments, **keywords)

    return marked
