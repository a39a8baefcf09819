"""Custom logit processors: Python that requests bring, run on their own rows of logits.

SGLang's `CustomLogitProcessor`, serialized by its `to_str`. A processor sees one row at a time, so
one that raises fails its own request only.
"""

from __future__ import annotations

import functools
import json
import logging
import struct
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from pie_driver_sglang._core import SlotGroup

logger = logging.getLogger(__name__)

MAX_SEQUENCES: Final = 4096
"""Sequences whose processors are kept; more than a driver has running."""
MAX_BYTES: Final = 256 << 20
"""Bytes of their payloads together: those of sequences that have ended stay until then."""
MAX_CLASSES: Final = 256
"""Deserialized classes that are kept."""
OFF: Final = "custom logit processors are off in this driver: set `enable_custom_logit_processor`"
_LOGGED: Final = 300
"""Characters of an error's text for the client."""


class ProcessedRequest:
    """What a processor finds as `__req__` in its parameters, of SGLang's `Req`.

    Attributes:
        origin_input_ids: The prompt: an array of 64-bit integers.
        output_ids: The output so far.
    """

    def __init__(self, prompt: array[int]) -> None:
        self.origin_input_ids = prompt
        self.output_ids = array("q")


class _Sequence(NamedTuple):
    """A processor with its parameters, which may keep state from token to token."""

    payload: bytes
    processor: Any
    params: dict[str, Any] | None
    request: ProcessedRequest


class CustomProcessors:
    """Runs the processors of sampled rows."""

    def __init__(self, *, enabled: bool = False) -> None:
        """Off by default: a processor is a pickle, which runs any code.

        Args:
            enabled: The operator allows it.
        """
        self._enabled = enabled
        self._sequences: OrderedDict[int, _Sequence] = OrderedDict()
        self._bytes = 0

    def apply(self, logits: torch.Tensor, group: SlotGroup) -> tuple[tuple[int, str], ...]:
        """Changes the rows of the slots that have a processor.

        Args:
            logits: ``[slots, vocabulary]`` float32, after penalties, biases and masks.
            group: The staged group.

        Returns:
            The slots whose processor failed, and why; their rows are as before.
        """
        failures = []
        for slot, context, payload, tokens in group.custom:
            try:
                self._process(logits[slot : slot + 1], context, payload, tokens)
            # All of them, as CancelledError is no Exception: drivers ignore interrupts.
            except BaseException as error:
                reason = _reason(error)
                logger.warning("a custom logit processor failed: %s", reason, exc_info=True)
                self._take(context)
                failures.append((slot, reason))
        return tuple(failures)

    def _process(self, row: torch.Tensor, context: int, payload: bytes, tokens: bytes) -> None:
        if not self._enabled:
            raise PermissionError(OFF)
        own = self._sequence(context, payload, tokens)
        changed = own.processor(row.clone(), [own.params])
        if not isinstance(changed, torch.Tensor):
            raise TypeError(f"it returned {type(changed).__name__}, expected the logits")
        if changed.shape != row.shape:
            found, expected = list(changed.shape), list(row.shape)
            raise ValueError(f"it returned logits of shape {found}, expected {expected}")
        largest = changed.float().max()
        if not bool(largest.isfinite()):
            # Of a row with NaN the largest is NaN, of one without any token -inf.
            raise ValueError("it returned logits without a finite largest one")
        row.copy_(changed)

    def _sequence(self, context: int, payload: bytes, tokens: bytes) -> _Sequence:
        """The sequence of a context, with its output so far."""
        ids = array("q", memoryview(tokens).cast("I").tolist())
        (prompt,) = struct.unpack_from("<I", payload)
        output = ids[prompt:]
        own = self._take(context)
        is_new = own is None or own.payload != payload
        if own is None or is_new or len(output) < len(own.request.output_ids):
            own = _opened(payload, ids[:prompt])
        own.request.output_ids = output
        # Frames without a context id have 0.
        if context:
            self._sequences[context] = own
            self._bytes += len(payload)
        while len(self._sequences) > MAX_SEQUENCES or self._bytes > MAX_BYTES:
            self._take(next(iter(self._sequences)))
        return own

    def _take(self, context: int) -> _Sequence | None:
        """Forgets the sequence of a context, and returns it."""
        own = self._sequences.pop(context, None)
        self._bytes -= 0 if own is None else len(own.payload)
        return own


def _reason(error: BaseException) -> str:
    """The kind and the text of an error in one line, whatever its class does."""
    try:
        text = str(error)
    except BaseException:
        text = "an error without a text"
    # Lone surrogates are in no answer.
    text = text[:_LOGGED].encode(errors="backslashreplace").decode()
    return " ".join(f"{type(error).__name__}: {text}".split())[:_LOGGED]


def _opened(payload: bytes, prompt: array[int]) -> _Sequence:
    given = json.loads(payload[4:])
    params = given["params"]
    request = ProcessedRequest(prompt)
    if params is not None:
        params["__req__"] = request
    return _Sequence(payload, _class(given["callable"])(), params, request)


@functools.lru_cache(maxsize=MAX_CLASSES)
def _class(text: str) -> Any:
    """The class that `CustomLogitProcessor.to_str` has serialized."""
    # Imported here: only drivers with processors need it.
    import dill

    return dill.loads(bytes.fromhex(json.loads(text)["callable"]))
