"""`/start_profile`: steps, operators and kernels as a Chrome trace file."""

from __future__ import annotations

from typing import Any, Final

from pie_driver_sglang.errors import ConfigError
from pie_driver_sglang.frontends.common.profiles import Profiles, read_request

_FIELDS: Final = (
    "output_dir",
    "start_step",
    "num_steps",
    "activities",
    "profile_by_stage",
    "profile_stages",
    "with_stack",
    "record_shapes",
    "profile_prefix",
)


class Profiler:
    """Starts and stops the profiles of a scheduler process."""

    def __init__(self, profiles: Profiles, replica: int | None) -> None:
        """No profile yet; `replica` is None without data parallelism."""
        self._profiles, self._replica = profiles, replica

    def start(self, message: Any) -> str:
        """Start a profile, and say where its file will be.

        Args:
            message: SGLang's ``ProfileReq``.

        Raises:
            ConfigError: The request is not supported, or a profile is running.
        """
        if message.merge_profiles and self._replica is not None:
            raise ConfigError(
                "`merge_profiles` is not supported with `--dp-size`: each replica writes a file",
                "leave it out; the ranks of a replica are in one file",
            )
        number = "" if self._replica is None else f"-DP-{self._replica}"
        fields = {name: getattr(message, name) for name in _FIELDS}
        return self._profiles.start(read_request(fields, f"{message.profile_id}-TP-0{number}"))

    def stop(self) -> str:
        """Stop the profile, and say where its file is.

        Raises:
            ConfigError: None is running, or its file could not be written.
        """
        return self._profiles.stop()
