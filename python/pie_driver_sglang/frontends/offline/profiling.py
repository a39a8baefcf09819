"""`ProfileMethods`: methods of the engine that write what its steps do, and how long they take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pie_driver_sglang.errors import ConfigError, StartError, quoted
from pie_driver_sglang.frontends.common.profiles import Profiles, read_request
from pie_driver_sglang.frontends.offline.error_notes import with_hint, with_note

_ARGUMENTS: Final = (
    "output_dir",
    "start_step",
    "num_steps",
    "activities",
    "profile_by_stage",
    "with_stack",
    "record_shapes",
    "profile_id",
    "merge_profiles",
    "profile_prefix",
    "profile_stages",
)
"""SGLang's; `merge_profiles` is without effect, as all ranks are in one file."""


class ProfileMethods:
    """Methods of `Engine`."""

    _runtime: Any
    _profiles: Profiles

    def start_profile(self, **arguments: Any) -> str:
        """Record steps, operators and kernels from now on.

        Args:
            arguments: Those of SGLang's `/start_profile`: `output_dir`, `num_steps`, `start_step`,
                `activities`, `with_stack`, `record_shapes`, `profile_prefix` and `profile_id`.

        Returns:
            Where the file will be, a gzipped Chrome trace: after `num_steps` steps, or
            :meth:`stop_profile`.

        Raises:
            ConfigError: An argument is unknown, not supported or wrong, or a profile is running.
        """
        if unknown := sorted(set(arguments) - set(_ARGUMENTS)):
            text = f"`start_profile` has no argument {quoted(unknown[0])}"
            raise with_note(ConfigError(text, f"use {', '.join(_ARGUMENTS)}"))
        _ = self._runtime
        name = f"{arguments.get('profile_id') or time.time()}-TP-0"
        request = with_hint(read_request, arguments, name)
        with_hint(self._profiles.start, request)
        return str(request.path)

    def stop_profile(self) -> str:
        """End the profile; blocks until its file is written.

        Returns:
            The number of steps in it, and where it is.

        Raises:
            ConfigError: None is running, or its file is not complete.
        """
        said: str = with_hint(self._profiles.stop)
        return said

    @contextlib.contextmanager
    def trace_steps(self, path: str | Path) -> Iterator[None]:
        """Write the steps of a block to a file for ui.perfetto.dev, or raise a `StartError`."""
        runtime = self._runtime
        runtime.start_trace(Path(path))
        try:
            yield
        finally:
            ended = runtime.end_trace()
        if failures := [failure for _, _, failure in ended if failure]:
            raise StartError(f"the trace is incomplete: {failures[0]}", "name another file")
