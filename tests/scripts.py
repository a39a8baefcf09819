"""Python scripts that tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pie_driver_sglang
from tiny_models import REPOSITORY

LIMIT_S: Final = 90.0
"""Less than the time of a test, so that a script that hangs is ended."""


def run(
    script: str,
    *arguments: str,
    interpreted: bool = False,
    plugins: str = "",
    limit_s: float = LIMIT_S,
) -> str:
    """What a script, named from the repository's root, prints; it must end well.

    With `interpreted` Triton's interpreter runs its kernels on the CPU. `limit_s` must stay below
    the time of the test.
    """
    package = str(Path(pie_driver_sglang.__file__).parents[1])
    search_path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    changed = ("TRITON_INTERPRET", "SGLANG_PLUGINS", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in changed}
    environment["PYTHONPATH"] = search_path
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    if plugins:
        environment["SGLANG_PLUGINS"] = plugins
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
