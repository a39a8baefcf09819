"""Ranks, their engine, and the data that a leader sends of a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from pie_driver_sglang.engine import ModelEngine

if TYPE_CHECKING:
    from pickle import PickleBuffer

    import torch

    from pie_driver_sglang._core import Pass, SlotGroup
    from pie_driver_sglang.ranks.commands import Forward
    from pie_driver_sglang.sampling.types import Outputs


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
    """A copy of :class:`pie_driver_sglang._core.AttentionMask`."""

    offsets: bytearray
    words: bytearray


class Span(NamedTuple):
    """A copy of :class:`pie_driver_sglang._core.ImageSpan`."""

    number: int
    request: int
    kv: tuple[int, int]
    continues: bool
    grid: tuple[int, int, int]
    pixels: bytes | PickleBuffer | memoryview
    """Empty where the former pass had the image; a worker gets a view over the message."""


class Images(NamedTuple):
    """A copy of :class:`pie_driver_sglang._core.PassImages`."""

    spans: list[Span]
    positions: bytearray


class RankEngine(ModelEngine, Protocol):
    """The engine of one rank of several.

    The leader calls it between a broadcast and the answer; every other rank calls it from the
    commands that it receives (`commands.py`). Threads, streams and errors are those of
    :class:`~pie_driver_sglang.engine.ModelEngine`. Calls that reduce or gather over ranks block the
    device until all ranks have made them.
    """

    def forward(self, batch: Pass | Forward) -> None:
        """Runs the staged pass, or a copy of it that the leader has sent."""

    def pass_bytes(self, batch: Pass) -> int:
        """Bytes at the start of the block that hold a staged pass."""

    @property
    def slot_bytes(self) -> int:
        """Bytes at the start of the block that hold staged slots, without their masks."""

    def slot_logits(self, group: SlotGroup) -> torch.Tensor:
        """Computes the logits of the staged slots, with all ranks.

        Returns:
            ``[slots, vocabulary]`` float32 on the device.
        """

    def compute_logits(self, slots: int) -> None:
        """Computes this rank's part of the logits of the staged slots, for the leader."""

    def sample_logits(self, group: SlotGroup, logits: torch.Tensor) -> Outputs:
        """Samples the staged slots from their logits, on this rank only.

        Blocks as :meth:`~pie_driver_sglang.engine.ModelEngine.sample` does; may change `logits`.
        """
