"""What the serving loop does after a call of the engine that failed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pie_driver_sglang.errors import LostError

if TYPE_CHECKING:
    from pie_driver_sglang.engine import Engine

logger = logging.getLogger(__name__)


def go_on(engine: Engine, error: Exception, kind: str, text: str, *arguments: object) -> None:
    """Logs what failed and was answered. Ends the loop if the engine cannot go on.

    Args:
        engine: Whose call has failed.
        error: What it raised.
        kind: By which the log limits repeats.
        text: The log line, with places for `arguments`.
        arguments: Values of the line.

    Raises:
        LostError: The device can run nothing any more.
        Exception: `error` itself, where this rank has failed and others wait for it.
    """
    loss = engine.find_loss()
    if loss is not None:
        logger.debug(text, *arguments, exc_info=error)
        raise LostError(loss) from error
    logger.error(text, *arguments, exc_info=error, extra={"kind": kind})
    if not engine.recovers:
        raise error
