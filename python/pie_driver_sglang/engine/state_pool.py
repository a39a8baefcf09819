"""Recurrent state: the slots of a backend's state as the runtime names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pie_driver_sglang.engine.backend_features import StateBackend


class StatePool:
    """The state of a model's recurrent layers: convolution windows and matrices.

    The runtime's slot `s` is the pool's slot `s + 1`; slot 0 is for padding, and for requests that
    may not keep their state.
    """

    def __init__(self, backend: StateBackend) -> None:
        self._backend = backend
        self._rows = backend.rows

    @property
    def slots(self) -> int:
        """Slots that the runtime may name: ``0..slots``."""
        return self._backend.slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot over all layers."""
        return sum(part[:, 0].numel() * part.itemsize for part in self._backend.parts)

    def assign(self, rows: torch.Tensor, states: bytearray) -> None:
        """Names the state of the requests of a pass.

        Args:
            rows: ``[requests]`` int64: their rows of the block table.
            states: As `Pass.states` has it.
        """
        pairs = torch.frombuffer(states, dtype=torch.int64).view(-1, 2)
        self._rows[rows] = pairs[:, 0].to(self._rows)
        fresh = pairs[pairs[:, 1] != 0, 0]
        if len(fresh):
            self._backend.clear(fresh.to(self._rows.device))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots; see `ModelExecutor.copy_states`."""
        device = self._rows.device
        source, target = (torch.tensor(ids, device=device) + 1 for ids in (sources, targets))
        self._backend.copy(source, target)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
