"""The scheduler process: SGLang's ZeroMQ sockets on one side, the native runtime on the other.

One thread receives messages, another sends outputs.
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

from pie_driver_sglang.console import print_notice
from pie_driver_sglang.errors import DriverError
from pie_driver_sglang.frontends.common.arguments import EngineArguments
from pie_driver_sglang.frontends.sglang_server.components import SchedulerComponents
from pie_driver_sglang.frontends.sglang_server.flow_control import SendWindow
from pie_driver_sglang.observability import start_spans
from pie_driver_sglang.observability.active import active_line

logger = logging.getLogger(__name__)

_PUBLISH_S: Final = 0.5
"""Period of the load snapshots for `/v1/loads` while requests run."""
_SEND_WAIT_S: Final = 0.5
_HANDLED_S: Final = 0.5
"""How long outputs wait for acknowledgements of the tokenizer manager."""


def run_scheduler(
    plan: EngineArguments, acknowledged: Sequence[Connection], *arguments: Any
) -> None:
    """The entry point of the process that SGLang starts for its scheduler.

    Args:
        plan: Arguments of the runtime.
        acknowledged: Acknowledgements of outputs, by replica; empty without.
        arguments: Those of SGLang's ``run_scheduler_process``.
    """
    start_spans.rest("process")
    # transformers would import its 700 modules without need.
    sys.modules.setdefault("sklearn", None)  # type: ignore[arg-type]
    from pie_driver_sglang.frontends.sglang_server.compat import scheduler_ipc

    given = scheduler_ipc.SchedulerArguments(arguments)
    leads = given.rank == 0
    parent = scheduler_ipc.begin_process(given, leads=leads)
    try:
        if leads:
            window = SendWindow(acknowledged[given.replica or 0] if acknowledged else None)
            with SchedulerProcess(plan, given, window) as process:
                process.serve()
        else:
            # The driver starts its own ranks. SGLang waits for this process, and ends it.
            given.pipe.send(_ready(1, 1, {}))
            signal.pause()
    except DriverError as error:
        # Its message has the cause, which a traceback would hide.
        logger.error("%s", f"{error}\n\nhint: {error.hint}" if error.hint else error)
        scheduler_ipc.report_failure(parent)
    except Exception:
        logger.exception("the scheduler failed")
        scheduler_ipc.report_failure(parent)


class SchedulerProcess:
    """The runtime, the sockets and the two threads. Use it as a context manager."""

    def __init__(self, plan: EngineArguments, given: Any, window: SendWindow) -> None:
        """Start the driver, and connect the sockets while it loads."""
        components = SchedulerComponents(plan, given)
        start_spans.rest("tokenizer, start of the driver")
        from pie_driver_sglang.frontends.sglang_server.compat import load_snapshots, scheduler_ipc
        from pie_driver_sglang.frontends.sglang_server.control_messages import ControlHandler
        from pie_driver_sglang.frontends.sglang_server.held_requests import HeldRequests
        from pie_driver_sglang.frontends.sglang_server.profile import Profiler

        # Kept: it owns the file that restarted drivers write.
        self._components = components
        self._pipe, self._runtime = given.pipe, components.runtime
        self._sockets = scheduler_ipc.Sockets(given.settings, given.ports)
        self._loads = load_snapshots.LoadSnapshots(given)
        start_spans.rest("imports, sockets")
        with start_spans.span("wait for the driver"):
            components.wait_ready()
        if components.returns_embeddings:
            # A request has one output, which does not say from which replica it is.
            window = SendWindow(None)
        self._window = window
        self._announced = _ready(components.kv_tokens, components.prompt_length, components.active)
        if not given.replica:
            print_notice(active_line(components.active))
        self._front = components.front()
        self._profiles = components.profiles()
        updates = components.updates(self._front)
        self._held = HeldRequests(lambda: updates.is_draining)
        self._control = ControlHandler(
            self._runtime,
            self._front,
            components.server_info(),
            components.adapters(self._front),
            updates,
            Profiler(self._profiles, given.replica),
            window,
        )
        self._metrics = components.metrics(self._front)
        self._spans = components.spans(self._front)
        self._batch_log = components.batch_log()
        self._failure: BaseException | None = None

    def serve(self) -> None:
        """Report readiness, and serve until SGLang shuts it down.

        Raises:
            StartError: The drivers cannot be restarted.
        """
        self._pipe.send(self._announced)
        sender = self._sockets.sender()
        outputs = threading.Thread(target=self._send_outputs, name="outputs", daemon=True)
        outputs.start()
        published, was_idle = 0.0, False
        while not self._control.is_stopping:
            self._check()
            received = self._held.admit(self._sockets.receive(self._control.wait_ms))
            to_detokenizer, to_tokenizer, others, unreadable = self._front.receive(received)
            for line in unreadable:
                logger.error("%s", line)
            for message in others:
                reply = self._control.handle(message)
                to_detokenizer += reply.to_detokenizer
                to_tokenizer += reply.to_tokenizer
            sender.send(to_detokenizer, [*to_tokenizer, *self._control.pending_replies()])
            is_idle = not self._front.open_requests
            # The last snapshot stays, so it must be that of an idle scheduler.
            if time.monotonic() - published > _PUBLISH_S or is_idle != was_idle:
                self._loads.write(self._control.counts())
                published, was_idle = time.monotonic(), is_idle
            self._front.reap_sessions()
            self._components.forward_log()

    def _send_outputs(self) -> None:
        try:
            sender = self._sockets.sender()
            while not self._control.is_stopping:
                send_next(self._front, sender, self._window)
        except BaseException as error:
            self._failure = error

    def _check(self) -> None:
        """Raise if the sender or the drivers have failed."""
        if self._failure is not None:
            raise self._failure
        self._runtime.wait_ready(0.0)

    def __enter__(self) -> SchedulerProcess:
        """Return the process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the drivers and remove the shared memory."""
        if self._metrics is not None:
            self._metrics.close()
        if self._spans is not None:
            self._spans.close()
        if self._batch_log is not None:
            self._batch_log.close()
        self._profiles.close()
        self._runtime.shutdown()
        self._components.close()
        self._loads.close()
        self._sockets.close()


def send_next(front: Any, sender: Any, window: SendWindow) -> None:
    """Send new outputs, once the tokenizer manager has acknowledged the previous ones."""
    window.wait(_HANDLED_S)
    to_detokenizer, to_tokenizer, _ = front.poll(_SEND_WAIT_S)
    sender.send(to_detokenizer, to_tokenizer)
    window.sent(len(to_detokenizer))


def _ready(tokens: int, longest: int, active: dict[str, Any]) -> dict[str, Any]:
    """The message that SGLang waits for; `/server_info` shows it."""
    return {
        "status": "ready",
        "max_total_num_tokens": tokens,
        "max_req_input_len": longest,
        "startup_time": None,
        "scheduler": "pie",
        "active": active,
    }
