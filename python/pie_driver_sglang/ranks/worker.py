"""`python -m pie_driver_sglang.ranks.worker`: a rank that the leader starts.

It loads its shard of the model and runs the leader's commands until the leader dies.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pie_driver_sglang import _core
from pie_driver_sglang.config.config_file import load_config
from pie_driver_sglang.config.driver_config import DriverConfig
from pie_driver_sglang.errors import DriverError
from pie_driver_sglang.fork_server.client import run_in_fork
from pie_driver_sglang.logs import LogSource, configure_logging
from pie_driver_sglang.ranks.commands import unpack
from pie_driver_sglang.ranks.parallel import report
from pie_driver_sglang.ranks.types import Rank
from pie_driver_sglang.shared_names import use_token

if TYPE_CHECKING:
    from pie_driver_sglang.driver.library import Library

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a worker until its leader dies.

    Args:
        argv: The arguments after the program's name; None for the process's own.

    Returns:
        The exit status of a worker that failed and has reported why.
    """
    arguments = _parser().parse_args(argv)
    _core.die_with_parent(arguments.leader)
    use_token()
    # A child of this process must not keep them open after its end.
    for name in ("rendezvous_fd", "broadcast_fd", "report_fd"):
        os.set_inheritable(getattr(arguments, name), False)
    os.dup2(2, 1)
    # As the leader does.
    faulthandler.register(signal.SIGUSR1, file=2)
    # Signals to the process group are the leader's: this process ends with it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    library: Library = importlib.import_module(arguments.library).LIBRARY
    try:
        _configure_logging()
        config = load_config(arguments.config, library.rules)
        device = config.driver.device[arguments.rank]
        source = LogSource(config.driver.group_id, arguments.rank, device)
        options = config.driver.options
        _configure_logging(options.log_level, source, options.log_format)
        size = config.driver.tensor_parallel_size
        rank = Rank(arguments.rank, size, arguments.rendezvous_fd)
        run(config, library, rank, arguments.broadcast_fd)
    except DriverError as error:
        logger.debug("rank %d failed", arguments.rank, exc_info=True)
        report(arguments.report_fd, library.renamed(error))
    except BaseException as error:
        # A panic of the native half is not an `Exception`.
        logger.exception("rank %d stops on an unexpected error", arguments.rank)
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        report(arguments.report_fd, DriverError(text, "the traceback above says where"))
    return 1


def run(config: DriverConfig, library: Library, rank: Rank, broadcast_fd: int) -> None:
    """Loads this rank's shard of the model and runs the leader's commands.

    Raises:
        DriverError: The start failed.
    """
    _, engine = library.load_rank(config, rank)
    spin_budget_us = config.driver.spin_budget_us
    follower = _core.Follower(
        broadcast_fd,
        rank.number - 1,
        engine.block.data,
        spin_budget_us=spin_budget_us,
        graph_path=engine.make_graph_path(),
    )
    for data in follower:
        unpack(data).run(engine)


def _configure_logging(
    level: str | None = None, source: LogSource | None = None, log_format: str = "text"
) -> None:
    """Logs errors only, since the leader logs the same information and warnings."""
    configure_logging(level, source=source, log_format=log_format)
    logging.disable(logging.NOTSET)
    if logging.getLogger(__package__).isEnabledFor(logging.DEBUG):
        return
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pie_driver_sglang.ranks.worker",
        description="One rank of a model on several devices. The driver starts it.",
    )
    parser.add_argument("--config", type=Path, required=True, help="driver.toml")
    parser.add_argument("--library", required=True, help="module of the library's backend")
    parser.add_argument("--rank", type=int, required=True, help="1 or more")
    parser.add_argument("--leader", type=int, required=True, help="the driver's pid")
    parser.add_argument("--rendezvous-fd", type=int, required=True, help="file for the rendezvous")
    parser.add_argument("--broadcast-fd", type=int, required=True, help="the leader's commands")
    parser.add_argument("--report-fd", type=int, required=True, help="pipe for this rank's error")
    return parser


if __name__ == "__main__":
    # It ignores SIGTERM, and ends with its leader.
    status = run_in_fork("pie_driver_sglang.ranks.worker", sys.argv[1:], signal.SIGKILL)
    if status is not None:
        os._exit(status)
    # Not through the interpreter's end, where libraries may wait for the other ranks.
    os._exit(main())
