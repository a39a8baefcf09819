"""What the checks of this folder have in common: arguments, timing by turns, and one record.

::

    def parser() -> argparse.ArgumentParser:
        return frame.parser(__doc__, "pocket", "device")


    def main() -> None:
        arguments = parser().parse_args()
        with frame.Report(__file__, arguments) as report:
            report.add(batch=8, p50_us=1768.0)
            report.hold("ulps apart", 1.0, at_most=2)

A check that ends writes a `Record` where `--json` says, or into its `--out`. Its status is 1
if it raised, or if one of its bars does not hold.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Final, Self

import msgspec

from pie_driver_sglang import _core

REPOSITORY: Final = Path(__file__).resolve().parents[2]
POCKET: Final = REPOSITORY / "models" / "pocket"
UNFINISHED: Final = "it has not ended"
"""The error of a record while its check runs, and of one that was killed."""


class Bar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a check holds a figure to."""

    name: str
    value: float | None
    """None for NaN and infinities."""
    bar: Annotated[str, msgspec.Meta(pattern=r"^[<>]= \S+$")]
    """The limit: `<= 2` or `>= 0.98`."""
    ok: bool


class Record(msgspec.Struct, forbid_unknown_fields=True):
    """What one run of a check leaves: the schema of every file that a check writes."""

    check: str
    """The script's name without its ending."""
    commit: str
    """Of the build, as :func:`commit` finds it."""
    device: str
    """Count and name of the visible GPUs, or `cpu`."""
    driver: str
    """Version of NVIDIA's driver, empty without one."""
    torch: str
    date: str
    """Start of the check: UTC, ISO 8601."""
    command: str
    rows: list[dict[str, Any]]
    bars: list[Bar]
    error: str | None = UNFINISHED
    """Why the check stopped before its end; None if it did not."""

    @property
    def ok(self) -> bool:
        """Whether the check came to its end and every bar holds."""
        return self.error is None and all(bar.ok for bar in self.bars)


def read(path: Path) -> Record:
    """The record in a file.

    Raises:
        msgspec.ValidationError: The file has another schema.
    """
    return msgspec.json.decode(path.read_bytes(), type=Record)


