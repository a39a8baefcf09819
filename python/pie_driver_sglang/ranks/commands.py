"""Commands that a leader sends to its workers, which run them in order.

Commands travel as pickles between the processes of one start, over memory that no other process
maps. The pixels of images travel next to the pickle, so that they are copied once on the way there.
Steps of the graph path bypass Python and need no command.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pie_driver_sglang.engine.control_commands import ControlCommand
from pie_driver_sglang.engine.executor import ModelExecutor
from pie_driver_sglang.errors import AdapterError, WeightsError
from pie_driver_sglang.ranks.types import Images, Mask, Span

if TYPE_CHECKING:
    import torch

    from pie_driver_sglang._core import Pass, PassImages, SlotGroup
    from pie_driver_sglang.kernels.sampling.outputs import Outputs


class RankExecutor(ModelExecutor, Protocol):
    """The engine of one rank of several.

    The leader calls it between a broadcast and the answer; every other rank calls it from the
    commands that it receives. Threads, streams and errors are those of
    `ModelExecutor`. Calls that reduce or gather over ranks
    block the device until all ranks have made them.
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

        Blocks as :meth:`~pie_driver_sglang.engine.executor.ModelExecutor.sample` does; may change
        `logits`.
        """


class Forward(NamedTuple):
    """Run the staged pass: a copy of `Pass`."""

    tokens: int
    requests: int
    decode: bool
    seq_lens_sum: int
    updates: int
    slots: int
    mask: Mask | None
    adapters: bytes | None
    images: Images | None
    states: bytearray | None
    token_history: bytes | None = None

    @staticmethod
    def of(batch: Pass, known: Container[int] = ()) -> Forward:
        """Copies a pass of the planner.

        Args:
            batch: The pass.
            known: Images that the previous pass had as well; their pixels are not sent again.
        """
        mask = batch.mask
        return Forward(
            tokens=batch.tokens,
            requests=batch.requests,
            decode=batch.decode,
            seq_lens_sum=batch.seq_lens_sum,
            updates=batch.updates,
            slots=batch.slots,
            mask=None if mask is None else Mask(mask.offsets, mask.words),
            adapters=batch.adapters,
            images=None if batch.images is None else _copied(batch.images, known),
            states=batch.states,
            token_history=batch.token_history,
        )

    @property
    def spans(self) -> list[Span]:
        """Its images."""
        return [] if self.images is None else self.images.spans

    def run(self, engine: RankExecutor) -> None:
        """Runs it."""
        engine.forward(self)


class Logits(NamedTuple):
    """Compute the logits of the staged slots."""

    slots: int

    def run(self, engine: RankExecutor) -> None:
        """Runs it."""
        engine.compute_logits(self.slots)


class CopyPages(NamedTuple):
    """Copy pages."""

    direction: str
    sources: Sequence[int]
    targets: Sequence[int]

    def run(self, engine: RankExecutor) -> None:
        """Runs it."""
        engine.copy_pages(*self)


class CopyStates(NamedTuple):
    """Copy slots of recurrent state."""

    sources: Sequence[int]
    targets: Sequence[int]

    def run(self, engine: RankExecutor) -> None:
        """Runs it."""
        engine.copy_states(*self)


class BeginLoad(NamedTuple):
    """Begin to read an adapter."""

    number: int
    adapter_id: int
    path: str

    def run(self, engine: RankExecutor) -> None:
        """Runs it. The leader sends `FinishLoad` once it has read its own files."""
        engine.begin_load(*self, done=lambda: None)


class FinishLoad(NamedTuple):
    """Continue to make the adapter usable, once this rank has read it."""

    number: int

    def run(self, engine: RankExecutor) -> None:
        """Runs it. The leader reports a failure."""
        with contextlib.suppress(AdapterError):
            engine.finish_load(self.number)


class DiscardLoad(NamedTuple):
    """Drop what was read."""

    number: int

    def run(self, engine: RankExecutor) -> None:
        """Runs it."""
        engine.discard_load(self.number)


class FetchAdapters(NamedTuple):
    """Make the adapters of the next pass ready."""

    adapter_ids: Sequence[int]

    def run(self, engine: RankExecutor) -> None:
        """Runs it. The leader finds the same adapters missing."""
        engine.fetch_adapters(self.adapter_ids)


class LoadWarmUpAdapter(NamedTuple):
    """Load the adapter of the warm-up."""

    def run(self, engine: RankExecutor) -> None:
        """Runs it. The leader reports a failure."""
        with contextlib.suppress(AdapterError):
            engine.load_warm_up_adapter()


class DropWarmUpAdapter(NamedTuple):
    """Remove the adapter of the warm-up."""

    def run(self, engine: RankExecutor) -> None:
        """Runs it."""
        engine.drop_warm_up_adapter()


class Control(NamedTuple):
    """Update, read, release or resume the weights; unload an adapter; start or stop a profile."""

    command: ControlCommand

    def run(self, engine: RankExecutor) -> None:
        """Runs it. All ranks refuse the same, and the leader reports it."""
        with contextlib.suppress(WeightsError):
            engine.control(self.command)


Command = (
    Forward
    | Logits
    | CopyPages
    | CopyStates
    | BeginLoad
    | FinishLoad
    | DiscardLoad
    | FetchAdapters
    | LoadWarmUpAdapter
    | DropWarmUpAdapter
    | Control
)


def pack(command: Command) -> list[bytes | memoryview]:
    """Makes the parts of a message: sizes, buffers that the pickle leaves out, and the pickle.

    A buffer is the sender's own memory, not a copy.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(command, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = struct.pack(f"<{len(views) + 1}Q", len(views), *(view.nbytes for view in views))
    return [sizes, *views, body]


def unpack(message: bytes) -> Command:
    """Reads a message of :func:`pack`; buffers are views over it, aligned as their sizes are."""
    view = memoryview(message)
    (count,) = struct.unpack_from("<Q", view)
    at = 8 * (count + 1)
    buffers = []
    for size in struct.unpack_from(f"<{count}Q", view, 8):
        buffers.append(view[at : at + size])
        at += size
    command: Command = pickle.loads(view[at:], buffers=buffers)
    return command


def _copied(images: PassImages, known: Container[int]) -> Images:
    spans = []
    for span in images.spans:
        pixels = b"" if span.number in known else pickle.PickleBuffer(span.pixels)
        row = (span.number, span.request, span.kv, span.continues, span.grid)
        spans.append(Span(*row, pixels))
    return Images(spans, images.positions)
