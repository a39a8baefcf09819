"""`Engine` in the tests' process, with drivers that are forked."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from pie_driver_sglang.frontends.offline.engine import Engine
from support.models.tiny_models import POCKET


@contextmanager
def running(python: str, model: Path = POCKET, **arguments: Any) -> Iterator[Engine]:
    """An engine on the CPU; `python` is :func:`fork_server.interpreter`."""
    with mock.patch.object(sys, "executable", python):
        engine = Engine(model_path=str(model), device="cpu", **arguments)
    with engine:
        yield engine


@contextmanager
def small(python: str, pages: int, **arguments: Any) -> Iterator[Engine]:
    """One of so many pages of 16 tokens that some requests are retracted, and prompts are cut."""
    settings = {"chunked_prefill_size": 48, "schedule_conservativeness": 0.0, **arguments}
    with running(python, max_total_tokens=16 * pages, **settings) as engine:
        yield engine
