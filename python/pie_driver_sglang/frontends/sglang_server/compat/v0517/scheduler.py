"""Implements `SchedulerCompat`: a process is told each of its ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from sglang.srt.managers import load_snapshot
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

from pie_driver_sglang.frontends.sglang_server.compat.protocols import ReadImage

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

POSITIONAL: Final = {
    "sglang.srt.managers.scheduler.run_scheduler_process": (
        "server_args",
        "port_args",
        "gpu_id",
        "tp_rank",
        "attn_cp_rank",
        "moe_dp_rank",
        "moe_ep_rank",
        "pp_rank",
        "dp_rank",
        "pipe_writer",
        "display_tp_rank",
        "display_dp_rank",
        "display_moe_ep_rank",
    ),
}
"""Parameters that SGLang passes by position; `tools/check_compat.py` compares their order."""


def parameters() -> tuple[str, ...]:
    """All of them."""
    (names,) = POSITIONAL.values()
    return names


def ranks_of(scheduler: Any) -> tuple[int, int | None]:
    """By its `ParallelState`."""
    return scheduler.ps.tp_rank, scheduler.ps.dp_rank


def uses_zmq(args: ServerArgs) -> bool:
    """By the settings and a variable."""
    return bool(load_snapshot.should_use_zmq(args))


def make_load_writer(args: ServerArgs, ports: PortArgs, replicas: int, replica: int) -> Any:
    """By the settings."""
    return load_snapshot.create_load_snapshot_writer(
        args, port_args=ports, dp_size=replicas, dp_rank=replica
    )


def media_classes() -> tuple[type, ...]:
    """None."""
    return ()


def image_reader() -> Callable[[bytes], list[ReadImage]]:
    """They are pickled."""
    from pie_driver_sglang.frontends.sglang_server.compat.v0517.image_inputs import read_images

    return read_images


def parallelism_of(rank: dict[str, int]) -> dict[str, int]:
    """As they are."""
    return rank


def make_collector(args: ServerArgs, rank: int, replica: int | None) -> Any:
    """All ranks but that of tensor parallelism are 0."""
    leader = SimpleNamespace(pp_rank=0, attn_tp_rank=0, attn_cp_rank=0, moe_ep_rank=0)
    context = SchedulerMetricsCollector.init_new(
        server_args=args,
        ps=leader,
        tp_rank=rank,
        pp_rank=0,
        dp_rank=replica,
        enable_priority_scheduling=args.enable_priority_scheduling,
        enable_lora=bool(args.enable_lora),
        # Its gauges are of the host's tier, which ours has without that flag, too.
        enable_hierarchical_cache=True,
    )
    return context.collector
