"""Programmatic dependent launch: a GPU kernel starts while the one before it ends.

A kernel that is launched so must call `follow` before it touches memory that others write or read:
it waits there until the kernel before it has ended, and with that, by the same rule, all before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9


def chained(device: torch.device) -> dict[str, Any]:
    """Options of a launch on a device: ``CHAINED``, a constant of the kernel, and Triton's own."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < _HOPPER:
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def follow():  # type: ignore[no-untyped-def]
    """Waits for the kernel before, and lets the next one start as soon as there is room."""
    gdc_wait()
    gdc_launch_dependents()
