"""Programmatic dependent launch (PDL): a GPU kernel starts while the previous one ends.

A kernel launched this way must wait for the end of the previous kernel (`griddepcontrol.wait`), and
therefore of all earlier ones. Before its wait it must not read what the previous kernel writes, nor
write what that reads or writes. It may read what earlier kernels wrote if the previous kernel
triggered it after its own wait (`pdl_wait_trigger`), but not if that was before
(`pdl_trigger_wait`). A kernel without PDL, like most of torch's, waits for all earlier kernels
before it starts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_HOPPER = 9


def pdl_options(device: torch.device) -> dict[str, Any]:
    """Launch options: the kernel's constexpr ``PDL``, and Triton's ``launch_pdl``."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < _HOPPER:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@triton.jit
def pdl_wait():
    """Waits for the previous kernel."""
    gdc_wait()


@triton.jit
def pdl_trigger():
    """Lets the next kernel start as soon as SMs have room."""
    gdc_launch_dependents()


@triton.jit
def pdl_wait_trigger():
    """Waits for the previous kernel, then triggers the next one."""
    pdl_wait()
    pdl_trigger()


@triton.jit
def pdl_trigger_wait():
    """Triggers the next kernel, then waits for the previous one.

    The next kernel may then start long before the previous one has ended. So until it has waited
    itself, it may read only what was written before the last kernel without PDL.
    """
    pdl_trigger()
    pdl_wait()
