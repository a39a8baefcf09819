"""Implements `PassesCompat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def read_block_table(runner: ModelRunner) -> None:
    """Nothing: they take it from the runner."""


def plan_kv(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Nothing: they read the block table."""
