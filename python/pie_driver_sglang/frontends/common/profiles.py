"""`Profiles`: the steps of a runtime, with the operators and kernels of its drivers, as a file.

The native runtime traces steps, torch's profiler in each driver what they run, and a process merges
both into one Chrome trace when the profile ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pie_driver_sglang.errors import ConfigError, DriverError, StartError, WeightsError, quoted
from pie_driver_sglang.frontends.common.control_socket import ControlSocket, OwnedLock

logger = logging.getLogger(__name__)

_FOLDER_VARIABLE: Final = "SGLANG_TORCH_PROFILER_DIR"
_FOLDER: Final = "/tmp"
"""SGLang's default folder of profiles."""
ACTIVITIES: Final = ("CPU", "GPU")
_LOOK_S: Final = 0.02
_CLOSE_S: Final = 10.0
"""How long the end of a runtime waits for a profile that is being written."""
_EARLY_STEPS: Final = 256
"""Kernels are recorded from so many steps before `start_step`, as steps are counted from outside;
those before it are cut off."""
MOST_STEPS: Final = 10_000
"""Steps of a profile with kernels and without `num_steps`: torch keeps their events in memory until
it ends."""
_MERGE: Final = "pie_driver_sglang.observability.profile_merge"
_CLOSED: Final = b"]\n"
"""How a trace of steps ends that is complete."""
_UNSUPPORTED: Final = {
    "profile_by_stage": "steps of both stages are in one file, named `prompt` and `decode`",
    "profile_stages": "steps of both stages are in one file, named `prompt` and `decode`",
}


class ProfileRequest(NamedTuple):
    """What is to be profiled.

    Attributes:
        path: The file.
        activities: Of torch's profiler; none for steps alone.
        with_stack: Whether to record Python's functions.
        record_shapes: Whether to record the shapes of operators' arguments.
        start_step: The number of the first step; 0 for the next one.
        num_steps: How many steps; None until it is stopped, or has `MOST_STEPS` with kernels.
    """

    path: Path
    activities: tuple[str, ...] = ACTIVITIES
    with_stack: bool = True
    record_shapes: bool = True
    start_step: int = 0
    num_steps: int | None = None

    @property
    def most_steps(self) -> int | None:
        """Steps after which it ends by itself; None where it has no limit."""
        if self.num_steps is None and self.activities:
            return MOST_STEPS
        return self.num_steps

    @property
    def is_cut(self) -> bool:
        """Whether it begins or ends by the number of a step that the request names."""
        return self.start_step > 0 or self.num_steps is not None


def read_request(fields: Mapping[str, Any], name: str) -> ProfileRequest:
    """Read SGLang's arguments of `start_profile`.

    Args:
        fields: Their values by name; None stands for the default.
        name: What the file is called, between prefix and suffix.

    Raises:
        ConfigError: One is unsupported or wrong.
    """
    for field, reason in _UNSUPPORTED.items():
        if fields.get(field):
            raise ConfigError(f"`{field}` is not supported: {reason}", "leave it out")
    activities = fields.get("activities")
    if not isinstance(activities, list | tuple | None):
        raise ConfigError(f"`activities` is {quoted(activities)}", "use a list of CPU and GPU")
    for activity in activities or ():
        if activity not in ACTIVITIES:
            raise ConfigError(
                f"activity {quoted(activity)} is not supported",
                "use CPU and GPU, or an empty list for steps alone",
            )
    prefix = f"{fields['profile_prefix']}-" if fields.get("profile_prefix") else ""
    folder = fields.get("output_dir") or os.environ.get(_FOLDER_VARIABLE) or _FOLDER
    if not isinstance(folder, str | Path):
        raise ConfigError(f"`output_dir` is {quoted(folder)}", "name a folder")
    return ProfileRequest(
        path=Path(folder) / f"{prefix}{name}.trace.json.gz",
        activities=ACTIVITIES if activities is None else tuple(activities),
        with_stack=_switch(fields, "with_stack"),
        record_shapes=_switch(fields, "record_shapes"),
        start_step=_count(fields, "start_step") or 0,
        num_steps=_count(fields, "num_steps") or None,
    )


