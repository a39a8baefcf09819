"""`HeldRequests`: requests that arrive while an update waits for those that run.

A tokenizer manager of SGLang holds requests back during an update of its own. With several
tokenizer workers those of the others would still arrive, and under load an update would never find
a moment without requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from pie_driver_sglang.frontends.sglang_server.compat import messages

_REQUESTS: Final = (
    "TokenizedGenerateReqInput",
    "BatchTokenizedGenerateReqInput",
    "TokenizedEmbeddingReqInput",
    "BatchTokenizedEmbeddingReqInput",
)
_ABORT: Final = "AbortReq"


class HeldRequests:
    """The requests that are held back, in the order of their arrival."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        """None yet.

        Args:
            holds: Whether new requests must wait now.
        """
        self._holds = holds
        self._held: list[bytes] = []

    def admit(self, received: Sequence[bytes]) -> Sequence[bytes]:
        """The messages to handle now: these, or those that were held before and these."""
        if not self._holds():
            if not self._held:
                return received
            held, self._held = self._held, []
            return [*held, *received]
        return [data for data in received if not self._hold(data)]

    def _hold(self, data: bytes) -> bool:
        """Keep a message for later if it is a request; whether it must not be handled now."""
        try:
            message = messages.decode_message(data)
        except Exception:
            # It is logged where it is handled.
            return False
        name = type(message).__name__
        if name == _ABORT:
            # It also aborts requests that are held: those before it.
            self._held.append(data)
            return False
        # Batches have no id of their own.
        rid = getattr(message, "rid", None)
        if name not in _REQUESTS or str(rid).startswith(messages.PROBE_PREFIX):
            return False
        self._held.append(data)
        return True
