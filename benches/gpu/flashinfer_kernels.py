"""FlashInfer's kernels, which nvcc compiles at their first use: in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

BUILDS: Final = {
    "sampling": "from flashinfer.sampling import get_sampling_module as build; build()",
    "all-reduce": (
        "from flashinfer.comm import gen_trtllm_comm_module as made; made().build_and_load()"
    ),
}
"""What has each of them built, if it is not in the user's cache."""


def unavailable_reason(name: str, limit_s: float) -> str | None:
    """Why FlashInfer's kernels of a name cannot be had; None when they are built.

    Args:
        name: A key of `BUILDS`.
        limit_s: The build is given up after so many seconds.
    """
    try:
        built = subprocess.run(
            [sys.executable, "-c", BUILDS[name]],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__} after {limit_s:g} s"
    if not built.returncode:
        return None
    lines = (built.stderr or built.stdout).strip().splitlines()
    return lines[-1][:300] if lines else f"status {built.returncode}"