class Profiles:
    """The profiles of a runtime, one at a time. Any thread may call it."""

    def __init__(self, runtime: Any, socket: ControlSocket) -> None:
        """None runs.

        Args:
            runtime: The native runtime.
            socket: Connects to its drivers.
        """
        self._runtime, self._socket = runtime, socket
        self._lock = OwnedLock()
        self._profile: _Profile | None = None
        self._is_over = False

    def start(self, request: ProfileRequest) -> str:
        """Start a profile, and say where its file will be.

        Raises:
            ConfigError: One is running, its folder cannot be written, or torch cannot profile.
        """
        with self._lock:
            if self._profile is not None and not self._profile.ended_by_itself():
                raise ConfigError("a profile is under way already", "call `/stop_profile` first")
            self._profile = None
            self._profile = _Profile(self._runtime, self._socket, request)
        if self._is_over:
            self.close()
        return f"profiling into {request.path}"

    def stop(self) -> str:
        """End the profile, and say where its file is. Blocks until it is written.

        Raises:
            ConfigError: None is running, or its file is not complete.
        """
        # Held until it is written, as a driver profiles one thing at a time.
        with self._lock:
            profile, self._profile = self._profile, None
            if profile is None:
                raise ConfigError("no profile is under way", "call `/start_profile` first")
            return profile.stop()

    def close(self) -> None:
        """Drop a profile that runs, as its runtime and the drivers end.

        Also in a signal handler, whose thread may be in another method: without the lock.
        """
        self._is_over = True
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.abandon()


