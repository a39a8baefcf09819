"""Flow control between a scheduler and the tokenizer manager."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from pie_driver_sglang.errors import StartError
from pie_driver_sglang.frontends.sglang_server import compat, scheduler_process
from pie_driver_sglang.frontends.sglang_server.flow_control import (
    MOST_IN_FLIGHT,
    Acknowledger,
    SendWindow,
)

LONG_S = 20.0


@pytest.fixture
def acknowledger() -> Acknowledger:
    return Acknowledger(2)


def waits(window: SendWindow, limit_s: float = 0.05) -> bool:
    """Whether a message may not be sent for so long."""
    begin = time.monotonic()
    window.wait(limit_s)
    return time.monotonic() - begin >= limit_s


def is_open(window: SendWindow) -> bool:
    """Whether a message may be sent at once."""
    begin = time.monotonic()
    window.wait(LONG_S)
    return time.monotonic() - begin < LONG_S


def test_a_window_is_filled_and_opens(acknowledger: Acknowledger) -> None:
    window = SendWindow(acknowledger.schedulers[0])
    for _ in range(MOST_IN_FLIGHT):
        assert is_open(window)
        window.sent(1)
    begin = time.monotonic()
    timer = threading.Timer(0.1, acknowledger.handled, (None,))
    timer.start()
    window.wait(LONG_S)
    assert 0.1 <= time.monotonic() - begin < LONG_S
    timer.join()
    window.sent(1)
    # One of those before it is under way still.
    acknowledger.handled([0, 0])
    assert is_open(window)


def test_a_lost_acknowledgement_costs_time_alone(acknowledger: Acknowledger) -> None:
    window = SendWindow(acknowledger.schedulers[0])
    window.sent(MOST_IN_FLIGHT)
    assert waits(window)
    assert is_open(window)


def test_each_replica_has_its_own(acknowledger: Acknowledger) -> None:
    first, second = (SendWindow(end) for end in acknowledger.schedulers)
    first.sent(MOST_IN_FLIGHT)
    second.sent(MOST_IN_FLIGHT)
    acknowledger.handled([1, 1, 1])
    assert is_open(second)
    assert waits(first)


def test_more_acknowledgements_than_messages(acknowledger: Acknowledger) -> None:
    """Refusals are sent by another thread, and acknowledged as outputs are."""
    window = SendWindow(acknowledger.schedulers[0])
    window.sent(MOST_IN_FLIGHT)
    for _ in range(MOST_IN_FLIGHT + 3):
        acknowledger.handled([None])
    assert is_open(window)
    window.sent(MOST_IN_FLIGHT)
    assert waits(window)


def test_a_scheduler_that_reads_nothing_holds_up_no_one(acknowledger: Acknowledger) -> None:
    for _ in range(200_000):
        acknowledger.handled(None)


def test_outputs_add_up_while_none_is_handled(
    acknowledger: Acknowledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is fetched from the runtime meanwhile, which makes one output of what is not."""
    monkeypatch.setattr(scheduler_process, "_HANDLED_S", LONG_S)
    fetched: list[float] = []
    window = SendWindow(acknowledger.schedulers[0])
    stop = threading.Event()

    class Front:
        def poll(self, _: float) -> tuple[list[bytes], list[bytes], list[bytes]]:
            fetched.append(time.monotonic())
            return [b"outputs"], [b"probe"], []

    class Sender:
        def send(self, to_detokenizer: list[bytes], to_tokenizer: list[bytes]) -> None:
            assert (to_detokenizer, to_tokenizer) == ([b"outputs"], [b"probe"])

    def run() -> None:
        while not stop.is_set():
            scheduler_process.send_next(Front(), Sender(), window)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for handled in range(5):
            until = time.monotonic() + LONG_S
            while len(fetched) < handled + MOST_IN_FLIGHT and time.monotonic() < until:
                time.sleep(0.01)
            time.sleep(0.02)
            assert len(fetched) == handled + MOST_IN_FLIGHT
            acknowledger.handled(None)
    finally:
        stop.set()
        acknowledger.handled(None)
        thread.join(LONG_S)


def test_nothing_is_awaited_where_none_acknowledges() -> None:
    window = SendWindow(None)
    window.sent(100)
    assert is_open(window)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (StartError("no GPU is visible", "run `nvidia-smi`"), "no GPU is visible\n\nhint: run"),
        (StartError("it has ended"), "it has ended"),
        (KeyError("a fault of ours"), "Traceback"),
    ],
)
def test_a_failed_start_is_logged_by_its_cause(
    error: Exception,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A known cause has no traceback."""
    reported: list[Any] = []
    ipc = SimpleNamespace(
        SchedulerArguments=lambda _: SimpleNamespace(rank=0, replica=None),
        begin_process=lambda _, leads: "the parent" if leads else None,
        report_failure=reported.append,
    )
    monkeypatch.setattr(compat, "scheduler_ipc", ipc, raising=False)
    monkeypatch.setattr(scheduler_process, "SchedulerProcess", mock.Mock(side_effect=error))
    monkeypatch.setitem(sys.modules, "sklearn", sys.modules.get("sklearn"))
    scheduler_process.run_scheduler(mock.Mock(), ())
    assert expected in caplog.text
    assert ("Traceback" in caplog.text) == (expected == "Traceback")
    assert reported == ["the parent"]
