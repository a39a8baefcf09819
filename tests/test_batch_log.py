"""The log lines `Prefill batch` and `Decode batch`: SGLang's fields, and our statistics."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from pie_driver_sglang.observability.batch_log import (
    BatchLog,
    BatchLogThread,
    LogSettings,
    line_writer,
)
from support.servers.pie_server import wait_until

SETTINGS = LogSettings(interval=40, page_size=16, on_cpu=False, has_graphs=True, speculates=False)
NOTHING = {
    "steps": 0,
    "rows": 0,
    "running": 0,
    "waiting": 0,
    "unbound": 0,
    "admissions": 0,
    "matched_tokens": 0,
    "prefill_tokens": 0,
    "pending_tokens": 0,
    "output_tokens": 0,
    "retractions": 0,
    "drafted": 0,
    "accepted": 0,
    "pages_total": 100,
    "pages_free": 100,
    "pages_cached": 0,
    "new_token_ratio": 0.7,
}


def counts(**grown: Any) -> dict[str, Any]:
    return {**NOTHING, **grown}


def source(*parts: str) -> str:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    [folder] = spec.submodule_search_locations or ()
    return Path(folder, "srt", *parts).read_text(encoding="utf-8")


def test_the_lines_have_the_statistics() -> None:
    log = BatchLog(SETTINGS, counts(), 10.0)
    assert log.lines(counts(), 11.0) == []
    first = counts(steps=1, admissions=3, prefill_tokens=500, matched_tokens=64, running=3)
    first |= {"waiting": 5, "unbound": 1, "pending_tokens": 900, "pages_free": 60}
    first |= {"pages_cached": 15, "output_tokens": 2}
    assert log.lines(first, 12.0) == [
        "Prefill batch, #new-seq: 3, #new-token: 500, #cached-token: 64, token usage: 0.25, "
        "#running-req: 3, #queue-req: 4, #pending-token: 900, cuda graph: True, "
        "input throughput (token/s): 250.00"
    ]
    # Not enough steps for a line yet, then idle, then enough.
    assert log.lines({**first, "steps": 30, "output_tokens": 90}, 13.0) == []
    assert log.lines({**first, "steps": 30, "output_tokens": 90}, 113.0) == []
    assert log.lines({**first, "steps": 41, "output_tokens": 123}, 114.0) == [
        "Decode batch, #running-req: 3, #token: 400, token usage: 0.25, cuda graph: True, "
        "gen throughput (token/s): 41.00, #queue-req: 4"
    ]
    assert log.lines({**first, "steps": 60, "output_tokens": 150}, 115.0) == []


def test_drafts_are_part_of_the_line_where_requests_ask_for_them() -> None:
    settings = SETTINGS._replace(on_cpu=True, speculates=True)
    log = BatchLog(settings, counts(), 0.0)
    done = counts(steps=40, rows=80, output_tokens=120, drafted=160, accepted=40, running=2)
    [line] = log.lines(done, 1.0)
    assert "token usage: 0.00, accept len: 1.50, accept rate: 0.25, cpu graph: False, " in line


def test_retractions_are_logged() -> None:
    log = BatchLog(SETTINGS, counts(), 0.0)
    [line] = log.lines(counts(steps=1, retractions=2, new_token_ratio=0.65), 1.0)
    assert line == "Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.7000 -> 0.6500"


def test_the_fields_are_those_of_sglang() -> None:
    """Their names and their order, by the source of the installed SGLang."""
    log = BatchLog(SETTINGS._replace(speculates=True), counts(), 0.0)
    done = counts(steps=40, output_tokens=40, prefill_tokens=10, retractions=1)
    prefill, decode, retract = log.lines(done, 1.0)
    reporter = source("managers", "scheduler_components", "metrics_reporter.py")
    _, _, report = reporter.partition("def report_prefill_stats")
    of_prefill, _, of_decode = report.partition("def report_decode_stats")
    pools = source("managers", "scheduler_components", "pool_stats_observer.py")
    scheduler = source("managers", "scheduler.py")
    for line, text in ((prefill, of_prefill), (decode, of_decode), (retract, scheduler)):
        fields = re.findall(r"([#\w][^,:.]*): ", line)
        assert len(fields) > 1
        at = 0
        for field in fields:
            if field in ("cuda graph", "token usage", "#token"):
                # SGLang composes these of parts of their own.
                assert field in reporter + pools
                continue
            assert (at := text.find(f"{field}: ", at)) >= 0, field
    parsed = re.search(
        r"_PATTERN_DECODE = \(\n(.*?)\n\)\n", source("debug_utils", "log_parser.py"), re.DOTALL
    )
    assert parsed is not None
    pattern = "".join(re.findall(r'r"(.*)"', parsed[1]))
    # Its last comma is of a field that SGLang's line has only with an estimate of FLOPs.
    found = re.search(pattern.removesuffix(","), f"[2026-11-29 08:42:12 DP1 TP0] {decode}")
    assert found is not None
    assert (found["dp_rank"], found["num_running_req"], found["queue_req"]) == ("1", "0", "0")
    assert float(found["gen_throughput"]) == 40.0


def test_replicas_are_named_and_a_failed_reading_ends_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lines: list[str] = []
    readings = iter([[counts(), counts()], [counts(), counts(prefill_tokens=8)]])

    def read() -> list[dict[str, Any]]:
        try:
            return next(readings)
        except StopIteration:
            raise RuntimeError("the runtime is gone") from None

    thread = BatchLogThread(read, SETTINGS, lines.append)
    wait_until(lambda: "batches are not logged any more" in caplog.messages, 60, "its end")
    thread.close()
    [line] = lines
    assert line.startswith("DP1 Prefill batch, #new-seq: 0, #new-token: 8, ")


def test_an_engine_logs_where_logging_or_its_level_says_so(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("WARNING", "pie_driver_sglang")
    assert line_writer(None) is line_writer("warning") is None
    write = line_writer("info")
    assert write is not None
    write("Decode batch, 100 %")
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] Decode batch, 100 %\n", capsys.readouterr().err
    )
    caplog.set_level("INFO", "pie_driver_sglang")
    write = line_writer(None)
    assert write is not None
    write("Decode batch")
    assert caplog.messages == ["Decode batch"]
