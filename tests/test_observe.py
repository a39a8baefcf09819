"""Observability of a driver: the metrics line, Prometheus metrics, JSON logs."""

from __future__ import annotations

import itertools
import json
import logging
import re
import socket
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pie_driver_sglang import _core
from pie_driver_sglang.engine import progress
from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.observability import reporter
from pie_driver_sglang.observability.backoff import LONGEST_S, Backoff
from pie_driver_sglang.observability.driver_metrics import METRICS, PREFIX, READY, Exporter
from pie_driver_sglang.observability.log_line import line, log_fields
from pie_driver_sglang.observability.reporter import IntervalLog, MetricsFile, Reporter
from pie_driver_sglang.observability.served_model import ServedModel, for_group
from support import REPOSITORY
from support.process import drivers
from support.process import runtime_client as rc

MODEL = ServedModel("tiny", 50, 16)
DIRECTIONS = ("D2H", "H2D", "D2D", "H2H")


NAMES = (
    *("steps", "graph_steps", "python_steps", "requests", "computed_tokens", "prompt_tokens"),
    *("generated_tokens", "drafts", "accepted_drafts", "last_requests", "used_pages"),
    *("copied_states", "aborted_batches", "abandoned"),
)


class Counted(SimpleNamespace):
    """Counts as `_core.Counts` has them, set by hand."""

    def __init__(self, **changed: Any) -> None:
        pages = dict.fromkeys(DIRECTIONS, 0)
        values = {**dict.fromkeys(NAMES, 0), "copied_pages": pages, "refused": {}}
        super().__init__(**{**values, **changed})

    def since(self, earlier: Counted) -> Counted:
        changed = {name: getattr(self, name) - getattr(earlier, name) for name in NAMES}
        return Counted(**changed, refused=self.refused)

    def quantile_us(self, name: str, share: float) -> float | None:
        return {"host": 2.0, "step": 1500.0}[name] * (1 + share) if self.steps else None

    def sum_s(self, _: str) -> float:
        return 0.5

    def below(self, _: str) -> list[tuple[float, int]]:
        return [(1e-6, 1), (2e-6, 3), (float("inf"), self.steps)]


def test_the_line_has_the_figures() -> None:
    counts: Any = Counted(
        steps=20,
        requests=50,
        generated_tokens=60,
        prompt_tokens=1000,
        used_pages=25,
        drafts=40,
        accepted_drafts=10,
        copied_pages={"D2H": 3, "H2D": 2, "D2D": 9, "H2H": 9},
        refused={"page-id": 2, "geometry": 1},
        aborted_batches=4,
    )
    assert line(log_fields(counts, 4.0, MODEL)) == (
        "20 steps in 4.0 s (5.0/s), 60 tokens generated (15.0/s), 1,000 of prompts (250.0/s), "
        "batch 2.5, KV 50.0 % (25 of 50 pages), pages swapped 3 out, 2 in, "
        "drafts 10 of 40 accepted (25 %), refused 3, aborted 4, "
        "host 3.0 µs (p99 4.0 µs), step 2.2 ms (p99 3.0 ms)"
    )


def test_without_steps_the_line_has_no_times() -> None:
    counts: Any = Counted(refused={"page-id": 1})
    text = line(log_fields(counts, 0.0, MODEL))
    assert text.endswith("refused 1, aborted 0, host - (p99 -), step - (p99 -)")


