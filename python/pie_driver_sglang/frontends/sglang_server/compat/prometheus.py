"""SGLang's scheduler metrics, and the request times that its frontend reports."""

from __future__ import annotations

import io
import pickle
import struct
import time
from collections.abc import Iterable
from typing import Any, Final

from sglang.srt.observability import req_time_stats

from pie_driver_sglang.frontends.sglang_server.compat.selection import scheduler_compat

FIGURE_PREFIX: Final = "sglang:"
"""Prefix of SGLang's scheduler metrics."""

TimesTemplate = tuple[bytes, tuple[int, int, int, int]]
"""A pickled object without framing opcodes, and the offsets of its three times and of the
difference between wall clock and monotonic clock."""

_HEAD: Final = 2
"""Bytes of a pickle in front of its object: the protocol."""
_FIELDS: Final = ("wait_queue_entry_time", "forward_entry_time", "prefill_finished_time")


class SchedulerMetrics:
    """SGLang's metrics of one scheduler, in the multiprocess files of prometheus_client."""

    def __init__(self, record: Any, *, rank: int, replica: int | None) -> None:
        """Register them.

        Args:
            record: ``ServerArgs``.
            rank: Of tensor parallelism.
            replica: Of data parallelism; None without.
        """
        self._collector = scheduler_compat().make_collector(record, rank, replica)
        self.labels: dict[str, Any] = dict(self._collector.labels)

    def put(self, name: str, label: tuple[str, str] | None, value: float, grown: float) -> bool:
        """Set a metric; False if SGLang has none of that name.

        Args:
            name: The whole name.
            label: A label besides those of all metrics, and its value.
            value: Of a gauge.
            grown: By how much a counter has grown.
        """
        metric = self._metric(name)
        if metric is None:
            return False
        labels = {**self.labels, **dict([label] if label else ())}
        child = metric.labels(**labels)
        if hasattr(child, "set"):
            child.set(value)
        elif grown > 0:
            child.inc(grown)
        return True

    def observe(self, waits: Iterable[tuple[float, float]]) -> None:
        """Add requests to the histograms of queue and prefill seconds."""
        for queued, computed in waits:
            self._collector.observe_queue_time(queued)
            self._collector.observe_per_stage_req_latency("prefill_forward", computed)

    def put_sessions(self, count: int) -> None:
        """Set the number of open sessions, where streaming sessions are enabled."""
        if self._collector.enable_streaming_session:
            self._collector.num_streaming_sessions.labels(**self.labels).set(count)

    def _metric(self, name: str) -> Any | None:
        # Some attributes have another name.
        word = name.removeprefix(FIGURE_PREFIX)
        for attribute in (word, word.replace("_requests_total", "_reqs_total")):
            found = getattr(self._collector, attribute, None)
            if found is not None:
                return found
        return None


def times_template() -> TimesTemplate:
    """A pickled ``SchedulerReqTimeStats``, whose times Rust overwrites.

    Raises:
        RuntimeError: It is pickled as by another version of SGLang.
    """
    marks = (1.5e9, 2.5e9, 3.5e9)
    stats = req_time_stats.SchedulerReqTimeStats(has_timing_data=True)
    for field, mark in zip(_FIELDS, marks, strict=True):
        setattr(stats, field, mark)
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    # Without a memo, so that copies can be concatenated.
    pickler.fast = True
    pickler.dump(stats)
    data = buffer.getvalue()
    # Without the protocol and the STOP opcode.
    body = data[_HEAD:-1]
    lead = req_time_stats.global_diff_realtime_monotonic
    numbers = [struct.pack(">d", number) for number in (*marks, lead)]
    if any(body.count(number) != 1 for number in numbers):
        raise RuntimeError(
            "SGLang's SchedulerReqTimeStats is not pickled with one number for each time and "
            "clock: install the version that this package names"
        )
    first, second, third, fourth = (body.index(number) for number in numbers)
    return body, (first, second, third, fourth)


def clock_s() -> float:
    """The clock of these times, in seconds."""
    return time.perf_counter()
