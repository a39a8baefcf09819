"""`pie-sglang bench --one-batch`: figures of steps, and batches of a real driver."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from pathlib import Path
from unittest import mock

import pytest

from pie_driver_sglang.cli import bench
from pie_driver_sglang.cli.engine_options import add_engine_options
from pie_driver_sglang.cli.one_batch import BatchShape, Step, batch_table, read_steps, record_of
from pie_driver_sglang.config.option_checks import parse_option
from pie_driver_sglang.errors import ConfigError, StartError
from support.models.tiny_models import POCKET


def test_the_figures_of_a_batch() -> None:
    steps = [
        # Two prefills, the second with a decode of what the first has prefilled.
        Step(1_000.0, 21_000.0, 2, 200),
        Step(22_000.0, 41_000.0, 4, 202),
        Step(42_000.0, 45_000.0, 4, 4),
        Step(45_500.0, 49_000.0, 4, 4),
        Step(49_000.0, 54_000.0, 4, 4),
        # The rest of the later two: no whole batch.
        Step(54_000.0, 55_000.0, 2, 2),
    ]
    record = record_of(BatchShape(4, 100, 5), steps)
    assert record == pytest.approx(
        {
            "batch_size": 4,
            "input_len": 100,
            "output_len": 5,
            "prefill_latency": 0.040,
            "prefill_throughput": 10_000,
            "median_decode_latency": 0.004,
            "median_decode_throughput": 1_000,
            "total_latency": 0.054,
            "overall_throughput": 4 * 105 / 0.054,
        }
    )
    one = record_of(BatchShape(4, 100, 1), steps[:2])
    assert "median_decode_latency" not in one
    lines = batch_table([record, one]).splitlines()
    assert lines[0].split()[:3] == ["batch", "input", "output"]
    assert lines[1].split()[3:7] == ["0.04000", "10,000.0", "0.00400", "1,000.0"]
    assert lines[2].split()[5:7] == ["-", "-"]
    with pytest.raises(StartError, match="no step of"):
        record_of(BatchShape(4, 100, 5), steps[2:])


def test_a_last_chunk_of_one_token_is_a_prefill() -> None:
    steps = [Step(0.0, 900.0, 1, 64), Step(900.0, 1_000.0, 1, 1), Step(1_000.0, 1_300.0, 1, 1)]
    record = record_of(BatchShape(1, 65, 2), steps)
    assert record["prefill_latency"] == pytest.approx(0.001)
    assert record["median_decode_latency"] == pytest.approx(0.0003)


def test_steps_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    steps = [("decode", 30.0, 4.0, 2, 2), ("prompt", 10.0, 15.0, 2, 50)]
    events = [
        {"ph": "X", "name": name, "ts": ts, "dur": dur, "args": {"requests": rows, "tokens": count}}
        for name, ts, dur, rows, count in steps
    ]
    others = [{"ph": "M", "name": "process_name"}, {"ph": "X", "name": "host", "ts": 5.0, "dur": 1}]
    path.write_text(json.dumps([*others, *events]))
    assert read_steps(path) == [Step(10.0, 25.0, 2, 50), Step(30.0, 34.0, 2, 2)]


@pytest.mark.parametrize(
    "words", [["--batch-size", "0"], ["--input-len", "1"], ["--output-len", "0"], ["--dp", "2"]]
)
def test_what_is_no_batch(words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        bench.main(["--one-batch", "--model", str(POCKET), *words])
    assert refusal.value.hint


def test_flags_of_the_server_are_arguments_of_the_engine() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    flags = "--load-format dummy --lora-paths a=x b=y --enable-lora --option page_size=32"
    options = parser.parse_args(flags.split())
    assert dict(map(parse_option, options.option)) == {
        "load_format": "dummy",
        "lora_paths": ["a=x", "b=y"],
        "enable_lora": True,
        "page_size": 32,
    }


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_batches_of_a_driver(
    forked_python: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record, profiles = tmp_path / "record.json", tmp_path / "profiles"
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(profiles))
    words = ["--one-batch", "--model", str(POCKET), "--device", "cpu"]
    words += [
        "--batch-size",
        "1",
        "4",
        "--input-len",
        "40",
        "3000",
        "--output-len",
        "6",
        "--profile",
    ]
    with mock.patch.object(sys, "executable", forked_python):
        assert bench.main([*words, "--json", str(record)]) == 0
    found = json.loads(record.read_text())
    shapes = [(each["batch_size"], each["input_len"], each["output_len"]) for each in found]
    assert shapes == [(1, 40, 6), (4, 40, 6)]
    for each in found:
        assert 0 < each["prefill_latency"] < each["total_latency"]
        assert 0 < each["median_decode_latency"] < each["total_latency"]
    output = capsys.readouterr()
    assert len(output.out.splitlines()) == 3
    names = [path.name for path in profiles.iterdir()]
    assert sorted(name.split("-")[0] for name in names) == [
        f"batch{size}_input40_output6" for size in (1, 4)
    ]
    assert all(f"profile: {profiles / name}" in output.err for name in names)
    with gzip.open(profiles / names[0], "rt") as file:
        assert any(event.get("cat") == "cpu_op" for event in json.load(file)["traceEvents"])
    assert output.err.count("skipping (1, 3000, 6): 3,006 is above the 2,048 positions of the") == 1
