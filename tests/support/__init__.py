"""Helpers of the tests: models, process, servers, hostile, sglang_scripts, kernels, tools."""

from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
