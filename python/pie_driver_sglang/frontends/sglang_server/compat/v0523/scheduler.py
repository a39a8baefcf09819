"""Implements `SchedulerCompat`: ranks are those that the process has published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sglang.srt.managers import load_snapshot
from sglang.srt.managers.schedule_batch import MultimodalDataItem, MultimodalProcessorOutput
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector
from sglang.srt.runtime_context import get_lora, get_parallel, get_schedule

if TYPE_CHECKING:
    from sglang.srt.server_args import PortArgs, ServerArgs

POSITIONAL: Final = {
    "sglang.srt.managers.scheduler.run_scheduler_process": (
        "server_args",
        "port_args",
        "gpu_id",
        "tp_rank",
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
    """Those of the process; a scheduler keeps none."""
    parallel = get_parallel()
    return parallel.tp_rank, parallel.dp_rank


def uses_zmq(args: ServerArgs) -> bool:
    """By the published settings and a variable."""
    return bool(load_snapshot.should_use_zmq())


def make_load_writer(args: ServerArgs, ports: PortArgs, replicas: int, replica: int) -> Any:
    """By the published settings."""
    return load_snapshot.create_load_snapshot_writer(ports, dp_size=replicas, dp_rank=replica)


def media_classes() -> tuple[type, ...]:
    """A processor's output and its items."""
    return MultimodalProcessorOutput, MultimodalDataItem


def image_reader() -> None:
    """None: Rust reads them."""


def parallelism_of(rank: dict[str, int]) -> list[dict[str, Any]]:
    """For each model of the process; ours has no draft model."""
    return [{"role": "target", **rank}]


def make_collector(args: ServerArgs, rank: int, replica: int | None) -> Any:
    """Its labels have the published ranks."""
    context = SchedulerMetricsCollector.init_new(
        server_args=args,
        enable_priority_scheduling=get_schedule().enable_priority_scheduling,
        enable_lora=bool(get_lora().enable_lora),
        # Its gauges are of the host's tier, which ours has without that flag, too.
        enable_hierarchical_cache=True,
    )
    return context.collector
