"""`pie-sglang batch`: a file of requests over a kill, and what is refused before a model loads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sqlite3
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from pie_driver_sglang.cli import batch, main
from pie_driver_sglang.errors import ConfigError, StartError
from pie_driver_sglang.frontends.batches import offline_run
from pie_driver_sglang.frontends.batches.batch_records import BatchStatus, LineResult
from pie_driver_sglang.frontends.batches.batch_runner import MAX_STARTS, BatchRunner
from pie_driver_sglang.frontends.batches.batch_store import BatchStore
from pie_driver_sglang.frontends.batches.line_requests import Application, LineResponse
from pie_driver_sglang.frontends.batches.line_slots import LineSlots
from pie_driver_sglang.frontends.batches.offline_run import OfflineJob, OfflineRun, error_messages
from support.models.tiny_models import POCKET
from support.process import fork_server

URL = "/v1/completions"
LINES = 120
EMPTY: Mapping[str, Any] = {}


def write(path: Path, count: int = 4, first: Mapping[str, Any] = EMPTY, **body: Any) -> Path:
    """Write an input, whose first line has parameters of its own."""
    lines = (
        {
            "custom_id": f"id-{number}",
            "method": "POST",
            "url": URL,
            "body": {
                "model": "m",
                "prompt": f"def f{number}(x):",
                "max_tokens": 4,
                **body,
                **({} if number else first),
            },
        }
        for number in range(count)
    )
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return path


@pytest.fixture
def job(tmp_path: Path) -> OfflineJob:
    return OfflineJob(write(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", "m")


def finish(job: OfflineJob) -> None:
    """Runs all lines, of which the third fails, but leaves the store."""

    async def send(_url: str, body: dict[str, Any]) -> LineResponse:
        return LineResponse(400 if "f2" in body["prompt"] else 200, b"{}")

    with OfflineRun(job) as run:
        runner = BatchRunner(
            run.store,
            run.batch,
            Application(send, lambda _: None),
            LineSlots(2, lambda: 0),
            end_batch=run.end_batch,
        )
        ended = asyncio.run(runner.run())
        assert (ended.completed, ended.failed) == (3, 1)


def test_a_run_that_ended_is_cleaned_up(
    job: OfflineJob, capsys: pytest.CaptureFixture[str]
) -> None:
    finish(job)
    lines = list(map(json.loads, job.output.read_text().splitlines()))
    assert [each["custom_id"] for each in lines] == [f"id-{number}" for number in range(4)]
    assert [each["response"]["status_code"] for each in lines] == [200, 200, 400, 200]
    mask = os.umask(0)
    os.umask(mask)
    assert job.output.stat().st_mode & 0o777 == 0o666 & ~mask
    # As after a kill before the store was removed.
    words = ["batch", str(job.input), "--output", str(job.output), "--model", "m"]
    with OfflineRun(job) as run:
        before = job.output.read_bytes()
        assert run.end_batch(run.store, run.batch.id, tuple) == run.batch
        assert job.output.read_bytes() == before
        modes = {path.name: path.stat().st_mode & 0o077 for path in job.folder.iterdir()}
        assert {job.folder.stat().st_mode & 0o077, *modes.values()} == {0}
    assert main.main(words) == 1
    assert "was complete already" in capsys.readouterr().err
    assert not job.folder.exists()
    assert main.main(words) == 1
    assert "exists\n\nhint: name another `--output`" in capsys.readouterr().err


def test_another_input_or_model_does_not_continue_a_run(job: OfflineJob) -> None:
    with OfflineRun(job) as run, pytest.raises(StartError, match=f"process {os.getpid()} of"):
        assert run.batch.endpoint == URL
        OfflineRun(job)
    with OfflineRun(job) as again:
        assert again.batch == run.batch
        again.store.add_results(again.batch.id, [LineResult(2, False, "{}")])
    with pytest.raises(ConfigError, match="the model is 'n', and the lines so far were run with"):
        OfflineRun(job._replace(model="n"))
    write(job.input, 5)
    with pytest.raises(ConfigError, match=r"in.jsonl' has changed since 1 of its lines were run"):
        OfflineRun(job)


def test_a_run_without_results_begins_anew(job: OfflineJob) -> None:
    """For example with a model after one that could not be loaded."""
    with OfflineRun(job) as first:
        pass
    write(job.input, 5)
    other = job._replace(model="n")
    with OfflineRun(other) as second:
        assert second.batch.id != first.batch.id
        assert json.loads(second.batch.metadata or "")["model"] == "n"
        path = second.store.path_of(second.batch.input_file_id)
        assert path.read_bytes() == job.input.read_bytes()
        assert [file.id for file in second.store.list_files(None, None, 9)] == [path.name]
    with OfflineRun(other) as again:
        assert again.batch == second.batch
    # What is no input leaves nothing, so that any other may follow.
    job.input.write_text("x")
    with pytest.raises(ConfigError, match="is no batch"):
        OfflineRun(other)
    assert not job.folder.exists()


def test_an_output_that_exists_does_not_end_a_run(
    job: OfflineJob, capsys: pytest.CaptureFixture[str]
) -> None:
    with OfflineRun(job) as run:
        batch = run.batch
    job.output.write_text("mine")
    words = ["batch", str(job.input), "--output", str(job.output), "--model", "m"]
    assert main.main(words) == 1
    assert "out.jsonl' exists\n\nhint: name another `--output`" in capsys.readouterr().err
    assert job.output.read_text() == "mine"
    job.output.unlink()
    with OfflineRun(job) as run:
        assert run.batch == batch


def test_the_folder_of_the_output_must_exist(job: OfflineJob, tmp_path: Path) -> None:
    folder = tmp_path / "missing" / "inner"
    words = ["batch", str(job.input), "--output", str(folder / "out.jsonl"), "--model", "m"]
    with pytest.raises(ConfigError, match="of the output does not exist") as refusal:
        batch.main(words[1:])
    assert str(folder) in str(refusal.value)
    assert not folder.parent.exists()


def test_a_run_that_was_killed_before_its_last_step_ends(
    job: OfflineJob, capsys: pytest.CaptureFixture[str]
) -> None:
    with OfflineRun(job) as run:
        before = (BatchStatus.VALIDATING,)
        run.store.move(run.batch.id, before, BatchStatus.IN_PROGRESS, total=4)
        texts = [f'{{"line": {number}}}' for number in range(4)]
        results = [LineResult(number + 1, False, text) for number, text in enumerate(texts)]
        run.store.add_results(run.batch.id, results)
        run.store.move(run.batch.id, (BatchStatus.IN_PROGRESS,), BatchStatus.FINALIZING)
    job.output.write_text("a part")
    words = ["batch", str(job.input), "--output", str(job.output), "--model", "m"]
    assert main.main(words) == 0
    assert job.output.read_text().splitlines() == texts
    assert not job.folder.exists()
    assert "was complete already" in capsys.readouterr().err


def test_an_output_that_is_gone_is_named(job: OfflineJob) -> None:
    finish(job)
    job.output.unlink()
    with pytest.raises(ConfigError, match=r"out.jsonl' is gone, of a run that ended"):
        OfflineRun(job)


def test_a_run_that_ends_the_process_each_time_reports_its_lines(
    job: OfflineJob, capsys: pytest.CaptureFixture[str]
) -> None:
    with OfflineRun(job) as run:
        before = (BatchStatus.VALIDATING,)
        run.store.move(run.batch.id, before, BatchStatus.IN_PROGRESS, total=4)
        run.store.add_results(run.batch.id, [LineResult(2, False, '{"custom_id": "id-1"}')])
        run.store.update(run.batch.id, starts=MAX_STARTS)
        app = Application(lambda *_: pytest.fail("a line ran"), lambda _: None)
        slots = LineSlots(2, lambda: 0)
        runner = BatchRunner(run.store, run.batch, app, slots, end_batch=run.end_batch)
        ended = asyncio.run(runner.run())
        assert (ended.status, ended.completed, ended.failed) == (BatchStatus.FAILED, 1, 3)
        [text] = error_messages(ended)
    lines = list(map(json.loads, job.output.read_text().splitlines()))
    assert [each["custom_id"] for each in lines] == [f"id-{number}" for number in range(4)]
    assert [each["error"]["code"] for each in lines if "error" in each] == ["batch_failed"] * 3
    words = ["batch", str(job.input), "--output", str(job.output), "--model", "m"]
    assert main.main(words) == 1
    assert f"the server ended {MAX_STARTS} times" in text
    assert text in capsys.readouterr().err


def test_a_second_process_leaves_a_run_that_is_validated(
    job: OfflineJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = offline_run.validate

    def slow(*arguments: Any) -> Any:
        with pytest.raises(StartError, match=f"process {os.getpid()} of"):
            OfflineRun(job)
        return validate(*arguments)

    monkeypatch.setattr(offline_run, "validate", slow)
    with OfflineRun(job) as run:
        assert run.store.path_of(run.batch.input_file_id).read_bytes() == job.input.read_bytes()


@pytest.mark.parametrize("error", [OSError(28, "No space left"), sqlite3.OperationalError("full")])
def test_a_full_disk_is_one_line(
    job: OfflineJob,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(BatchStore, "add_batch", fail)
    assert main.main(["batch", str(job.input), "--output", str(job.output), "--model", "m"]) == 1
    line, _, hint = capsys.readouterr().err.strip().partition("\n\nhint: ")
    assert f"in.jsonl' cannot be stored in '{job.folder}': " in line
    assert "\n" not in line
    assert "make room there" in hint
    assert not job.folder.exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--output", "x"], "the first argument is '--output', expected the input"),
        (["{folder}/none.jsonl"], "none.jsonl' cannot be opened: No such file or directory"),
        (["{folder}"], "cannot be opened: Is a directory"),
        (["{folder}/wrong.jsonl"], "wrong.jsonl' is no batch: line 1: `custom_id` is None, exp"),
        (["{folder}/in.jsonl", "--output", "{folder}/no/out"], ""),
        (["{folder}/in.jsonl", "--max-num-seqs", "3"], "--max-num-seqs"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "in.jsonl")
    (tmp_path / "wrong.jsonl").write_text("{}\n" * 3)
    (tmp_path / "no").write_text("a file")
    given = [word.format(folder=tmp_path) for word in words]
    assert main.main(["batch", *given]) == 1
    line, _, hint = capsys.readouterr().err.strip().partition("\n\nhint: ")
    assert text in line
    assert "\n" not in line
    assert hint
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "no", "wrong.jsonl"}


def test_flags_are_those_of_the_server(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl")
    job, flags = batch.parse_job([str(path), "--tp", "2", "--model", "m", "--api-key", "k"])
    assert job == OfflineJob(path, tmp_path / "in.output.jsonl", "m")
    assert flags == ["--tp-size", "2", "--model-path", "m", "--log-level", "error"]
    job, flags = batch.parse_job([str(path), "--log-level", "info", "--output", "o"])
    assert job.output == Path("o").absolute()
    assert Path(job.model).name == "pocket"
    assert flags == ["--log-level", "info", "--model-path", job.model]


def committed(folder: Path) -> list[str]:
    """The results of a run so far."""
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(folder / "batches.sqlite3")) as database,
    ):
        return [text for (text,) in database.execute("SELECT text FROM results ORDER BY line")]
    return []


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_killed_run_continues(tmp_path: Path, forked_python: str) -> None:
    # It cannot end before the kill, because of one line.
    long = {"max_tokens": 600, "ignore_eos": True}
    source = write(tmp_path / "in.jsonl", LINES, long, temperature=0)
    output = tmp_path / "out.jsonl"
    words = ["batch", str(source), "--output", str(output), "--model", str(POCKET)]
    words += ["--device", "cpu", "--scheduler", "pie", "--batch-concurrency", "4"]
    command = [forked_python, "-m", "pie_driver_sglang", *words]
    folder = OfflineJob(source, output, "").folder
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 300
        while len(committed(folder)) < LINES // 10:
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.01)
        family = fork_server.family(process.pid)
        process.kill()
        assert psutil.wait_procs(family, 30)[1] == []
    before = committed(folder)
    assert LINES // 10 <= len(before) < LINES
    assert not output.exists()
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert f"{len(before)} of {LINES} lines are done already" in run.stderr
    assert f"{LINES} lines completed, 0 failed, in {output}; this run: " in run.stderr
    assert f"this run: {LINES - len(before)} lines" in run.stderr
    lines = output.read_text().splitlines()
    assert [json.loads(each)["custom_id"] for each in lines] == [
        f"id-{number}" for number in range(LINES)
    ]
    assert set(before) <= set(lines)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["in.jsonl", "out.jsonl"]
