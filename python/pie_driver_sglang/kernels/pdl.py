"""Programmatic dependent launch (PDL): a GPU kernel starts while the previous one ends.

Every kernel that is launched this way must wait for the end of the previous kernel, and therefore
of all earlier ones: by `follow` or `lead`. Until then it must not touch what the previous kernel
writes or reads. It may read what kernels before that one wrote if the previous kernel let it start
after its own wait (`follow`), but not if that was earlier (`lead`). A kernel without PDL, like most
of torch's, waits for all earlier kernels before it starts.
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
def await_previous():
    """Waits for the previous kernel."""
    gdc_wait()


@triton.jit
def release_next():
    """Lets the next kernel start as soon as SMs have room."""
    gdc_launch_dependents()


@triton.jit
def follow():
    """Waits for the previous kernel, then releases the next one."""
    await_previous()
    release_next()


@triton.jit
def lead():
    """Releases the next kernel, and waits for the previous one.

    The next kernel may then start long before the previous one has ended. So until it has waited
    itself it may read only what was written before the last kernel without PDL.
    """
    release_next()
    await_previous()
