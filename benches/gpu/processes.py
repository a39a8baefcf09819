"""Processes of a check: one after the other within a time for all of them, or one by itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

REFUSAL = "pie_driver_sglang: "
"""How a driver's line begins that says why it does not start."""
STOP_S = 8.0
"""What a process is left to end by itself, of the time for all."""


class Found(NamedTuple):
    """What a process of :func:`find` has left."""

    value: Any
    """What it handed over; None without."""
    refusal: str | None
    """Why a driver did not start."""
    output: str
    """All that it printed."""
    status: str


def hand_over(value: Any) -> None:
    """Prints what :func:`find` reads."""
    print(f"found {json.dumps(value)}")


def find(command: Sequence[object], limit_s: float) -> Found:
    """Runs a process that ends with :func:`hand_over`."""
    try:
        ended = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=limit_s, check=False
        )
        output, status = ended.stdout + ended.stderr, f"status {ended.returncode}"
    except subprocess.TimeoutExpired as error:
        parts = (part for part in (error.stdout, error.stderr) if part)
        output = "".join(part.decode(errors="replace") for part in parts)
        status = f"over {limit_s:.0f} s"
    lines = output.splitlines()
    found = [json.loads(line[6:]) for line in lines if line.startswith("found ")]
    refusals = [number for number, line in enumerate(lines) if line.startswith(REFUSAL)]
    # A hint may follow.
    said = " ".join(lines[refusals[-1] : refusals[-1] + 3]) if refusals else ""
    refusal = said.removeprefix(REFUSAL) or None
    return Found(found[-1] if found else None, refusal, output, status)


class Runner:
    """Runs processes until they have spent their time; what happens between them does not count."""

    def __init__(self, log: Path, budget_s: float) -> None:
        """Opens the log, which gets what is printed; `budget_s` is for all processes."""
        self.failed: list[str] = []
        """Processes that could not be started, ran out of time or ended with a status."""
        self._log = log.open("w", encoding="utf-8")
        self._left_s = budget_s

    def run(
        self,
        what: str,
        command: Sequence[object],
        limit_s: float,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Prints, line by line, and returns the output; an error or a time-out is printed too."""
        began, left_s = time.monotonic(), min(limit_s, self._left_s)
        words = [str(word) for word in command]
        self.say(f"--- {what}: {' '.join(words)}")
        if left_s < STOP_S:
            self._fail(what, "no time left")
            return ""
        try:
            process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            self._fail(what, str(error))
            return ""
        watchdog = threading.Timer(left_s - STOP_S / 2, self._stop, (what, process))
        watchdog.start()
        lines = []
        try:
            with process:
                for line in process.stdout or ():
                    self.say(line.rstrip())
                    lines.append(line)
        finally:
            # Its number may be another's by then.
            watchdog.cancel()
            self._left_s -= time.monotonic() - began
        if process.returncode:
            self._fail(what, f"status {process.returncode}")
        return "".join(lines)

    def say(self, text: str) -> None:
        """Prints and logs."""
        print(text, flush=True)
        print(text, file=self._log, flush=True)

    def close(self) -> None:
        """Closes the log."""
        self._log.close()

    def _fail(self, what: str, how: str) -> None:
        self.say(f"{what}: {how}")
        self.failed.append(what)

    def _stop(self, what: str, process: subprocess.Popen[str]) -> None:
        """Ends a process and those that it has started; a driver removes its region on SIGTERM."""
        self.say(f"{what}: no time left, stopped")
        for number in (signal.SIGTERM, signal.SIGKILL):
            # The session of its own is what the process leads.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            time.sleep(STOP_S / 4)