class _Profile:
    """A profile that runs, or has ended by itself."""

    def __init__(self, runtime: Any, socket: ControlSocket, request: ProfileRequest) -> None:
        self._runtime, self._socket, self._request = runtime, socket, request
        self._target = request.path
        self._stopped = threading.Event()
        self._result: str | ConfigError | None = None
        self._has_kernels = self._has_steps = self._is_abandoned = False
        self._watch: threading.Thread | None = None
        self._parts = self._make_folder()
        self._steps = self._parts / "steps.json"
        try:
            self._begin()
        except BaseException:
            self._drop()
            raise
        if request.start_step > 0 or request.most_steps is not None:
            self._watch = threading.Thread(target=self._run, name="profile", daemon=True)
            self._watch.start()

    def stop(self) -> str:
        """As `Profiles.stop`."""
        self._stopped.set()
        if self._watch is not None:
            self._watch.join()
        else:
            self._finish()
        if isinstance(self._result, str):
            return self._result
        raise self._result or ConfigError("the profile was dropped", "start another one")

    def ended_by_itself(self) -> bool:
        """Whether it has all its steps; waits for its file if so."""
        if self._watch is None or not self._is_closed():
            return False
        self._watch.join()
        return True

    def abandon(self) -> None:
        """End it without a file; the drivers end as well."""
        self._has_kernels, self._is_abandoned = False, True
        self._stopped.set()
        if self._watch is not None:
            # It may be at its end, and writing the file.
            self._watch.join(_CLOSE_S)
        self._drop()

    def _drop(self) -> None:
        try:
            with contextlib.suppress(DriverError):
                self._stop_kernels()
            if self._has_steps:
                # Else it may be another one's trace.
                self._runtime.end_trace()
        finally:
            shutil.rmtree(self._parts, ignore_errors=True)

    def _make_folder(self) -> Path:
        """A folder for the parts of the file, next to it."""
        try:
            self._target = self._target.expanduser()
            folder = self._target.parent
            folder.mkdir(parents=True, exist_ok=True)
            # Its name is longer than the file's, which so cannot be too long either.
            return Path(tempfile.mkdtemp(prefix=f".{self._target.name}.", dir=folder))
        except (OSError, RuntimeError, ValueError) as error:
            # RuntimeError: there is no home folder. ValueError: a null byte.
            text = f"{quoted(self._target)} cannot be written: {error}"
            raise ConfigError(text, "name a folder as `output_dir`") from error

    def _begin(self) -> None:
        request = self._request
        skip = max(0, request.start_step - self._count())
        if skip <= _EARLY_STEPS:
            # First, so that no step is without its kernels.
            self._start_kernels()
        try:
            self._runtime.start_trace(self._steps, skip=skip, steps=request.most_steps)
            self._has_steps = True
        except StartError as error:
            raise ConfigError(str(error), error.hint) from None

    def _run(self) -> None:
        """Follow a profile that begins or ends by the number of a step."""
        request = self._request
        while not self._stopped.wait(_LOOK_S) and not self._is_closed():
            if not self._has_kernels and self._count() >= request.start_step - _EARLY_STEPS:
                try:
                    self._start_kernels()
                except ConfigError as error:
                    logger.error("the profile has no kernels: %s", error.with_hint)
                    break
        if self._is_abandoned:
            return
        if request.num_steps is None and not self._stopped.is_set() and self._is_closed():
            logger.warning(
                "a profile without `num_steps` has ended after %d steps, the most of one with "
                "kernels; set `num_steps` for more",
                MOST_STEPS,
            )
        self._finish()
        if isinstance(self._result, ConfigError):
            logger.error("a profile failed: %s", self._result.with_hint)

    def _finish(self) -> None:
        try:
            self._result = self._written()
        except DriverError as error:
            self._result = ConfigError(error.message, error.hint)
        except OSError as error:
            text = f"{self._target} cannot be written: {error}"
            self._result = ConfigError(text, "profile again")
        finally:
            shutil.rmtree(self._parts, ignore_errors=True)

    def _written(self) -> str:
        """Write the file, and say what is in it."""
        ends = self._runtime.end_trace()
        failures = [failure for _, _, failure in ends if failure is not None]
        drivers: list[list[str]] = []
        try:
            answers = self._stop_kernels()
            # What one replica lacks, the others have.
            drivers = [answer["files"] if answer["success"] else [] for answer in answers]
            failures += [answer["message"] for answer in answers if not answer["success"]]
        except WeightsError as error:
            failures.append(error.message)
        if not ends:
            text = "the profile has no steps: the runtime has ended, or a step takes too long"
            raise ConfigError(text, "profile again")
        self._merge([str(path) for path, _, _ in ends], drivers)
        if failures:
            raise ConfigError(
                f"{self._target} is not complete: {'; '.join(failures)}", "profile again"
            )
        return f"{sum(steps for _, steps, _ in ends)} steps in {self._target}"

    def _merge(self, steps: list[str], drivers: list[list[str]]) -> None:
        given = {
            "steps": steps,
            "drivers": drivers,
            "target": str(self._target),
            "cut": self._request.is_cut,
        }
        done = subprocess.run(
            [sys.executable, "-m", _MERGE],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode < 0:
            name = signal.Signals(-done.returncode).name
            raise ConfigError(
                f"{self._target} is not written: the process that merges it was ended by {name}",
                "if memory ran out, profile fewer steps, or without `with_stack`",
            )
        if done.returncode != 0:
            [reason] = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
            raise ConfigError(
                f"{self._target} cannot be written: {reason}", "look at the space on its disk"
            )

    def _start_kernels(self) -> None:
        request = self._request
        if not request.activities:
            return
        command = {
            "command": "StartProfile",
            "activities": request.activities,
            "with_stack": request.with_stack,
            "record_shapes": request.record_shapes,
        }
        self._has_kernels = True
        try:
            answers = self._socket.call(command)
        except WeightsError as error:
            raise ConfigError(error.message, error.hint) from error
        for answer in answers:
            if not answer["success"]:
                raise ConfigError(answer["message"], answer["hint"])

    def _stop_kernels(self) -> list[dict[str, Any]]:
        """Each driver's answer: with the `files` of its ranks, or a `message`."""
        if not self._has_kernels:
            return []
        self._has_kernels = False
        return self._socket.call({"command": "StopProfile", "folder": str(self._parts)})

    def _count(self) -> int:
        """Steps so far."""
        return int(self._runtime.stats()["steps"])

    def _is_closed(self) -> bool:
        """Whether every replica has its steps."""
        for path in self._parts.glob(f"{self._steps.name}*"):
            # Once merged they are removed.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - len(_CLOSED)))
                if file.read() != _CLOSED:
                    return False
        return True


def _switch(fields: Mapping[str, Any], name: str) -> bool:
    """A switch that is on by default, or what SGLang's variable of the environment says."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"`{name}` is {quoted(value)}", "use true or false")
    off = os.environ.get(f"SGLANG_PROFILE_{name.upper()}", "true").lower() not in ("true", "1")
    return value is not False and not off


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 2**63:
        raise ConfigError(
            f"`{name}` is {quoted(value)}", "use a number of steps, which is not negative"
        )
    return value
