"""From a configuration to a planner and an executor over a model that SGLang has loaded."""

from __future__ import annotations

from collections.abc import Callable

from pie_driver_sglang._core import Planner
from pie_driver_sglang.backends.sglang.boot import boot, within
from pie_driver_sglang.backends.sglang.model_backend import SglangBackend
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.engine.backend_executor import BackendExecutor
from pie_driver_sglang.engine.build import build_executor
from pie_driver_sglang.ranks.types import ALONE, Rank


def load_engine(
    config: DriverConfig, rank: Rank = ALONE, before_kernels: Callable[[], None] = lambda: None
) -> tuple[Planner, BackendExecutor]:
    """Loads a rank's part of the model and plans for its sizes.

    Args:
        config: The driver's.
        rank: Which part.
        before_kernels: Is called once the weights are loaded, before kernels are launched.

    Raises:
        StartError: The model cannot be loaded or served here.
    """
    booted = boot(config, rank)
    before_kernels()
    with within(booted.plan):
        backend = SglangBackend(booted, rank)
        return build_executor(backend, booted.block_table, booted.plan, config)
