"""Runs the checks of `registry.py`, or some of them, on one GPU or on several at once.

    python benches/gpu/all_checks.py --list
    python benches/gpu/all_checks.py --out DIR --small DIR --large DIR --pie-load BINARY [CHECK ...]

--small and --large have the config.json of a Qwen3-0.6B and a Qwen3-14B shape; weights are random.
The binary is what `make load` builds. Checks that time the host run first, one after the other;
then the others of one GPU side by side, one on each; and at last those that need several GPUs. What
a check prints goes to DIR/CHECK.txt, its record (`frame.Record`) to DIR/CHECK.json or into the
folder DIR/CHECK. The status is 1 when a check failed, ran out of time, or left no record whose bars
all hold.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import frame
import msgspec
from registry import CHECKS, Check, table

GRACE_S = 20.0
FOLDER = Path(__file__).resolve().parent


def words(name: str, check: Check, values: dict[str, object], out: Path, limit_s: int) -> list[str]:
    """The arguments of a check's script."""
    own = {"record": out / f"{name}.json", "folder": out / name, "limit": limit_s}
    return [word.format(**values, **own) for word in check.arguments.split()]


def record_of(name: str, check: Check, out: Path) -> Path:
    """Where a check's record is."""
    if "{folder}" in check.arguments:
        return out / name / f"{Path(check.script).stem}.json"
    return out / f"{name}.json"


class Checks:
    """Runs checks, and remembers which of them failed."""

    def __init__(self, arguments: argparse.Namespace, gpus: Sequence[str]) -> None:
        """Takes the folders, the limit, and the GPUs' names."""
        self._values: dict[str, object] = {
            "small": arguments.small,
            "large": arguments.large,
            "pie_load": arguments.pie_load.resolve(),
            "pocket": frame.POCKET,
            "several": ",".join(str(count) for count in (8, 4, 2) if count <= len(gpus)),
        }
        self._out: Path = arguments.out.resolve()
        self._limit_s: int | None = arguments.limit_s
        self._gpus = gpus
        self.failed: list[str] = []

    def run_side_by_side(self, names: Sequence[str]) -> None:
        """Runs checks of one GPU, each on the next one that is free."""
        free: SimpleQueue[str] = SimpleQueue()
        for gpu in self._gpus:
            free.put(gpu)

        def work(name: str) -> None:
            gpu = free.get()
            try:
                self.run(name, gpu)
            finally:
                free.put(gpu)

        with ThreadPoolExecutor(len(self._gpus)) as pool:
            list(pool.map(work, names))

    def run(self, name: str, gpus: str) -> None:
        """Runs a check to its end or its limit."""
        check = CHECKS[name]
        limit_s = self._limit_s or 60 * check.minutes
        command = [check.script, *words(name, check, self._values, self._out, limit_s)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "PYTHONUNBUFFERED": "1"}
        record = record_of(name, check, self._out)
        record.unlink(missing_ok=True)
        started = time.monotonic()
        with (self._out / f"{name}.txt").open("w", encoding="utf-8") as log:
            print(f"$ CUDA_VISIBLE_DEVICES={gpus} {' '.join(command)}", file=log, flush=True)
            process = subprocess.Popen(
                [sys.executable, FOLDER / command[0], *command[1:]],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(limit_s + GRACE_S)
                how = outcome(status, record)
            except subprocess.TimeoutExpired:
                how = "out of time"
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if how != "done":
            self.failed.append(name)
        print(f"{name} on {gpus}: {how}, {time.monotonic() - started:.0f} s", flush=True)


def outcome(status: int, record: Path) -> str:
    """What became of a check that ended: `done`, or what is wrong."""
    try:
        found = frame.read(record)
    except (OSError, msgspec.MsgspecError) as error:
        return f"status {status}, no record: {error}"
    broken = [f"{bar.name} {bar.value}, must be {bar.bar}" for bar in found.bars if not bar.ok]
    if found.error:
        broken.append(found.error)
    if status or broken:
        return "; ".join([f"status {status}", *broken])
    return "done"


def visible_gpus() -> list[str]:
    """Their numbers, in a process that makes no context on them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu for gpu in named.split(",") if gpu]
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return [str(number) for number in range(len(listed.stdout.splitlines()))]


def parser() -> argparse.ArgumentParser:
    """The arguments, except `--list`."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = [name for name, check in CHECKS.items() if check.usual]
    made.add_argument("checks", nargs="*", default=usual, metavar="CHECK")
    made.add_argument("--list", action="store_true", help="print the checks and end")
    made.add_argument("--out", type=Path, required=True, help="folder for records and logs")
    made.add_argument("--small", type=frame.shapes, required=True, help="Qwen3-0.6B's shape")
    made.add_argument("--large", type=frame.shapes, required=True, help="Qwen3-14B's shape")
    made.add_argument("--pie-load", type=Path, required=True, help="see `make load`")
    made.add_argument("--limit-s", type=int, help="seconds of a check, instead of its own limit")
    return made


def main() -> None:
    """Runs the checks."""
    if sys.argv[1:] == ["--list"]:
        print(table())
        return
    own = parser()
    arguments = own.parse_args()
    unknown = set(arguments.checks) - CHECKS.keys()
    if unknown:
        own.error(f"unknown checks: {', '.join(sorted(unknown))}; there are {', '.join(CHECKS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus()
    if not gpus:
        own.error("there is no GPU")
    checks = Checks(arguments, gpus)
    chosen = [name for name in CHECKS if name in arguments.checks]
    one_gpu = [name for name in chosen if CHECKS[name].gpus == 1]
    for name in one_gpu:
        if CHECKS[name].alone:
            checks.run(name, gpus[0])
    checks.run_side_by_side([name for name in one_gpu if not CHECKS[name].alone])
    for name in chosen:
        if 1 < CHECKS[name].gpus <= len(gpus):
            checks.run(name, ",".join(gpus))
        elif CHECKS[name].gpus > len(gpus):
            print(f"{name}: needs {CHECKS[name].gpus} GPUs, left out", flush=True)
    if checks.failed:
        sys.exit(f"failed: {', '.join(checks.failed)}")


if __name__ == "__main__":
    main()
