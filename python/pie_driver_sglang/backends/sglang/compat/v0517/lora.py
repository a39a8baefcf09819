"""Implements `LoraCompat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.lora.lora_manager import LoRAManager


def bind_by_memory(manager: LoRAManager, rows: int) -> None:
    """A row is a request of one token."""
    manager.init_cuda_graph_batch_info(rows, num_tokens_per_req=1)
