"""Implements `PassesCompat`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def read_block_table(runner: ModelRunner) -> None:
    """They take it from a translator, which was made with the pools and keeps their table."""
    runner.init_kv_index_translator()


def plan_kv(runner: ModelRunner, batch: ForwardBatch) -> None:
    """As `ForwardBatch.init_new` does it; our pools keep the tensors of the batch."""
    translator = runner.kv_index_translator
    translator.own_plan(batch).bind(batch, translator)
