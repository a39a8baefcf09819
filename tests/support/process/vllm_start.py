"""`python -m support.process.vllm_start`: a driver on vLLM whose workers are forked from it.

Arguments: `driver.toml`, the files for handshake, stdout and stderr, and what its workers call
first, as module, function and first argument; see `vllm_drivers.start`.
"""

from __future__ import annotations

import importlib
import sys

from pie_driver_sglang.backends.vllm import library
from support.process import runtime_client


def main(config: str, handshake: str, stdout: str, stderr: str, *change: str) -> None:
    """Becomes the driver."""
    module, name, by = change
    function = getattr(importlib.import_module(module), name) if name else None
    runtime_client.drive(config, handshake, stdout, stderr, function, by, library.__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
