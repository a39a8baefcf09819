"""The scripts of `examples`, as their reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pie_driver_sglang
from support import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


def run_example(name: str, *arguments: str, python: str = sys.executable) -> str:
    """What an example prints."""
    done = subprocess.run(
        [python, str(EXAMPLES / name), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(Path(pie_driver_sglang.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
