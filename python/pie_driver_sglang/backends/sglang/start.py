"""From a configuration to a loaded rank: the environment, the device, then SGLang itself."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from pie_driver_sglang.backends.sglang import environment
from pie_driver_sglang.backends.sglang.compile_ahead import CompileAhead
from pie_driver_sglang.backends.sglang.version import warn_untried
from pie_driver_sglang.config.driver_config import NEVER_PARK, DriverConfig
from pie_driver_sglang.engine.device import begin_context, check_device
from pie_driver_sglang.observability import start_spans

if TYPE_CHECKING:
    from pie_driver_sglang import _core
    from pie_driver_sglang.engine.backend_executor import BackendExecutor
    from pie_driver_sglang.ranks.types import Rank

logger = logging.getLogger(__name__)


def load_rank(config: DriverConfig, rank: Rank) -> tuple[_core.Planner, BackendExecutor]:
    """Loads a rank's part of the model; all ranks do so at once.

    Raises:
        DriverError: The device is not there, or the model cannot be loaded or served on it.
    """
    device = config.driver.device[rank.number]
    architectures = config.model.hf_config["architectures"]
    spins = config.driver.spin_budget_us == NEVER_PARK
    environment.prepare(device, architectures, spins=spins, ranks=rank.size)
    with CompileAhead.begin(config, rank) as kernels:
        return _load(config, rank, kernels)


def _load(
    config: DriverConfig, rank: Rank, kernels: CompileAhead
) -> tuple[_core.Planner, BackendExecutor]:
    """Imports SGLang and loads the model, while kernels are compiled."""
    device = config.driver.device[rank.number]
    begin_context(device)
    with start_spans.span("imports"):
        check_device(device)
        logger.info("importing SGLang")
        with environment.importing_sglang(device, is_driver=True):
            from pie_driver_sglang.backends.sglang.load import load_engine

    if rank.number == 0:
        warn_untried(device)
    logger.info("loading %s", config.model.snapshot_dir)
    planner, engine = load_engine(config, rank, kernels.wait)
    if config.driver.options.nvtx:
        from pie_driver_sglang.engine.nvtx_ranges import mark_calls

        mark_calls(engine)
    return planner, engine
