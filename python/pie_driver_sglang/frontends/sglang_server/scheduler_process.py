"""The process in the place of SGLang's scheduler: sockets on one side, the runtime on the other.

One thread takes messages, one sends outputs. Between them and the driver is Rust.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Final

from pie_driver_sglang.frontends.common.types import EngineArguments
from pie_driver_sglang.frontends.sglang_server.flow import Window
from pie_driver_sglang.frontends.sglang_server.parts import Parts
from pie_driver_sglang.observability.active import active_line

logger = logging.getLogger(__name__)

_PUBLISH_S: Final = 0.5
"""How old the counts for `/v1/loads` may be while requests run."""
_SEND_WAIT_S: Final = 0.5
_HANDLED_S: Final = 0.5
"""How long outputs wait for a tokenizer manager that handles none."""


def run_scheduler(
    plan: EngineArguments, acknowledged: Sequence[Connection], *arguments: Any
) -> None:
    """Runs in the process that SGLang starts for its scheduler.

    Args:
        plan: What the runtime starts with.
        acknowledged: Acknowledgements of outputs, by replica; empty where there are none.
        arguments: Those of SGLang's ``run_scheduler_process``.
    """
    # transformers would import it, for what is not needed here: 700 modules.
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
    from pie_driver_sglang.frontends.sglang_server.compat import scheduling

    given = scheduling.SchedulerArguments(arguments)
    leads = given.rank == 0
    parent = scheduling.begin_process(given.settings, leads=leads)
    try:
        if leads:
            window = Window(acknowledged[given.replica or 0] if acknowledged else None)
            with SchedulerProcess(plan, given, window) as process:
                process.serve()
        else:
            # The driver starts its own ranks. SGLang waits for this process, and ends it.
            given.pipe.send(_ready(1, 1, {}))
            signal.pause()
    except Exception:
        logger.exception("the scheduler failed")
        scheduling.report_failure(parent)


class SchedulerProcess:
    """The runtime, the sockets and the two threads. Use it as a context manager."""

    def __init__(self, plan: EngineArguments, given: Any, window: Window) -> None:
        """Starts the driver, and connects meanwhile.

        Args:
            plan: What the runtime starts with.
            given: SGLang's arguments.
            window: Of the messages of outputs.
        """
        self._window = window
        parts = Parts(plan, given)
        from pie_driver_sglang.frontends.sglang_server.compat import loads, scheduling
        from pie_driver_sglang.frontends.sglang_server.control import Control
        from pie_driver_sglang.frontends.sglang_server.profile import Profiler

        # Kept, because drivers that are started again write into a file of theirs.
        self._parts = parts
        self._pipe, self._runtime, self._log = given.pipe, parts.runtime, parts.log
        self._sockets = scheduling.Sockets(given.settings, given.ports)
        self._loads = loads.LoadBoard(given.settings, given.ports, given.replica)
        parts.wait_ready()
        self._announced = _ready(parts.tokens, parts.prompt_length, parts.active)
        if not given.replica:
            sys.stderr.write(f"pie-sglang: {active_line(parts.active)}\n")
            sys.stderr.flush()
        self._front = parts.front()
        self._control = Control(
            self._runtime,
            self._front,
            parts.facts(),
            parts.adapters(self._front),
            Profiler(self._runtime, given.replica),
            window,
        )
        self._metrics = parts.metrics(self._front)
        self._spans = parts.spans(self._front)
        self._failure: BaseException | None = None

    def serve(self) -> None:
        """Says that it is ready, and serves until SGLang says that it ends.

        Raises:
            StartError: The drivers are gone for good.
        """
        self._pipe.send(self._announced)
        sender = self._sockets.sender()
        outputs = threading.Thread(target=self._send_outputs, name="outputs", daemon=True)
        outputs.start()
        published, was_idle = 0.0, False
        while not self._control.is_stopping:
            self._check()
            received = self._sockets.receive(self._control.wait_ms)
            to_detokenizer, to_tokenizer, others, unreadable = self._front.receive(received)
            for line in unreadable:
                logger.error("%s", line)
            for message in others:
                reply = self._control.obey(message)
                to_detokenizer += reply.to_detokenizer
                to_tokenizer += reply.to_tokenizer
            sender.send(to_detokenizer, [*to_tokenizer, *self._control.due()])
            is_idle = not self._front.open_requests
            # The last counts stay, so those of an idle scheduler must be the last.
            if time.monotonic() - published > _PUBLISH_S or is_idle != was_idle:
                self._loads.write(self._control.counts())
                published, was_idle = time.monotonic(), is_idle
            self._front.reap_sessions()
            self._log.pass_on()

    def _send_outputs(self) -> None:
        try:
            sender = self._sockets.sender()
            while not self._control.is_stopping:
                send_next(self._front, sender, self._window)
        except BaseException as error:
            self._failure = error

    def _check(self) -> None:
        """Ends the process if it cannot serve any longer."""
        if self._failure is not None:
            raise self._failure
        self._runtime.wait_ready(0.0)

    def __enter__(self) -> SchedulerProcess:
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the drivers and remove what is in shared memory."""
        if self._metrics is not None:
            self._metrics.close()
        if self._spans is not None:
            self._spans.close()
        self._runtime.shutdown()
        self._loads.close()
        self._sockets.close()


def send_next(front: Any, sender: Any, window: Window) -> None:
    """Sends what is new, once the tokenizer manager has handled what was sent before.

    Args:
        front: `_core.SglangFrontend`.
        sender: `SocketSender`.
        window: Of the messages.
    """
    window.wait(_HANDLED_S)
    to_detokenizer, to_tokenizer, _ = front.poll(_SEND_WAIT_S)
    sender.send(to_detokenizer, to_tokenizer)
    window.sent(len(to_detokenizer))


def _ready(tokens: int, longest: int, active: dict[str, Any]) -> dict[str, Any]:
    """What SGLang waits for; `/server_info` shows it."""
    return {
        "status": "ready",
        "max_total_num_tokens": tokens,
        "max_req_input_len": longest,
        "startup_time": None,
        "scheduler": "pie",
        "active": active,
    }
