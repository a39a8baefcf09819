"""Implements `RanksCompat`: the rank is published with the settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import ServerArgs


def runner_arguments(rank: int, size: int, gpu_id: int) -> dict[str, Any]:
    """None: `SettingsCompat.publish` has named the rank."""
    return {}


def make_groups(args: ServerArgs, model_config: ModelConfig) -> None:
    """As SGLang's scheduler does it before it makes a runner; once in a process."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import get_device

    # torch's process group is there already, so the port is not used.
    bootstrap.init_parallel_runtime(server_args=args, device=get_device().device, dist_port=0)
    bootstrap.init_layer_runtime(model_config=model_config)


def rank_and_size(runner: ModelRunner) -> tuple[int, int]:
    """Those of the process; a runner keeps none."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return int(parallel.tp_rank), int(parallel.tp_size)
