"""SGLang's data-parallel controller, which blocks instead of polling and forks its schedulers.

SGLang's own busy-polls its socket, which takes a core from the drivers and the HTTP server. It
starts the scheduler of each replica from a thread: spawned, that would import SGLang again, and a
fork of a process with threads may deadlock on a lock that another thread held.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from sglang.srt.entrypoints import engine
from sglang.srt.managers import data_parallel_controller
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.io_struct import sock_recv

from pie_driver_sglang.frontends.sglang_server.compat import forking
from pie_driver_sglang.frontends.sglang_server.compat.front_forks import inherited_context

_LOOK_MS: Final = 500
"""How often SGLang's watchdog is fed, and the schedulers are looked at."""


@contextlib.contextmanager
def blocking_controller(*, forks: bool) -> Iterator[None]:
    """Within it, SGLang's server starts this controller.

    Args:
        forks: Whether schedulers may be forks. SGLang's own may not: they use CUDA.
    """
    run = functools.partial(run_controller, forks)
    with mock.patch.object(engine, "run_data_parallel_controller_process", run):
        yield


def run_controller(forks: bool, **arguments: Any) -> None:
    """The entry point of the controller process.

    Args:
        forks: As of `blocking_controller`.
        arguments: Those of SGLang's function.
    """
    context = inherited_context() if forks else None
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(DataParallelController, "event_loop", _dispatch))
        if context is not None:
            stack.enter_context(mock.patch.object(data_parallel_controller, "mp", context))
        run = data_parallel_controller.run_data_parallel_controller_process
        forking.run_with_default_signals(functools.partial(run, **arguments))


def _dispatch(controller: DataParallelController) -> None:
    """Dispatch each message when it arrives.

    Raises:
        RuntimeError: The scheduler of a replica has failed, which SGLang's server would not notice.
    """
    schedulers = [each for each in controller.scheduler_procs if each is not None]
    looked_at = time.monotonic()
    while True:
        controller.soft_watchdog.feed()
        if controller.recv_from_tokenizer.poll(_LOOK_MS):
            controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))
        if time.monotonic() - looked_at > _LOOK_MS / 1e3:
            looked_at = time.monotonic()
            # With status 0 they end in a shutdown.
            if ended := [each for each in schedulers if each.exitcode]:
                raise RuntimeError(f"a scheduler ended with status {ended[0].exitcode}")
