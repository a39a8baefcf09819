"""Programmatic dependent launch: a GPU kernel starts while the one before it ends.

Every kernel that is launched so must call `follow`: it waits there until the kernel in front has
ended, and so, by the same rule, all kernels in front of that one. Before, it may touch nothing that
the kernel in front writes or reads; what kernels further ahead wrote it may read, since the one in
front let it start behind its own `follow`. (Kernels of others need not keep to that order; one that
is not launched so, like most of torch's, ends all that is in front of it.)
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
def follow():
    """Waits for the kernel before, and lets the next one start as soon as there is room."""
    gdc_wait()
    gdc_launch_dependents()
