"""From a configuration to a loaded rank: the environment, then vLLM itself."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pie_driver_sglang.backends.environment import (
    importing,
    prepare_host,
    prepare_libraries,
    prepare_local_ranks,
)
from pie_driver_sglang.backends.vllm.compat import process
from pie_driver_sglang.backends.vllm.version import REMEDY, check_build
from pie_driver_sglang.config.driver_config import NEVER_PARK, DriverConfig
from pie_driver_sglang.config.vllm_options import VLLM_NAMES
from pie_driver_sglang.engine.device import begin_context, check_device
from pie_driver_sglang.errors import StartError, rename_options
from pie_driver_sglang.observability.active import REASONS

if TYPE_CHECKING:
    from pie_driver_sglang import _core
    from pie_driver_sglang.engine.backend_executor import BackendExecutor
    from pie_driver_sglang.ranks.types import Rank

logger = logging.getLogger(__name__)


def load_vllm(config: DriverConfig, rank: Rank) -> tuple[_core.Planner, BackendExecutor]:
    """Loads a rank's part of the model; all ranks do so at once.

    Raises:
        DriverError: The device is not there, or the model cannot be loaded or served on it.
    """
    device = config.driver.device[rank.number]
    check_build(device)
    prepare_host(spins=config.driver.spin_budget_us == NEVER_PARK, ranks=rank.size)
    prepare_libraries(process.VLLM_FOLDERS)
    process.set_variables()
    if rank.size > 1:
        prepare_local_ranks()
        process.disable_multicast()
    if not logger.isEnabledFor(logging.DEBUG):
        # It warns on every start of what a CPU lacks.
        logging.getLogger("vllm").setLevel(logging.ERROR)
    begin_context(device)
    with _named_packages(), importing(process.UNNEEDED):
        check_device(device)
        logger.info("importing vLLM")
        from pie_driver_sglang.backends.vllm.boot import boot_vllm
        from pie_driver_sglang.backends.vllm.model_backend import VllmBackend
        from pie_driver_sglang.engine.build import build_executor

        if config.driver.options.enable_lora:
            # Its imports take seconds.
            import pie_driver_sglang.backends.vllm.lora  # noqa: F401

    logger.info("loading %s", config.model.snapshot_dir)
    booted = boot_vllm(config, rank)
    backend = VllmBackend(booted, rank)
    planner, executor = build_executor(backend, booted.block_table, booted.plan, config)
    reasons = executor.active[REASONS].items()
    named = {part: rename_options(reason, VLLM_NAMES) for part, reason in reasons}
    executor.active = {**executor.active, REASONS: named}
    return planner, executor


@contextlib.contextmanager
def _named_packages() -> Iterator[None]:
    """Turns a package that vLLM lacks into one line."""
    try:
        yield
    except ModuleNotFoundError as error:
        logger.debug("the import of vLLM failed", exc_info=True)
        raise StartError(
            f"vLLM needs {error.name or error}, which is not in {sys.prefix}", REMEDY
        ) from error
