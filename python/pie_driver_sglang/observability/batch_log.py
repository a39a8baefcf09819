"""SGLang's log lines `Prefill batch` and `Decode batch`, with the statistics of our scheduler.

Scripts and dashboards that parse the log of SGLang 0.5.17 read the same fields. A thread reads the
statistics, so the step loop does not log. Steps between two readings share one line.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from pie_driver_sglang._core import Runtime

logger = logging.getLogger(__name__)

READ_S: Final = 0.25
"""Period of the readings: a replica logs at most one line of each kind in it."""

Counts = Mapping[str, Any]
"""Statistics of one replica, as `_core.Runtime.stats` lists them under `replicas`."""


class LogSettings(NamedTuple):
    """What the lines depend on besides the statistics.

    Attributes:
        interval: Steps from one `Decode batch` line to the next.
        page_size: Tokens of a KV page.
        on_cpu: Whether the model runs on the CPU.
        has_graphs: Whether the driver captures its steps in CUDA graphs.
        speculates: Whether requests ask for drafts.
    """

    interval: int
    page_size: int
    on_cpu: bool
    has_graphs: bool
    speculates: bool


class BatchLog:
    """The lines of one replica."""

    def __init__(self, settings: LogSettings, counts: Counts, now: float) -> None:
        """Begin with the next step.

        Args:
            settings: Of the runtime.
            counts: The current statistics.
            now: A monotonic time in seconds.
        """
        self._settings = settings
        self._last, self._prefill, self._decode = counts, counts, counts
        self._last_at = self._prefill_at = now
        self._decode_s = 0.0

    def lines(self, counts: Counts, now: float) -> list[str]:
        """The lines that are due at a reading."""
        if _grown("steps", self._last, counts):
            # Idle time is not part of the throughput.
            self._decode_s += now - self._last_at
        found = []
        if any(_grown(each, self._prefill, counts) for each in ("prefill_tokens", "admissions")):
            found.append(self._prefill_line(counts, now))
            self._prefill, self._prefill_at = counts, now
        if (
            _grown("steps", self._decode, counts) >= self._settings.interval
            and _grown("output_tokens", self._decode, counts) > 0
        ):
            found.append(self._decode_line(counts))
            self._decode, self._decode_s = counts, 0.0
        if retracted := _grown("retractions", self._last, counts):
            ratios = self._last["new_token_ratio"], counts["new_token_ratio"]
            found.append(
                f"Retract requests. #retracted_reqs: {retracted}, "
                f"#new_token_ratio: {ratios[0]:.4f} -> {ratios[1]:.4f}"
            )
        self._last, self._last_at = counts, now
        return found

    def _prefill_line(self, counts: Counts, now: float) -> str:
        tokens = _grown("prefill_tokens", self._prefill, counts)
        throughput = tokens / max(now - self._prefill_at, 1e-9)
        return (
            f"Prefill batch, #new-seq: {_grown('admissions', self._prefill, counts)}, "
            f"#new-token: {tokens}, "
            f"#cached-token: {_grown('matched_tokens', self._prefill, counts)}, "
            f"token usage: {self._usage(counts):.2f}, "
            f"#running-req: {counts['running']}, #queue-req: {_queued(counts)}, "
            f"#pending-token: {counts['pending_tokens']}, {self._graphs()}, "
            f"input throughput (token/s): {throughput:.2f}"
        )

    def _decode_line(self, counts: Counts) -> str:
        throughput = _grown("output_tokens", self._decode, counts) / max(self._decode_s, 1e-9)
        used = _used_pages(counts) * self._settings.page_size
        drafts = ""
        if self._settings.speculates:
            accepted = _grown("accepted", self._decode, counts)
            drafted = _grown("drafted", self._decode, counts)
            rows = _grown("rows", self._decode, counts)
            drafts = (
                f"accept len: {(accepted + rows) / max(rows, 1):.2f}, "
                f"accept rate: {accepted / max(drafted, 1):.2f}, "
            )
        return (
            f"Decode batch, #running-req: {counts['running']}, #token: {used}, "
            f"token usage: {self._usage(counts):.2f}, {drafts}{self._graphs()}, "
            f"gen throughput (token/s): {throughput:.2f}, #queue-req: {_queued(counts)}"
        )

    def _usage(self, counts: Counts) -> float:
        return float(_used_pages(counts) / max(counts["pages_total"], 1))

    def _graphs(self) -> str:
        settings = self._settings
        label = "cpu graph" if settings.on_cpu else "cuda graph"
        return f"{label}: {settings.has_graphs and not settings.on_cpu}"


class BatchLogThread:
    """Reads the statistics of a runtime, and writes the lines of its replicas."""

    def __init__(
        self,
        read: Callable[[], Sequence[Counts]],
        settings: LogSettings,
        write: Callable[[str], object],
    ) -> None:
        """Start the thread.

        Args:
            read: Returns the statistics of each replica.
            settings: Of the runtime.
            write: Writes a line; with several replicas it begins with `DP` and the number.
        """
        self._read, self._write = read, write
        now = time.monotonic()
        self._logs = [BatchLog(settings, counts, now) for counts in read()]
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="batch-log", daemon=True).start()

    def close(self) -> None:
        """End the thread, without a wait: any thread may call it."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(READ_S):
            try:
                self._log(time.monotonic())
            except Exception:
                # Requests are served all the same.
                logger.exception("batches are not logged any more")
                return

    def _log(self, now: float) -> None:
        for number, (log, counts) in enumerate(zip(self._logs, self._read(), strict=True)):
            prefix = f"DP{number} " if len(self._logs) > 1 else ""
            for line in log.lines(counts, now):
                self._write(prefix + line)


def start_batch_log(
    runtime: Runtime,
    active: Mapping[str, Any],
    write: Callable[[str], object] | None,
    *,
    interval: int,
    device: str,
    speculates: bool,
) -> BatchLogThread | None:
    """Start to log the batches of a runtime whose drivers are ready; None without `write`.

    Args:
        runtime: The runtime.
        active: The active components; see `observability.active`.
        write: Writes a line.
        interval: As `LogSettings.interval`.
        device: The first one of the runtime.
        speculates: As `LogSettings.speculates`.
    """
    if write is None:
        return None
    settings = LogSettings(
        interval=interval,
        page_size=int(runtime.capabilities()["kv_page_size"]),
        on_cpu=device.startswith("cpu"),
        has_graphs=active.get("steps") == "graph path",
        speculates=speculates,
    )
    return BatchLogThread(lambda: runtime.stats()["replicas"], settings, write)


def line_writer(level: str | None) -> Callable[[str], object] | None:
    """How an engine writes the lines: through `logging` if it takes them, or to stderr; or not.

    Args:
        level: The engine's `log_level`; None if it is not set.
    """
    if logger.isEnabledFor(logging.INFO):
        return logger.info
    return _write_to_stderr if level in ("debug", "info") else None


def _write_to_stderr(line: str) -> None:
    """Write a line as SGLang's processes do, with the local time."""
    sys.stderr.write(f"{time.strftime('[%Y-%m-%d %H:%M:%S]')} {line}\n")


def _grown(name: str, before: Counts, counts: Counts) -> int:
    return max(0, int(counts[name]) - int(before[name]))


def _queued(counts: Counts) -> int:
    """Waiting requests; as in SGLang without those that wait for their grammar."""
    return max(0, int(counts["waiting"]) - int(counts["unbound"]))


def _used_pages(counts: Counts) -> int:
    return max(0, int(counts["pages_total"] - counts["pages_free"] - counts["pages_cached"]))
