"""The checks that need a GPU: their arguments, their registry, and the record that each leaves."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import scripts
from tiny_models import REPOSITORY

FOLDER = REPOSITORY / "benches" / "gpu"


@pytest.fixture(scope="module")
def frame() -> Iterator[Any]:
    """What the checks have in common."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("frame")
    sys.path.remove(str(FOLDER))


@pytest.fixture
def arguments(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(device="cpu", json=tmp_path / "new" / "record.json")


class TestRecord:
    def test_of_a_check_that_ends(self, frame: Any, arguments: argparse.Namespace) -> None:
        with frame.Report("benches/gpu/some_check.py", arguments) as report:
            report.add(batch=8, p50_us=1.5)
            report.put("part", {"first": 1})
            report.put("part", {"second": math.inf})
            assert report.hold("off", 0.5, at_most=0.5)
            assert report.hold("speed", 0.98, at_least=0.98)
        record = frame.read(arguments.json)
        assert record.ok
        assert (record.check, record.device, record.driver) == ("some_check", "cpu", "")
        assert record.commit == frame.commit() != ""
        assert record.rows == [
            {"batch": 8, "p50_us": 1.5},
            # JSON knows no infinity.
            {"part": "part", "figures": {"second": None}},
        ]
        assert record.bars == [
            frame.Bar("off", 0.5, "<= 0.5", True),
            frame.Bar("speed", 0.98, ">= 0.98", True),
        ]

    @pytest.mark.parametrize("value", [0.51, math.nan])
    def test_a_bar_that_does_not_hold_ends_with_status_1(
        self, value: float, frame: Any, arguments: argparse.Namespace
    ) -> None:
        with (
            pytest.raises(SystemExit) as ended,
            frame.Report("some_check.py", arguments) as report,
        ):
            assert not report.hold("off", value, at_most=0.5)
        assert ended.value.code == 1
        record = frame.read(arguments.json)
        assert record.error is None
        assert not record.ok
        assert not record.bars[0].ok

    def test_of_a_check_that_raises(self, frame: Any, arguments: argparse.Namespace) -> None:
        with (
            pytest.raises(ValueError, match="no tokens"),
            frame.Report("some_check.py", arguments) as report,
        ):
            report.add(batch=8)
            raise ValueError("no tokens")
        record = frame.read(arguments.json)
        assert (record.error, record.rows, record.ok) == (
            "ValueError: no tokens",
            [{"batch": 8}],
            False,
        )

    def test_of_a_check_that_is_killed(self, frame: Any, arguments: argparse.Namespace) -> None:
        with frame.Report("some_check.py", arguments) as report:
            report.add(batch=8)
            # All that a signal would leave.
            record = frame.read(arguments.json)
        assert record.error == frame.UNFINISHED
        assert not record.ok

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("commit", None),
            ("more", 1),
            ("rows", [1]),
            ("bars", [{"name": "off", "value": "1", "bar": "<= 2", "ok": True}]),
            ("bars", [{"name": "off", "value": 1, "bar": "below 2", "ok": True}]),
            ("bars", [{"name": "off", "value": 1, "bar": "<= 2"}]),
        ],
    )
    def test_another_schema_is_refused(
        self, key: str, value: object, frame: Any, arguments: argparse.Namespace
    ) -> None:
        with frame.Report("some_check.py", arguments):
            pass
        fields = json.loads(arguments.json.read_text())
        fields[key] = value
        arguments.json.write_text(json.dumps(fields))
        with pytest.raises(msgspec.ValidationError):
            frame.read(arguments.json)

    def test_a_bar_has_one_limit(self, frame: Any, arguments: argparse.Namespace) -> None:
        with frame.Report("some_check.py", arguments) as report:
            for limits in ({}, {"at_most": 1, "at_least": 0}):
                with pytest.raises(TypeError, match="one limit"):
                    report.hold("off", 0.5, **limits)


def test_ways_take_turns(frame: Any) -> None:
    called: list[str] = []

    def way(name: str) -> float:
        called.append(name)
        return len(called)

    times = frame.in_turns({name: lambda name=name: way(name) for name in "ab"}, 2, settle=1)
    assert "".join(called) == "ababab"
    assert times == {"a": [3, 5], "b": [4, 6]}


def test_a_folder_without_a_shape_is_named(frame: Any, tmp_path: Path) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"{tmp_path} is not a folder with"):
        frame.shapes(str(tmp_path))
    config = tmp_path / "config.json"
    config.touch()
    assert frame.shapes(str(tmp_path)) == frame.shapes(str(config)) == tmp_path.resolve()


@pytest.mark.engine
def test_every_script_is_registered_and_takes_its_arguments(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    found = json.loads(scripts.run("tests/gpu_checks.py", str(tmp_path)).splitlines()[-1])
    helps, arguments = found["helps"], found["arguments"]
    listed = {line.split("`")[1] for line in found["table"].splitlines()[2:]}
    assert listed == {path.name for path in FOLDER.glob("*_check.py")}
    assert helps.keys() == {*listed, "all_checks.py"}
    for name, text in helps.items():
        assert f"python benches/gpu/{name}" in text
    # Each leaves its record where `all_checks.py` looks for it.
    for name, given in arguments.items():
        assert given.get("json") == f"out/{name}.json" or given.get("out") == f"out/{name}"
