"""The thread that writes the scheduler's metrics: what an error of it leaves behind."""

from __future__ import annotations

import itertools
import math
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


class _Metrics:
    """Stands for SGLang's: keeps what is written, and fails when it is told to."""

    def __init__(self) -> None:
        self.labels: dict[str, str] = {}
        self.values: dict[str, float] = {}
        self.counters: dict[str, float] = {}
        self.failures = 0

    def put(self, name: str, label: Any, value: float, grown: float) -> bool:
        if self.failures and not math.isnan(value):
            self.failures -= 1
            raise OSError(28, "No space left on device")
        self.values[name] = value
        self.counters[name] = self.counters.get(name, 0.0) + grown
        return True

    def observe(self, waits: Any) -> None:
        list(waits)

    def put_sessions(self, count: int) -> None:
        pass


def test_metrics_are_written_again_after_an_error() -> None:
    """A gauge that cannot be written is NaN meanwhile, and a counter loses nothing."""
    from pie_driver_sglang.frontends.sglang_server import scheduler_metrics as module

    steps, dropped, again = itertools.count(1), threading.Event(), threading.Event()
    metrics = _Metrics()

    def read() -> list[list[tuple[str, bool, str, None, float]]]:
        number = next(steps)
        if number == 3:
            metrics.failures = 2
        if number > 3 and math.isnan(metrics.values["sglang:num_running_reqs"]):
            dropped.set()
        if number > 6:
            again.set()
        counter = ("sglang:steps_total", True, "Steps.", None, float(number))
        return [[("sglang:num_running_reqs", False, "Running.", None, 7.0), counter]]

    runtime: Any = SimpleNamespace(metrics=read)
    front: Any = SimpleNamespace(take_waits=list, open_sessions=0)
    with mock.patch.object(module, "PERIOD_S", 0.001):
        thread = module.MetricsThread(runtime, front, metrics)  # type: ignore[arg-type]
        assert dropped.wait(60), "the gauge keeps its last value"
        assert again.wait(60), "the thread has ended"
        thread.close()
    assert metrics.values["sglang:num_running_reqs"] == 7.0
    assert metrics.counters["sglang:steps_total"] == next(steps) - 1