class Report:
    """A record that grows while a check runs; the file is written after every row."""

    def __init__(self, script: str, arguments: argparse.Namespace) -> None:
        """Begins a record.

        Args:
            script: The check's `__file__`.
            arguments: Of a parser that :func:`parser` made.
        """
        name = Path(script).stem
        device = getattr(arguments, "device", "cuda")
        gpus, driver = ("cpu", "") if str(device) == "cpu" else visible_gpus()
        self.record = Record(
            check=name,
            commit=commit(),
            device=gpus,
            driver=driver,
            torch=metadata.version("torch"),
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=shlex.join([f"benches/gpu/{name}.py", *sys.argv[1:]]),
            rows=[],
            bars=[],
        )
        out: Path | None = getattr(arguments, "out", None)
        self._path: Path | None = out / f"{name}.json" if out else arguments.json
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        record = self.record
        print(f"{name}: commit {record.commit}, {gpus}, torch {record.torch}", flush=True)

    def add(self, **figures: Any) -> None:
        """Adds a row."""
        self.record.rows.append(figures)
        self._write()

    def put(self, part: str, figures: Any) -> None:
        """Sets the only row of a part, of which more becomes known as the check runs."""
        rows = [row for row in self.record.rows if row.get("part") != part]
        self.record.rows = [*rows, {"part": part, "figures": figures}]
        self._write()

    def hold(
        self,
        name: str,
        value: float,
        *,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> bool:
        """Holds a figure to one limit; returns whether it keeps to it. NaN keeps to none."""
        if (at_most is None) == (at_least is None):
            raise TypeError(f"{name}: one limit, at_most or at_least")
        if at_most is not None:
            bar, ok = f"<= {at_most:g}", bool(value <= at_most)
        else:
            bar, ok = f">= {at_least:g}", bool(value >= at_least)
        self.record.bars.append(Bar(name, float(value), bar, ok))
        self._write()
        return ok

    def __enter__(self) -> Self:
        """Returns the report."""
        self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Writes the record and prints the bars; ends the process if one does not hold."""
        record = self.record
        record.error = None if error is None else f"{type(error).__name__}: {error}"
        self._write()
        for bar in record.bars:
            held = "ok" if bar.ok else "WRONG"
            print(f"bar {bar.name}: {bar.value:g}, must be {bar.bar}: {held}")
        sys.stdout.flush()
        if error is None and not record.ok:
            raise SystemExit(1)

    def _write(self) -> None:
        if self._path is not None:
            text = msgspec.json.format(msgspec.json.encode(self.record), indent=1)
            # A check that is killed meanwhile leaves the former file, not half of this one.
            new = self._path.with_suffix(".new")
            new.write_bytes(text + b"\n")
            new.replace(self._path)


def commit() -> str:
    """The commit of the build, else the one of this folder's repository; `unknown` without both.

    A wheel that `make` has built carries it. A final `+` marks sources that were changed since.
    """
    built = _core.build_info().get("commit")
    if built:
        return built
    command = ["git", "-C", REPOSITORY, "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def engine_device(device: str) -> str:
    """`device` of an `Engine` for a torch device such as `cuda:0`: its kind alone."""
    return device.partition(":")[0]


def visible_gpus() -> tuple[str, str]:
    """Count and name of the visible GPUs, and the driver's version, without a context on them."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        command += ["-i", named]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown", ""
    gpus = [line.split(", ") for line in listed.stdout.splitlines()]
    names = sorted({name for name, _ in gpus})
    return f"{len(gpus)} x {' and '.join(names)}", gpus[0][1] if gpus else ""


def parser(doc: str, *common: str) -> argparse.ArgumentParser:
    """A parser with the arguments that a check shares with others.

    Args:
        doc: The script's docstring.
        common: Keys of `_COMMON`. All checks have `--json`, but those with `--out`.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in common:
        made.add_argument(f"--{name}", **_COMMON[name])
    if "out" not in common:
        made.add_argument("--json", type=Path, help="where to write the record")
    return made


def shapes(text: str) -> Path:
    """A folder whose `config.json` names a model's shape, given by itself or by that file."""
    path = Path(text).resolve()
    folder = path.parent if path.name == "config.json" else path
    if not (folder / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a folder with a config.json")
    return folder


def _pocket(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "model.safetensors").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a folder with a model.safetensors")
    return path


SHAPES: Final[Mapping[str, Any]] = {
    "type": shapes,
    "help": "folder with a config.json; the weights are random",
}
"""How `--shapes` is declared."""
_COMMON: Final[Mapping[str, Mapping[str, Any]]] = {
    "pocket": {"type": _pocket, "default": POCKET, "help": "folder of the embedded model"},
    "shapes": SHAPES,
    "device": {"default": "cuda:0", "help": "torch's name of it"},
    "option": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "a line of [driver.options], in TOML; may be repeated",
    },
    "out": {"type": Path, "required": True, "help": "folder for the record, figures and logs"},
    "pie-load": {"type": Path, "required": True, "help": "the load generator, see `make load`"},
}


def model_folder(shapes: Path, folder: Path) -> Path:
    """Makes of an empty folder a model of these shapes; a load makes up its weights."""
    shutil.copyfile(shapes / "config.json", folder / "config.json")
    return folder


def in_turns(
    ways: Mapping[str, Callable[[], float]], rounds: int, *, warmup: int = 0
) -> dict[str, list[float]]:
    """Times ways to do the same that take turns, so that a drift of the machine meets all of them.

    Args:
        ways: Each returns what it took.
        rounds: Times of each that count.
        warmup: Rounds before those, not counted.

    Returns:
        For each way, what it took in each round.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(warmup + rounds):
        for name, way in ways.items():
            took = way()
            if number >= warmup:
                times[name].append(took)
    return times
