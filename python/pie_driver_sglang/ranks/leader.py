"""`LeaderExecutor`: the executor of rank 0, which has all ranks run each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pie_driver_sglang.errors import AdapterError, WeightsError
from pie_driver_sglang.ranks.commands import (
    BeginLoad,
    Command,
    Control,
    CopyPages,
    CopyStates,
    DiscardLoad,
    DropWarmUpAdapter,
    FetchAdapters,
    FinishLoad,
    Forward,
    LoadWarmUpAdapter,
    Logits,
    pack,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pie_driver_sglang._core import Broadcast, GraphPath, Pass, SlotGroup
    from pie_driver_sglang.engine.control_commands import ControlCommand
    from pie_driver_sglang.engine.executor import ModelInfo
    from pie_driver_sglang.kernels.sampling.outputs import Outputs
    from pie_driver_sglang.ranks.commands import RankExecutor


class LeaderExecutor:
    """Implements `ModelExecutor` on all ranks at once.

    Each call is broadcast to the other ranks before this rank's engine runs it, so all ranks run it
    at the same time. Only this rank samples.
    """

    recovers = True
    """False once this rank has failed in a collective operation that the others wait for."""

    def __init__(self, engine: RankExecutor, broadcast: Broadcast) -> None:
        self._engine = engine
        self._broadcast = broadcast
        self._continued: list[int] = []
        """Images of the last pass that continue in the next one; workers have their pixels."""

    def find_loss(self) -> str | None:
        """Asks this rank's device; None if it may be waiting for the other ranks."""
        return self._engine.find_loss() if self.recovers else None

    @property
    def model_info(self) -> ModelInfo:
        """Sizes and names, equal on all ranks."""
        return self._engine.model_info

    @property
    def active(self) -> Mapping[str, Any]:
        """What runs the model, equal on all ranks."""
        return self._engine.active

    @property
    def block(self) -> npt.NDArray[np.uint8]:
        """This rank's block; see `ModelExecutor.block`."""
        return self._engine.block

    def make_graph_path(self) -> GraphPath | None:
        """Makes this rank's graph path, which broadcasts every step before its launch."""
        graph_path = self._engine.make_graph_path()
        if graph_path is not None:
            graph_path.lead(self._broadcast)
        return graph_path

    def forward(self, batch: Pass) -> None:
        """Runs the pass; see `ModelExecutor.forward`."""
        self._broadcast.send_block(self.block.data, self._engine.pass_bytes(batch))
        command = Forward.of(batch, self._continued)
        self._continued = [span.number for span in command.spans if span.continues]
        with self._together(command):
            self._engine.forward(batch)

    def sample(self, group: SlotGroup) -> Outputs:
        """Computes the group; see `ModelExecutor.sample`."""
        self._broadcast.send_block(self.block.data, self._engine.slot_bytes)
        with self._together(Logits(len(group))):
            logits = self._engine.slot_logits(group)
        return self._engine.sample_logits(group, logits)

    def take_waits(self) -> tuple[int, int]:
        """This rank's times; see `ModelExecutor.take_waits`."""
        return self._engine.take_waits()

    def copy_pages(self, direction: str, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies each rank's part; see `ModelExecutor.copy_pages`."""
        with self._together(CopyPages(direction, sources, targets)):
            self._engine.copy_pages(direction, sources, targets)

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies each rank's part; see `ModelExecutor.copy_states`."""
        with self._together(CopyStates(sources, targets)):
            self._engine.copy_states(sources, targets)

    def begin_load(
        self, number: int, adapter_id: int, path: str, done: Callable[[], object]
    ) -> None:
        """Reads it on all ranks; see `ModelExecutor.begin_load`.

        It is done when all of them have read it.
        """
        with self._together(BeginLoad(number, adapter_id, path)):
            self._engine.begin_load(number, adapter_id, path, done)

    def finish_load(self, number: int) -> bool:
        """On all ranks or on none; see `ModelExecutor.finish_load`."""
        with self._together(FinishLoad(number)):
            return self._engine.finish_load(number)

    def discard_load(self, number: int) -> None:
        """On all ranks; see `ModelExecutor.discard_load`."""
        with self._together(DiscardLoad(number)):
            self._engine.discard_load(number)

    def fetch_adapters(self, adapter_ids: Sequence[int]) -> dict[int, str]:
        """On all ranks; see `ModelExecutor.fetch_adapters`."""
        with self._together(FetchAdapters(adapter_ids)):
            return self._engine.fetch_adapters(adapter_ids)

    def graph_adapter_slots(self) -> list[tuple[int, int]]:
        """The same on all ranks; see `ModelExecutor.graph_adapter_slots`."""
        return self._engine.graph_adapter_slots()

    def load_warm_up_adapter(self) -> None:
        """On all ranks; see `ModelExecutor.load_warm_up_adapter`."""
        with self._together(LoadWarmUpAdapter()):
            self._engine.load_warm_up_adapter()

    def drop_warm_up_adapter(self) -> None:
        """On all ranks; see `ModelExecutor.drop_warm_up_adapter`."""
        with self._together(DropWarmUpAdapter()):
            self._engine.drop_warm_up_adapter()

    def control(self, command: ControlCommand) -> dict[str, Any]:
        """Runs the command on all ranks; see `ModelExecutor.control`."""
        with self._together(Control(command)):
            return self._engine.control(command)

    @contextlib.contextmanager
    def _together(self, command: Command) -> Iterator[None]:
        """Broadcasts `command`, then runs the body on this rank."""
        self.recovers = False
        self._broadcast.send(pack(command))
        try:
            yield
        except (AdapterError, WeightsError):
            # All ranks refuse it, so none of them waits for another.
            self.recovers = True
            raise
        self.recovers = True
