"""Implements `RanksCompat`: `ModelRunner` is given a `ParallelState`, and keeps it as `ps`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


def runner_arguments(rank: int, size: int, gpu_id: int) -> dict[str, Any]:
    """The state, which has all ranks in one group of tensor parallelism."""
    from sglang.srt.distributed.parallel_state_wrapper import ParallelState

    state = ParallelState.trivial(
        gpu_id=gpu_id,
        tp_rank=rank,
        tp_size=size,
        attn_tp_rank=rank,
        attn_tp_size=size,
    )
    return {"ps": state}


def make_groups(args: ServerArgs, model_config: ModelConfig) -> None:
    """Nothing: the runner makes them."""


def rank_and_size(runner: ModelRunner) -> tuple[int, int]:
    """By the runner's state."""
    return runner.ps.tp_rank, runner.ps.tp_size
