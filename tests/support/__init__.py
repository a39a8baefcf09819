"""Helpers: models, process, servers, hostile, sglang_scripts, kernels, tools and versions."""

from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[2]
