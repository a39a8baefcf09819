"""Decides whether the serving loop continues after an exception of the engine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pie_driver_sglang.errors import LostError

if TYPE_CHECKING:
    from pie_driver_sglang.engine.executor import ModelExecutor

logger = logging.getLogger(__name__)


def log_or_raise(
    engine: ModelExecutor, error: Exception, kind: str, text: str, *arguments: object
) -> None:
    """Log a failed call whose request has been answered; raise if the engine cannot continue.

    Args:
        engine: The engine that raised.
        error: The exception.
        kind: The kind of log line, for its rate limit.
        text: The log line, a format for `arguments`.
        arguments: Values of the line.

    Raises:
        LostError: The device is lost.
        Exception: `error` itself, if other ranks wait for this one.
    """
    loss = engine.find_loss()
    if loss is not None:
        logger.debug(text, *arguments, exc_info=error)
        raise LostError(loss) from error
    logger.error(text, *arguments, exc_info=error, extra={"kind": kind})
    if not engine.recovers:
        raise error