class TestWorkLog:
    @pytest.fixture
    def lines(self, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
        caplog.set_level(logging.INFO, logger="pie_driver_sglang")
        return caplog

    def log(self) -> IntervalLog:
        counts: Any = Counted()
        return IntervalLog(10.0, MODEL, counts, 100.0)

    @staticmethod
    def take(log: IntervalLog, steps: int, now: float) -> None:
        counts: Any = Counted(steps=steps)
        log.take(counts, now)

    def test_an_idle_driver_logs_nothing(self, lines: pytest.LogCaptureFixture) -> None:
        log = self.log()
        for second in range(100):
            self.take(log, 0, 100.0 + second)
        assert not lines.records

    def test_metrics_are_logged_after_the_interval(self, lines: pytest.LogCaptureFixture) -> None:
        log = self.log()
        for second in range(1, 26):
            self.take(log, 7 * second, 100.0 + second)
        assert [record.getMessage()[:25] for record in lines.records] == [
            "70 steps in 10.0 s (7.0/s)"[:25]
        ] * 2
        assert lines.records[0].__dict__["fields"]["figures"]["steps"] == 70

    def test_rates_refer_to_the_time_with_work(self, lines: pytest.LogCaptureFixture) -> None:
        """After an hour of idleness three seconds of work are told of once, as three seconds."""
        log = self.log()
        for second in range(1, 4):
            self.take(log, 0, 3700.0)
            self.take(log, 5 * second, 3700.0 + second)
        for second in range(4, 100):
            self.take(log, 15, 3700.0 + second)
        (record,) = lines.records
        assert record.getMessage().startswith("15 steps in 3.0 s (5.0/s), ")

    def test_nothing_is_lost_between_two_lines(self, lines: pytest.LogCaptureFixture) -> None:
        log = self.log()
        steps = 0
        for second in range(1, 200):
            steps += second % 13 // 3
            self.take(log, steps, 100.0 + second)
        for second in range(200, 220):
            self.take(log, steps, 100.0 + second)
        assert (
            sum(record.__dict__["fields"]["figures"]["steps"] for record in lines.records) == steps
        )


def parsed(text: str) -> dict[str, Any]:
    """The samples of a page of metrics, by name and by the label that is theirs alone."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("group", "model_name")}
            found[(sample.name, *rest.values())] = sample.value
    return found


def test_every_metric_is_exported_once_by_its_name() -> None:
    from prometheus_client import generate_latest

    exporter = Exporter(4)
    assert parsed(generate_latest(exporter.registry()).decode()) == {(READY,): 0.0}
    counts: Any = Counted(steps=3, graph_steps=2, python_steps=1, refused={"page-id": 2})
    exporter.begin(lambda: counts, MODEL)
    text = generate_latest(exporter.registry()).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    names = {metric.name.removesuffix("_total") for metric in METRICS}
    assert families.keys() == names | {READY}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.text)
        assert all(sample.labels["group"] == "4" for sample in family.samples)
    samples = parsed(text)
    assert samples[f"{PREFIX}steps_total", "graph"] == 2
    assert samples[f"{PREFIX}refused_total", "page-id"] == 2
    assert samples[f"{PREFIX}host_seconds_bucket", "2e-06"] == 3
    assert samples[f"{PREFIX}host_seconds_count",] == 3
    assert samples[READY,] == 1


def test_names_follow_prometheus_rules() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"pie_driver:[a-z_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.read is None) == (metric.kind == "histogram") == bool(metric.histogram)
        if metric.sglang:
            assert metric.sglang == f"sglang:{metric.word}"
    assert len({metric.word for metric in METRICS}) == len(METRICS)


def test_the_document_lists_every_metric_and_no_other() -> None:
    text = (REPOSITORY / "docs" / "metrics.md").read_text()
    rows = {
        line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `pie_driver:")
    }
    assert rows.keys() == {READY, *(metric.name for metric in METRICS)}
    for metric in METRICS:
        cells = [cell.strip().strip("`") for cell in rows[metric.name].split("|")[1:-1]]
        assert cells == [metric.name, metric.kind, metric.label, metric.text, metric.sglang]
    known = {READY, *(metric.name for metric in METRICS)}
    parts = ("_bucket", "_sum", "_count")
    known |= {metric.name + part for metric in METRICS if metric.histogram for part in parts}
    assert set(re.findall(r"pie_driver:[a-z_]+", text)) <= known | {f"{PREFIX}word"}


def options(**changed: Any) -> Any:
    return SimpleNamespace(
        **{"log_interval_s": 0, "metrics_port": None, "metrics_file": None, **changed}
    )


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"127.0.0.1:{port}") as caught,
            Reporter(3, options(metrics_port=port - 3)),
        ):
            pass
    assert "plus N" in caught.value.hint


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "missing" / "metrics.prom")
    with (
        pytest.raises(ConfigError, match="metrics_file") as caught,
        Reporter(0, options(metrics_file=path)),
    ):
        pass
    assert caught.value.hint


def test_a_file_that_cannot_be_written_for_a_while_is_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = folder / "metrics.prom"
    folder.mkdir()
    exporter = Exporter(0)
    file = MetricsFile(exporter, str(path))
    file.begin()
    counts: Any = Counted()
    file.update(counts, 0.0)
    assert path.exists()
    # A folder in its place: it cannot be replaced, as on a disk that is full.
    path.unlink()
    folder.rmdir()
    for step in range(1, 6):
        counts.steps += 1
        file.update(counts, float(step))
    folder.mkdir()
    file.update(counts, 5.5)
    assert not path.exists(), "it waits longer after each failure"
    file.update(counts, 100.0)
    assert path.exists()
    # A file that cannot be replaced goes: its values would pass for current ones.
    with mock.patch.object(reporter, "write_metrics", side_effect=OSError(28, "No space left")):
        counts.steps += 1
        file.update(counts, 101.0)
    assert not path.exists()


def test_a_reader_that_fails_once_does_not_end_the_reports(tmp_path: Path) -> None:
    path = tmp_path / "metrics.prom"
    counts: Any = Counted()
    calls, done = itertools.count(), threading.Event()

    def read() -> Any:
        number = next(calls)
        if number == 0:
            raise RuntimeError("for once")
        if number > 3:
            done.set()
        counts.steps = number
        return counts

    with (
        mock.patch.object(reporter, "TICK_S", 0.001),
        mock.patch.object(reporter, "write_metrics"),
        Reporter(0, options(metrics_file=str(path))) as found,
    ):
        found.begin(read, ServedModel("m", 16, 16))
        assert done.wait(60)


def test_attempts_follow_later_after_each_failure() -> None:
    backoff = Backoff(1.0)
    assert [backoff.failed() for _ in range(3)] == [True, False, False]
    assert backoff.wait_s == 8.0
    for _ in range(10):
        backoff.failed()
    assert backoff.wait_s == LONGEST_S
    assert backoff.succeeded()
    assert backoff.wait_s == 1.0
    assert not backoff.succeeded()


def test_a_group_has_a_path_of_its_own() -> None:
    assert for_group("/run/pie-{group}.prom", 7) == "/run/pie-7.prom"
    assert for_group(None, 7) is None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.engine
def test_driver_metrics_match_the_clients_counts(llama_snapshot: Path, tmp_path: Path) -> None:
    """JSON lines, the port and the file, against the counts of the client."""
    port, path = free_port(), tmp_path / "metrics.prom"
    options = {
        "log_format": "json",
        "log_interval_s": 1,
        "metrics_port": 1,
        "metrics_file": str(path),
        "cpu_mem_budget_in_gb": 1,
    }
    # The group's number is added to the port.
    group = port - 1
    config = drivers.write_config(tmp_path, llama_snapshot, options=options, group_id=group)
    with drivers.fork(config) as driver:
        counted = serve(driver.client())
        samples: dict[Any, float] = {}

        def is_current() -> bool:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
                samples.update(parsed(page.read().decode()))
            return samples[f"{PREFIX}batch_requests_total",] == counted["requests"]

        rc.eventually(is_current, "the last batch in the metrics")
        rc.eventually(lambda: figures_of(driver.stderr())["steps"] == counted["steps"], "the line")
        rc.eventually(lambda: parsed(path.read_text()) == untimed(samples, path), "the file")
        log = driver.stderr()
        assert driver.stop() == 0
    assert_metrics(samples, counted)
    told = figures_of(log)
    for name in ("steps", "requests", "generated_tokens", "prompt_tokens", "swapped_out_pages"):
        assert told[name] == counted[name], name
    lines = [json.loads(text) for text in driver.stderr().splitlines()]
    own = [entry for entry in lines if "group" in entry]
    assert {(entry["group"], entry["rank"], entry["device"]) for entry in own} == {
        (group, 0, "cpu")
    }
    assert any("request 0 of context 77 rejected: page id" in entry["message"] for entry in lines)
    assert lines[-1]["message"] == "stopped by SIGTERM"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", lines[-1]["time"])


def serve(client: _core.Client) -> dict[str, int]:
    """Prompts, decodes, a swap, a request that is refused and one with a probe, counted."""
    counted = dict.fromkeys(
        ("steps", "requests", "generated_tokens", "prompt_tokens", "swapped_out_pages"), 0
    )

    def forward(*requests: Any, prompt: int = 0) -> Any:
        reply = client.forward(list(requests))
        counted["steps"] += 1
        counted["requests"] += len(requests)
        counted["generated_tokens"] += sum(map(len, reply.tokens))
        counted["prompt_tokens"] += prompt
        return reply.tokens

    first, second = rc.Context([5, 6, 7, 8, 9], [3]), rc.Context([7, 8], [4], context_id=2)
    (tokens,) = forward(first.request(), prompt=5)
    first.take(tokens[0])
    tokens = forward(first.request(), second.request(), prompt=2)
    for context, found in zip((first, second), tokens, strict=True):
        context.take(found[0])
    for _ in range(20):
        tokens = forward(first.request(), second.request())
        # Decodes stay within a page.
        if len(first.tokens) < rc.PAGE:
            for context, found in zip((first, second), tokens, strict=True):
                context.take(found[0])
    forward(second.request(_core.Sampler.entropy()))
    client.copy("D2H", [3, 4], [0, 1])
    counted["swapped_out_pages"] += 2
    broken = rc.Context([5], [10**6], context_id=77).request()
    forward(broken, first.request())
    return counted


def figures_of(log: str) -> dict[str, Any]:
    """The figures of all lines so far, added up."""
    total: dict[str, Any] = {"steps": 0}
    for text in log.splitlines():
        for name, value in json.loads(text).get("figures", {}).items():
            if isinstance(value, int):
                total[name] = total.get(name, 0) + value
    return total


def untimed(samples: dict[Any, float], path: Path) -> dict[Any, float]:
    """The samples that the file must have, too; its pages may be of an earlier reading."""
    in_file = parsed(path.read_text())
    pages = {(f"{PREFIX}num_used_tokens",), (f"{PREFIX}token_usage",)}
    return {name: in_file.get(name, 0.0) if name in pages else v for name, v in samples.items()}


def assert_metrics(samples: dict[Any, float], counted: dict[str, int]) -> None:
    steps = [samples[f"{PREFIX}steps_total", path] for path in ("graph", "python")]
    assert steps == [counted["steps"] - 1, 1], "the probe takes Python's path"
    for word, name in (
        ("generation_tokens_total", "generated_tokens"),
        ("prompt_tokens_total", "prompt_tokens"),
    ):
        assert samples[PREFIX + word,] == counted[name]
    assert samples[f"{PREFIX}copied_pages_total", "D2H"] == counted["swapped_out_pages"]
    assert samples[f"{PREFIX}refused_total", "page-id"] == 1
    assert samples[f"{PREFIX}step_seconds_count",] == counted["steps"]
    assert samples[f"{PREFIX}host_seconds_bucket", "+Inf"] == counted["steps"]
    assert samples[f"{PREFIX}num_running_reqs",] == 2
    assert 0 < samples[f"{PREFIX}num_used_tokens",] <= 3 * rc.PAGE


@pytest.mark.engine
def test_a_text_log_names_group_rank_and_device(llama_snapshot: Path, tmp_path: Path) -> None:
    options = {"log_interval_s": 1}
    config = drivers.write_config(tmp_path, llama_snapshot, options=options)
    with drivers.fork(config) as driver:
        client = driver.client()
        rc.greedy_tokens(client, [5, 6, 7], 1, 4)
        source = f"[group {rc.group_id(config)} rank 0 cpu]"
        log = driver.logged("4 steps in ", "of prompts")
        assert driver.stop() == 0
    head = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    lines = [text for text in driver.stderr().splitlines() if "pie_driver_sglang: " in text]
    assert all(re.match(head + re.escape(source), text) for text in lines), lines
    assert "4 steps in " in log
    assert lines[-1].endswith("INFO pie_driver_sglang: stopped by SIGTERM")
    for warning in ("Cuda graph is disabled", "init_cpu_threads_env"):
        assert warning not in driver.stderr()


def test_progress_off_a_terminal_is_lines(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_INTERVAL_S", 0.0)
    caplog.set_level(logging.INFO, logger="pie_driver_sglang")
    shown = progress.progress_type()
    assert list(shown(range(3), desc="Loading shards")) == [0, 1, 2]
    list(shown(range(3), desc="Loading shards", disable=True))
    told = [record.getMessage() for record in caplog.records]
    assert told[:2] == ["Loading shards: 1 of 3", "Loading shards: 2 of 3"]
    assert told[-1] == "Loading shards: 3 of 3"
    assert capfd.readouterr() == ("", "")


def test_short_intervals_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="pie_driver_sglang")
    list(progress.progress_type()(range(3), desc="Loading shards"))
    assert not caplog.records
