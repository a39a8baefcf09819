"""Python scripts that tests run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pie_driver_sglang
from tiny_models import REPOSITORY

_LIMIT_S: Final = 230.0
"""Less than the time of a test that imports SGLang on a busy machine."""


def run(script: str, *arguments: str, interpreted: bool = False, plugins: str = "") -> str:
    """What a script, named from the repository's root, prints; it must end well.

    With `interpreted` Triton's interpreter runs its kernels on the CPU.
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
        timeout=_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
