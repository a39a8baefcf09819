"""Recurrent state: the slots of SGLang's state pool as the runtime names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


class StatePool:
    """The state of a model's recurrent layers: convolution windows and matrices.

    The runtime's slot `s` is the pool's slot `s + 1`; slot 0 is for padding, and for requests that
    may not keep their state.
    """

    def __init__(self, table: HybridReqToTokenPool) -> None:
        self._rows = table.req_index_to_mamba_index_mapping
        self._pool = table.mamba_pool
        cache = self._pool.mamba_cache
        self._parts: list[torch.Tensor] = [*cache.conv, cache.temporal]

    @staticmethod
    def of(table: ReqToTokenPool) -> StatePool | None:
        """The pool beside a block table; None for a model without recurrent layers."""
        return StatePool(table) if isinstance(table, HybridReqToTokenPool) else None

    @property
    def slots(self) -> int:
        """Slots that the runtime may name: ``0..slots``."""
        return int(self._pool.size)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot over all layers."""
        return sum(part[:, 0].numel() * part.itemsize for part in self._parts)

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
            self._pool.clear_slots(fresh.to(self._rows.device))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots; see :meth:`pie_driver_sglang.engine.ModelEngine.copy_states`."""
        device = self._rows.device
        source, target = (torch.tensor(ids, device=device) + 1 for ids in (sources, targets))
        self._pool.copy_from(source, target)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def widen(table: HybridReqToTokenPool, plain: ReqToTokenPool) -> None:
    """Gives a hybrid model's block table the rows of another one, and keeps its states."""
    for name in ("size", "_alloc_size", "max_context_len", "req_to_token", "free_slots"):
        setattr(table, name, getattr(plain, name))
    table.req_generation = plain.req_generation
    rows = plain.req_to_token.shape[0]
    table.req_index_to_mamba_index_mapping = torch.zeros(
        rows, dtype=torch.int32, device=plain.req_to_token.device
    )
