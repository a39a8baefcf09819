"""`KernelProfiler`: torch's profiler around the passes of this rank.

It records the operators of the serving thread and, on a GPU, the kernels of the process, those of
captured graphs among them. `frontends/common/profiles.py` starts it, and merges its files.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity

from pie_driver_sglang.engine import process_groups
from pie_driver_sglang.engine.control_commands import StartProfile, StopProfile
from pie_driver_sglang.errors import WeightsError

_IDLE: Final = "no kernels are profiled"


class KernelProfiler:
    """The profile of one rank. All ranks start and stop it together, on their serving threads."""

    def __init__(self, device: torch.device, rank: int) -> None:
        """Nothing is profiled yet.

        Args:
            device: Of the model.
            rank: This rank's number.
        """
        self._device, self._rank = device, rank
        self._profile: Any = None

    def start(self, command: StartProfile) -> dict[str, Any]:
        """Record from now on; what was recorded before and not written is dropped.

        Raises:
            WeightsError: Torch cannot profile.
        """
        process_groups.agreed(lambda: self._start(command))
        return {}

    def stop(self, command: StopProfile) -> dict[str, Any]:
        """Write what was recorded; blocks until all ranks have.

        Returns:
            `files`: the Chrome trace of each rank.

        Raises:
            WeightsError: None is running, or a file cannot be written.
        """
        path = process_groups.agreed(lambda: self._stop(Path(command.folder)))
        return {"files": process_groups.gathered(path)}

    def _start(self, command: StartProfile) -> None:
        on_device = {"CPU": ProfilerActivity.CPU}
        if self._device.type == "cuda":
            on_device["GPU"] = ProfilerActivity.CUDA
        activities = [on_device[name] for name in command.activities if name in on_device]
        if not activities:
            raise WeightsError(
                f"the device is {self._device.type}, which has no activity GPU",
                "ask for the activity CPU",
            )
        if self._profile is not None:
            # The frontend has one at a time: it has given this one up, after its time limit.
            former, self._profile = self._profile, None
            former.stop()
        profile = torch.profiler.profile(
            activities=activities,
            with_stack=command.with_stack,
            record_shapes=command.record_shapes,
        )
        with warnings.catch_warnings():
            # It warns that events of former cycles are dropped; there is one cycle.
            warnings.simplefilter("ignore")
            profile.start()
        self._profile = profile

    def _stop(self, folder: Path) -> str:
        if self._profile is None:
            raise WeightsError(_IDLE, "call `/start_profile` first")
        profile, self._profile = self._profile, None
        profile.stop()
        # Drivers of several replicas share the folder.
        path = folder / f"{os.getpid()}-rank-{self._rank}.json"
        profile.export_chrome_trace(str(path))
        # Torch logs a file that it cannot write, and says nothing.
        with path.open("rb") as file:
            file.seek(-2, 2)
            if not file.read().rstrip().endswith(b"}"):
                raise OSError(f"{path} is incomplete")
        return str(path)
