"""SGLang's data-parallel controller, which blocks instead of polling.

SGLang's own busy-polls its socket, which takes a core from the drivers and the HTTP server.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

from sglang.srt.entrypoints import engine
from sglang.srt.managers import data_parallel_controller
from sglang.srt.managers.data_parallel_controller import DataParallelController
from sglang.srt.managers.io_struct import sock_recv

from pie_driver_sglang.frontends.sglang_server.compat import forking

_LOOK_MS: Final = 500
"""How often SGLang's watchdog is fed."""


@contextlib.contextmanager
def blocking_controller() -> Iterator[None]:
    """Within it, SGLang's server starts this controller."""
    with mock.patch.object(engine, "run_data_parallel_controller_process", run_controller):
        yield


def run_controller(**arguments: Any) -> None:
    """The entry point of the controller process, with the arguments of SGLang's function."""
    with mock.patch.object(DataParallelController, "event_loop", _dispatch):
        run = data_parallel_controller.run_data_parallel_controller_process
        forking.run_with_default_signals(functools.partial(run, **arguments))


def _dispatch(controller: DataParallelController) -> None:
    """Dispatch each message when it arrives."""
    while True:
        controller.soft_watchdog.feed()
        if controller.recv_from_tokenizer.poll(_LOOK_MS):
            controller._request_dispatcher(sock_recv(controller.recv_from_tokenizer))
