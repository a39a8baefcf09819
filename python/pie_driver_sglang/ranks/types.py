"""Ranks, and the data that a leader sends of a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pickle import PickleBuffer


class Rank(NamedTuple):
    """One process of a model."""

    number: int = 0
    """``0..size``; 0 is the leader."""
    size: int = 1
    """Processes of the model."""
    rendezvous: int = -1
    """Descriptor of the file for the rendezvous; -1 for a single rank."""


ALONE = Rank()
"""The rank of a model on one device."""


class Mask(NamedTuple):
    """A copy of `AttentionMask`."""

    offsets: bytearray
    words: bytearray


class Span(NamedTuple):
    """A copy of `ImageSpan`."""

    number: int
    request: int
    kv: tuple[int, int]
    continues: bool
    grid: tuple[int, int, int]
    pixels: bytes | PickleBuffer | memoryview
    """Empty where the former pass had the image; a worker gets a view over the message."""


class Images(NamedTuple):
    """A copy of `PassImages`."""

    spans: list[Span]
    positions: bytearray
