"""`/start_profile`: steps as a Chrome trace file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang import _core
from pie_driver_sglang.errors import ConfigError, StartError

_FOLDER_VARIABLE: Final = "SGLANG_TORCH_PROFILER_DIR"
_FOLDER: Final = "/tmp"
"""SGLang's default folder of profiles."""
_ACTIVITIES: Final = frozenset({"CPU", "GPU"})


class Profiler:
    """Starts and stops the runtime's trace."""

    def __init__(self, runtime: _core.Runtime, replica: int | None) -> None:
        """No trace yet; `replica` is None without data parallelism."""
        self._runtime = runtime
        self._name = "TP-0" if replica is None else f"TP-0-DP-{replica}"

    def start(self, message: Any) -> str:
        """Start a profile, and return the path of its file.

        Args:
            message: SGLang's ``ProfileReq``.

        Raises:
            ConfigError: The request is not supported, or a profile is running.
        """
        wrong = sorted(set(message.activities or ()) - _ACTIVITIES)
        if wrong or message.profile_by_stage or message.profile_stages or message.merge_profiles:
            what = f"activity {wrong[0]}" if wrong else "stages and merged profiles"
            raise ConfigError(
                f"{what} cannot be profiled: a profile has the steps, with their times on the host "
                "and in the driver",
                "ask for activities CPU and GPU alone; `nsys` shows kernels (option `nvtx`)",
            )
        folder = message.output_dir or os.environ.get(_FOLDER_VARIABLE) or _FOLDER
        prefix = f"{message.profile_prefix}-" if message.profile_prefix else ""
        path = Path(folder) / f"{prefix}{message.profile_id}-{self._name}.trace.json"
        skip = max(0, (message.start_step or 0) - int(self._runtime.stats()["steps"]))
        try:
            path = path.expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._runtime.start_trace(path, skip=skip, steps=message.num_steps or None)
        except (OSError, RuntimeError) as error:
            # RuntimeError: there is no home folder.
            raise ConfigError(f"{path} cannot be written: {error}", "name a folder") from error
        except StartError as error:
            raise ConfigError(str(error), error.hint) from None
        return f"profiling into {path}"

    def stop(self) -> str:
        """Stop the profile, and return where its file is.

        Raises:
            ConfigError: None is running, or its file could not be written.
        """
        ends = self._runtime.end_trace()
        if not ends:
            raise ConfigError("no profile is under way", "call `/start_profile` first")
        [(path, steps, failure)] = ends
        if failure is not None:
            raise ConfigError(f"{path} ends early: {failure}", "look for room on its disk")
        return f"{steps} steps in {path}"
