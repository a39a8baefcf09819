"""Programmatic dependent launch (PDL): a GPU kernel starts while the previous one ends.

Every kernel that is launched this way must call `follow`, which waits for the end of the previous
kernel and therefore of all earlier ones. Before `follow`, a kernel must not touch what the previous
kernel writes or reads. It may read what kernels before that one wrote, because the previous kernel
let it start only after its own `follow`. After a kernel that calls `lead` this does not hold. A
kernel without PDL, like most of torch's, waits for all earlier kernels before it starts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9


def chained(device: torch.device) -> dict[str, Any]:
    """Launch options: the kernel's constant ``CHAINED``, and Triton's ``launch_pdl``."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < _HOPPER:
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def follow():
    """Waits for the previous kernel, then lets the next one start as soon as SMs have room."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def lead():
    """Lets the next kernel start as soon as SMs have room, and waits for the previous one.

    The next kernel may then start long before the previous one has ended. So until it has waited
    itself it may read only what was written before the last kernel without PDL.
    """
    gdc_launch_dependents()
    gdc_wait()
