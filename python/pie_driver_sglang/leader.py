"""The engine of a model that is spread over several processes, as its leader has it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from pie_driver_sglang.commands import Command, CopyPages, CopyStates, Forward, Logits
from pie_driver_sglang.engine import Engine, Facts

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pie_driver_sglang._core import Broadcast, Lane, Pass, SlotGroup
    from pie_driver_sglang.sampling import Outputs


class Ranked(Engine, Protocol):
    """An engine that knows which part of the staging block the other ranks need."""

    def pass_bytes(self, batch: Pass) -> int:
        """Length of the block's beginning that a pass is staged in."""

    @property
    def slot_bytes(self) -> int:
        """Length of the block's beginning that slots are staged in."""


class LeadingEngine:
    """Implements :class:`pie_driver_sglang.engine.Engine` on all ranks at once.

    Whatever this rank's engine does, the others are told first, so that they do it at the same
    time. Sampling is this rank's alone.
    """

    recovers = False
    """A rank that fails leaves the others waiting in a collective operation."""

    def __init__(self, engine: Ranked, broadcast: Broadcast) -> None:
        self._engine = engine
        self._broadcast = broadcast

    @property
    def facts(self) -> Facts:
        """The same on all ranks."""
        return self._engine.facts

    @property
    def block(self) -> npt.NDArray[np.uint8]:
        """This rank's; see :attr:`pie_driver_sglang.engine.Engine.block`."""
        return self._engine.block

    @property
    def lane(self) -> Lane | None:
        """This rank's, which tells the others of every step that it launches."""
        lane = self._engine.lane
        if lane is not None:
            lane.lead(self._broadcast)
        return lane

    def forward(self, batch: Pass) -> None:
        """Runs the pass; see :meth:`pie_driver_sglang.engine.Engine.forward`."""
        self._broadcast.send_block(self.block.data, self._engine.pass_bytes(batch))
        self._tell(Forward.of(batch))
        self._engine.forward(batch)

    def sample(self, group: SlotGroup) -> Outputs:
        """Computes the group; see :meth:`pie_driver_sglang.engine.Engine.sample`."""
        self._broadcast.send_block(self.block.data, self._engine.slot_bytes)
        self._tell(Logits(len(group)))
        return self._engine.sample(group)

    def take_waits(self) -> tuple[int, int]:
        """This rank's; see :meth:`pie_driver_sglang.engine.Engine.take_waits`."""
        return self._engine.take_waits()

    def copy_pages(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies each rank's part; see :meth:`pie_driver_sglang.engine.Engine.copy_pages`."""
        self._tell(CopyPages(direction, sources, targets))
        self._engine.copy_pages(direction, sources, targets)

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies each rank's part; see :meth:`pie_driver_sglang.engine.Engine.copy_states`."""
        self._tell(CopyStates(sources, targets))
        self._engine.copy_states(sources, targets)

    def load_adapter(self, adapter_id: int, path: str) -> None:
        """Adapters are off; see :meth:`pie_driver_sglang.engine.Engine.load_adapter`."""
        self._engine.load_adapter(adapter_id, path)

    def fetch_adapters(self, adapter_ids: Sequence[int]) -> dict[int, str]:
        """Adapters are off; see :meth:`pie_driver_sglang.engine.Engine.fetch_adapters`."""
        return self._engine.fetch_adapters(adapter_ids)

    def rehearsal_adapter(self) -> AbstractContextManager[None]:
        """Adapters are off; see :meth:`pie_driver_sglang.engine.Engine.rehearsal_adapter`."""
        return self._engine.rehearsal_adapter()

    def _tell(self, command: Command) -> None:
        self._broadcast.send(pickle.dumps(command))
